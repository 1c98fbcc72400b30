"""Text to tokens: tokenizers, chat templates, and the workers that write token files."""

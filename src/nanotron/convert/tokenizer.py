"""The files of a tokenizer, as Hugging Face names them."""

from __future__ import annotations

import json

from nanotron.checkpoint.storage import Folder

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def copy_tokenizer(source: Folder, target: Folder) -> list[str]:
    """Copy what tokenizer files a folder has; returns their names.

    A tokenizer.json that stands alone gets the tokenizer_config.json without which transformers does not open it.
    """
    names = set(source.names())
    copied = [name for name in FILES if name in names]
    for name in copied:
        target.write(name, source.stream(name))
    if "tokenizer.json" in copied and "tokenizer_config.json" not in copied:
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1) + "\n"
        target.write("tokenizer_config.json", [content.encode()])
    return copied

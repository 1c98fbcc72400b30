"""LLM pretraining with data, tensor, pipeline, context and expert parallelism in readable PyTorch."""

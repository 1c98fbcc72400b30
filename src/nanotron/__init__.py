"""LLM pretraining with data, tensor and pipeline parallelism in readable PyTorch."""

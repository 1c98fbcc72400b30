"""What a run tells while it runs: the step line, metrics.jsonl, TensorBoard, Weights & Biases, MFU and memory."""

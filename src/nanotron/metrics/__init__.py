"""What a run tells while it runs: the step line, metrics.jsonl, TensorBoard and trackers, MFU and memory."""

"""What a run tells while it runs: the step line, metrics.jsonl, TensorBoard, Weights & Biases, MFU and memory."""

from nanotron.metrics.record import Metrics

__all__ = ["Metrics"]

"""From gradients to the next weights: flat buckets, global-norm clipping, AdamW and SGD, the learning rate."""

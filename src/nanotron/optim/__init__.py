"""From gradients to the next weights: flat buckets, global-norm clipping, AdamW, Muon and SGD, the learning rate."""

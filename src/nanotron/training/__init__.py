"""A run: set up, the training step, evaluation, saving and stopping."""

"""A training step of a config, shown: who sits where, who holds what, what happens when, and which line does it."""

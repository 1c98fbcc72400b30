"""The operators that a model is made of, and which kernel makes each on which processor."""

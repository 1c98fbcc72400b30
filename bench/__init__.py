"""Measurements: ours and what a user would pick instead, alternating in one run."""

"""What a user would pick instead of ours: each a process as bench.serve describes, in an environment of its own."""

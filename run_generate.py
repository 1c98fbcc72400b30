"""Generate text from a checkpoint: ``torchrun --nproc_per_node=4 run_generate.py --ckpt-path DIR --tp 2 --pp 2``."""

import sys

from nanotron.generate.command import run_generate

if __name__ == "__main__":
    sys.exit(run_generate())

"""Generate text from a checkpoint: ``torchrun --nproc_per_node=4 run_generate.py --ckpt-path DIR --tp 2 --pp 2``."""

import sys

from nanotron.generate.command import run_generate
from nanotron.launch.streams import open_streams

if __name__ == "__main__":
    open_streams()
    sys.exit(run_generate())

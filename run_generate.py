"""Generate text from a checkpoint: ``python run_generate.py --ckpt-path DIR --prompt "…"``."""

import sys

from nanotron.generate import run_generate

if __name__ == "__main__":
    sys.exit(run_generate())

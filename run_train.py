"""Train a model: ``torchrun --nproc_per_node=N run_train.py --config-file X.yaml``, or ``python`` for one process."""

import sys

from nanotron.launch.run import run_train
from nanotron.launch.streams import open_streams

if __name__ == "__main__":
    open_streams()
    sys.exit(run_train())

"""Small token files and configs for the data tests."""

import numpy as np

from nanotron.config import get_config_from_dict
from nanotron.data.nanoset_writer import NanosetWriter


def write_nanoset(folder, documents, *, number=0, token_bytes=2):
    """Write one `.ds` triple into `folder` and return the path of its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{number:05d}_unshuffled.ds"
    with NanosetWriter(str(path), tokenizer="Unknown Tokenizer", token_bytes=token_bytes) as writer:
        writer.write(documents)
    return path


def random_documents(count, *, seed=0, vocab_size=257, longest=40):
    """Documents of random length, at least one token each."""
    generator = np.random.default_rng(seed)
    return [generator.integers(vocab_size, size=generator.integers(1, longest)).tolist() for _ in range(count)]


def make_config(**changes):
    """A tiny config; `changes` go to tokens, unless they are named like a section, `model_config`, `dtype` or `dp`."""
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 257}
    config = {
        "parallelism": changes.pop("parallelism", {"dp": changes.pop("dp", 1)}),
        "model": {
            "dtype": changes.pop("dtype", "float32"),
            "model_config": {**model, **changes.pop("model_config", {})},
        },
        "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
    }
    config |= {name: changes.pop(name) for name in ("data_stages", "tokenizer") if name in changes}
    tokens = {"sequence_length": 8, "micro_batch_size": 2, "batch_accumulation_per_replica": 2, "train_steps": 20}
    return get_config_from_dict({**config, "tokens": {**tokens, **changes}})

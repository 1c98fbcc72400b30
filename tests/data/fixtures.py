"""Small token files and configs for the data tests."""

import struct

import numpy as np

from nanotron.config import get_config_from_dict
from nanotron.data.tokenize.nanoset_writer import NanosetWriter


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


def write_megatron(prefix, documents, *, dtype="<u2", code=8):
    """Write `prefix.bin` and `prefix.idx` from the format's description: a document is a list of sequences."""
    sequences = [sequence for document in documents for sequence in document]
    itemsize = np.dtype(dtype).itemsize
    lengths = [len(sequence) for sequence in sequences]
    offsets = [sum(lengths[:number]) * itemsize for number in range(len(lengths))]
    firsts = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    np.array([token for sequence in sequences for token in sequence], dtype=dtype).tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(firsts)))
        file.write(np.array(lengths, "<i4").tobytes() + np.array(offsets, "<i8").tobytes())
        file.write(np.array(firsts, "<i8").tobytes())


def write_hub_cache(home, name, files):
    """Lay a repository's files out in a Hugging Face home (HF_HOME) as if they had been downloaded."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    for file, text in files.items():
        (snapshot / file).write_text(text)

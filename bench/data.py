"""Data: tokenizing beside datatrove, reading beside a plain memory-mapped copy, and starting on a huge sparse file.

    python -m bench.data [tokenize] [read] [start] [--rounds 5]

Contenders alternate within a round; printed are medians over the rounds, of tokens per second of processor time (one
core's, however busy the machine is). The text is the embedded corpus;
tokenizing needs `pip install datatrove orjson`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

from nanotron.data.collate import collate
from nanotron.data.order.stage import Stage
from nanotron.data.order.windows import TokenWindows
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.corpus import corpus_files
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from nanotron.data.tokenize.workers import Job, tokenize

SEQUENCE_LENGTH = 2048
BATCH = 32
TRILLION = 10**12


def alternate(contenders: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median rate of each contender, in millions of tokens per second; the first round warms the page cache."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            rate = run()
            if number > 0:
                rates[name].append(rate / 1e6)
    return {name: median(found) for name, found in rates.items()}


def bench_tokenize(folder: Path, rounds: int) -> dict[str, float]:
    """One process, one thread, the same JSONL file and tokenizer, to the same bytes; rates of tokens written."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.remove()
    logging.disable(logging.WARNING)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in corpus_files()]
    save_tokenizer(train_bpe(texts, 4096), str(folder / "tokenizer"), eos=END_OF_TEXT)
    (folder / "in").mkdir()
    lines = (json.dumps({"text": text, "id": str(number)}) for number, text in enumerate(filter(None, texts)))
    (folder / "in" / "texts.jsonl").write_text("\n".join(lines) + "\n")
    name = str(folder / "tokenizer" / "tokenizer.json")

    def ours() -> float:
        shutil.rmtree(folder / "ours", ignore_errors=True)
        start = time.process_time()
        summary = tokenize(Job([str(folder / "in")], str(folder / "ours"), name, eos=END_OF_TEXT), show_progress=False)
        return summary.tokens / (time.process_time() - start)

    def datatrove() -> float:
        shutil.rmtree(folder / "theirs", ignore_errors=True)
        start = time.process_time()
        reader = JsonlReader(str(folder / "in"))
        writer = DocumentTokenizer(str(folder / "theirs"), name, eos_token=END_OF_TEXT, shuffle_documents=False)
        writer.run(reader.run())
        seconds = time.process_time() - start
        return os.path.getsize(folder / "theirs" / "00000_unshuffled.ds") / 2 / seconds

    rates = alternate({"ours": ours, "datatrove": datatrove}, rounds)
    same = (folder / "ours/00000_unshuffled.ds").read_bytes() == (folder / "theirs/00000_unshuffled.ds").read_bytes()
    assert same, "the two wrote different tokens"
    assert load_tokenizer(name).token_to_id(END_OF_TEXT) is not None
    return rates


def bench_read(folder: Path, rounds: int) -> dict[str, float]:
    """Batches of 32 rows in shuffled order from the page cache, beside copying as many bytes through a memory map."""
    path = folder / "read" / "00000_unshuffled.ds"
    path.parent.mkdir()
    np.random.default_rng(0).integers(4096, size=2**25, dtype=np.uint16).tofile(path)
    documents = np.arange(1000, 2**25, 1000, dtype="<u8")
    Path(f"{path}.index").write_bytes(np.append(documents, np.uint64(2**25)).tobytes())
    Path(f"{path}.metadata").write_text(f"Unknown Tokenizer|2\n{2**25}\n33.6 MT")
    source = TokenWindows("bench", open_token_files(str(path.parent)), SEQUENCE_LENGTH, vocab_size=4096)
    stage = Stage("bench", [source], seed=1)
    rows = 8192

    def ours() -> float:
        start = time.process_time()
        for first in range(0, rows, BATCH):
            collate(stage.rows(first, BATCH), document_masking=False)
        return rows * SEQUENCE_LENGTH / (time.process_time() - start)

    def memory_map() -> float:
        start = time.process_time()
        tokens = np.memmap(path, dtype="<u2", mode="r")
        for row in range(rows):
            tokens[row * SEQUENCE_LENGTH : (row + 1) * SEQUENCE_LENGTH].astype(np.int64)
        return rows * SEQUENCE_LENGTH / (time.process_time() - start)

    return alternate({"ours": ours, "memory-mapped copy": memory_map}, rounds)


def first_batch(folder: str) -> None:
    """In a process of its own: open, read one batch, print the seconds and the extra resident bytes."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before, start = resident(), time.perf_counter()
    stage = Stage("bench", [TokenWindows("bench", open_token_files(folder), SEQUENCE_LENGTH)], seed=1)
    collate(stage.rows(0, BATCH), document_masking=False)
    print(time.perf_counter() - start, (resident() - before) / 2**20)


def bench_start(folder: Path, rounds: int) -> dict[str, float]:
    """A sparse trillion tokens (2 TB), then ten files of them: seconds to the first batch and MiB of extra memory."""
    found = {}
    for num_files in (1, 10):
        sparse = folder / f"sparse {num_files}"
        sparse.mkdir()
        for number in range(num_files):
            path = sparse / f"{number:05d}_unshuffled.ds"
            path.touch()
            os.truncate(path, 2 * TRILLION)
            Path(f"{path}.metadata").write_text(f"Unknown Tokenizer|2\n{TRILLION}\n1.00 TT")
            index = Path(f"{path}.index")
            index.touch()
            os.truncate(index, 8 * 10**9)
            with index.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(np.uint64(TRILLION).tobytes())
        command = [sys.executable, "-m", "bench.data", "--first-batch", str(sparse)]
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(rounds)]
        numbers = [tuple(map(float, run.stdout.split())) for run in runs]
        found[f"{num_files} × 2 TB: seconds"] = median(seconds for seconds, _ in numbers)
        found[f"{num_files} × 2 TB: MiB"] = median(mebibytes for _, mebibytes in numbers)
    return found


def main() -> None:
    """Print one table and, last, the same numbers as JSON."""
    benches = {"tokenize": bench_tokenize, "read": bench_read, "start": bench_start}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", choices=[[], *benches], help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-batch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_batch:
        first_batch(options.first_batch)
        return
    found = {}
    for name in options.what or benches:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = benches[name](Path(folder), options.rounds)
        for contender, value in found[name].items():
            print(f"{name:<10} {contender:<24} {value:10.3f}")
        if "ours" in found[name]:
            ours, peer = found[name].values()
            print(f"{name:<10} {'ratio':<24} {ours / peer:10.3f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

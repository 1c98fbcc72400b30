"""The embedded default corpus: text that every machine with Python has, the standard library's own sources.

It is tokenized once, by a byte-level BPE trained on it, into a Nanoset beside its tokenizer. Runs without data_stages
train on it. Where it lies and how large its vocabulary is are facts known before it exists.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nanotron.data.tokenize.nanoset_writer import NanosetWriter, token_bytes_for
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.logging import get_logger

logger = get_logger(__name__)

CORPUS_FOLDER = "data/python-bpe4096"
VOCAB_SIZE = 4096

LOOK_S = 0.1
SOON_S, SAY_S = 2.0, 60.0  # how long a process waits for another one before it says so, and from then on

_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_TABLES = {"encodings", "pydoc_data"}  # of characters and of help texts, a tenth of all: no code to learn from


def corpus_files() -> list[Path]:
    """The standard library's Python sources in a fixed order, without tests, tables and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in root.rglob("*.py") if not (_LEFT_OUT | _TABLES) & set(path.relative_to(root).parts))


def is_prepared(folder: str = CORPUS_FOLDER) -> bool:
    """Whether the tokenized corpus is there; it appears whole or not at all."""
    return os.path.isdir(folder)


def prepare_corpus(folder: str = CORPUS_FOLDER) -> str:
    """Tokenize the corpus into `folder` unless it is there; of many processes one does the work, the others wait."""
    if not is_prepared(folder):
        with file_lock(f"{folder}.lock"):
            if not is_prepared(folder):
                _prepare(folder)
    return folder


def _prepare(folder: str) -> None:
    logger.info(f"preparing the embedded corpus in {folder}, once: a BPE of {VOCAB_SIZE} tokens is trained on it")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in corpus_files()]
    partial = f"{folder}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = train_bpe(texts, VOCAB_SIZE)
    save_tokenizer(tokenizer, partial, eos=END_OF_TEXT)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert end is not None
    path = os.path.join(partial, "00000_unshuffled.ds")
    logger.info(f"{folder}: {len(texts)} files are tokenized")
    with NanosetWriter(path, tokenizer=f"{folder}/tokenizer.json", token_bytes=token_bytes_for(VOCAB_SIZE)) as writer:
        for encoding in tokenizer.encode_batch_fast(texts):
            writer.write([[*encoding.ids, end]])
    os.rename(partial, folder)


@contextmanager
def file_lock(path: str) -> Iterator[None]:
    """Hold the file lock `path`; the kernel lets go of it when the process ends, however it ends.

    Who holds it works for as long as it takes; waiting is said, with that process, soon and then every minute.
    """
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    began, next_line = time.monotonic(), SOON_S
    with open(path, "a+") as file:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            seconds = time.monotonic() - began
            if seconds > next_line:
                file.seek(0)
                line = f"waiting for {file.read().strip()}, which holds {path}, for {seconds:.0f} s"
                logger.log(logging.INFO if next_line < SAY_S else logging.WARNING, line)  # at first, once for all ranks
                next_line = SAY_S * (1 + seconds // SAY_S)
            time.sleep(LOOK_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield

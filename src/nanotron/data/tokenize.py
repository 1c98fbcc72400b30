"""Text to Nanosets: cut the input into shards, tokenize them with parallel workers, keep every finished shard.

    output/tokenizer.json               the tokenizer, so that the folder explains itself
    output/00000_unshuffled.ds …        one file triple per shard; visible only when complete
    output/.tokenize/plan.json          the shards and how they are tokenized
    output/.tokenize/00000.json         shard 0 is finished: its documents and tokens
    output/.tokenize/summary.json       all shards are finished

The same command again continues where it was killed; another input or tokenizer in the same folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import chain
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

from tokenizers import Tokenizer

from nanotron.data.documents import HubDataset, Piece, find_pieces, read_texts
from nanotron.data.nanoset_writer import NanosetWriter, token_bytes_for, write_atomically
from nanotron.data.tokenize_progress import TokenizeProgress
from nanotron.data.tokenizer import (
    END_OF_TEXT,
    end_of_document_token,
    load_tokenizer,
    save_tokenizer,
    train_bpe,
    vocab_size,
)
from nanotron.errors import ConfigError

SHARD_BYTES = 64 * 2**20
BPE_TRAINING_CHARACTERS = 2**30
BATCH_CHARACTERS = 2**21


@dataclass(frozen=True)
class Job:
    """What to tokenize, with what, into which folder."""

    inputs: Sequence[str]
    output: str
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, or a Hugging Face name."""
    train_bpe: int | None = None
    """Instead of `tokenizer`: train a byte-level BPE of this many tokens on the input."""
    eos: str | None = None
    """Token appended to every document; None: the tokenizer's own, if it says one."""
    append_eos: bool = True
    column: str = "text"
    hub: HubDataset = field(default_factory=HubDataset)
    workers: int = 1
    shard_bytes: int = SHARD_BYTES


@dataclass(frozen=True)
class Summary:
    """What the output folder holds when all is done."""

    documents: int
    tokens: int
    shards: int
    resumed_shards: int
    """Shards that an earlier, interrupted call had finished."""


@dataclass(frozen=True)
class _Shard:
    """All a worker needs to know; it crosses a process boundary."""

    number: int
    pieces: list[Piece]
    output: str
    tokenizer_name: str
    eos_id: int | None
    column: str
    hub: HubDataset


def tokenize(job: Job, *, show_progress: bool = True) -> Summary:
    """Tokenize everything that is not yet tokenized and return the totals of the folder."""
    if (job.tokenizer is None) == (job.train_bpe is None):
        raise ConfigError("give one of --tokenizer NAME and --train-bpe SIZE, not both and not neither")
    pieces = find_pieces(job.inputs, job.hub, piece_size=job.shard_bytes)
    groups = list(_group(pieces, job.shard_bytes))
    os.makedirs(os.path.join(job.output, ".tokenize"), exist_ok=True)
    _agree_on_plan(job, groups)
    tokenizer = _prepare_tokenizer(job, pieces)
    eos_id = _eos_id(job, tokenizer)
    name = job.tokenizer or os.path.join(job.output, "tokenizer.json")
    shards = [
        _Shard(number, group, job.output, name, eos_id, job.column, job.hub) for number, group in enumerate(groups)
    ]
    pending = [shard for shard in shards if not os.path.exists(_report_path(shard))]
    total = sum(piece.size for shard in pending for piece in shard.pieces)
    with TokenizeProgress(total, visible=show_progress) as progress:
        _run(pending, job.workers, progress)
    reports = [json.loads(Path(_report_path(shard)).read_text()) for shard in shards]
    documents, tokens = (sum(report[key] for report in reports) for key in ("documents", "tokens"))
    if tokens == 0:
        raise ConfigError(f"{', '.join(job.inputs)} hold no text in column {job.column!r}; nothing was written")
    summary = Summary(documents, tokens, len(shards), len(shards) - len(pending))
    write_atomically(os.path.join(job.output, ".tokenize", "summary.json"), json.dumps(asdict(summary)).encode())
    return summary


def _group(pieces: Sequence[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Gather neighbouring small files into shards; a large piece, or one of a data set, is a shard of its own."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and (piece.kind.startswith("hf") or size + piece.size > shard_bytes):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield group


def _agree_on_plan(job: Job, groups: list[list[Piece]]) -> None:
    """Write the plan of a new folder; in a folder that was begun, refuse any other plan."""
    facts = {
        "tokenizer": job.tokenizer or f"a trained BPE of {job.train_bpe} tokens",
        "eos": job.eos if job.append_eos else "no token",
        "column": job.column,
        "data set": list(job.hub),
        "input": hashlib.blake2b(json.dumps(groups).encode(), digest_size=16).hexdigest(),
    }
    path = os.path.join(job.output, ".tokenize", "plan.json")
    if not os.path.exists(path):
        if any(name.endswith(".ds") for name in os.listdir(job.output)):
            raise ConfigError(f"{job.output} already holds a Nanoset that was not begun here; choose another output")
        write_atomically(path, json.dumps({**facts, "shards": groups}, indent=1).encode())
        return
    earlier = json.loads(Path(path).read_text())
    changed = [name for name in facts if earlier.get(name) != facts[name]]
    if changed:
        raise ConfigError(
            f"{job.output} was begun with another {' and '.join(changed)}; choose another output or remove that folder"
        )


def _prepare_tokenizer(job: Job, pieces: Sequence[Piece]) -> Tokenizer:
    """The tokenizer, trained first if asked for, and left in the output folder."""
    own = os.path.join(job.output, "tokenizer.json")
    if job.tokenizer is not None:
        tokenizer = load_tokenizer(job.tokenizer)
        if not os.path.exists(own):
            save_tokenizer(tokenizer, job.output, eos=job.eos or end_of_document_token(job.tokenizer))
        return tokenizer
    if os.path.exists(own):
        return load_tokenizer(own)
    assert job.train_bpe is not None
    tokenizer = train_bpe(_training_texts(job, pieces), job.train_bpe)
    save_tokenizer(tokenizer, job.output, eos=END_OF_TEXT)
    return tokenizer


def _training_texts(job: Job, pieces: Sequence[Piece]) -> Iterator[str]:
    """The first texts of the input, as many as a BPE profits from."""
    characters = 0
    for text, _ in chain.from_iterable(read_texts(piece, job.column, job.hub) for piece in pieces):
        yield text
        characters += len(text)
        if characters > BPE_TRAINING_CHARACTERS:
            return


def _eos_id(job: Job, tokenizer: Tokenizer) -> int | None:
    if not job.append_eos:
        return None
    token = job.eos or (END_OF_TEXT if job.tokenizer is None else end_of_document_token(job.tokenizer))
    if token is None:
        raise ConfigError(
            f"tokenizer {job.tokenizer!r} does not say which token ends a document; use --eos or --no-eos"
        )
    eos_id = tokenizer.token_to_id(token)
    if eos_id is None:
        raise ConfigError(f"--eos {token!r} is not a token of {job.tokenizer or 'the trained BPE'}")
    return eos_id


def _report_path(shard: _Shard) -> str:
    return os.path.join(shard.output, ".tokenize", f"{shard.number:05d}.json")


def _run(shards: Sequence[_Shard], workers: int, progress: TokenizeProgress) -> None:
    """Tokenize the shards in this process, or in as many as asked for."""
    if workers <= 1 or len(shards) <= 1:
        for shard in shards:
            tokenize_shard(shard, progress.counters)
            progress.refresh()
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(shards)), mp_context=context, initializer=_start_worker, initargs=(progress.counters,)
    )
    try:
        running: set[Future[None]] = {pool.submit(_tokenize_in_worker, shard) for shard in shards}
        while running:
            finished, running = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
            progress.refresh()
    except BrokenProcessPool:
        raise ConfigError(
            "a worker was killed (out of memory?); the same command goes on from the finished shards, --workers N "
            "sets how many run at once"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker_counters: SynchronizedArray[int]


def _start_worker(counters: SynchronizedArray[int]) -> None:
    """Runs once in each worker: one thread per worker, and the counters shared with the parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    global _worker_counters
    _worker_counters = counters


def _tokenize_in_worker(shard: _Shard) -> None:
    tokenize_shard(shard, _worker_counters)


def tokenize_shard(shard: _Shard, counters: SynchronizedArray[int]) -> None:
    """Write one shard and then its report; counters are [size read, documents, tokens]."""
    tokenizer = load_tokenizer(shard.tokenizer_name)
    path = os.path.join(shard.output, f"{shard.number:05d}_unshuffled.ds")
    with NanosetWriter(
        path, tokenizer=shard.tokenizer_name, token_bytes=token_bytes_for(vocab_size(tokenizer))
    ) as writer:
        for texts, size in _batches(shard):
            before = writer.num_tokens
            # Without an end token the tokenizer's own template is applied, as datatrove does.
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=shard.eos_id is None)
            documents = [encoding.ids for encoding in encodings]
            if shard.eos_id is not None:
                for document in documents:
                    document.append(shard.eos_id)
            writer.write(documents)
            with counters.get_lock():
                for place, count in enumerate((size, len(texts), writer.num_tokens - before)):
                    counters[place] += count
    report = {"documents": writer.num_documents, "tokens": writer.num_tokens}
    write_atomically(_report_path(shard), json.dumps(report).encode())


def _batches(shard: _Shard) -> Iterator[tuple[list[str], int]]:
    """Texts of about BATCH_CHARACTERS in all, with their share of the shard's size."""
    texts: list[str] = []
    characters = size = 0
    for text, part in chain.from_iterable(read_texts(piece, shard.column, shard.hub) for piece in shard.pieces):
        texts.append(text)
        characters += len(text)
        size += part
        if characters > BATCH_CHARACTERS:
            yield texts, size
            texts, characters, size = [], 0, 0
    if texts:
        yield texts, size

"""Text to Nanosets: cut the input into shards, tokenize them with parallel workers, keep every finished shard.

    output/tokenizer.json               the tokenizer, so that the folder explains itself
    output/00000_unshuffled.ds …        one file triple per shard; visible only when complete
    output/.tokenize/plan.json          the shards and how they are tokenized
    output/.tokenize/00000.json         shard 0 is finished: its documents and tokens
    output/.tokenize/summary.json       all shards are finished

The same command again continues where it was killed; another input or tokenizer in the same folder is refused. The
output may be a URL: a shard is then written on this machine, in a temporary folder, and uploaded when it is finished.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.sharedctypes import SynchronizedArray
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from nanotron.checkpoint.storage import LocalFolder, open_folder, read_text
from nanotron.data.sources.documents import HubDataset, InputPart, Text, find_pieces, place_of, read_texts
from nanotron.data.tokenize.long_texts import PIECE, NoCut
from nanotron.data.tokenize.nanoset_writer import NanosetWriter, token_bytes_for
from nanotron.data.tokenize.progress import COUNTERS, TokenizeProgress
from nanotron.data.tokenize.tokenizer import (
    END_OF_TEXT,
    TOKENIZER,
    TextTokenizer,
    files_of,
    kept_files,
    open_tokenizer,
    read_files,
    tokenizer_of,
    train_bpe,
    vocab_size,
    write_files,
)
from nanotron.errors import ConfigError, complain
from nanotron.logging import human_format

RECORDS, PLAN = ".tokenize", "plan.json"
SHARD_BYTES = 64 * 2**20
BPE_TRAINING_CHARACTERS = 2**30
BATCH_CHARACTERS = 2**21
BATCH_TEXTS = 2**16  # however short they are


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
    bos: str | None = None
    """Token that every document begins with; None: what the tokenizer puts there."""
    prepend_bos: bool = True
    read_special_tokens: bool = False
    """Text that spells a special token becomes that token."""
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
    empty_documents: int
    """Documents of the input that have no tokens; they are left out."""
    first_empty: str | None
    """The file of the first of them, and its line or row."""

    mended_documents: int
    """Documents that held halves of characters' codes, which are U+FFFD now."""

    @property
    def mended(self) -> str | None:
        """A line for the user about the documents that were changed, if any were."""
        count = human_format(self.mended_documents)
        what = "half a character's code (a lone surrogate), which is U+FFFD now"
        return f"documents with {what}: {count}" if self.mended_documents else None

    @property
    def left_out(self) -> str | None:
        """A line for the user about the documents that were left out, if any were."""
        count, plural = human_format(self.empty_documents), "s" * (self.empty_documents > 1)
        return f"left out {count} empty document{plural}, the first: {self.first_empty}" if self.first_empty else None


@dataclass(frozen=True)
class _Shard:
    """All a worker needs to know; it crosses a process boundary."""

    number: int
    pieces: list[InputPart]
    job: Job

    @property
    def report(self) -> str:
        """The file that says it is finished."""
        return f"{self.number:05d}.json"


def tokenize(job: Job, *, show_progress: bool = True) -> Summary:
    """Tokenize everything that is not yet tokenized and return the totals of the folder."""
    if (job.tokenizer is None) == (job.train_bpe is None):
        raise ConfigError("give one of --tokenizer NAME and --train-bpe SIZE, not both and not neither")
    pieces = find_pieces(job.inputs, job.hub, piece_size=job.shard_bytes)
    groups = list(_group(pieces, job.shard_bytes))
    output = open_folder(job.output)
    output.join(RECORDS).make()
    if not _is_begun(job, groups) or TOKENIZER not in output.names():
        _write_tokenizer(job, pieces, show_progress=show_progress)
        plan = {**_facts(job, groups), "shards": groups}
        output.join(RECORDS).write(PLAN, [json.dumps(plan, indent=1).encode()])
    shards = [_Shard(number, group, job) for number, group in enumerate(groups)]
    finished = set(output.join(RECORDS).names())
    pending = [shard for shard in shards if shard.report not in finished]
    total = sum(piece.size for shard in pending for piece in shard.pieces)
    with TokenizeProgress(job.output, total, len(pending), visible=show_progress) as progress:
        _run(pending, job.workers, progress.counters)
    summary = _summarize(shards, len(shards) - len(pending))
    if summary.tokens == 0:
        raise ConfigError(f"{', '.join(job.inputs)} hold no text in column {job.column!r}; nothing was written")
    output.join(RECORDS).write("summary.json", [json.dumps(asdict(summary)).encode()])
    return summary


def _summarize(shards: Sequence[_Shard], resumed: int) -> Summary:
    """The totals of the shards' reports."""
    reports = [json.loads(read_text(open_folder(shard.job.output).join(RECORDS), shard.report)) for shard in shards]
    documents, tokens, empty = (sum(report[key] for report in reports) for key in ("documents", "tokens", "empty"))
    firsts = (
        place_of(shard.pieces[report["first_empty"][0]], report["first_empty"][1])
        for shard, report in zip(shards, reports, strict=True)
        if report["empty"]
    )
    mended = sum(report.get("mended", 0) for report in reports)
    return Summary(documents, tokens, len(shards), resumed, empty, next(firsts, None), mended)


def _group(pieces: Sequence[InputPart], shard_bytes: int) -> Iterator[list[InputPart]]:
    """Gather neighbouring small files into shards; a large piece, or one of a data set, is a shard of its own."""
    group: list[InputPart] = []
    size = 0
    for piece in pieces:
        if group and (piece.kind.startswith("hf") or size + piece.size > shard_bytes):
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    if group:
        yield group


def _facts(job: Job, groups: list[list[InputPart]]) -> dict[str, Any]:
    """What may not change while a folder is being written."""
    return {
        "tokenizer": job.tokenizer or f"a trained BPE of {job.train_bpe} tokens",
        "eos": job.eos if job.append_eos else "no token",
        "bos": job.bos if job.prepend_bos else "no token",
        "reading of special tokens": job.read_special_tokens or None,
        "column": job.column,
        "data set": list(job.hub),
        "input": hashlib.blake2b(json.dumps(groups).encode(), digest_size=16).hexdigest(),
    }


def _is_begun(job: Job, groups: list[list[InputPart]]) -> bool:
    """Whether the folder was begun with this plan; raises ConfigError when it was with another, or holds tokens."""
    output = open_folder(job.output)
    if PLAN not in output.join(RECORDS).names():
        if any(name.endswith(".ds") for name in output.names()):
            raise ConfigError(f"{job.output} already holds a Nanoset that was not begun here; choose another output")
        return False
    earlier, facts = json.loads(read_text(output.join(RECORDS), PLAN)), _facts(job, groups)
    changed = [name for name in facts if earlier.get(name) != facts[name]]
    if changed:
        raise ConfigError(
            f"{job.output} was begun with another {' and '.join(changed)}; choose another output or remove that folder"
        )
    return True


def _write_tokenizer(job: Job, pieces: Sequence[InputPart], *, show_progress: bool) -> None:
    """Leave the tokenizer in the output folder, trained first if asked for. The shards are read with that one.

    Its files say what --bos and --eos ask for, so that who reads the folder begins and ends texts alike.
    """
    name = job.tokenizer or "the trained BPE"
    files = read_files(job.tokenizer) if job.tokenizer is not None else _train(job, pieces, show_progress=show_progress)
    known = tokenizer_of(files, name).tokenizer
    for option, token in (("--eos", job.eos), ("--bos", job.bos)):
        if token is not None and known.token_to_id(token) is None:
            raise ConfigError(f"{option} {token!r} is not a token of {name}")
    kept = kept_files(files, name, eos=job.eos, bos=job.bos, prepend_bos=job.prepend_bos)
    if job.append_eos and tokenizer_of(kept, name).end is None:
        raise ConfigError(f"tokenizer {name!r} does not say which token ends a document; use --eos or --no-eos")
    write_files(kept, job.output)


def _train(job: Job, pieces: Sequence[InputPart], *, show_progress: bool) -> dict[str, str]:
    assert job.train_bpe is not None
    if show_progress:
        complain(f"{job.output}: training a BPE of {job.train_bpe} tokens on the input")
    return files_of(train_bpe(_training_texts(job, pieces), job.train_bpe), eos=END_OF_TEXT)


def _training_texts(job: Job, pieces: Sequence[InputPart]) -> Iterator[str]:
    """The first texts of the input, as many as a BPE profits from."""
    characters = 0
    for piece in pieces:
        for text, *_ in read_texts(piece, job.column, job.hub):
            if text:  # a long one in pieces, cut anywhere: it is only counted
                yield from (text[start : start + PIECE] for start in range(0, len(text), PIECE))
            characters += len(text)
            if characters > BPE_TRAINING_CHARACTERS:
                return


def _run(shards: Sequence[_Shard], workers: int, counters: SynchronizedArray[int]) -> None:
    """Tokenize the shards in this process, or in as many as asked for."""
    if workers <= 1 or len(shards) <= 1:
        for shard in shards:
            tokenize_shard(shard, counters)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(shards)), mp_context=context, initializer=_start_worker, initargs=(counters,)
    )
    try:
        for future in as_completed([pool.submit(_tokenize_in_worker, shard) for shard in shards]):
            future.result()
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
    """Write one shard and then its report; the counters are those of TokenizeProgress."""
    output, name = open_folder(shard.job.output), f"{shard.number:05d}_unshuffled.ds"
    if isinstance(output, LocalFolder):
        report = _write_shard(shard, os.path.join(output.path, name), counters)
    else:
        with TemporaryDirectory(prefix="nanotron-") as folder:
            report = _write_shard(shard, os.path.join(folder, name), counters)
            local = open_folder(folder)
            for file in sorted(local.names(), reverse=True):  # the tokens last: where they are, the shard is whole
                output.write(file, local.stream(file))
    output.join(RECORDS).write(shard.report, [json.dumps(report).encode()])
    _count(counters, shards=1)


def _write_shard(shard: _Shard, path: str, counters: SynchronizedArray[int]) -> dict[str, Any]:
    """Write the files of one shard; returns its report."""
    job = shard.job
    tokenizer = open_tokenizer(job.output, read_special_tokens=job.read_special_tokens)
    tokenizer = tokenizer if job.append_eos else replace(tokenizer, end=None)
    token_bytes = token_bytes_for(vocab_size(tokenizer.tokenizer))
    name = job.tokenizer or os.path.join(job.output, TOKENIZER)
    empty: list[_Read] = []
    mended = 0
    with NanosetWriter(path, tokenizer=name, token_bytes=token_bytes) as writer:
        for batch in _batches(shard):
            before = writer.num_tokens
            documents = _tokens(tokenizer, batch, shard)
            empty += [read for read, document in zip(batch, documents, strict=True) if not document]
            mended += sum(read.text.is_mended for read in batch)
            documents = [document for document in documents if document]
            writer.write(documents)
            size = sum(read.text.size for read in batch)
            _count(counters, size=size, documents=len(documents), tokens=writer.num_tokens - before)
    first = (empty[0].piece, empty[0].text.place) if empty else None
    return {
        "documents": writer.num_documents,
        "tokens": writer.num_tokens,
        "empty": len(empty),
        "first_empty": first,
        "mended": mended,
    }


def _tokens(tokenizer: TextTokenizer, batch: Sequence[_Read], shard: _Shard) -> list[list[int]]:
    try:
        return tokenizer.documents([read.text.text for read in batch])
    except NoCut as error:
        piece, text = batch[error.number]
        raise ConfigError(f"{place_of(shard.pieces[piece], text.place)}: {error}") from None


class _Read(NamedTuple):
    """A text, and the number of its piece within the shard."""

    piece: int
    text: Text


def _batches(shard: _Shard) -> Iterator[list[_Read]]:
    """Texts of about BATCH_CHARACTERS in all."""
    batch: list[_Read] = []
    characters = 0
    for number, piece in enumerate(shard.pieces):
        for text in read_texts(piece, shard.job.column, shard.job.hub):
            batch.append(_Read(number, text))
            characters += len(text.text)
            if characters > BATCH_CHARACTERS or len(batch) == BATCH_TEXTS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _count(counters: SynchronizedArray[int], **counts: int) -> None:
    with counters.get_lock():
        for name, count in counts.items():
            counters[COUNTERS.index(name)] += count

"""What `nanotron tokenize` and `tools/preprocess_data.py` do with their arguments."""

from __future__ import annotations

from nanotron.data.tokenize.corpus import CORPUS_FOLDER, is_prepared, prepare_corpus
from nanotron.data.tokenize.tokenizer import load_tokenizer, vocab_size
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import complain, say
from nanotron.logging import human_format


def prepare_default_corpus(folder: str | None) -> None:
    """Prepare the embedded corpus unless it is there, and say which."""
    folder = folder or CORPUS_FOLDER
    known = is_prepared(folder)
    if not known:
        complain(f"{folder}: the embedded corpus is being prepared, which takes a minute: a BPE is trained on it first")
    prepare_corpus(folder)
    say(f"{folder}: the embedded corpus {'is already tokenized' if known else 'has been tokenized'}")


def run_tokenize(job: Job) -> None:
    """Tokenize and print one line of totals, and one about empty documents if there were any."""
    summary, output = tokenize(job), job.output
    resumed = f", {summary.resumed_shards} of them from before" if summary.resumed_shards else ""
    documents = f"{human_format(summary.documents)} document{'s' if summary.documents != 1 else ''}"
    shards = f"{summary.shards} shard{'s' if summary.shards != 1 else ''}"
    shortfall = _shortfall(output, job.train_bpe)
    say(f"{output}: {documents}, {human_format(summary.tokens)} tokens in {shards}{resumed}{shortfall}")
    for line in filter(None, (summary.left_out, summary.mended)):
        say(f"{output}: {line}")


def _shortfall(output: str, train_bpe: int | None) -> str:
    """What the line says when the texts hold too few pairs for a BPE of the size that was asked for."""
    if train_bpe is None:
        return ""
    size = vocab_size(load_tokenizer(output))
    return f"; the texts are too few for a BPE of {train_bpe} tokens, it has {size}" if size < train_bpe else ""

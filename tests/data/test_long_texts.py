"""Texts of many megabytes: the tokens are those of the whole, and the memory that of a piece."""

import argparse
import inspect
import json
import textwrap

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from nanotron.data.tokenize import long_texts, tokenizer
from nanotron.data.tokenize.long_texts import pieces
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, TextTokenizer, save_tokenizer, train_bpe
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import ConfigError

TEXT = "".join(inspect.getsource(module) for module in (argparse, textwrap, json))


def metaspace():
    """A tokenizer in the manner of SentencePiece: words begin with their space, and so does a text."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False))
    return made


@pytest.mark.parametrize("make", [lambda: train_bpe([TEXT], 600), metaspace], ids=["byte level", "metaspace"])
def test_the_pieces_of_a_text_have_its_tokens(make, monkeypatch):
    made = make()
    whole = [made.encode(text, add_special_tokens=False).ids for text in ("a", TEXT, "b")]
    for module in (long_texts, tokenizer):
        monkeypatch.setattr(module, "PIECE", 3000)
    assert TextTokenizer(made, (), None, (), None).documents(["a", TEXT, "b"]) == whole
    cut = list(pieces(TEXT, lambda text: made.encode(text).ids, 0))
    assert "".join(cut) == TEXT
    assert len(TEXT) / 3000 < len(cut) < len(TEXT) / 1500 + 1


def test_a_word_without_end_is_named_with_its_file_and_line(tmp_path, monkeypatch):
    for name in ("PIECE", "LONGEST"):
        monkeypatch.setattr(long_texts, name, 1000)
    monkeypatch.setattr(tokenizer, "PIECE", 1000)
    save_tokenizer(train_bpe(["a text"], 257), str(tmp_path / "tokenizer"), eos=END_OF_TEXT)
    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a text", "a" * 5000)))
    with pytest.raises(ConfigError) as caught:
        tokenize(Job([str(source)], str(tmp_path / "out"), tokenizer=str(tmp_path / "tokenizer")))
    (line,) = caught.value.problems
    assert line.startswith(
        f"{source}: line 2 (byte 19): a text of 5,000 characters in which the tokenizer sees nowhere"
    )

"""Tokens as text: whole characters, rows in order, and prompts from files."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from nanotron.data.tokenize.tokenizer import train_bpe
from nanotron.errors import ConfigError
from nanotron.generate.text import as_json, as_text, read_prompts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe(["no euro sign here"], 260)


def test_a_character_is_shown_when_its_last_byte_has_come(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€b").ids
    assert len(ids) == 5, "the euro sign is three tokens"
    assert list(as_text(["x"], [[token] for token in ids], tokenizer)) == ["x", "a", "", "", "€", "b", "\n"]


def test_bytes_that_make_no_character_are_shown_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a€").ids[:-1]
    assert "".join(as_text(["x"], [[token] for token in ids], tokenizer)) == "xa\N{REPLACEMENT CHARACTER}\n"


def test_the_first_row_is_shown_as_it_comes_and_the_next_when_it_has_ended(tokenizer: Tokenizer) -> None:
    a, b, c = (tokenizer.token_to_id(letter) for letter in "abc")
    steps = [[a, b, c], [a, None, c], [None, None, c], [None, None, c]]
    pieces = list(as_text(["1", "2", "3"], steps, tokenizer))
    assert pieces == ["1", "a", "a", "\n", "2b\n", "3ccc", "c", "\n"]


def test_json_has_a_line_for_every_prompt(tokenizer: Tokenizer) -> None:
    a, b = (tokenizer.token_to_id(letter) for letter in "ab")
    lines = list(as_json(["é", "2"], [[a, b], [None, b]], tokenizer))
    assert lines == [
        f'{{"prompt": "é", "text": "a", "tokens": [{a}]}}\n',
        f'{{"prompt": "2", "text": "bb", "tokens": [{b}, {b}]}}\n',
    ]


def test_a_batch_file_holds_a_prompt_on_each_line_that_is_not_blank(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("def \n\n  x = {\n")
    assert read_prompts(str(tmp_path / "prompts.txt")) == ["def ", "  x = {"]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "two\\nlines", "id": 1}\n"é"\n')
    assert read_prompts(str(tmp_path / "prompts.jsonl")) == ["two\nlines", "é"]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("empty.txt", "\n", "holds no prompt"),
        ("bad.jsonl", '"fine"\n{"text": "x"}\n', "bad.jsonl:2: neither a JSON string"),
        ("bad.jsonl", "def f():\n", "bad.jsonl:1: neither a JSON string"),
        ("missing.txt", None, "no such file"),
    ],
)
def test_a_batch_file_that_holds_no_prompts_is_refused(
    tmp_path: Path, name: str, content: str | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        read_prompts(str(tmp_path / name))

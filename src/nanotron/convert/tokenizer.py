"""The files of a tokenizer, as Hugging Face names them, in folders here or remote."""

from __future__ import annotations

import json

from nanotron.checkpoint.storage import Folder, read_text
from nanotron.data.tokenize.tokenizer import FILES, SETTINGS, STOPS, TOKENIZER, TextTokenizer, tokenizer_of

COPIED = (
    *(name for name in FILES if name != STOPS),
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def copy_tokenizer(source: Folder, target: Folder) -> list[str]:
    """Copy what tokenizer files a folder has, and how its model draws and stops; returns the tokenizer's names.

    A tokenizer.json that stands alone gets the tokenizer_config.json without which transformers does not open it.
    """
    names = set(source.names())
    copied = [name for name in COPIED if name in names]
    for name in [*copied, *names & {STOPS}]:
        target.write(name, source.stream(name))
    if TOKENIZER in copied and SETTINGS not in copied:
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1) + "\n"
        target.write(SETTINGS, [content.encode()])
    return copied


def read_tokenizer(folder: Folder, *, read_special_tokens: bool = False) -> TextTokenizer | None:
    """The tokenizer of a folder's tokenizer.json, if it has one; raises ConfigError when that is none."""
    names = folder.names()
    if TOKENIZER not in names:
        return None
    files = {name: read_text(folder, name) for name in FILES if name in names}
    return tokenizer_of(files, folder.path, read_special_tokens=read_special_tokens)

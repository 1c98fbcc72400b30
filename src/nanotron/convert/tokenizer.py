"""The files of a tokenizer, as Hugging Face names them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from nanotron.checkpoint.storage import Folder, read_text
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


def copy_tokenizer(source: Folder, target: Folder) -> list[str]:
    """Copy what tokenizer files a folder has; returns their names.

    A tokenizer.json that stands alone gets the tokenizer_config.json without which transformers does not open it.
    """
    names = set(source.names())
    copied = [name for name in FILES if name in names]
    for name in copied:
        target.write(name, source.stream(name))
    if "tokenizer.json" in copied and "tokenizer_config.json" not in copied:
        content = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1) + "\n"
        target.write("tokenizer_config.json", [content.encode()])
    return copied


class FoundTokenizer(NamedTuple):
    """A tokenizer, and the ids of the tokens that it says begin and end a text."""

    tokenizer: Tokenizer
    begin: int | None
    end: int | None


def read_tokenizer(folder: Folder) -> FoundTokenizer | None:
    """The tokenizer of a folder's tokenizer.json, if it has one; raises ConfigError when that is none."""
    from tokenizers import Tokenizer

    names = folder.names()
    if "tokenizer.json" not in names:
        return None
    try:
        tokenizer = Tokenizer.from_str(read_text(folder, "tokenizer.json"))
    except Exception as error:  # the library raises bare Exception for what it cannot parse
        raise ConfigError(f"{folder.path}/tokenizer.json is not a tokenizer: {error}") from None
    if "tokenizer_config.json" not in names:
        return FoundTokenizer(tokenizer, None, None)
    settings = json.loads(read_text(folder, "tokenizer_config.json"))
    tokens = [settings.get(name) for name in ("bos_token", "eos_token")]
    contents = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    begin, end = (None if content is None else tokenizer.token_to_id(content) for content in contents)
    return FoundTokenizer(tokenizer, begin, end)

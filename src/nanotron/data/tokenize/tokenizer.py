"""Tokenizers: loading one by path or Hugging Face name, training a byte-level BPE, and the few facts others need."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.data.tokenize.nanoset_writer import write_atomically
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """A `tokenizer.json`, a folder that holds one, or a name on the Hugging Face hub."""
    from tokenizers import Tokenizer

    path = tokenizer_file(name_or_path)
    if path is not None:
        try:
            return Tokenizer.from_file(path)
        except Exception as error:  # the library raises bare Exception for a file it cannot parse
            raise ConfigError(f"{path} is not a tokenizer.json: {error}") from None
    if os.path.exists(name_or_path):
        raise ConfigError(f"{name_or_path} holds no tokenizer.json; name a tokenizer.json or a folder that holds one")
    try:
        return Tokenizer.from_pretrained(name_or_path)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"tokenizer {name_or_path!r} is neither a file, nor a folder, nor found on the Hugging Face hub ({reason})"
        ) from None


def tokenizer_file(name_or_path: str) -> str | None:
    """The local tokenizer.json that the name stands for, if it is local."""
    if os.path.isdir(name_or_path):
        path = os.path.join(name_or_path, "tokenizer.json")
        return path if os.path.isfile(path) else None
    return name_or_path if os.path.isfile(name_or_path) else None


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id, which is what an embedding must hold."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def end_of_document_token(name_or_path: str) -> str | None:
    """The tokenizer's own end-of-sequence token, from the tokenizer_config.json beside its tokenizer.json."""
    path = tokenizer_file(name_or_path)
    if path is None:
        return None
    config = Path(path).parent / "tokenizer_config.json"
    if not config.is_file():
        return None
    token = json.loads(config.read_text()).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def end_of_document_id(name_or_path: str) -> int | None:
    """The id of the tokenizer's end-of-sequence token, or None when it has none."""
    token = end_of_document_token(name_or_path)
    return None if token is None else load_tokenizer(name_or_path).token_to_id(token)


def train_bpe(texts: Iterable[str], num_tokens: int) -> Tokenizer:
    """A byte-level BPE whose token 0 is END_OF_TEXT; the same texts give the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if num_tokens <= len(alphabet):
        raise ConfigError(f"a byte-level BPE needs more than {len(alphabet)} tokens, not {num_tokens}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, special_tokens=[END_OF_TEXT], initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: str, *, eos: str | None) -> None:
    """Write the tokenizer_config.json that lets transformers open the folder, then tokenizer.json."""
    os.makedirs(folder, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    write_atomically(os.path.join(folder, "tokenizer_config.json"), (json.dumps(config, indent=2) + "\n").encode())
    write_atomically(os.path.join(folder, "tokenizer.json"), tokenizer.to_str(pretty=True).encode())

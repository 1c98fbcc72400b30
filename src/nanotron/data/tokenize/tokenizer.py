"""Tokenizers: opening one by path or Hugging Face name, what its files say of a text's ends, training a byte-level BPE.

    tokenizer.json            the tokenizer, and a template of what it puts around a text
    tokenizer_config.json     names bos_token and eos_token
    special_tokens_map.json   names them where tokenizer_config.json does not
    chat_template.jinja       the chat template; without it, tokenizer_config.json may hold one
    generation_config.json    the tokens at which a model stops; the first of them, where no file names an eos_token

A text becomes ``begin`` and its tokens wherever it is read: by ``nanotron tokenize``, in training, as a prompt. A
document is followed by ``end``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from nanotron.checkpoint.storage import Folder, open_folder, read_text
from nanotron.config.model import Tokens
from nanotron.data.tokenize.long_texts import PIECE, pieces
from nanotron.errors import ConfigError
from nanotron.untrusted import MAPPING, checked, parse_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TOKENIZER, SETTINGS, NAMES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, STOPS = "chat_template.jinja", "generation_config.json"
MOST_IDS = 2**32  # what the library counts ids with
FILES = (TOKENIZER, SETTINGS, NAMES, TEMPLATE, STOPS)


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer, and what every text begins and ends with."""

    tokenizer: Tokenizer
    """Cuts nothing off and adds nothing by itself; its offsets are those of all characters of a token."""
    begin: tuple[int, ...]
    """The tokens before every text."""
    end: int | None
    """The token after every document; None: no file names one."""
    stops: tuple[int, ...]
    """The tokens at which a model's text ends, `end` first."""
    bos: int | None
    """The token that is named bos_token, whether texts begin with it or not."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text that goes on."""
        return [*self.begin, *self._tokens(text)]

    def documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of whole documents; one without a token of its own has none at all. Raises NoCut."""
        encodings = self.tokenizer.encode_batch_fast(
            [text for text in texts if len(text) <= PIECE], add_special_tokens=False
        )
        whole = iter(encodings)
        documents: list[list[int]] = [
            next(whole).ids if len(text) <= PIECE else self._long(text, number) for number, text in enumerate(texts)
        ]
        for ids in filter(None, documents):
            ids[:0] = self.begin
            ids += _ids(self.end)
        return documents

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _long(self, text: str, number: int) -> list[int]:
        return [token for piece in pieces(text, self._tokens, number) for token in self._tokens(piece)]

    def stops_with(self, model: int | list[int] | None) -> tuple[int, ...]:
        """`stops` and the model's own eos_token_id, which counts where no file says more, or says one of the same."""
        if self.stops and not {*self.stops} & {*_ids(model)}:
            return self.stops
        return tuple(dict.fromkeys(self.stops + _ids(model)))


def open_tokenizer(name_or_path: str, *, read_special_tokens: bool = False) -> TextTokenizer:
    """A `tokenizer.json`, a folder that holds one, or a name on the Hugging Face hub, with what its other files say.

    Text that spells a special token stays text, unless `read_special_tokens`. Raises ConfigError.
    """
    return tokenizer_of(read_files(name_or_path), name_or_path, read_special_tokens=read_special_tokens)


def tokenizer_of(files: Mapping[str, str], where: str, *, read_special_tokens: bool = False) -> TextTokenizer:
    """The tokenizer that the texts of FILES describe; `where` they lie begins the line about what is wrong in them."""
    from tokenizers import processors

    tokenizer, settings = _parse_tokenizer(files[TOKENIZER], where), settings_of(files, where)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    try:
        begin = () if tokenizer.post_processor is None else _begin(json.loads(tokenizer.post_processor.__getstate__()))
    except KeyError as error:
        raise ConfigError(f"{where}: its tokenizer.json begins texts with {error}, which it does not know") from None
    bos = _named(tokenizer, settings, "bos")
    others = (one for one in _ids(_stops(files, where)) if one < MOST_IDS and tokenizer.id_to_token(one))
    stops = (*_ids(_named(tokenizer, settings, "eos")), *others)
    tokenizer.post_processor = processors.Sequence([])  # after its template was read
    tokenizer.encode_special_tokens = not read_special_tokens
    return TextTokenizer(tokenizer, begin, next(iter(stops), None), tuple(dict.fromkeys(stops)), bos)


def _stops(files: Mapping[str, str], where: str) -> int | list[int] | None:
    """The tokens at which generation_config.json stops."""
    said = _json(files, STOPS, where).get("eos_token_id")
    try:
        ids: int | list[int] | None = TypeAdapter(Tokens | None).validate_python(said)
    except ValidationError:
        text = f"{where}: its {STOPS} has eos_token_id={json.dumps(said)}, which is neither a token nor a list of some"
        raise ConfigError(text) from None
    return ids


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    """One id, several or none, as the files have them."""
    return (value,) if isinstance(value, int) else tuple(value or ())


def load_tokenizer(name_or_path: str) -> Tokenizer:
    """Only what tokenizer.json says."""
    return _parse_tokenizer(read_files(name_or_path)[TOKENIZER], name_or_path)


def _parse_tokenizer(text: str, where: str) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(text)
    except BaseException as error:  # the library raises bare Exception, and where it panics not even that
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(f"{where}: its tokenizer.json is not a tokenizer: {error}") from None


def settings_of(files: Mapping[str, str], where: str) -> dict[str, Any]:
    """tokenizer_config.json, with the tokens that special_tokens_map.json names; each by what it is spelled like."""
    said = {name: value for name, value in _json(files, SETTINGS, where).items() if value is not None}
    settings = {**_json(files, NAMES, where), **said}
    return {name: value.get("content", value) if isinstance(value, dict) else value for name, value in settings.items()}


def _json(files: Mapping[str, str], name: str, where: str) -> dict[str, Any]:
    try:
        return checked(MAPPING, parse_json(files.get(name, "{}")))
    except ValueError as error:
        raise ConfigError(f"{where}: its {name} is damaged ({error})") from None


def _named(tokenizer: Tokenizer, settings: Mapping[str, Any], kind: str) -> int | None:
    token = settings.get(f"{kind}_token")
    found: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    return found


def _begin(processor: Mapping[str, Any]) -> tuple[int, ...]:
    """What a tokenizer's own template, which is in the post_processor of tokenizer.json, puts before a text."""
    if processor["type"] == "Sequence":
        return tuple(token for part in processor["processors"] for token in _begin(part))
    if processor["type"] == "TemplateProcessing":
        before = takewhile(lambda piece: "SpecialToken" in piece, processor["single"])
        special = processor["special_tokens"]
        return tuple(token for piece in before for token in special[piece["SpecialToken"]["id"]]["ids"])
    return (processor["cls"][1],) if "cls" in processor else ()  # of BERT and RoBERTa


def read_files(name_or_path: str) -> dict[str, str]:
    """The texts of those of FILES that a tokenizer has, by their names; raises ConfigError when there is none."""
    if "://" in name_or_path:
        return _files_at(open_folder(name_or_path.removesuffix(f"/{TOKENIZER}")))
    path = tokenizer_file(name_or_path)
    if path is None and os.path.exists(name_or_path):
        raise ConfigError(f"{name_or_path} holds no tokenizer.json; name a tokenizer.json or a folder that holds one")
    path = path or os.path.join(_folder_from_hub(name_or_path), TOKENIZER)
    try:
        beside = {name: Path(path).with_name(name) for name in FILES}
        found = {name: file.read_text(encoding="utf-8") for name, file in beside.items() if file.is_file()}
        return {**found, TOKENIZER: Path(path).read_text(encoding="utf-8")}
    except FileNotFoundError:
        raise ConfigError(f"tokenizer {name_or_path!r}: the Hugging Face hub has no tokenizer.json of it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"tokenizer {name_or_path!r}: a file of it is not UTF-8 text ({error})") from None


def _files_at(folder: Folder) -> dict[str, str]:
    """The same of a folder behind a URL, or of one that is being written."""
    names = folder.names()
    if TOKENIZER not in names:
        raise ConfigError(f"{folder.path} holds no tokenizer.json; name a tokenizer.json or a folder that holds one")
    return {name: read_text(folder, name) for name in FILES if name in names}


def tokenizer_file(name_or_path: str) -> str | None:
    """The local tokenizer.json that the name stands for, if it is local."""
    if os.path.isdir(name_or_path):
        path = os.path.join(name_or_path, TOKENIZER)
        return path if os.path.isfile(path) else None
    return name_or_path if os.path.isfile(name_or_path) else None


@cache
def _folder_from_hub(name: str) -> str:
    """The hub's cache of a tokenizer's files, brought up to date unless the hub is out of reach (HF_HUB_OFFLINE)."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import tqdm

    class NoBar(tqdm):  # of a few small files, drawn by every rank
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]

    try:
        return snapshot_download(name, allow_patterns=list(FILES), tqdm_class=NoBar)
    except Exception as error:  # the library raises many kinds, each with a message for the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"tokenizer {name!r} is neither a file, nor a folder, nor found on the Hugging Face hub ({reason})"
        ) from None


def vocab_size(tokenizer: Tokenizer) -> int:
    """One more than the largest token id, which is what an embedding must hold."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


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


def kept_files(
    files: Mapping[str, str], where: str, *, eos: str | None = None, bos: str | None = None, prepend_bos: bool = True
) -> dict[str, str]:
    """What says the same of a tokenizer in a folder of its own, in a form that transformers opens too.

    Of generation_config.json only the tokens are kept: how to draw is another model's. ``eos``, ``bos`` and
    ``prepend_bos`` are said instead of what the files say.
    """
    named = {name: token for name, token in (("eos_token", eos), ("bos_token", bos)) if token is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings_of(files, where), **named}
    kept = {name: text for name, text in files.items() if name != NAMES} | {SETTINGS: _text(settings)}
    if bos is not None or not prepend_bos:
        kept[TOKENIZER] = _begun_with(bos if prepend_bos else None, _parse_tokenizer(files[TOKENIZER], where))
    opened = tokenizer_of(kept, where)
    if opened.end is not None:
        kept[SETTINGS] = _text({**settings, "eos_token": opened.tokenizer.id_to_token(opened.end)})
    if STOPS in kept:
        kept[STOPS] = _text({"eos_token_id": list(opened.stops)})
    return kept


def _begun_with(bos: str | None, tokenizer: Tokenizer) -> str:
    """The tokenizer.json whose template puts this token, or nothing, before a text."""
    from tokenizers import processors

    special = [] if bos is None else [(bos, tokenizer.token_to_id(bos))]
    begin = [token for token, _ in special]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*begin, "$A"], pair=[*begin, "$A", *begin, "$B"], special_tokens=special
    )
    text: str = tokenizer.to_str(pretty=True)
    return text


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def write_files(files: Mapping[str, str], folder: str) -> None:
    """Write a tokenizer's files, tokenizer.json last: where it is, the others are. The folder may be a URL."""
    target = open_folder(folder)
    target.make()
    for name in sorted(files, key=lambda name: name == TOKENIZER):
        target.write(name, [files[name].encode()])


def files_of(tokenizer: Tokenizer, *, eos: str | None) -> dict[str, str]:
    """The files of a tokenizer made here, with the tokenizer_config.json that lets transformers open them."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
    return {TOKENIZER: tokenizer.to_str(pretty=True), SETTINGS: _text(settings)}


def save_tokenizer(tokenizer: Tokenizer, folder: str, *, eos: str | None) -> None:
    """Write the files of a tokenizer made here."""
    write_files(files_of(tokenizer, eos=eos), folder)

"""What a folder of weights holds: which model, on which layout it is to run here, and its tokenizer.

A checkpoint of ours, of Hugging Face's Nanotron, or a Hugging Face model; the layout that wrote it does not matter.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanotron.checkpoint.safetensors import DTYPE_NAMES
from nanotron.checkpoint.storage import open_folder, read_text
from nanotron.checkpoint.verify import refuse_damage
from nanotron.config import Config, ParallelismArgs
from nanotron.config.document import parse
from nanotron.config.load import read_document
from nanotron.config.rules import RULES
from nanotron.convert.folders import OURS, Found, kind_of, read_model_config
from nanotron.convert.importing import starter_config
from nanotron.convert.sources import open_weights
from nanotron.convert.tokenizer import read_tokenizer
from nanotron.data.probe import tokenizer_name
from nanotron.data.tokenize.tokenizer import TextTokenizer, open_tokenizer
from nanotron.errors import ConfigError
from nanotron.models.specs import FINAL_NORM
from nanotron.parallel.agreement import alone

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Source:
    """A model that can be loaded, and the words for its token ids."""

    path: str
    """The folder of the weights: of one step, where there are several."""
    config: Config
    texts: TextTokenizer
    notes: tuple[str, ...] = ()
    """What the folder holds that is not used."""

    @property
    def tokenizer(self) -> Tokenizer:
        """From ids to text."""
        return self.texts.tokenizer

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens that end a text: the tokenizer's own, else the model's; none: no text ends."""
        return self.texts.stops_with(self.config.model.model_config.eos_token_id)

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt, begun as training texts are; raises ConfigError for one that cannot be gone on from."""
        ids = self.texts.encode(prompt)
        if not ids:
            raise ConfigError("the prompt is empty; give at least one character")
        size = self.config.model.model_config.vocab_size
        if max(ids) >= size:
            raise ConfigError(f"the tokenizer knows token {max(ids)}, the model only {size}; is it another model's?")
        return ids


def open_source(path: str, *, read_special_tokens: bool = False) -> Source:
    """Read config and tokenizer of a step's folder, a folder of steps (the newest complete one), or a model's folder.

    ``read_special_tokens``: a prompt that spells one holds it, as it does where the run read its own texts so. Raises
    ConfigError when it holds no weights that can be read, or when no tokenizer is found for them.
    """
    found = kind_of(path.rstrip("/"))
    config, notes = _config(found)
    reads = read_special_tokens or config.tokenizer.read_special_tokens
    return Source(found.path, config, _tokenizer(found.path, config, read_special_tokens=reads), tuple(notes))


def laid_out(config: Config, *, tp: int, pp: int) -> Config:
    """The config with one replica on tp · pp ranks; raises ConfigError when the model cannot be cut so."""
    other = copy(config)
    other.parallelism = ParallelismArgs(dp=1, tp=tp, pp=pp)
    axes = ("parallelism.tp", "parallelism.pp")
    breaches = [(key, text) for rule in RULES for key, text in rule.ask(other) if key in axes]
    if breaches:
        raise ConfigError([f"{key.removeprefix('parallelism.')}={text}" for key, text in breaches])
    return other


def _config(found: Found) -> tuple[Config, list[str]]:
    """The config of the run that wrote a checkpoint; for a model from elsewhere, one that has its shape, and notes."""
    if found.kind == OURS:
        refuse_damage(found.path, alone(), kinds=())  # of the text files; the weights' follows when they are loaded
        try:
            text = read_text(open_folder(found.path), "config.yaml")
        except FileNotFoundError:
            raise ConfigError(f"{found.path}/config.yaml is missing; copy it from the run directory") from None
        return read_document(f"{found.path}/config.yaml", parse(text)).value(), []
    model = read_model_config(found.path)
    weights = open_weights(found.path, model)
    return starter_config(model, "generate", DTYPE_NAMES[weights.dtype("weight", FINAL_NORM)]), weights.ignored


def _tokenizer(path: str, config: Config, *, read_special_tokens: bool) -> TextTokenizer:
    """The tokenizer beside the weights or in the run directory above, else the one that the config names."""
    parent = path.rpartition("/")[0] or "."
    for folder in (path, parent):
        if found := read_tokenizer(open_folder(folder), read_special_tokens=read_special_tokens):
            return found
    name = tokenizer_name(config)
    if name is None:
        raise ConfigError(f"no tokenizer.json in {path} or {parent}, and the config names none; put one there")
    return open_tokenizer(name, read_special_tokens=read_special_tokens)

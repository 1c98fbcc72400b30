"""What a folder of weights holds: which model, on which layout it is to run here, and its tokenizer.

A checkpoint of ours, of the existing Nanotron, or a Hugging Face model; the layout that wrote it does not matter.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanotron.checkpoint.storage import open_folder, read_text
from nanotron.checkpoint.verify import refuse_damage
from nanotron.config import Config, ParallelismArgs
from nanotron.config.document import parse
from nanotron.config.load import read_document
from nanotron.config.rules import RULES
from nanotron.convert.importing import DTYPE_NAMES, read_model_config, starter_config
from nanotron.convert.sources import OURS, Found, kind_of, open_weights
from nanotron.convert.tokenizer import read_tokenizer
from nanotron.data.probe import tokenizer_name
from nanotron.data.tokenize.tokenizer import end_of_document_token, load_tokenizer
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
    tokenizer: Tokenizer
    end: int | None
    """The token that ends a text: the tokenizer's own, else the model's; None: no text ends."""
    notes: tuple[str, ...] = ()
    """What the folder holds that is not used."""

    def encode(self, prompt: str) -> list[int]:
        """The ids of a prompt; raises ConfigError for one that the model cannot go on from."""
        ids: list[int] = self.tokenizer.encode(prompt).ids
        if not ids:
            raise ConfigError("the prompt is empty; give at least one character")
        size = self.config.model.model_config.vocab_size
        if max(ids) >= size:
            raise ConfigError(f"the tokenizer knows token {max(ids)}, the model only {size}; is it another model's?")
        return ids


def open_source(path: str) -> Source:
    """Read config and tokenizer of a step's folder, a folder of steps (the newest complete one), or a model's folder.

    Raises ConfigError when it holds no weights that can be read, or when no tokenizer is found for them.
    """
    found = kind_of(path.rstrip("/"))
    config, notes = _config(found)
    tokenizer, end = _tokenizer(found.path, config)
    end = config.model.model_config.eos_token_id if end is None else end
    return Source(found.path, config, tokenizer, end, tuple(notes))


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


def _tokenizer(path: str, config: Config) -> tuple[Tokenizer, int | None]:
    """The tokenizer beside the weights or in the run directory above, else the one that the config names; its end."""
    parent = path.rpartition("/")[0] or "."
    for folder in (path, parent):
        found = read_tokenizer(open_folder(folder))
        if found is not None:
            return found.tokenizer, found.end
    name = tokenizer_name(config)
    if name is None:
        raise ConfigError(f"no tokenizer.json in {path} or {parent}, and the config names none; put one there")
    tokenizer, end = load_tokenizer(name), end_of_document_token(name)
    return tokenizer, None if end is None else tokenizer.token_to_id(end)

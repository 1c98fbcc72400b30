"""Text from a checkpoint, one token after another.

    prompt ─► token ids ─► model ─► logits of the last position ─► sampled id ─► … until the end of the text

The checkpoint's own config says which model it holds; any layout's checkpoint opens here as one piece on one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.checkpoint.format import INDEX, Piece
from nanotron.checkpoint.read import load
from nanotron.checkpoint.resume import newest_complete
from nanotron.config import Config, get_config_from_file
from nanotron.data.probe import tokenizer_name
from nanotron.data.tokenizer import end_of_document_token, load_tokenizer, tokenizer_file
from nanotron.errors import ConfigError
from nanotron.launch.place import Place, choose_device
from nanotron.mesh import Mesh
from nanotron.models.llama import Llama
from nanotron.models.specs import llama_specs

DEFAULT_PROMPTS = ("def ", "import os")


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int | None = None
    """Choose among this many most likely tokens."""
    top_p: float | None = None
    """Choose among the fewest tokens whose probabilities add up to this (arXiv 1904.09751)."""
    seed: int = 42

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} is negative; use 0 for greedy, or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to choose; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is no probability; use more than 0 and at most 1")


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id from the logits [V] of the last position."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = logits.softmax(0)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # probability of all that is likelier
        probabilities[order[before >= sampling.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))


class Generator:
    """A checkpoint's model on one device, with its tokenizer.

    ``path``: a step's folder, or the folder of steps, of which the newest complete one is taken.
    Raises ConfigError when it holds no complete checkpoint, or when no tokenizer is found beside it.
    """

    def __init__(self, path: str, device: torch.device) -> None:
        self.checkpoint = newest_complete(path) or path.rstrip("/")
        if not Path(self.checkpoint, INDEX).is_file():
            raise ConfigError(f"{path} holds no complete checkpoint; name a step's folder or the folder of the steps")
        self.config = get_config_from_file(Path(self.checkpoint) / "config.yaml")
        name = _tokenizer_beside(self.checkpoint, self.config)
        self.tokenizer = load_tokenizer(name)
        end = end_of_document_token(name)
        self._end = self.tokenizer.token_to_id(end) if end is not None else None
        self._device = device
        self._model = _load_model(self.config, self.checkpoint, device)

    @torch.inference_mode()
    def tokens(self, prompt: Sequence[int], max_new_tokens: int, sampling: Sampling) -> Iterator[int]:
        """Yield the ids that follow the prompt's, up to the end-of-text token, which is not yielded."""
        longest = self.config.model.model_config.max_position_embeddings
        ids, generator = list(prompt), torch.Generator().manual_seed(sampling.seed)
        for _ in range(max_new_tokens):
            chosen = choose(self._last_logits(ids[-longest:]), sampling, generator)
            if chosen == self._end:
                return
            ids.append(chosen)
            yield chosen

    def text(self, prompt: str, max_new_tokens: int, sampling: Sampling) -> Iterator[str]:
        """Yield the text that follows the prompt, piece by piece; a character is held back until it is whole."""
        ids = self.tokenizer.encode(prompt).ids
        if not ids:
            raise ConfigError("the prompt is empty; give at least one character")
        made, shown = [], ""
        for token in self.tokens(ids, max_new_tokens, sampling):
            made.append(token)
            text = self.tokenizer.decode(made)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text

    def _last_logits(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=self._device)  # [1, s]
        positions = torch.arange(len(ids), device=self._device).unsqueeze(0)
        logits, _, _ = self._model(None, Batch(tokens, torch.full_like(tokens, IGNORED_LABEL), positions))
        assert isinstance(logits, Tensor)
        return logits[0, -1]  # [1, s, V] -> [V]


def _tokenizer_beside(checkpoint: str, config: Config) -> str:
    """The tokenizer kept in the run directory, the checkpoint's parent; else the one that the config names."""
    for folder in (Path(checkpoint), Path(checkpoint).parent):
        inside = tokenizer_file(str(folder))
        if inside is not None:
            return inside
    name = tokenizer_name(config)
    if name is None:
        raise ConfigError(f"no tokenizer.json in {Path(checkpoint).parent}, and the config names none; put one there")
    return name


def _load_model(config: Config, checkpoint: str, device: torch.device) -> Llama:
    """The whole model on one device, filled from the checkpoint."""
    mesh, shape = Mesh(), config.model.model_config
    specs = llama_specs(shape)
    layers = (0, shape.num_hidden_layers)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model = Llama(shape, specs, mesh, layers=layers, embed=True, head=True, dtype=dtype, device=device)
    pieces = [
        Piece("weight", name, specs[name].shape, specs[name].local_box(mesh), weight.data)
        for name, weight in model.weights.items()
    ]
    load(checkpoint, pieces)
    return model.eval()


def write_text(generator: Generator, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> None:
    """Print every prompt and, as it comes, what follows it."""
    for prompt in prompts:
        print(prompt, end="", flush=True)
        for piece in generator.text(prompt, max_new_tokens, sampling):
            print(piece, end="", flush=True)
        print()


def run_generate(argv: Sequence[str] | None = None) -> int:
    """The command line of ``run_generate.py``. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="run_generate.py", description="Generate text from a checkpoint.")
    parser.add_argument("--ckpt-path", required=True, metavar="DIR", help="a step's folder, or the folder of the steps")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="text to go on from; repeatable")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="longest continuation (128)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (the default)")
    parser.add_argument("--top-k", type=int, metavar="K", help="choose among the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens of total mass P")
    parser.add_argument("--seed", type=int, default=42, metavar="N", help="seed of the choices (42)")
    asked = parser.parse_args(argv)
    try:
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.seed)
        return generate(asked.ckpt_path, asked.prompt or DEFAULT_PROMPTS, asked.max_new_tokens, sampling)
    except ConfigError as mistake:
        print(mistake, file=sys.stderr)
        return 2


def generate(path: str, prompts: Sequence[str], max_new_tokens: int, sampling: Sampling) -> int:
    """Open a checkpoint on this machine's accelerator or CPU and write its continuations. Returns the exit code."""
    device, _ = choose_device(Place(rank=0, world=1, local_rank=0, local_world=1))
    write_text(Generator(path, device), prompts, max_new_tokens, sampling)
    return 0

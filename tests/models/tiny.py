"""Tiny models and batches that the model tests share, and the comparison of gradients by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.config.model import LlamaConfig, MistralConfig, ModelConfig, Qwen2Config, Qwen3Config
from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.models.specs import StageModules, decoder_specs
from nanotron.parallel.mesh import Mesh

VOCABULARY = 257
FAMILIES: dict[str, type[ModelConfig]] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


def tiny_config(family: str = "llama", **facts: Any) -> ModelConfig:
    """A model of two layers with grouped heads and a vocabulary that divides by nothing."""
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    return FAMILIES[family](**{**shape, **facts})


def tiny_batch(rows: int = 2, length: int = 24, seed: int = 0) -> Batch:
    """Random tokens and labels; some labels are no targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, length), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, length), generator=generator)
    labels[:, ::5] = IGNORED_LABEL
    return Batch(tokens, labels, torch.arange(length).expand(rows, -1).contiguous())


def whole_model(config: ModelConfig, mesh: Mesh | None = None, *, dtype: torch.dtype, **options: Any) -> DecoderChunk:
    """The model as one chunk on one rank of a mesh, with weights that leave nothing at its neutral value."""
    mesh = mesh or Mesh()
    specs = decoder_specs(config, sequence_parallel=options.get("sequence_parallel", False))
    model = DecoderChunk(config, specs, mesh, StageModules.whole(config), ChunkOptions(dtype, **options))
    model.initialize(seed=7)
    disturb(model)
    return model


def disturb(model: DecoderChunk) -> None:
    """Move norms and biases away from ones and zeros, where a missing or misplaced one would not show."""
    for name, weight in model.weights.items():
        spec = model.specs[name]
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = 0.2 * torch.randn(spec.shape, generator=generator, dtype=torch.float32)
        if spec.init.kind != "normal":
            with torch.no_grad():
                weight.add_(whole[spec.local_box(model.mesh).slices()])
        else:
            weight.data.mul_(3.0)


def mean_loss(model: DecoderChunk, batch: Batch) -> tuple[Tensor, Tensor]:
    """(logits, mean loss over the valid tokens)."""
    logits, losses, _ = model(None, batch)
    return logits, sum(losses.values(), torch.zeros(())) / (batch.labels != IGNORED_LABEL).sum()


def gradients(model: DecoderChunk) -> dict[str, Tensor]:
    """Every weight's gradient by global name."""
    found = {}
    for name, weight in model.weights.items():
        assert weight.grad is not None, f"{name} has no gradient"
        found[name] = weight.grad
    return found


def gradient_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """max|Δ| of each parameter's gradient, in units of max(max|g|, 1e-3 · rms of all gradients)."""
    assert ours.keys() == reference.keys(), f"only one has {ours.keys() ^ reference.keys()}"
    count = sum(grad.numel() for grad in reference.values())
    rms = (sum(float(grad.double().square().sum()) for grad in reference.values()) / count) ** 0.5
    errors = {}
    for name, grad in reference.items():
        assert ours[name].shape == grad.shape, f"{name}: {tuple(ours[name].shape)}, not {tuple(grad.shape)}"
        scale = max(float(grad.abs().max()), 1e-3 * rms)
        errors[name] = float((ours[name].double() - grad.double()).abs().max()) / scale
    return errors


def differing(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float) -> list[str]:
    """The parameters whose gradients differ by more than the tolerance, each with how much."""
    return [
        f"{name}: {error:.1e} of its largest gradient (allowed {tolerance:.0e})"
        for name, error in gradient_errors(ours, reference).items()
        if not error <= tolerance
    ]

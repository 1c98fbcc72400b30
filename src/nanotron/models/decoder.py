"""A decoder as one pipeline chunk: some of its layers, maybe its two ends (Llama, Mistral, Qwen2, Qwen3).

    b rows   s tokens   t tensor-parallel ranks   d hidden size   f intermediate size   h query heads   e head dim
    "local" sizes: h/t heads and f/t features live on a rank. x between blocks is [b, s, d], or [b, s/t, d] under
    sequence parallelism; the blocks are the same lines either way, only the words for entering and leaving differ.

The families differ in which biases and norms their parameter table has (models/specs.py), and in nothing else here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from nanotron.batch import Batch, Spans
from nanotron.models.cache import LayerCache
from nanotron.models.experts import MoE
from nanotron.models.specs import EMBED, FINAL_NORM, HEAD, StageModules, decoder_layers, head_name
from nanotron.ops.chunk import Hooks, Use
from nanotron.ops.context import ContextMode, context_attention
from nanotron.ops.cross_entropy import cross_entropy
from nanotron.ops.embedding import embedding
from nanotron.ops.fp8 import Fp8, Multiplier
from nanotron.ops.fused import Fuse, add_and_norm, eager, queries_and_keys, rms_norm, swiglu
from nanotron.ops.kernels import Kernels, kernels_of
from nanotron.ops.linear import TensorParallel, linear
from nanotron.ops.recompute import Recompute, recomputed
from nanotron.ops.rope import Rotary, rotary_frequencies, rotary_length
from nanotron.parallel.comm import with_transpose
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import ParamSpec, draw

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

Make = Callable[[str], nn.Parameter]
Attend = Callable[[Tensor, Tensor, Tensor, "Spans | None"], Tensor]
"""(q, k, v, spans) -> attended values."""


@dataclass(frozen=True)
class ChunkOptions:
    """How a chunk computes: speed and memory depend on it, and no number but for rounding."""

    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    sequence_parallel: bool = False
    recompute: Recompute = False
    """Activation checkpointing: keep each layer's input only, and compute the layer again in backward.

    ``"selective"``: keep what its matmuls gave too, and compute norms, attention and what is elementwise again.
    """
    recompute_offload: bool = False
    """Keep the inputs of layers that are computed again in host memory."""
    recompute_allgather: bool = True
    """Under sequence parallelism, keep this rank's tokens of a gathered input only, and gather it again in backward."""
    overlap: bool = False
    """Multiply while tensors are under way over tp."""
    loss_chunk: int | None = None
    """Tokens of a row whose logits exist at once; None: all."""
    fuse: Fuse = eager
    """How elementwise work runs."""
    context_mode: ContextMode = "ALL_GATHER"
    """How queries and keys come together where rows are cut over cp."""
    kernels: Kernels | None = None
    """Who multiplies and attends; None: what is fastest on the device."""
    fp8: Multiplier | None = None
    """Who multiplies in fp8, in the matmuls of layers; None: these are as all others."""
    without_storage: bool = False
    """Make weights that have a gradient without memory of their own: buckets will give them some."""


class DecoderChunk(nn.Module):
    """One chunk: the layers of ``modules``, with the embedding and the head only where they belong.

    ``weights`` maps global names to this chunk's local shards. Values are undefined until ``initialize`` or a load.
    """

    mlps: ClassVar[Mapping[str, Callable[..., nn.Module]]]
    """The second half of a layer, by the layer's kind; it gives [b, s, d], or that with losses and metrics."""
    attention: ClassVar[Callable[..., nn.Module]]
    """The first half."""

    def __init__(
        self,
        config: ModelConfig,
        specs: Mapping[str, ParamSpec],
        mesh: Mesh,
        modules: StageModules,
        options: ChunkOptions,
        hooks: Hooks | None = None,
        *,
        kinds: Sequence[str] | None = None,
        shared: Mapping[str, nn.Parameter] | None = None,
    ) -> None:
        """``kinds``: of all the model's layers; None: those of a decoder.

        ``shared``: weights of this rank's other chunks, used instead of a second copy of a tied one.
        """
        super().__init__()
        self.config, self.mesh, self.options = config, mesh, options
        self.hooks, self.fuse = hooks or Hooks(), options.fuse
        self.specs: dict[str, ParamSpec] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.tp = TensorParallel(
            mesh,
            self.hooks.weight_grads,
            sequence_parallel=options.sequence_parallel,
            recompute_allgather=options.recompute_allgather,
            overlap=options.overlap,
            kernels=options.kernels or kernels_of(options.device),
        )

        precision = torch.promote_types(options.dtype, torch.float32)

        def make(name: str) -> nn.Parameter:
            if name not in self.weights:
                self.specs[name] = specs[name]
                if shared and name in shared:
                    self.weights[name] = shared[name]
                else:
                    shape, learns = specs[name].local_box(mesh).shape, specs[name].learns
                    dtype = options.dtype if learns else precision
                    absent = learns and options.without_storage
                    weight = torch.empty(() if absent else shape, dtype=dtype, device=options.device).expand(shape)
                    self.weights[name] = nn.Parameter(weight, requires_grad=learns)
            return self.weights[name]

        attend = partial(
            context_attention,
            mesh=mesh,
            mode=options.context_mode,
            kernels=self.tp.kernels,
            gather_again=not options.recompute,
        )
        kinds, tp = kinds or decoder_layers(config), self.tp
        if options.fp8 is not None:
            tp = replace(tp, fp8=Fp8(options.fp8, tp.kernels, options.fuse))
        self.embed = make(EMBED) if modules.embed else None
        self.layers = nn.ModuleList(
            Block(
                config,
                make,
                f"layers.{i}",
                tp,
                options.fuse,
                partial(attend, window=config.window_of(i)),
                type(self).attention,
                self.mlps[kinds[i]],
            )
            for i in modules.layers
        )
        self.norm = make(FINAL_NORM) if modules.head else None
        self.head = make(head_name(config)) if modules.head else None
        self.frequencies = rotary_frequencies(config, precision, options.device)

    def initialize(self, seed: int) -> None:
        """Draw every weight of the chunk: the same values on any layout (params.draw)."""
        for name, weight in self.weights.items():
            spec = self.specs[name]
            with torch.no_grad():
                weight.copy_(torch.from_numpy(draw(spec, spec.local_box(self.mesh), seed)))

    def uses(self, sequence_length: int) -> list[Use]:
        """Its blocks in the order of its forward; a tied weight is used by the embedding and by the head."""
        layers = dict[str, list[str]]()
        for name, weight in self.weights.items():
            if name.startswith("layers.") and weight.requires_grad:
                layers.setdefault(".".join(name.split(".")[:2]), []).append(name)
        size = self.options.loss_chunk
        chunks = -(-sequence_length // size) if size else 1
        uses = [Use(block, tuple(names)) for block, names in layers.items()]
        if self.embed is not None:
            uses.insert(0, Use(EMBED, (EMBED,), rereads=False))
        if self.head is not None:
            uses += [Use(FINAL_NORM, (FINAL_NORM,)), Use(HEAD, (head_name(self.config),), chunks, rereads=not size)]
        return uses

    def forward(
        self, x: Tensor | None, batch: Batch, cache: Sequence[LayerCache] | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Run the chunk on one microbatch: (activations for the next chunk, token-sum losses, metrics).

        x: None in the first chunk, else [b, s, d] ([b, s/t, d]). The last chunk returns losses {"lm": …, "z": …}, and
        its logits [b, s, V/t] unless they were computed in chunks; any adds its routers' losses.
        cache: one for each layer, to generate: the batch goes on from the tokens that it holds, and the last chunk
        returns the logits [b, 1, V/t] of its last token, and no losses.
        metrics: what routers tell, by "load/" and "entropy/" and the layer's name; while the hooks are measuring, Σ x²
        over this rank's tokens, of the outputs of embedding and layers.
        """
        losses: dict[str, Tensor] = {}
        metrics: dict[str, Tensor] = {}
        if self.embed is not None:
            self.hooks.before_block(EMBED)
            x = embedding(batch.tokens, self.embed, self._first_row(EMBED), self.tp)  # [b, s] -> [b, s, d]
            metrics |= self._measured("embed", x)
        assert x is not None, "only the first chunk starts from tokens"
        interleaved, length = self.config.rope_interleaved, rotary_length(self.config)
        rotary = Rotary(batch.positions, self.frequencies, x.dtype, interleaved=interleaved, length=length)
        caches: Sequence[LayerCache | None] = cache or [None] * len(self.layers)
        matmuls = self.tp.matmuls if self.options.recompute == "selective" else None
        for block, kept in zip(self.layers, caches, strict=True):
            self.hooks.before_block(str(block.name))
            if self.options.recompute and torch.is_grad_enabled():
                offload = self.options.recompute_offload
                x, added, told = recomputed(block, x, rotary, batch.spans, matmuls=matmuls, offload=offload)
            else:
                x, added, told = block(x, rotary, batch.spans, kept)
            self.hooks.after_block(str(block.name), x)
            losses |= {name: losses[name] + loss if name in losses else loss for name, loss in added.items()}
            metrics |= {f"{name}/{block.name}": value for name, value in told.items()}
            metrics |= self._measured(str(block.name), x)
        if self.head is None or self.norm is None:
            return x, losses, metrics
        self.hooks.before_block(FINAL_NORM)
        self.hooks.before_block(HEAD)
        x = self.fuse(rms_norm)(x, self.norm, self.config.rms_norm_eps)
        if cache is not None:
            (x,) = linear(x[:, -1:], [self.head], self.tp)  # [b, s, d] -> [b, 1, V/t]
            return x, {}, {}
        if self.options.loss_chunk is None:
            (x,) = linear(x, [self.head], self.tp, enter=self.tp.enter)  # [b, s, d] -> [b, s, V/t]: the logits
            lm, squared_log_z = cross_entropy(
                x, batch.labels, self._first_row(head_name(self.config)), self.mesh, fuse=self.fuse
            )
            self.hooks.after_block(HEAD, lm, squared_log_z)
        else:
            lm, squared_log_z = self._chunked_loss(x, batch.labels, self.options.loss_chunk)
        z_loss = {"z": self.config.z_loss_coefficient * squared_log_z} if self.config.z_loss_enabled else {}
        return x, {"lm": lm, **z_loss, **losses}, metrics

    def _measured(self, name: str, x: Tensor) -> dict[str, Tensor]:
        """{name: Σ x²} in float64 when activations are measured, else nothing."""
        if not self.hooks.measures:
            return {}
        precision = torch.promote_types(x.dtype, torch.float32)
        return {name: torch.linalg.vector_norm(x.detach(), dim=-1, dtype=precision).double().square().sum()}

    def _chunked_loss(self, x: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """Loss sums of x [b, s, d] ([b, s/t, d]), whose logits exist for ``size`` tokens of a row at a time.

        With a chunk's logits goes its gradient: backward has only x's to pass on.
        """
        x = self.tp.entered(x)
        chunks = zip(torch.split(x.detach(), size, 1), torch.split(labels, size, 1), strict=True)
        sums, grads = zip(*(self.loss_and_gradient(*chunk) for chunk in chunks), strict=True)
        total = torch.stack(sums).sum(0)
        if not torch.is_grad_enabled():
            return total[0], total[1]
        grad = torch.cat(grads, dim=1)
        lm, squared_log_z = with_transpose(x, lambda _: total, lambda _: grad)
        return lm, squared_log_z

    def loss_and_gradient(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Both loss sums of some tokens x [b, s, d], and x's gradient, if there is to be one.

        That is of all losses times ``hooks.loss_scale``; the head's weights get theirs at once.
        """
        assert self.head is not None
        x.requires_grad_(torch.is_grad_enabled())
        (logits,) = linear(x, [self.head], self.tp)  # [b, s, d] -> [b, s, V/t]
        name = head_name(self.config)
        lm, squared_log_z = cross_entropy(logits, labels, self._first_row(name), self.mesh, fuse=self.fuse)
        if torch.is_grad_enabled():
            z_weight = self.config.z_loss_coefficient if self.config.z_loss_enabled else 0.0
            torch.autograd.backward((lm + z_weight * squared_log_z) * self.hooks.loss_scale())
        return torch.stack([lm.detach(), squared_log_z.detach()]), x.grad

    def _first_row(self, name: str) -> int:
        return self.specs[name].local_box(self.mesh).offset[0]


class Block(nn.Module):
    """One decoder layer: attention and MLP, each on normalised input and added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        make: Make,
        name: str,
        tp: TensorParallel,
        fuse: Fuse,
        attend: Attend,
        attention: Callable[..., nn.Module],
        mlp: Callable[..., nn.Module],
    ) -> None:
        super().__init__()
        self.name, self.eps, self.fuse = name, config.rms_norm_eps, fuse
        self.attn_norm = make(f"{name}.attn_norm.weight")
        self.attn = attention(config, make, f"{name}.attn", tp, fuse, attend)
        self.mlp_norm = make(f"{name}.mlp_norm.weight")
        self.mlp = mlp(config, make, f"{name}.mlp", tp, fuse)

    def forward(
        self, x: Tensor, rotary: Rotary, spans: Spans | None, cache: LayerCache | None = None
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """x [b, s, d] ([b, s/t, d]) -> (the next layer's x, losses, metrics); sums over this rank's tokens."""
        y = self.attn(self.fuse(rms_norm)(x, self.attn_norm, self.eps), rotary, spans, cache)
        x, y = self.fuse(add_and_norm)(x, y, self.mlp_norm, self.eps)
        z = self.mlp(y)
        z, losses, metrics = z if isinstance(z, tuple) else (z, {}, {})
        return x + z, losses, metrics


class Attention(nn.Module):
    """Grouped-query attention over this rank's heads (arXiv 2305.13245)."""

    def __init__(
        self, config: ModelConfig, make: Make, name: str, tp: TensorParallel, fuse: Fuse, attend: Attend
    ) -> None:
        super().__init__()
        self.tp, self.eps, self.head_dim, self.fuse, self.attend = (
            tp,
            config.rms_norm_eps,
            config.head_dim,
            fuse,
            attend,
        )
        self.q, self.kv = make(f"{name}.q.weight"), make(f"{name}.kv.weight")
        self.qkv_biases = [make(f"{name}.q.bias"), make(f"{name}.kv.bias")] if config.qkv_bias else []
        self.q_norm = make(f"{name}.q_norm.weight") if config.qk_norm else None
        self.k_norm = make(f"{name}.k_norm.weight") if config.qk_norm else None
        self.out = make(f"{name}.out.weight")
        self.out_biases = [make(f"{name}.out.bias")] if config.out_bias else []

    def forward(self, x: Tensor, rotary: Rotary, spans: Spans | None, cache: LayerCache | None) -> Tensor:
        q, kv = linear(x, [self.q, self.kv], self.tp, enter=self.tp.enter, biases=self.qkv_biases)
        q, k, v = self.heads(q, kv, rotary)
        if cache is not None:
            k, v = cache.append(k, v)  # [b, s, kv/t, e] -> [b, n, kv/t, e], the earlier tokens' first
        attended = self.attend(q, k, v, spans)  # [b, s, h/t, e]
        (y,) = linear(attended.flatten(2), [self.out], self.tp, exit=self.tp.exit, biases=self.out_biases)
        return y

    def heads(self, q: Tensor, kv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as attention wants them: normalised, with positions."""
        q = q.view(*q.shape[:2], -1, self.head_dim)  # [b, s, h/t·e] -> [b, s, h/t, e]
        k, v = kv.view(*kv.shape[:2], 2, -1, self.head_dim).unbind(2)  # [b, s, 2·kv/t·e] -> 2 × [b, s, kv/t, e]
        q, k = self.fuse(queries_and_keys)(
            q, k, self.q_norm, self.k_norm, self.eps, rotary.cos, rotary.sin, interleaved=rotary.interleaved
        )
        return q, k, v


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) over this rank's features (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig, make: Make, name: str, tp: TensorParallel, fuse: Fuse) -> None:
        super().__init__()
        self.tp, self.fuse = tp, fuse
        self.gate_up, self.down = make(f"{name}.gate_up.weight"), make(f"{name}.down.weight")

    def forward(self, x: Tensor) -> Tensor:
        (gate_up,) = linear(x, [self.gate_up], self.tp, enter=self.tp.enter)  # [b, s, d] -> [b, s, 2·f/t]
        (y,) = linear(self.fuse(swiglu)(gate_up), [self.down], self.tp, exit=self.tp.exit)
        return y


DecoderChunk.attention = Attention
DecoderChunk.mlps = {"dense": MLP, "sparse": partial(MoE, shared=MLP)}

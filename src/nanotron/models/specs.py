"""The table of a model's parameters: everything there is to know about each, once.

    V vocabulary   d hidden size   f intermediate size   h query heads   kv key/value heads   e head dim

    embed.weight                    [V, d]        cut on dim 0 over tp; V need not divide
    layers.i.attn_norm.weight       [d]
    layers.i.attn.q.weight          [h·e, d]      cut on dim 0 over tp: whole heads
    layers.i.attn.kv.weight         [2, kv·e, d]  keys | values, cut on dim 1 over tp_kv; tp_rep ranks share a head
    layers.i.attn.out.weight        [d, h·e]      cut on dim 1 over tp
    layers.i.mlp_norm.weight        [d]
    layers.i.mlp.gate_up.weight     [2, f, d]     gate | up, cut on dim 1 over tp
    layers.i.mlp.down.weight        [d, f]        cut on dim 1 over tp
    norm.weight                     [d]
    head.weight                     [V, d]        as embed.weight; absent when tied: then the head *is* embed.weight

A layer with E experts of inner width f, and a shared one of width g, has instead of mlp.gate_up and mlp.down:

    layers.i.mlp.router.weight           [E, d]
    layers.i.mlp.router.bias             [E]           moves by bias_update_rate, has no gradient
    layers.i.mlp.shared.gate_up.weight   [2, g, d]     as a dense MLP's; so is shared.down [d, g]
    layers.i.mlp.shared_gate.weight      [1, d]
    layers.i.mlp.experts.gate_up.weight  [E, 2, f, d]  cut on dim 0 over ep, then tp: whole experts
    layers.i.mlp.experts.down.weight     [E, d, f]     cut on dim 0 over ep, then tp

Where the family has them: attn.q.bias [h·e], attn.kv.bias [2, kv·e], attn.out.bias [d], attn.q_norm.weight and
attn.k_norm.weight [e]. Fused tensors are stacked on a dim of their own, so every shard stays one cut of one dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple

from nanotron.parallel.params import Init, ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

EMBED, HEAD, FINAL_NORM = "embed.weight", "head.weight", "norm.weight"
ONES, ZEROS = Init("ones"), Init("zeros")


def head_name(config: ModelConfig) -> str:
    """The parameter the output layer multiplies by: the embedding's own when the two are tied."""
    return EMBED if config.tie_word_embeddings else HEAD


def is_hidden(spec: ParamSpec) -> bool:
    """Whether it is one or several matrices, in its last two dims, from one inner width of a layer to another."""
    return spec.decay and spec.name.startswith("layers.") and ".router." not in spec.name and spec.shape[-2] > 1


ROUTER_LOSSES = ("balance", "router_z")
"""What routers add to the loss, in any stage."""


def loss_names(config: ModelConfig) -> tuple[str, ...]:
    """The losses that the stages report, each a sum over tokens."""
    moe = config.moe_config
    wanted = {
        "lm": True,
        "z": config.z_loss_enabled,
        "balance": moe is not None and moe.router_aux_loss_coef > 0,
        "router_z": moe is not None and moe.router_z_loss_coef > 0,
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


class StageModules(NamedTuple):
    """What one chunk holds of the model: some of its layers, by number, and its two ends."""

    layers: Sequence[int]
    embed: bool
    head: bool

    @staticmethod
    def whole(config: ModelConfig) -> StageModules:
        """All of the model."""
        return StageModules(range(config.num_hidden_layers), embed=True, head=True)


LayerSpecs = Callable[["ModelConfig", str, Init, Init, tuple[str, ...]], Iterator[ParamSpec]]
"""(config, name of the layer, init, init of what writes to the residual stream, axes over which a gradient of what is
replicated is partial) -> parameters of one of its halves, without the norm before it."""


def decoder_layers(config: ModelConfig) -> list[str]:
    """The kind of each layer: ``"sparse"`` where it has experts, else ``"dense"``."""
    sparse = set(config.sparse_layers)
    return ["sparse" if layer in sparse else "dense" for layer in range(config.num_hidden_layers)]


def decoder_specs(
    config: ModelConfig,
    *,
    std: float = 0.02,
    scaling_method: str = "num_layers",
    sequence_parallel: bool = False,
    kinds: Sequence[str] | None = None,
    mlps: Mapping[str, LayerSpecs] | None = None,
    attention: LayerSpecs | None = None,
) -> dict[str, ParamSpec]:
    """Every parameter of a decoder by global name, in the order the model uses them.

    ``std`` of the normal initialisation; matrices that write to the residual stream (attn.out, mlp.down) are divided by
    √(2·layers) (``"num_layers"``), √(2·(layer + 1)) (``"layer_index"``) or 1 (``"none"``).
    Under ``sequence_parallel`` every replicated parameter sees only its rank's tokens, so its gradient is partial.
    ``kinds``: of each layer, where the family has its own; ``mlps``: the parameters of each kind's second half;
    ``attention``: those of the first.
    """
    partial = ("tp",) if sequence_parallel else ()
    d, vocabulary = (config.hidden_size,), (config.vocab_size, config.hidden_size)
    specs = [ParamSpec(EMBED, vocabulary, Init("normal", std), decay=True, shard=(("tp", 0),))]
    for layer, kind in enumerate(kinds or decoder_layers(config)):
        depth = {"none": 0.5, "num_layers": config.num_hidden_layers, "layer_index": layer + 1}[scaling_method.lower()]
        init, residual_init = Init("normal", std), Init("normal", std / sqrt(2 * depth))
        name = f"layers.{layer}"
        norms = (
            ParamSpec(f"{name}.{half}_norm.weight", d, ONES, False, partial_grad=partial) for half in ("attn", "mlp")
        )
        specs += [next(norms), *(attention or attention_specs)(config, name, init, residual_init, partial)]
        specs += [next(norms), *(mlps or MLP_SPECS)[kind](config, name, init, residual_init, partial)]
    specs.append(ParamSpec(FINAL_NORM, d, ONES, decay=False, partial_grad=partial))
    if not config.tie_word_embeddings:
        specs.append(ParamSpec(HEAD, vocabulary, Init("normal", std), decay=True, shard=(("tp", 0),)))
    return {spec.name: spec for spec in specs}


def attention_specs(
    config: ModelConfig, layer: str, init: Init, residual_init: Init, partial: tuple[str, ...]
) -> Iterator[ParamSpec]:
    """Of grouped-query attention."""
    d, e = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * e, config.num_key_value_heads * e
    shared_heads = ("tp_rep",)  # each rank's query heads give only a part of a shared key/value head's gradient
    local_heads = ("tp",)  # q and k norms see this rank's heads only, in either tp mode

    yield ParamSpec(f"{layer}.attn.q.weight", (q, d), init, decay=True, shard=(("tp", 0),))
    kv_shard = (("tp_kv", 1),)
    yield ParamSpec(f"{layer}.attn.kv.weight", (2, kv, d), init, decay=True, shard=kv_shard, partial_grad=shared_heads)
    if config.qkv_bias:
        yield ParamSpec(f"{layer}.attn.q.bias", (q,), ZEROS, decay=False, shard=(("tp", 0),))
        yield ParamSpec(f"{layer}.attn.kv.bias", (2, kv), ZEROS, decay=False, shard=kv_shard, partial_grad=shared_heads)
    if config.qk_norm:
        yield ParamSpec(f"{layer}.attn.q_norm.weight", (e,), ONES, decay=False, partial_grad=local_heads)
        yield ParamSpec(f"{layer}.attn.k_norm.weight", (e,), ONES, decay=False, partial_grad=local_heads)
    yield ParamSpec(f"{layer}.attn.out.weight", (d, q), residual_init, decay=True, shard=(("tp", 1),))
    if config.out_bias:
        yield ParamSpec(f"{layer}.attn.out.bias", (d,), ZEROS, decay=False, partial_grad=partial)


def dense_mlp_specs(
    config: ModelConfig, layer: str, init: Init, residual_init: Init, partial: tuple[str, ...] = ()
) -> Iterator[ParamSpec]:
    """Of a gated MLP."""
    yield from _gated(f"{layer}.mlp", config.hidden_size, config.intermediate_size, init, residual_init)


def sparse_mlp_specs(
    config: ModelConfig, layer: str, init: Init, residual_init: Init, partial: tuple[str, ...]
) -> Iterator[ParamSpec]:
    """Of a router, its experts, and the expert that all tokens share."""
    d, moe, name = config.hidden_size, config.moe_config, f"{layer}.mlp"
    assert moe is not None
    experts, f = moe.num_experts, moe.moe_intermediate_size
    yield ParamSpec(f"{name}.router.weight", (experts, d), init, decay=True, partial_grad=partial)
    if moe.bias_update_rate is not None:
        yield ParamSpec(f"{name}.router.bias", (experts,), ZEROS, decay=False, learns=False)
    if moe.enable_shared_expert:
        yield from _gated(f"{name}.shared", d, moe.shared_expert_intermediate_size, init, residual_init)
        if moe.shared_expert_gate:
            yield ParamSpec(f"{name}.shared_gate.weight", (1, d), init, decay=True, partial_grad=partial)
    cut = (("ep", 0), ("tp", 0))
    yield ParamSpec(f"{name}.experts.gate_up.weight", (experts, 2, f, d), init, decay=True, shard=cut)
    yield ParamSpec(f"{name}.experts.down.weight", (experts, d, f), residual_init, decay=True, shard=cut)


def _gated(name: str, d: int, f: int, init: Init, residual_init: Init) -> Iterator[ParamSpec]:
    yield ParamSpec(f"{name}.gate_up.weight", (2, f, d), init, decay=True, shard=(("tp", 1),))
    yield ParamSpec(f"{name}.down.weight", (d, f), residual_init, decay=True, shard=(("tp", 1),))


MLP_SPECS: dict[str, LayerSpecs] = {"dense": dense_mlp_specs, "sparse": sparse_mlp_specs}

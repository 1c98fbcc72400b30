"""Which layouts `make parity` compares with one device: the main options' product, and by name what it leaves out.

layout × schedule × tp mode × ZeRO stage × tied           every combination that means something (the product)
by name                                                   families, odd layer counts, short batches, recomputation,
                                                          cut sequences, windows, experts, compiled and other schedules
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import product
from math import gcd
from typing import Any

from nanotron.pipeline.schedules import SCHEDULE_NAMES

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 1), (2, 2, 2)]
LAYOUTS += [(1, 4, 1), (1, 1, 3), (3, 1, 1)]
PRECISIONS = {"float32": 1e-5, "float64": 1e-9}
ROWS = 12  # samples of a step, on every layout
STEPS = 20  # of `make parity`
FIRST_STEPS = 3  # of `make test`: the third loss needs what the optimizer kept of the first step for its second


@dataclass(frozen=True)
class Case:
    """One training run of a tiny model. What `same_numbers` returns must not depend on the fields above the line."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    tp_mode: str = "ALL_REDUCE"
    zero_stage: int = 0
    rows: int | None = None  # of a microbatch; None: as many as leave two, or pp + 1 for a pipeline to fill and drain
    recompute_layer: bool | str = False
    tp_recompute_allgather: bool = True
    overlap: bool = False
    compile: bool = False
    pp_layers: tuple[int, ...] | None = None
    loss_chunk: int | None = None
    cp: int = 1
    cp_mode: str = "ALL_GATHER"
    ep: int = 1
    dp_shard: int | None = None
    # ---------------------------------------------------------------------------
    tied: bool = False
    family: str = "llama"
    layers: int = 4
    z_loss: bool = False
    documents: bool = False
    window: int | None = None
    window_layers: tuple[int, ...] | None = None
    experts: int = 0
    router: str = "plain"
    optimizer: str = "adamW"
    mup: bool = False
    fp8: bool = False
    dtype: str = "float32"
    accumulate_in_fp32: bool = True
    ramp: int = 0  # samples of the first step, where later ones have more
    steps: int = STEPS
    length: int = 32  # of a sequence

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def micro_batch_size(self) -> int:
        return self.rows or gcd(ROWS // (self.dp * max(2, self.pp + (self.pp > 1))), self.ramp // self.dp)

    @property
    def accumulation(self) -> int:
        count, rest = divmod(ROWS, self.dp * self.micro_batch_size)
        assert not rest, f"{self} does not divide {ROWS} rows"
        return count

    def same_numbers(self) -> Case:
        """The run on one device that this one must repeat."""
        names = [field.name for field in fields(Case)]
        layout = {field.name: field.default for field in fields(Case)[: names.index("tied")]}
        return replace(self, **layout)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The layout as dp-tp-pp digits and whatever differs from the default, short enough for a test's name."""
        named = {"dp", "cp", "tp", "pp", "schedule", "tp_mode", "zero_stage", "tied", "dtype"}
        words = [f"{self.dp}{self.tp}{self.pp}", f"cp{self.cp}" if self.cp > 1 else ""]
        words += [self.schedule if self.pp > 1 else ""]
        words += [{"ALL_REDUCE": "ar", "REDUCE_SCATTER": "rs"}[self.tp_mode] if self.tp > 1 else ""]
        words += [f"zero{self.zero_stage}" if self.dp * self.cp > 1 else "", "tied" if self.tied else "", self.dtype]
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in named and value != field.default:
                words.append(value if isinstance(value, str) else f"{field.name}={value}")
        return " ".join(word for word in words if word)


OPTIONS: dict[str, list[Any]] = {
    "layout": LAYOUTS,
    "schedule": ["afab", "1f1b"],
    "tp_mode": ["ALL_REDUCE", "REDUCE_SCATTER"],
    "zero_stage": [0, 1],
    "tied": [False, True],
    "dtype": list(PRECISIONS),
}


def case_of(values: dict[str, Any]) -> Case:
    """A case from one value per option; options without meaning on its layout (a schedule on pp=1) take the first."""
    values = dict(values)
    dp, tp, pp = values.pop("layout")
    if pp == 1:
        values["schedule"] = OPTIONS["schedule"][0]
    if tp == 1:
        values["tp_mode"] = OPTIONS["tp_mode"][0]
    if dp == 1:
        values["zero_stage"] = OPTIONS["zero_stage"][0]
    layers = 3 if pp == 3 else 4
    return Case(dp=dp, tp=tp, pp=pp, layers=layers, **values)


def product_cases() -> list[Case]:
    """Every combination that means something, once."""
    found = {case_of(dict(zip(OPTIONS, values, strict=True))) for values in product(*OPTIONS.values())}
    return sorted(found, key=lambda case: (case.dtype, case.tied, case.layers, case.world, str(case)))


def named_cases() -> list[Case]:
    """What the product leaves out."""
    cases = [
        Case(tp=2, family=family, tp_mode=mode, dtype=dtype)
        for family in ("qwen2", "qwen3")
        for mode, dtype in zip(OPTIONS["tp_mode"], PRECISIONS, strict=True)
    ]
    cases += [
        Case(pp=2, layers=5),
        Case(pp=2, layers=5, tied=True, dp=2, zero_stage=1, dtype="float64"),
        Case(pp=3, layers=3, schedule="afab", tied=True),
        Case(pp=2, rows=12, dtype="float64"),  # one microbatch, two stages
        Case(pp=3, layers=3, rows=6, schedule="afab"),
        Case(pp=3, layers=3, rows=6),
        Case(dp=2, pp=2, recompute_layer=True, zero_stage=1),
        Case(tp=2, pp=2, recompute_layer=True, tp_mode="REDUCE_SCATTER", dtype="float64"),
        Case(tp=2, tp_mode="REDUCE_SCATTER", tp_recompute_allgather=False),
        Case(tp=2, tp_mode="REDUCE_SCATTER", overlap=True),
        Case(tp=2, recompute_layer="selective", family="qwen3", documents=True),
        Case(tp=2, pp=2, schedule="zb_h1", recompute_layer="selective", tp_mode="REDUCE_SCATTER", dtype="float64"),
        Case(
            tp=4, family="qwen2", tp_mode="REDUCE_SCATTER", overlap=True, tp_recompute_allgather=False, dtype="float64"
        ),
        Case(tp=2, pp=2, schedule="zb_h1", overlap=True, recompute_layer=True),
        Case(
            tp=2,
            tp_mode="REDUCE_SCATTER",
            compile=True,
            overlap=True,
            recompute_layer=True,
            documents=True,
            loss_chunk=8,
            z_loss=True,
            family="qwen3",
        ),
        Case(  # a rank's shapes, and so its kernels, are those of tests/test_compile.py
            cp=2,
            pp=2,
            rows=2,
            length=64,
            schedule="zb_h1",
            compile=True,
            recompute_layer="selective",
            documents=True,
        ),
        Case(tp=4, family="qwen3", tp_mode="REDUCE_SCATTER", tied=True),
        Case(dp=3, rows=1, zero_stage=1, dtype="float64"),
        Case(dp=2, pp=2, pp_layers=(1, 3), documents=True),
        Case(tp=2, pp=2, tied=True, loss_chunk=7, z_loss=True, tp_mode="REDUCE_SCATTER", dtype="float64"),
    ]
    return cases


def context_cases() -> list[Case]:
    """Sequences cut over ranks: in both modes, with documents, beside every other axis, and with what saves memory."""
    exchanged = {"cp_mode": "ALL_TO_ALL"}
    return [
        Case(cp=2),
        Case(cp=2, dtype="float64", documents=True),
        Case(cp=3, length=48, documents=True),
        Case(cp=4, dtype="float64", family="qwen3"),
        Case(cp=2, **exchanged),
        Case(cp=2, **exchanged, documents=True, dtype="float64", family="qwen2", recompute_layer="selective"),
        Case(cp=2, dp=2, zero_stage=1, dtype="float64"),
        Case(cp=2, dp=2, documents=True),
        Case(cp=2, tp=2, tp_mode="REDUCE_SCATTER", recompute_layer=True, documents=True, dtype="float64"),
        Case(cp=2, tp=2, tp_mode="REDUCE_SCATTER", recompute_layer="selective", documents=True, dtype="float64"),
        Case(cp=2, tp=4, loss_chunk=7, z_loss=True),  # more tp ranks than key/value heads
        Case(cp=2, pp=2, schedule="zb_h1", tied=True, zero_stage=1, dtype="float64"),
        Case(cp=2, pp=2, schedule="zbv", documents=True),
        Case(cp=2, tp=2, pp=2, schedule="interleaved_1f1b", rows=6, zero_stage=1, tp_mode="REDUCE_SCATTER"),
        Case(cp=2, dp=2, pp=2, schedule="afab", **exchanged, zero_stage=1, recompute_layer=True),
    ]


def window_cases() -> list[Case]:
    """Sliding windows in all layers or in some: with documents, cut sequences, and two kinds of layer in pipelines."""
    some = {"window": 11, "window_layers": (0, 1, 3)}
    return [
        Case(cp=2, family="mistral", window=11),
        Case(cp=2, cp_mode="ALL_TO_ALL", documents=True, **some, dtype="float64", family="qwen3"),
        Case(cp=2, pp=2, schedule="zbv", documents=True, **some, dtype="float64", family="qwen2"),
        Case(tp=2, pp=2, schedule="zb_h1", tp_mode="REDUCE_SCATTER", recompute_layer=True, **some, family="qwen3"),
        Case(dp=2, pp=2, schedule="interleaved_1f1b", rows=3, documents=True, window=5, zero_stage=1, family="mistral"),
    ]


ROUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "z-loss": {"router_z_loss_coef": 0.01},
    "all": {"top_k": 8, "layers": [1, 3]},
    "shared": {"enable_shared_expert": True, "shared_expert_intermediate_size": 48, "layers": [1, 3]},
    "grouped": {
        "score_function": "sigmoid",
        "normalize_top_k": True,
        "num_expert_groups": 4,
        "top_k_groups": 2,
        "bias_update_rate": 0.01,
        "routed_scaling_factor": 1.5,
        "enable_shared_expert": True,
        "shared_expert_intermediate_size": 48,
        "shared_expert_gate": False,
    },
}
"""Further keys of moe_config, by name."""


EPS = 1e-5
"""Of Adam. With 1e-8 an element whose gradient is mere rounding moves as far as any other, and after 15 steps of Qwen3
one device in float32 is itself 1e-5 off one in float64, whatever library multiplies; so it is 3e-7."""
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamW": {"optimizer_factory": {"adam_eps": EPS}},
    "muon": {"optimizer_factory": {"name": "muon", "adam_eps": EPS, "adam_learning_rate": 1e-3}},
    "groups": {
        "optimizer_factory": {"name": "muon", "adam_eps": EPS, "muon_nesterov": False, "muon_scale": "spectral"},
        "weight_decay_exclude_named_params": [r"embed"],
        "groups": [
            {"params": [r"layers\.[01]\..*out"], "learning_rate": 1e-3, "weight_decay": 0.3},
            {"params": [r".*down", r"norm"], "optimizer": "adamW", "learning_rate": 2e-3},
            {"params": [r".*attn_norm"], "optimizer": "sgd"},
        ],
    },
}
"""The section ``optimizer``, by name."""


def optimizer_cases() -> list[Case]:
    """Muon beside every axis, and parameters in groups."""
    cases = [
        Case(dp=2, optimizer="muon", zero_stage=zero, dtype=dtype)
        for zero in (0, 1)
        for dtype in ("float32", "float64")
    ]
    return [
        *cases,
        Case(tp=2, optimizer="muon", tp_mode="REDUCE_SCATTER"),
        Case(tp=4, optimizer="muon", dtype="float64"),  # two ranks share a key/value head
        Case(cp=2, pp=2, optimizer="muon", zero_stage=1, tied=True),
        Case(dp=3, pp=2, rows=1, optimizer="muon", zero_stage=1, dtype="float64"),
        Case(dp=2, tp=2, pp=2, optimizer="groups", zero_stage=1, schedule="zb_h1"),
        Case(dp=2, tp=2, optimizer="groups", zero_stage=1, dtype="float64"),
        Case(dp=2, ep=2, tp=2, optimizer="muon", zero_stage=1, experts=8, router="shared", dtype="float64"),
        Case(dp=4, ep=2, optimizer="muon", zero_stage=1, experts=8, router="grouped", dtype="float64"),
        Case(tp=2, optimizer="muon", family="deepseek_v3", dtype="float64", experts=8),
        *(Case(dp=3, tp=2, pp=2, rows=1, optimizer="muon", zero_stage=zero, dtype="float64") for zero in range(4)),
        *(Case(dp=4, dp_shard=2, rows=1, optimizer="muon", zero_stage=zero, dtype="float64") for zero in (2, 3)),
        Case(dp=2, tp=2, mup=True, zero_stage=1, tp_mode="REDUCE_SCATTER"),
    ]


def ramp_cases() -> list[Case]:
    """A first step of fewer microbatches than the others, beside every axis, schedule and ZeRO stage."""
    return [
        *(Case(dp=2, zero_stage=zero, ramp=6, dtype="float64") for zero in range(4)),
        *(Case(tp=2, pp=2, rows=3, schedule=name, ramp=6) for name in SCHEDULE_NAMES),
        Case(cp=2, pp=3, layers=3, rows=4, zero_stage=1, ramp=4, documents=True),
        Case(dp=2, ep=2, pp=2, rows=3, zero_stage=3, ramp=6, experts=8, router="grouped", dtype="float64"),
        Case(dp=4, dp_shard=2, rows=1, zero_stage=3, ramp=4),
    ]


def expert_cases() -> list[Case]:
    """Experts: shared by replicas, cut over tp, beside every other axis, with each kind of router."""
    exact: dict[str, Any] = {"dtype": "float64", "experts": 8}
    gathered: dict[str, Any] = {"tp_mode": "REDUCE_SCATTER", **exact}
    return [
        Case(dp=2, ep=2, zero_stage=1, compile=True, **exact),
        Case(dp=2, ep=2, router="shared", recompute_layer=True, **exact),
        Case(tp=2, router="grouped", **exact),
        Case(tp=2, router="shared", family="qwen2", recompute_layer="selective", **gathered),
        Case(tp=4, router="grouped", documents=True, **gathered),
        Case(cp=2, documents=True, router="shared", **exact),
        Case(dp=2, ep=2, cp=2, zero_stage=1, family="qwen3", **exact),
        Case(dp=4, ep=2, zero_stage=1, router="grouped", **exact),
        Case(dp=2, ep=2, tp=2, zero_stage=1, router="grouped", **gathered),
        Case(dp=2, ep=2, pp=2, schedule="zb_h1", zero_stage=1, recompute_layer="selective", router="shared", **exact),
        Case(dp=2, ep=2, pp=2, schedule="zbv", router="grouped", rows=1, tied=True, zero_stage=1, **exact),
        Case(tp=2, family="olmoe", **exact),
        Case(tp=2, family="olmoe", recompute_layer="selective", **gathered),
        Case(tp=4, family="olmoe", **gathered),  # two ranks share a key/value head
        Case(tp=2, pp=2, schedule="zb_h1", router="z-loss", **gathered),
        Case(tp=2, family="deepseek_v3", recompute_layer="selective", router="grouped", **gathered),
        Case(dp=2, ep=2, tp=2, cp=2, family="deepseek_v3", zero_stage=1, **exact),
        Case(dp=2, ep=2, zero_stage=1, experts=8, router="z-loss"),
        Case(tp=2, tp_mode="REDUCE_SCATTER", experts=8, router="grouped", z_loss=True),
    ]


def sharded_cases() -> list[Case]:
    """Gradients (ZeRO-2) and weights (ZeRO-3) that are whole by block only, beside every other axis and saving."""
    exact: dict[str, Any] = {"dtype": "float64"}
    gathered: dict[str, Any] = {"tp_mode": "REDUCE_SCATTER"}
    cases = []
    for stage in (2, 3):
        cases += [
            Case(dp=2, zero_stage=stage),
            Case(dp=3, rows=1, zero_stage=stage, tied=True, **exact),
            Case(dp=2, zero_stage=stage, tied=True, loss_chunk=7, z_loss=True, family="qwen3"),
            Case(dp=2, zero_stage=stage, compile=True, recompute_layer=True, **exact),
            Case(dp=4, dp_shard=2, rows=1, zero_stage=stage, documents=True),
            Case(dp=2, tp=2, zero_stage=stage, recompute_layer="selective", **gathered, **exact),
            Case(dp=2, tp=4, zero_stage=stage, **gathered, family="qwen2"),  # two ranks share a key/value head
            Case(cp=2, zero_stage=stage, window=11, family="mistral", **exact),
            Case(dp=2, cp=2, dp_shard=1, zero_stage=stage, cp_mode="ALL_TO_ALL"),
            Case(dp=2, pp=2, zero_stage=stage, tied=True),  # the table of two stages stays whole
            Case(dp=2, pp=2, zero_stage=stage, schedule="zb_h1", recompute_layer=True, rows=1, **exact),
            Case(dp=2, pp=2, zero_stage=stage, schedule="zbv", rows=1, tied=True, **exact),
            Case(dp=2, tp=2, pp=2, zero_stage=stage, schedule="interleaved_1f1b", rows=3, overlap=True),
            Case(dp=4, ep=2, experts=8, router="grouped", rows=1, zero_stage=stage, **exact),
            Case(dp=4, ep=2, dp_shard=2, experts=8, router="shared", rows=1, zero_stage=stage, **exact),
            Case(dp=2, ep=2, cp=2, zero_stage=stage, experts=8, router="plain", family="deepseek_v3", **exact),
            Case(dp=2, tp=2, zero_stage=stage, experts=8, router="z-loss", family="olmoe", **gathered, **exact),
        ]
    return cases


def fp8_cases() -> list[Case]:
    """Layers that multiply in fp8; in float64, for where float32 rounds otherwise, fp8 may round a whole step apart."""
    exact: dict[str, Any] = {"dtype": "float64", "fp8": True}
    gathered: dict[str, Any] = {"tp_mode": "REDUCE_SCATTER", **exact}
    return [
        *(Case(dp=2, zero_stage=stage, **exact) for stage in (0, 1, 3)),
        Case(dp=2, zero_stage=3, recompute_layer=True, family="qwen2", **exact),
        Case(dp=2, zero_stage=1, compile=True, **exact),
        Case(tp=2, **exact),
        Case(tp=2, overlap=True, documents=True, **gathered),
        Case(tp=2, tp_recompute_allgather=False, family="qwen3", **gathered),
        Case(pp=2, tied=True, loss_chunk=7, z_loss=True, **exact),
        Case(tp=2, pp=2, schedule="zb_h1", recompute_layer="selective", **gathered),
        Case(dp=2, tp=2, pp=2, schedule="zbv", rows=1, zero_stage=1, **exact),
        Case(cp=2, zero_stage=1, **exact),
        Case(dp=2, tp=2, zero_stage=1, optimizer="muon", **exact),
        Case(dp=2, ep=2, zero_stage=3, experts=8, router="shared", **exact),
        Case(tp=2, pp=2, schedule="zb_h1", recompute_layer="selective", experts=8, router="grouped", **gathered),
    ]


def compiled_cases() -> list[Case]:
    """What takes a compiler's seconds: each option of the two compiled cases by name without the others."""
    return [
        Case(tp=2, compile=True),
        Case(tp=2, tp_mode="REDUCE_SCATTER", compile=True, overlap=True, recompute_layer=True, documents=True),
        Case(dp=2, compile=True, loss_chunk=7, z_loss=True, family="qwen3", zero_stage=1, dtype="float64"),
    ]


def schedule_cases() -> list[Case]:
    """The registered schedules that the product does not have: alone, and together with the other axes."""
    cases = []
    for name in SCHEDULE_NAMES:
        if name not in OPTIONS["schedule"]:
            cases += [
                Case(pp=3, layers=6, schedule=name, rows=2),
                Case(pp=2, dp=2, schedule=name, rows=1, tied=True, zero_stage=1, dtype="float64"),
            ]
    return cases


def schedule_product_cases() -> list[Case]:
    """The same schedules with more of everything."""
    cases = []
    for name in SCHEDULE_NAMES:
        if name not in OPTIONS["schedule"]:
            cases += [
                Case(pp=2, schedule=name, rows=1, recompute_layer=True),
                Case(pp=2, tp=2, schedule=name, rows=2, tp_mode="REDUCE_SCATTER", family="qwen2"),
                Case(pp=2, tp=2, dp=2, schedule=name, rows=1, zero_stage=1, dtype="float64"),
                Case(pp=3, layers=6, schedule=name, rows=1, tied=True),
            ]
    return cases


def every_case() -> list[Case]:
    """All of these, once."""
    cases = [*product_cases(), *named_cases(), *context_cases(), *window_cases(), *expert_cases()]
    cases += optimizer_cases()
    cases += sharded_cases()
    cases += ramp_cases()
    cases += fp8_cases()
    return list(dict.fromkeys([*cases, *compiled_cases(), *schedule_cases(), *schedule_product_cases()]))

"""Compares the planner with published runs: `python bench/published.py`; with `--fit` it fits the two constants first.

Rows alternate between "fit" and "held out" in the order in which they are written down. docs/plan.md holds the output.
Runs that took a kind of parallelism or recomputation that does not exist here are planned with the nearest there is;
the notes in docs/plan.md say which.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from statistics import median
from typing import NamedTuple

from nanotron.config import Config, get_config_from_dict
from nanotron.models.families import flops_per_step
from nanotron.plan.hardware import find_cluster
from nanotron.plan.predict import Plan, Planner


class Shape(NamedTuple):
    """A model: layers, hidden size, heads, key/value heads, feed-forward size, vocabulary, tied embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tied: bool


class Row(NamedTuple):
    """A published run on H100s; ``mfu`` in percent, ``memory`` in GB (None: not given, or not of such a layout)."""

    source: str
    name: str
    shape: Shape
    dp: int
    tp: int
    pp: int
    accumulation: int
    micro_batch: int
    zero: int
    mfu: float | None
    memory: float | None
    sequence: int = 4096
    recompute: bool = False
    tokens_per_second: float | None = None
    """Per device, where the source gives that instead of an MFU."""


def shapes() -> dict[str, Shape]:
    """The shapes that give the published parameter counts to three digits."""
    return {
        "1.34B": Shape(16, 2048, 32, 32, 8192, 131072, True),
        "3.57B": Shape(28, 3072, 32, 32, 8192, 131072, True),
        "8.86B": Shape(32, 4096, 32, 32, 14336, 131072, False),
        "80B": Shape(80, 8192, 64, 64, 28672, 131072, False),
        "Llama 3.1 8B": Shape(32, 4096, 32, 8, 14336, 128256, False),
        # GPT blocks with a feed-forward of 4 · hidden and no gate: as many parameters as a gated one of 8/3 · hidden
        "1.7B": Shape(24, 2048, 16, 16, 5440, 131072, False),
        "7.1B": Shape(30, 4096, 32, 32, 10880, 131072, False),
        "70B": Shape(84, 8192, 64, 64, 21760, 131072, False),
        "462B": Shape(112, 18432, 144, 144, 49152, 131072, False),
    }


NANOTRON = "Nanotron v0.5, docs/benchmark_summary.svg"
_NANOTRON_ROWS = """
 8 1.34B  44.32 41.76   4  1  2  16 4 1
 8 3.57B  46.68 56.87   4  1  2  32 2 1
 8 8.86B  45.22 63.07   2  1  4 128 1 1
32 1.34B  38.38 16.39  16  1  2  16 1 1
32 3.57B  40.39 53.33  16  1  2   8 2 1
32 8.86B  43.31 61.10  16  1  2  16 1 1
32 80B    14.76 65.97   1  8  4 256 1 0
128 1.34B 29.46 38.84  64  2  1   1 4 0
128 3.57B 34.59 66.20  32  4  1   1 8 0
128 8.86B 36.33 66.88  16  8  1   2 8 0
128 80B   34.29 61.18   1  4 32 256 1 0
512 1.34B  5.25  8.40 128  2  2   1 2 1
512 3.57B 10.49 16.42 128  4  1   1 2 1
512 8.86B 18.69 57.76 128  4  1   1 2 0
512 80B   17.79 53.46  32 16  1   4 2 1
"""
MEGATRON = "Megatron-LM README"
_MEGATRON_ROWS = """
1.7B 41 1  1 48  192
7.1B 47 2  1 48  192
70B  42 8  2 48  384
462B 47 8 16 48 3072
"""
TITAN = "TorchTitan, FSDP"


def rows() -> list[Row]:
    """All rows, in the order of the tables they come from."""
    found = []
    for line in _NANOTRON_ROWS.strip().split("\n"):
        gpus, name, mfu, memory, *layout = line.split()
        dp, tp, pp, accumulation, micro_batch, zero = map(int, layout)
        assert dp * tp * pp == int(gpus), line
        shape = shapes()[name]
        found.append(Row(NANOTRON, name, shape, dp, tp, pp, accumulation, micro_batch, zero, float(mfu), float(memory)))
    for line in _MEGATRON_ROWS.split("\n")[1:-1]:
        name, mfu, *layout = line.split()
        tp, pp, replicas, batch = map(int, layout)
        found.append(Row(MEGATRON, name, shapes()[name], replicas, tp, pp, batch // replicas, 1, 1, float(mfu), None))
    for devices, rate in ((8, 5762), (128, 5605)):
        shape = shapes()["Llama 3.1 8B"]
        found.append(Row(TITAN, "8B", shape, devices, 1, 1, 1, 2, 1, None, None, 8192, True, rate))
    return found


def config_of(row: Row) -> Config:
    """The config that a user would write for this run."""
    shape = row.shape
    return get_config_from_dict(
        {
            "parallelism": {
                "dp": row.dp,
                "tp": row.tp,
                "pp": row.pp,
                "tp_mode": "REDUCE_SCATTER",
                "recompute_layer": row.recompute,
            },
            "model": {
                "dtype": "bfloat16",
                "model_config": {
                    "hidden_size": shape.hidden,
                    "num_hidden_layers": shape.layers,
                    "num_attention_heads": shape.heads,
                    "num_key_value_heads": shape.kv_heads,
                    "intermediate_size": shape.ffn,
                    "vocab_size": shape.vocab,
                    "tie_word_embeddings": shape.tied,
                },
            },
            "optimizer": {"zero_stage": row.zero, "learning_rate_scheduler": {"learning_rate": 3e-4}},
            "tokens": {
                "sequence_length": row.sequence,
                "micro_batch_size": row.micro_batch,
                "batch_accumulation_per_replica": row.accumulation,
            },
        }
    )


class Compared(NamedTuple):
    """A published run beside its plan; percent and GB."""

    row: Row
    plan: Plan
    mfu: float
    fitted: bool

    @property
    def mfu_error(self) -> float:
        """Relative, with its sign."""
        return 100 * self.plan.mfu / self.mfu - 1

    @property
    def memory_error(self) -> float | None:
        """Relative, with its sign."""
        return None if self.row.memory is None else self.plan.worst.memory.total / 1e9 / self.row.memory - 1


def compare(planner: Planner, found: Sequence[Row]) -> list[Compared]:
    """Plan every row."""
    compared = []
    for index, row in enumerate(found):
        config = config_of(row)
        plan = planner.plan(config)
        mfu = published_mfu(row, config, planner)
        compared.append(Compared(row, plan, mfu, fitted=index % 2 == 0))
    return compared


def published_mfu(row: Row, config: Config, planner: Planner) -> float:
    """The MFU in percent that the source gives, or that follows from its tokens per second."""
    if row.tokens_per_second is None:
        assert row.mfu is not None
        return row.mfu
    flops = flops_per_step(config.model.model_config, num_samples=1, sequence_length=row.sequence) / row.sequence
    return 100 * flops * row.tokens_per_second / planner.cluster.peak_flops(config)


def fit(planner: Planner, found: Sequence[Row]) -> tuple[float, float]:
    """The constants with the least median error of MFU over the rows to fit: (matrix products, network)."""
    errors: dict[tuple[float, float], float] = {}
    for matmul, network in product((0.56, 0.6, 0.64, 0.68, 0.72, 0.76), (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)):
        planner.cluster = replace(planner.cluster, matmul_efficiency=matmul, network_efficiency=network)
        compared = [entry for entry in compare(planner, found) if entry.fitted]
        errors[matmul, network] = median(abs(entry.mfu_error) for entry in compared)
    best = min(errors, key=lambda constants: errors[constants])
    planner.cluster = replace(planner.cluster, matmul_efficiency=best[0], network_efficiency=best[1])
    return best


def kendall_tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Concordant minus discordant pairs, over all pairs that are not tied (Kendall's tau)."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    decided = [sign for sign in signs if sign != 0]
    return sum(1 if sign > 0 else -1 for sign in decided) / len(decided)


def table(compared: Sequence[Compared]) -> list[str]:
    """The comparison as a Markdown table."""
    lines = [
        "| source | model | dp/tp/pp, accumulation × micro-batch, ZeRO | | MFU %, published | predicted | error "
        "| GB, published | predicted | error |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in compared:
        row, memory = entry.row, entry.plan.worst.memory.total / 1e9
        layout = f"{row.dp}/{row.tp}/{row.pp}, {row.accumulation} × {row.micro_batch}, Z{row.zero}"
        known = [f"{row.memory:.1f}", f"{memory:.1f}", f"{entry.memory_error:+.0%}"] if row.memory else ["", "", ""]
        cells = [row.source.split(",")[0], row.name, layout, "fit" if entry.fitted else "held out"]
        cells += [f"{entry.mfu:.1f}", f"{100 * entry.plan.mfu:.1f}", f"{entry.mfu_error:+.0%}", *known]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def summary(compared: Sequence[Compared]) -> list[str]:
    """Median errors and the order of layouts."""

    def medians(chosen: Sequence[Compared]) -> str:
        memory = [abs(entry.memory_error) for entry in chosen if entry.memory_error is not None]
        return f"MFU {median(abs(entry.mfu_error) for entry in chosen):.1%}, memory {median(memory):.1%}"

    order = kendall_tau([(entry.mfu, entry.plan.mfu) for entry in compared])
    nanotron = [entry for entry in compared if entry.row.source == NANOTRON]
    of_each = []
    for source in dict.fromkeys(entry.row.source for entry in compared):
        tau = kendall_tau([(entry.mfu, entry.plan.mfu) for entry in compared if entry.row.source == source])
        of_each.append(f"{source.split(',')[0]} {tau:.2f}")
    memory = kendall_tau([(entry.row.memory or 0.0, entry.plan.worst.memory.total) for entry in nanotron])
    return [
        f"median error, rows to fit: {medians([entry for entry in compared if entry.fitted])}",
        f"median error, held out:    {medians([entry for entry in compared if not entry.fitted])}",
        f"median error, all rows:    {medians(compared)}",
        f"Kendall tau of MFU: all rows {order:.2f}, {', '.join(of_each)}; of memory, Nanotron: {memory:.2f}",
    ]


def main() -> None:
    """Print the table and its summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fit", action="store_true", help="fit the two constants instead of taking the planner's")
    options = parser.parse_args()
    planner, found = Planner(find_cluster("h100", 8)), rows()
    if options.fit:
        matmul, network = fit(planner, found)
        print(f"fitted: MATMUL_EFFICIENCY {matmul}, NETWORK_EFFICIENCY {network}\n")
    compared = compare(planner, found)
    print("\n".join([*table(compared), "", *summary(compared)]))


if __name__ == "__main__":
    main()

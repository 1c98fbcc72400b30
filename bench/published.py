"""Compares the planner with published runs: `python bench/published.py`; with `--fit` it fits the two constants first.

Rows alternate between "fit" and "held out" in the order in which they are written down. docs/plan.md holds the output.
Runs that took a kind of parallelism or recomputation that does not exist here are planned with the nearest there is;
the notes in docs/plan.md say which. What is known of a system's software and network, but of no single run, is planned
as it is there (``AsInV05``, ``NetworkOfV05``).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from statistics import median
from typing import NamedTuple

from nanotron.config import Config, get_config_from_dict
from nanotron.models.families import flops_per_step
from nanotron.models.specs import StageModules
from nanotron.pipeline.timeline import Timeline
from nanotron.plan.counting import Traffic, Work
from nanotron.plan.hardware import BASE_LATENCY, LINK_HOP, Cluster, find_cluster
from nanotron.plan.measure import StateCounts
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


NANOTRON = "Nanotron v0.5, docs/benchmark_summary.svg and scripts/scaling_benchmarks.py"
_NANOTRON_ROWS = """
  8 1.34B 44.32 41.76   4  1  2  16 4 1
  8 3.57B 46.68 56.87   4  1  2  32 2 1
  8 8.86B 45.22 63.07   2  1  4 128 1 1
 16 1.34B 41.59 19.45   8  1  2  32 1 1
 16 3.57B 43.77 54.31   8  1  2  16 2 1
 16 8.86B 43.94 58.34   4  4  1  16 4 1
 32 1.34B 38.38 16.39  16  1  2  16 1 1
 32 3.57B 40.39 53.33  16  1  2   8 2 1
 32 8.86B 43.31 61.10  16  1  2  16 1 1
 32 80B   14.76 65.97   1  8  4 256 1 0
 64 1.34B 32.47 16.27  32  1  2   8 1 1
 64 3.57B 35.53 36.73  32  1  2   8 1 1
 64 8.86B 39.50 59.09  32  1  2   8 1 1
 64 80B   30.65 63.07   1  4 16 256 1 0
128 1.34B 29.46 38.84  64  2  1   1 4 0
128 3.57B 34.59 66.20  32  4  1   1 8 0
128 8.86B 36.33 66.88  16  8  1   2 8 0
128 80B   34.29 61.18   1  4 32 256 1 0
256 1.34B 23.20 19.57  64  4  1   1 4 0
256 3.57B 26.77 38.98  64  4  1   1 4 0
256 8.86B 32.71 63.39  32  8  1   1 8 0
256 80B   30.75 64.21   4  4 16  64 1 1
512 1.34B  5.25  8.40 128  2  2   1 2 1
512 3.57B 10.49 16.42 128  4  1   1 2 1
512 8.86B 18.69 57.76 128  4  1   1 2 0
512 80B   17.79 53.46  32 16  1   4 2 1
"""
_TENSOR_PARALLEL_ROWS = """
 2  3 363.66
 4  9 345.51
 8 18 279.50
16 40 158.10
32 90  92.66
"""
"""tp, micro-batch, TFLOPS of a device: 3.57B on one replica, from the second source."""
ALL_REDUCE_IN_V05 = {2: 361.7, 4: 160.1, 8: 99.6, 16: 84.7, 32: 64.9, 64: 32.9}
"""Nodes -> GB/s of the bus, of all-reduces of 256 MB, as Nanotron's authors measured on their cluster: The Ultra-Scale
Playbook, "Communication Bandwidth by Number of Nodes"."""
HOP_IN_V05 = 85e-6
"""Seconds from node to node with which ``NetworkOfV05`` comes nearest to these."""
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
    for line in _TENSOR_PARALLEL_ROWS.strip().split("\n"):
        tp, micro_batch = map(int, line.split()[:2])
        mfu = float(line.split()[2]) / 9.894
        found.append(Row(NANOTRON, "3.57B", shapes()["3.57B"], 1, tp, 1, 1, micro_batch, 0, mfu, None))
    for line in _MEGATRON_ROWS.split("\n")[1:-1]:
        name, mfu, *layout = line.split()
        tp, pp, replicas, batch = map(int, layout)
        found.append(Row(MEGATRON, name, shapes()[name], replicas, tp, pp, batch // replicas, 1, 1, float(mfu), None))
    for devices, rate in ((8, 5762), (128, 5605)):
        shape = shapes()["Llama 3.1 8B"]
        found.append(Row(TITAN, "8B", shape, devices, 1, 1, 1, 2, 3, None, None, 8192, True, rate))
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
                "pp_layers": layers_in_v05(row) if row.source == NANOTRON else None,
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


def layers_in_v05(row: Row) -> list[int]:
    """Layers of each stage: the next one begins once a rank has more than its share of the matrices' numbers, the
    head's counted (its src/nanotron/models/base.py: build_model).
    """
    shape, layers = row.shape, [0] * row.pp
    layer, head = shape.hidden * (4 * shape.hidden + 3 * shape.ffn), shape.hidden * shape.vocab
    total, stage = shape.layers * layer + head, 0
    for placed in range(1, shape.layers + 1):
        layers[stage] += 1
        stage += placed * layer * row.pp > total * (stage + 1)
    return layers


class NetworkOfV05(Cluster):
    """The cluster of Nanotron's runs: what all-reduces took there grows with the nodes, as around rings."""

    def latency(self, kind: str, ranks: int, on_a_node: int) -> float:
        """As a cluster's, without trees, and with the hops that were measured."""
        nodes = -(-ranks // on_a_node)
        ring = (ranks - nodes) * LINK_HOP + (nodes if nodes > 1 else 0) * HOP_IN_V05
        return BASE_LATENCY + (2 if kind == "all_reduce" else 1) * ring


class AsInV05(Planner):
    """Plans ZeRO-1 as Nanotron v0.5 has it: gradients are all-reduced at once, weights gathered at once and then copied
    shard by shard to where they belong, and nothing computes meanwhile (its optim/gradient_accumulator.py,
    optim/zero.py and distributed.py: all_gather_coalesced).
    """

    def _state(
        self, config: Config, pp_rank: int, held: Sequence[StageModules], every_layer: bool = False
    ) -> StateCounts:
        state = super()._state(config, pp_rank, held, every_layer)
        if not self._exchanges(config):
            return state
        update = Work(state.update)
        for what, value in (("bytes", update.pop(Traffic("reduce_scatter", "dp", "bytes"))), ("calls", 1)):
            update[Traffic("all_reduce", "dp", what)] += value
        update[Traffic("reduce_scatter", "dp", "calls")], update[Traffic("all_gather", "dp", "calls")] = 0, 1
        tensors = sum(6 * len(modules.layers) + modules.embed + 2 * modules.head for modules in held)
        update["kernels"] += config.parallelism.dp * tensors
        return replace(state, update=update)

    def _hidden_seconds(self, config: Config, timeline: Timeline, pp_rank: int, update: Work) -> float:
        return 0.0 if self._exchanges(config) else super()._hidden_seconds(config, timeline, pp_rank, update)

    @staticmethod
    def _exchanges(config: Config) -> bool:
        return config.optimizer.zero_stage == 1 and config.parallelism.dp > 1


def planners(cluster: Cluster) -> dict[str, Planner]:
    """Who plans the rows of each source."""
    nanotron = AsInV05(NetworkOfV05(cluster.device, cluster.per_node))
    return {NANOTRON: nanotron, MEGATRON: Planner(cluster), TITAN: Planner(cluster)}


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


def compare(planning: Mapping[str, Planner], found: Sequence[Row]) -> list[Compared]:
    """Plan every row."""
    compared = []
    for index, row in enumerate(found):
        config, planner = config_of(row), planning[row.source]
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


def fit(planning: Mapping[str, Planner], found: Sequence[Row]) -> tuple[float, float]:
    """The constants with the least median error of MFU over the rows to fit: (matrix products, network)."""
    errors: dict[tuple[float, float], float] = {}
    for matmul, network in product((0.56, 0.6, 0.64, 0.68, 0.72, 0.76), (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)):
        _set(planning, matmul, network)
        compared = [entry for entry in compare(planning, found) if entry.fitted]
        errors[matmul, network] = median(abs(entry.mfu_error) for entry in compared)
    best = min(errors, key=lambda constants: errors[constants])
    _set(planning, *best)
    return best


def _set(planning: Mapping[str, Planner], matmul: float, network: float) -> None:
    for planner in planning.values():
        planner.cluster = replace(planner.cluster, matmul_efficiency=matmul, network_efficiency=network)


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
    of_each = []
    for source in dict.fromkeys(entry.row.source for entry in compared):
        tau = kendall_tau([(entry.mfu, entry.plan.mfu) for entry in compared if entry.row.source == source])
        of_each.append(f"{source.split(',')[0]} {tau:.2f}")
    memory = kendall_tau([(entry.row.memory, entry.plan.worst.memory.total) for entry in compared if entry.row.memory])
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
    planning, found = planners(find_cluster("h100", 8)), rows()
    if options.fit:
        matmul, network = fit(planning, found)
        print(f"fitted: MATMUL_EFFICIENCY {matmul}, NETWORK_EFFICIENCY {network}\n")
    compared = compare(planning, found)
    print("\n".join([*table(compared), "", *summary(compared)]))


if __name__ == "__main__":
    main()

"""The run itself: its name, folder, layout over devices, tokenizer, logs and profiler."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from nanotron.config.compat.retired import GENERAL, PARALLELISM, PROFILER, TOKENIZER, retires
from nanotron.config.keys import (
    Auto,
    Count,
    Derived,
    Float,
    Int,
    Lower,
    PathOrUrl,
    Reads,
    Upper,
    derived,
    fill,
    key,
    required,
    section,
    true_false_or,
)
from nanotron.pipeline.schedules import default_virtual_stages

MOST_RANKS = 2**16

LogLevel = Lower[Literal["debug", "info", "warning", "error", "critical"]]


@section
@retires(GENERAL)
class GeneralArgs:
    """The run: its name, folder, seed and how it uses its machine."""

    project: str = key("nanotron", "Name of the project that the run belongs to.", min_length=1)
    run: str = key(
        "%date_%jobid",
        "Name of the run; `%date` becomes the start time (YYYYmmdd_HHMMSS) and `%jobid` the Slurm job id or `local`.",
    )
    seed: Int = key(42, "Seed of the initial weights; the order of the data has its own (`data.seed`).", ge=0)
    run_dir: PathOrUrl | None = key(
        None,
        "Folder of the run's metrics, logs and resolved config.",
        derived="checkpoints.checkpoints_path when that is local, else runs/<run>",
    )
    threads_per_rank: Count | None = key(
        None, "CPU threads of each rank.", derived="cores of the machine // ranks on it, at least 1", gt=0
    )
    deterministic: bool = key(
        False,
        "On an accelerator, choose kernels that give the same bits in every run, and refuse what has none: slower. A"
        " CPU's always do.",
    )
    timeout_s: Float = key(
        600.0,
        "Seconds that a rank waits for another one's sign of life before the run ends and names that one.",
        gt=0,
        le=1e7,
    )
    heartbeat_s: Float = key(
        10.0,
        "Every process of a run gives a sign of life several times in so many seconds; one that gives none for twice"
        " as long (stopped, frozen, cut off) ends the run and is named.",
        gt=0,
        le=1e7,
    )
    replica_check_interval: Int | None = key(
        100,
        "Steps from one comparison of what replicas hold copies of to the next; there is one before each checkpoint"
        " too. A rank whose bits are others is named and ends the run without a save; null: they are not compared.",
        gt=0,
    )


def _schedule_name(value: Any) -> Any:
    """Accept a built-in schedule's name in any case, also as an enum member; leave a file's name as it is."""
    value = getattr(value, "name", value)
    return value.lower() if isinstance(value, str) and "." not in value else value


ScheduleName = Annotated[PathOrUrl, Reads(_schedule_name, lambda legal: legal)]


Recomputation = Annotated[Literal[False, True, "selective"], true_false_or("selective")]


@section
@retires(PARALLELISM)
class ParallelismArgs:
    """The layout: how many ranks share what. It changes speed and memory and nothing else."""

    dp: Auto[Count] = key(
        1,
        "Data-parallel replicas of the model; `auto`: the most that the launched ranks hold and that divide"
        " tokens.global_batch_size, ranks beyond them wait as spares.",
        gt=0,
    )
    pp: Count = key(1, "Pipeline-parallel ranks: each holds some of the layers, one after another.", gt=0)
    tp: Count = key(1, "Tensor-parallel ranks: each holds a shard of every layer's matrices.", gt=0)
    pp_engine: ScheduleName = key(
        "1f1b", "Pipeline schedule, by name, or your own: a `.csv` file, or `file.py:function`.", min_length=1
    )
    tp_mode: Upper[Literal["ALL_REDUCE", "REDUCE_SCATTER"]] = key(
        "ALL_REDUCE", "How tensor-parallel ranks exchange activations; REDUCE_SCATTER is sequence parallelism."
    )
    tp_linear_async_communication: bool | None = key(
        False,
        "Run matmuls while tensor-parallel communication is on its way. Meant for GPUs; brings little on CPUs.",
    )
    recompute_layer: Recomputation = key(
        False,
        "Activation checkpointing: keep only each layer's input for the backward pass and compute the layer again"
        " there; `selective` keeps what its matmuls gave too, and computes all but these again.",
    )
    recompute_offload: bool = key(
        False,
        "Keep the layer inputs that activation checkpointing keeps in host memory. Saves device memory, and takes a"
        " copy of each to the host and back; on a CPU it changes nothing.",
    )
    tp_recompute_allgather: bool = key(
        True, "Under REDUCE_SCATTER, gather a linear layer's input again in the backward pass instead of keeping it."
    )
    context_parallel_size: Count = key(
        1, "Ranks that share every sequence, each with two pieces of it (context parallelism).", gt=0
    )
    cp_mode: Upper[Literal["ALL_GATHER", "ALL_TO_ALL"]] = key(
        "ALL_GATHER",
        "How attention sees sequences that are cut: ALL_GATHER gathers keys and values, ALL_TO_ALL cuts heads instead.",
    )
    expert_parallel_size: Count = key(
        1,
        "Data-parallel replicas that share one set of experts, each holding some of them (expert parallelism); a"
        " divisor of dp.",
        gt=0,
    )
    dp_shard: Count | None = key(
        None,
        "Replicas that share the shards of every matrix at zero_stage 2 and 3, as on one node; the others hold copies"
        " (hybrid sharding). A divisor of dp.",
        derived="dp: no copies",
        gt=0,
    )
    pp_layers: list[Count] | None = key(
        None,
        "Layers of each pipeline stage, first to last, e.g. [5, 7].",
        derived="ranks of equal cost, embedding and head counted",
    )
    pp_virtual_stages: Derived[Count] = derived(
        "Stages that each pipeline rank holds.", "2 for interleaved_1f1b and zbv, else 1", gt=0
    )

    def __post_init__(self) -> None:
        fill(self, "pp_virtual_stages", default_virtual_stages(self.pp_engine))

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.context_parallel_size * self.tp * self.pp

    def replicas_of(self, num_ranks: int) -> int:
        """How many replicas so many ranks hold."""
        return num_ranks // (self.context_parallel_size * self.tp * self.pp)

    @property
    def sharing_ranks(self) -> int:
        """Ranks that share the shards of a matrix at zero_stage 2 and 3; of experts fewer do."""
        return (self.dp_shard or self.dp) * self.context_parallel_size

    def __str__(self) -> str:
        """As a person reads it: `dp 4 · pp 1 (1f1b) · tp 2 (ALL_REDUCE) · cp 2 (ALL_GATHER) · ep 2`."""
        parts = [f"dp {self.dp}", f"pp {self.pp} ({self.pp_engine})", f"tp {self.tp} ({self.tp_mode})"]
        parts += [f"cp {self.context_parallel_size} ({self.cp_mode})"] * (self.context_parallel_size > 1)
        parts += [f"ep {self.expert_parallel_size}"] * (self.expert_parallel_size > 1)
        parts += [f"dp_shard {self.dp_shard}"] * (self.dp_shard not in (None, self.dp))
        return " · ".join(parts)

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations between layers are cut along the sequence over the tensor-parallel ranks."""
        return self.tp_mode == "REDUCE_SCATTER"


@section
@retires(TOKENIZER)
class TokenizerArgs:
    """The tokenizer of the data."""

    tokenizer_name_or_path: PathOrUrl | None = key(
        None,
        "Hugging Face name, folder, or tokenizer.json file.",
        derived="the tokenizer that the data set's own metadata names",
    )
    read_special_tokens: bool = key(
        False, "Text that spells a special token (`<|endoftext|>`) becomes that token; else it stays text."
    )


@section
class LoggingArgs:
    """What is printed and recorded."""

    log_level: LogLevel = key("info", "Least severe message that rank 0 prints.")
    log_level_replica: LogLevel = key("warning", "Least severe message that the other ranks print.")
    iteration_step_info_interval: Int = key(1, "Steps from one printed line to the next.", gt=0)
    tensorboard: bool = key(False, "Write TensorBoard events to the run directory.")
    wandb: bool = key(False, "Send metrics to Weights & Biases, under general.project and general.run.")
    trackio: bool = key(False, "Send metrics to Trackio, which keeps them on this machine, under the same names.")


@section
class MetricsLoggingArgs:
    """How much is measured."""

    log_level: Int = key(
        0,
        "0: the run's own numbers. 1: also norms of every weight, gradient and activation, and update ratios.",
        ge=0,
        le=1,
    )
    log_detail_interval: Int = key(10, "Steps from one measurement of level 1 to the next.", gt=0)
    straggler_interval: Int | None = key(
        100, "Steps from one line about the slowest and the fullest rank to the next; null: no such lines.", gt=0
    )
    expert_interval: Int | None = key(
        None,
        "Steps from one record of every expert's load to the next, in models that have experts; null: about 200 records"
        " in a run.",
        gt=0,
    )


@section
class PipelineTraceArgs:
    """When each action of the pipeline schedule ran: `traces/pipeline-step-*-rank-*.json`, for `nanotron timeline`."""

    steps: list[Annotated[Int, Field(gt=0)]] = required(
        "Steps that are recorded; on a GPU they are slower than others.", example=[5], min_length=1
    )


@section
@retires(PROFILER)
class ProfilerArgs:
    """Traces of some steps: by torch's profiler on rank 0, and of the pipeline's schedule on all its ranks."""

    profiler_export_path: PathOrUrl | None = key(
        None, "Folder of the traces of torch's profiler.", derived="<run_dir>/traces, or none with pipeline_trace"
    )
    wait: Int = key(1, "Steps of each cycle that are not looked at.", ge=0)
    warmup: Int = key(1, "Steps of each cycle that are traced and thrown away.", ge=0)
    active: Int = key(1, "Steps of each cycle that are kept.", gt=0)
    repeat: Int = key(1, "Cycles.", gt=0)
    skip_first: Int = key(3, "Steps before the first cycle.", ge=0)
    record_shapes: bool = key(False, "Record the shapes of operators' inputs.")
    profile_memory: bool = key(False, "Record allocations.")
    with_stack: bool = key(True, "Record source lines.")

    pipeline_trace: PipelineTraceArgs | None = key(None, "Record when each pipeline action runs; null is never.")

    @property
    def torch_runs(self) -> bool:
        """Whether torch's profiler is asked for: always, except by a section that is only about the pipeline."""
        return self.profiler_export_path is not None or self.pipeline_trace is None

    @property
    def last_step(self) -> int:
        """The step after which torch's last trace is complete."""
        return self.skip_first + self.repeat * (self.wait + self.warmup + self.active)

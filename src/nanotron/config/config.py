"""The whole config: its sections, what they derive from each other, and how it becomes a file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from nanotron.config.checkpoints import CheckpointsArgs, S3UploadArgs
from nanotron.config.compat.retired import TOP_LEVEL, retires
from nanotron.config.data import DatasetStageArgs, default_stages
from nanotron.config.document import dump
from nanotron.config.general import (
    MOST_RANKS,
    GeneralArgs,
    LoggingArgs,
    MetricsLoggingArgs,
    ParallelismArgs,
    ProfilerArgs,
    TokenizerArgs,
)
from nanotron.config.keys import (
    Derived,
    Section,
    fields_of,
    fill,
    is_section,
    key,
    required,
    section,
    status_of,
    was_filled,
)
from nanotron.config.model import ModelArgs
from nanotron.config.training import MuonOptimizerArgs, OptimizerArgs, TokensArgs
from nanotron.pipeline.schedules import microbatch_unit

SOFTMAX_BYTES = 512 << 20
"""Of a microbatch's loss on a rank, beyond which it is computed in chunks, unless `model.loss_chunk` says in which."""


@section
@retires(TOP_LEVEL)
class Config:
    """What a run is."""

    general: Section[GeneralArgs] = key(None, "The run itself.", factory=GeneralArgs)
    parallelism: Section[ParallelismArgs] = key(None, "The layout.", factory=ParallelismArgs)
    model: Section[ModelArgs] = required("The model.", example={})
    tokenizer: Section[TokenizerArgs] = key(None, "The tokenizer.", factory=TokenizerArgs)
    tokens: Section[TokensArgs] = required("The batch and the length of the run.", example={})
    optimizer: Section[OptimizerArgs] = required("The optimizer.", example={})
    data_stages: Derived[list[DatasetStageArgs]] = key(
        None, "The data, stage by stage.", derived="the embedded corpus, for the whole run", min_length=1
    )
    checkpoints: Section[CheckpointsArgs] = key(None, "Saving and resuming.", factory=CheckpointsArgs)
    logging: Section[LoggingArgs] = key(None, "What is printed and recorded.", factory=LoggingArgs)
    metrics_logging: Section[MetricsLoggingArgs] = key(None, "How much is measured.", factory=MetricsLoggingArgs)
    profiler: ProfilerArgs | None = key(None, "A trace of some steps; null is none.")
    s3_upload: S3UploadArgs | None = key(
        None, "Copies of the checkpoints elsewhere; checkpoints.checkpoints_path may also be a URL itself."
    )

    def __post_init__(self) -> None:
        fill(self, "data_stages", default_stages())
        folder = self.general.project.replace("$", "_")  # which would begin a variable once it is a path in a file
        fill(self.checkpoints, "checkpoints_path", f"runs/{folder}")
        self.fit_to(None)
        scheduler = self.optimizer.learning_rate_scheduler
        length = scheduler.lr_schedule_steps or self.tokens.train_steps
        fill(scheduler, "lr_decay_steps", max(0, length - scheduler.lr_decay_starting_step))
        if isinstance(self.optimizer.optimizer_factory, MuonOptimizerArgs):
            fill(self.optimizer.optimizer_factory, "muon_ns_dtype", self.model.dtype)
        fill(self.model.model_config, "max_position_embeddings", max(self.stage_sequence_lengths))

    def fit_to(self, num_ranks: int | None) -> None:
        """Settle what follows from the number of launched ranks: dp where it is `auto`, and gradient accumulation.

        dp is then the most replicas that the ranks hold and that divide every step's batch; the fewest while the number
        of ranks is not known.
        """
        layout, tokens, batch = self.parallelism, self.tokens, self.tokens.global_batch_size
        shared = math.gcd(batch or 0, *(stage.global_batch_size for stage in tokens.batch_ramp))
        if layout.dp is None or was_filled(layout, "dp"):
            unit = layout.dp_shard or layout.expert_parallel_size
            most = MOST_RANKS if num_ranks is None else layout.replicas_of(num_ranks)
            rounds = microbatch_unit(layout.pp_engine, layout.pp) * tokens.micro_batch_size
            legal = (dp for dp in range(unit, most + 1, unit) if batch is not None and shared % (rounds * dp) == 0)
            fill(layout, "dp", next(legal, unit) if num_ranks is None else max(legal, default=unit))
        if batch is not None:
            fill(tokens, "batch_accumulation_per_replica", max(1, batch // (tokens.micro_batch_size * layout.dp)))

    @property
    def stage_sequence_lengths(self) -> list[int]:
        """Tokens per sample of each stage."""
        return [stage.sequence_length or self.tokens.sequence_length for stage in self.data_stages]

    @property
    def loss_chunk(self) -> int | None:
        """Tokens of a row whose logits exist at once, None for all: as asked, else by vocabulary and memory."""
        if self.model.loss_chunk is not None:
            return self.model.loss_chunk
        columns = -(-self.model.model_config.vocab_size // self.parallelism.tp)
        most = SOFTMAX_BYTES // (4 * self.tokens.micro_batch_size * columns)  # of each row, in float32
        longest = max(self.stage_sequence_lengths) // self.parallelism.context_parallel_size
        return None if longest <= most else max(1, most // 128 * 128 or most)

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all replicas, once tokens.batch_ramp is over."""
        return self.tokens.micro_batch_size * self.tokens.batch_accumulation_per_replica * self.parallelism.dp

    def batches(self, steps: int) -> list[tuple[int, int]]:
        """What the first so many steps are, in order: (steps, samples of each over all replicas)."""
        found = []
        for stage in self.tokens.batch_ramp:
            found.append((min(steps, stage.steps), stage.global_batch_size))
            steps -= found[-1][0]
        return [part for part in [*found, (steps, self.global_batch_size)] if part[0]]

    def samples_by(self, step: int) -> int:
        """Samples that the run has had after a step."""
        return sum(steps * samples for steps, samples in self.batches(step))

    def samples_of(self, step: int) -> int:
        """Samples of a step, over all replicas."""
        return self.samples_by(step) - self.samples_by(step - 1)

    def steps_left(self, step: int) -> float:
        """Steps up to the one that this start ends with, counted in steps of as many samples as the given one."""
        last = self.tokens.last_step
        return (self.samples_by(last) - self.samples_by(step)) / self.samples_of(step) if step < last else 0.0

    @property
    def ramp_microbatches(self) -> dict[str, int]:
        """Micro-batches of a replica in the steps of each stage of the ramp, by the key that they follow from."""
        at_once = self.tokens.micro_batch_size * self.parallelism.dp
        sizes = (stage.global_batch_size for stage in self.tokens.batch_ramp)
        return {f"tokens.batch_ramp[{index}].global_batch_size": size // at_once for index, size in enumerate(sizes)}

    @property
    def global_batch_size_in_tokens(self) -> int:
        """Tokens per step, over all replicas."""
        return self.global_batch_size * self.tokens.sequence_length

    @property
    def checkpoint_places(self) -> tuple[str, str | None]:
        """The folder of the checkpoints, and that of copies of them: `s3_upload`, which may also replace the first."""
        path, upload = self.checkpoints.checkpoints_path, self.s3_upload
        if upload is None:
            return path, None
        return (upload.upload_s3_path, None) if upload.remove_after_upload else (path, upload.upload_s3_path)

    def to_dict(self, *, resolved: bool = True) -> dict[str, Any]:
        """Return the config as plain mappings, lists and scalars; they load again to an equal config.

        Resolved, every key that counts is there; else only what differs from the defaults and was not derived.
        """
        keep = _counts if resolved else _was_chosen
        plain = _plain(self, keep)
        assert isinstance(plain, dict)
        return plain

    def to_texts(self) -> dict[str, str]:
        """Return the files, by name, that make a checkpoint readable without its run directory."""
        plain = self.to_dict()
        model = json.dumps(plain["model"]["model_config"], indent=1) + "\n"
        return {"config.yaml": dump(plain), "model_config.json": model}

    def save_as_yaml(self, file_path: str | Path, *, resolved: bool = False, header: str = "") -> None:
        """Write the config to a YAML file, below a header of comment lines; see `to_dict`."""
        comments = "".join(f"# {line}\n" for line in header.splitlines())
        Path(file_path).write_text(comments + dump(self.to_dict(resolved=resolved)), encoding="utf-8")


_Keep = Callable[[Any, str, FieldInfo], bool]


def _plain(value: Any, keep: _Keep) -> Any:
    if isinstance(value, list):
        return [_plain(item, keep) for item in value]
    if not is_section(value):
        return value
    kept = {name: info for name, info in fields_of(type(value)).items() if keep(value, name, info)}
    plain = {name: _plain(getattr(value, name), keep) for name in kept}
    if keep is _was_chosen:
        plain |= {name: "auto" for name in kept if was_filled(value, name) and kept[name].default is not None}
    return {name: item for name, item in plain.items() if item != {} or kept[name].default_factory is None}


def _default(info: FieldInfo) -> Any:
    return info.default if info.default_factory is None else info.default_factory()  # type: ignore[call-arg]


def _counts(section: Any, name: str, info: FieldInfo) -> bool:
    """Tell whether a key matters: not when it is null, and null is its default."""
    return getattr(section, name) is not None or info.default is not None


def _was_chosen(section: Any, name: str, info: FieldInfo) -> bool:
    """Tell whether a key says something: it marks its section, or is neither derived nor at its default."""
    value = getattr(section, name)
    if was_filled(section, name):
        return info.default is not None
    return status_of(info).marker or bool(value != _default(info))

"""The whole config: its sections, what they derive from each other, and how it becomes a file."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import Any

from nanotron.config.checkpoints import CheckpointsArgs, S3UploadArgs
from nanotron.config.data import DatasetStageArgs, default_stages
from nanotron.config.document import dump
from nanotron.config.general import (
    GeneralArgs,
    LoggingArgs,
    MetricsLoggingArgs,
    ParallelismArgs,
    ProfilerArgs,
    TokenizerArgs,
)
from nanotron.config.keys import Derived, Section, Status, fields_of, is_section, key, required, section, status_of
from nanotron.config.model import ModelArgs
from nanotron.config.training import OptimizerArgs, TokensArgs


@section
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
        None,
        "Upload of checkpoints by s5cmd.",
        refused="set checkpoints.checkpoints_path to the s3:// URL itself; files are uploaded behind training",
        allowed=(None,),
    )
    lighteval: dict[str, Any] | None = key(
        None,
        "Evaluation jobs on a Slurm cluster.",
        refused="evaluations are not started from a training run; export a checkpoint and evaluate that",
        allowed=(None,),
    )

    def __post_init__(self) -> None:
        if self.data_stages is None:
            self.data_stages = default_stages()
        if self.checkpoints.checkpoints_path is None:
            self.checkpoints.checkpoints_path = f"runs/{self.general.project}"
        scheduler = self.optimizer.learning_rate_scheduler
        if scheduler.lr_decay_steps is None:
            scheduler.lr_decay_steps = max(0, self.tokens.train_steps - scheduler.lr_decay_starting_step)
        if self.model.model_config.max_position_embeddings is None:
            self.model.model_config.max_position_embeddings = max(self.stage_sequence_lengths)

    @property
    def stage_sequence_lengths(self) -> list[int]:
        """Tokens per sample of each stage."""
        return [stage.sequence_length or self.tokens.sequence_length for stage in self.data_stages]

    @property
    def global_batch_size(self) -> int:
        """Samples per step, over all replicas."""
        return self.tokens.micro_batch_size * self.tokens.batch_accumulation_per_replica * self.parallelism.dp

    @property
    def global_batch_size_in_tokens(self) -> int:
        """Tokens per step, over all replicas."""
        return self.global_batch_size * self.tokens.sequence_length

    def to_dict(self) -> dict[str, Any]:
        """Return the config as plain mappings, lists and scalars, without the keys that say nothing."""
        plain = _plain(self)
        assert isinstance(plain, dict)
        return plain

    def save_as_yaml(self, file_path: str | FilePath) -> None:
        """Write the config to a YAML file, which loads again to an equal config."""
        FilePath(file_path).write_text(dump(self.to_dict()), encoding="utf-8")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not is_section(value):
        return value
    return {
        name: _plain(getattr(value, name))
        for name, info in fields_of(type(value)).items()
        if not _says_nothing(getattr(value, name), info.default, status_of(info))
    }


def _says_nothing(value: Any, default: Any, status: Status) -> bool:
    """Tell whether a key at its default can be left out: null, without effect here, or without a choice."""
    return bool(value == default and (value is None or status.notice or status.refused))

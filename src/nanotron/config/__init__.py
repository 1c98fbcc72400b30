"""What a run is: sections of keys, read from YAML, checked as a whole.

Imports neither torch nor anything that runs a model.
"""

from nanotron.config.checkpoints import CheckpointsArgs, S3UploadArgs
from nanotron.config.compat.retired import SpectralMupInit
from nanotron.config.config import Config
from nanotron.config.data import (
    CustomDatasetArgs,
    DataArgs,
    DatasetStageArgs,
    EmbeddedCorpusArgs,
    NanosetDatasetsArgs,
    PretrainDatasetsArgs,
    SFTDatasetsArgs,
)
from nanotron.config.experts import MoEConfig
from nanotron.config.general import (
    GeneralArgs,
    LoggingArgs,
    MetricsLoggingArgs,
    ParallelismArgs,
    ProfilerArgs,
    TokenizerArgs,
)
from nanotron.config.load import get_config_from_dict, get_config_from_file
from nanotron.config.model import (
    DeepseekV2Config,
    DeepseekV3Config,
    ExistingCheckpointInit,
    LlamaConfig,
    MistralConfig,
    ModelArgs,
    ModelConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    RandomInit,
    RopeScalingArgs,
)
from nanotron.config.training import (
    AdamWOptimizerArgs,
    BatchRampArgs,
    LRSchedulerArgs,
    LRStepArgs,
    MuonOptimizerArgs,
    OptimizerArgs,
    ParameterGroupArgs,
    SGDOptimizerArgs,
    TokensArgs,
)

__all__ = [
    "AdamWOptimizerArgs",
    "BatchRampArgs",
    "CheckpointsArgs",
    "Config",
    "CustomDatasetArgs",
    "DataArgs",
    "DatasetStageArgs",
    "DeepseekV2Config",
    "DeepseekV3Config",
    "EmbeddedCorpusArgs",
    "ExistingCheckpointInit",
    "GeneralArgs",
    "LRSchedulerArgs",
    "LRStepArgs",
    "LlamaConfig",
    "LoggingArgs",
    "MetricsLoggingArgs",
    "MistralConfig",
    "MoEConfig",
    "ModelArgs",
    "ModelConfig",
    "MuonOptimizerArgs",
    "NanosetDatasetsArgs",
    "OlmoeConfig",
    "OptimizerArgs",
    "ParallelismArgs",
    "ParameterGroupArgs",
    "PretrainDatasetsArgs",
    "ProfilerArgs",
    "Qwen2Config",
    "Qwen3Config",
    "RandomInit",
    "RopeScalingArgs",
    "S3UploadArgs",
    "SFTDatasetsArgs",
    "SGDOptimizerArgs",
    "SpectralMupInit",
    "TokenizerArgs",
    "TokensArgs",
    "get_config_from_dict",
    "get_config_from_file",
]

_NOT_HERE = {
    "AllForwardAllBackwardPipelineEngine": 'write pp_engine="afab"',
    "GenerationArgs": "generation has no config section; see `nanotron generate --help`",
    "LightEvalConfig": "evaluations are not started from a training run; export a checkpoint and evaluate that",
    "OneForwardOneBackwardPipelineEngine": 'write pp_engine="1f1b"',
    "Starcoder2Config": "the Starcoder2 family is not available",
}
"""Names that scripts of Hugging Face's Nanotron import and that have no counterpart, with the reason or the way out."""


def __getattr__(name: str) -> object:
    """Say why a name of Hugging Face's Nanotron is not here."""
    if name in _NOT_HERE:
        raise ImportError(f"nanotron.config.{name}: {_NOT_HERE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

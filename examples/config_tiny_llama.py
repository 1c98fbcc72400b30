"""Write config_tiny_llama.yaml, next to this script: a model small enough to train on a laptop, on 8 processes.

A config can be written by hand as well; a script is handy for sweeps. Edit, run, and train:
    python examples/config_tiny_llama.py && nanotron train examples/config_tiny_llama.yaml
"""

from pathlib import Path

from nanotron.config import (
    CheckpointsArgs,
    Config,
    GeneralArgs,
    LlamaConfig,
    LoggingArgs,
    LRSchedulerArgs,
    ModelArgs,
    MuonOptimizerArgs,
    OptimizerArgs,
    ParallelismArgs,
    RandomInit,
    TokensArgs,
)

HEADER = """\
yaml-language-server: $schema=config.schema.json
Written by config_tiny_llama.py. Keys that are left out have the defaults of docs/config.md;
`nanotron check examples/config_tiny_llama.yaml` prints them all.
"""

model_config = LlamaConfig(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,  # grouped-query attention: two query heads share a key/value head
    intermediate_size=384,
    tie_word_embeddings=True,  # most of so small a model is its vocabulary: keep it once
)

config = Config(
    general=GeneralArgs(project="tiny_llama", run="tiny_llama_%date_%jobid"),
    parallelism=ParallelismArgs(dp=2, tp=2, pp=2, pp_engine="1f1b", tp_mode="ALL_REDUCE"),
    model=ModelArgs(model_config=model_config, init_method=RandomInit(std=0.02), dtype="float32"),
    tokens=TokensArgs(sequence_length=128, micro_batch_size=4, batch_accumulation_per_replica=2, train_steps=128),
    optimizer=OptimizerArgs(
        zero_stage=1,
        weight_decay=0.1,
        clip_grad=1.0,
        optimizer_factory=MuonOptimizerArgs(adam_learning_rate=6e-3),
        learning_rate_scheduler=LRSchedulerArgs(
            learning_rate=0.02, lr_warmup_steps=8, lr_decay_style="cosine", min_decay_lr=0
        ),
    ),
    checkpoints=CheckpointsArgs(checkpoints_path="runs/tiny_llama", checkpoint_interval=128),
    logging=LoggingArgs(tensorboard=True, iteration_step_info_interval=4),
)

if __name__ == "__main__":
    config.save_as_yaml(Path(__file__).with_suffix(".yaml"), header=HEADER)

"""torchtitan 0.3.0 on CPUs: the same model as its own configuration, and what its Trainer misses there.

Everything is built by the library: `Trainer.Config`, its Llama 3 or Qwen3 modules, its parallelize and pipelining
functions, its fused AdamW, its clipping, its schedules. It does not run as shipped without an accelerator, so this file

- names the device, for torchtitan takes what torch reports or else "cuda", and gives `torch.cpu` the five functions of
  `torch.cuda` that its memory monitor calls (`run_on_cpu`);
- configures the library's `ScaledDotProductAttention`, which its Trainer takes too: on CPUs FlexAttention has no
  backward and varlen no kernel. Batches then carry no positions;
- has FSDP sum gradients (`CPUTrainer.__init__`): gloo lacks the scaled sum that it takes otherwise;
- leaves the groups' timeouts as they begin: the barrier before they are shortened wants the number of an accelerator;
- gives a pipeline its batch whole instead of in microbatches, which torch takes since 2.14, and takes the spmd_backend
  partial_dtensor: the default, spmd_types, needs torch 2.14's FSDP. All contenders have torch 2.13.

Otherwise as shipped: FSDP over dp, sequence parallelism with tp, fused q/k/v, chunked loss. Faster than shipped: no
activation checkpointing. Not used: torch.compile, checkpoints, profiler, traces. Experts are those of its Qwen3, which
multiply in bfloat16 whatever the rest does.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from bench.shapes import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Shape
from bench.work import microbatches


def run_on_cpu() -> None:
    """Let torchtitan take the CPU for its device; call it before torchtitan is imported."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.get_device_name = lambda device=None: "CPU"
    torch.cpu.get_device_properties = lambda device=None: SimpleNamespace(total_memory=memory)
    torch.cpu.memory_stats = lambda device=None: {}
    torch.cpu.reset_peak_memory_stats = lambda device=None: None
    torch.cpu.empty_cache = lambda: None


run_on_cpu()

# ruff: noqa: E402 - torchtitan looks for its device while it is imported, so it is imported only now.
import torchtitan.distributed.utils
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CommConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.trainer import Trainer

torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None


class CPUTrainer(Trainer):
    """torchtitan's Trainer with what gloo and torch 2.13 need."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        for module in (module for part in self.model_parts for module in part.modules()):
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def pp_forward_backward_step(
        self, *, input_dict_mbs: list[dict[str, Tensor]], label_mbs: list[Tensor], global_valid_tokens: Tensor
    ) -> Tensor:
        """All microbatches through the pipeline, joined here and cut by the schedule; the loss, where it is known."""
        parts = [self.post_dataloading_process(*part) for part in zip(input_dict_mbs, label_mbs, strict=True)]
        inputs, labels = (torch.cat([part[index] for part in parts]) for index in range(2))  # 2 × [m·b, s]
        losses: list[Tensor] | None = [] if self.pp_has_last_stage else None
        with self.train_context():
            self.pp_schedule.step(
                *([inputs] if self.pp_has_first_stage else []),
                target=labels if self.pp_has_last_stage else None,
                losses=losses,
                loss_kwargs={"global_valid_tokens": global_valid_tokens},
                return_outputs=False,
            )
        return torch.tensor(-1.0) if losses is None else torch.stack(losses).sum()


class SameTokens(BaseDataLoader):
    """The microbatches of every contender, again and again, as torchtitan's data loaders give them."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        shape: Annotated[dict[str, Any], tyro.conf.Suppress]  # not an option of the command line

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **_: Any) -> None:
        self.parts = microbatches(Shape(**config.shape), dp_rank, dp_world_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            for tokens, labels in self.parts:
                yield {"input": tokens}, labels

    def state_dict(self) -> dict[str, Any]:
        """Nothing is worth saving."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing was saved."""


class NoTokenizer(BaseTokenizer):
    """Tokens are numbers already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> Any:
        """Required by the base class, like its siblings."""
        raise AssertionError("torchtitan asked for a tokenizer, and the batches hold tokens already")

    decode = get_vocab_size = encode


def model_of(shape: Shape) -> Any:
    """The Llama of this shape, from the parts of torchtitan's registry."""
    hidden, vocabulary = shape.hidden_size, shape.vocab_size
    rope = llama3.ComplexRoPE.Config(dim=shape.head_dim, max_seq_len=shape.sequence_length, theta=shape.rope_theta)
    layers = llama3._build_llama3_layers(
        n_layers=shape.num_hidden_layers,
        dim=hidden,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        hidden_dim=shape.intermediate_size,
        rope=rope,
        attn_backend="flex",
    )
    normal = {"weight": partial(nn.init.normal_, std=0.02)}
    return llama3.Llama3Model.Config(
        dim=hidden,
        vocab_size=vocabulary,
        tok_embeddings=llama3.Embedding.Config(num_embeddings=vocabulary, embedding_dim=hidden, param_init=normal),
        norm=llama3.RMSNorm.Config(normalized_shape=hidden, param_init=llama3._NORM_INIT),
        lm_head=llama3.Linear.Config(in_features=hidden, out_features=vocabulary, param_init=normal),
        layers=layers,
    )


def sparse_model_of(shape: Shape) -> Any:
    """The Qwen3 of this shape with experts in every layer."""
    hidden, vocabulary = shape.hidden_size, shape.vocab_size
    layers = qwen3._build_qwen3_moe_layers(
        n_layers=shape.num_hidden_layers,
        dim=hidden,
        n_heads=shape.num_attention_heads,
        n_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        moe_hidden_dim=shape.moe_intermediate_size,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        attn_backend="flex",
        moe_comm_backend="standard",
        rope=qwen3.CosSinRoPE.Config(dim=shape.head_dim, max_seq_len=shape.sequence_length, theta=shape.rope_theta),
    )
    return qwen3.Qwen3Model.Config(
        dim=hidden,
        vocab_size=vocabulary,
        tok_embeddings=qwen3.Embedding.Config(
            num_embeddings=vocabulary, embedding_dim=hidden, param_init=qwen3._EMBEDDING_INIT
        ),
        norm=qwen3._qwen3_norm(hidden),
        lm_head=qwen3.Linear.Config(in_features=hidden, out_features=vocabulary, param_init=qwen3._LINEAR_INIT),
        layers=layers,
    )


def trainer_config(asked: dict[str, Any], *, steps: int = 1_000_000_000) -> CPUTrainer.Config:
    """The whole run that was asked for, in torchtitan's words; it logs every step."""
    shape, layout = Shape(**asked["shape"]), {"dp": 1, "tp": 1, "pp": 1, **asked.get("layout", {})}
    rows = shape.num_microbatches * shape.micro_batch_size
    if shape.num_experts:
        registered, model = qwen3.model_registry("debugmodel_moe", moe_comm_backend="standard"), sparse_model_of(shape)
    else:
        registered, model = llama3.model_registry("debugmodel"), model_of(shape)
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return CPUTrainer.Config(
        model_spec=dataclasses.replace(registered, model=model, state_dict_adapter=None),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size)),
        tokenizer=NoTokenizer.Config(),
        dataloader=SameTokens.Config(shape=dataclasses.asdict(shape)),
        optimizer=default_adamw(LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=rows // layout["dp"] if layout["pp"] > 1 else shape.micro_batch_size,
            global_batch_size=rows,
            seq_len=shape.sequence_length,
            max_norm=CLIP,
            steps=steps,
            mixed_precision_param=asked["dtype"],
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=layout["dp"],
            tensor_parallel_degree=layout["tp"],
            expert_parallel_degree=layout.get("expert_parallel_size", 1),
            enable_sequence_parallel=asked.get("sequence_parallel", True),
            pipeline_parallel_degree=layout["pp"],
            pipeline_parallel_schedule=asked.get("schedule", "1F1B"),
            pipeline_parallel_microbatch_size=shape.micro_batch_size,
        ),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        comm=CommConfig(trace_buf_size=0),
        debug=DebugConfig(enable_structured_logging=False),
    )

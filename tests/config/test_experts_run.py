"""The YAML of a Qwen2-MoE, as Hugging Face's Nanotron writes it, is checked and trained as it is."""

from __future__ import annotations

import json
from pathlib import Path

from nanotron.check import check
from tests.commands import nanotron

ROOT = Path(__file__).parents[2]
QWEN2_MOE = f"""
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
  checkpoints_path_is_shared_file_system: false
  resume_checkpoint_path: null
  save_final_state: true
  save_initial_state: false
data_stages:
- data:
    dataset: {{corpus: stdlib, folder: {ROOT / "data" / "python-bpe4096"}}}
    num_loading_workers: 0
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  benchmark_csv_path: null
  consumed_train_samples: null
  ignore_sanity_checks: true
  project: qwen_moe
  run: qwen_moe
  seed: 42
  step: null
lighteval: null
logging:
  iteration_step_info_interval: 1
  log_level: info
  log_level_replica: info
model:
  ddp_bucket_cap_mb: 25
  dtype: float32
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    _attn_implementation: sdpa
    _fused_rms_norm: true
    _fused_rotary_emb: true
    _use_doc_masking: false
    _use_qkv_packed: true
    attention_bias: true
    bos_token_id: 1
    eos_token_id: 2
    flex_attention_mask: null
    hidden_act: silu
    hidden_size: 32
    initializer_range: 0.02
    intermediate_size: 64
    is_qwen2_config: true
    log_attn_probs: true
    max_position_embeddings: 128
    moe_config:
      enable_shared_expert: true
      layers: [-1]
      moe_intermediate_size: 24
      num_experts: 8
      router_aux_loss_coef: 0.01
      shared_expert_intermediate_size: 48
      token_dispatcher_type: alltoall
      top_k: 2
    no_rope_layer: null
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 2
    pad_token_id: null
    pretraining_tp: 1
    ring_attn_heads_k_stride: null
    rms_norm_eps: 1.0e-06
    rope_interleaved: false
    rope_scaling: null
    rope_theta: 10000.0
    sliding_window_size: null
    tie_word_embeddings: true
    use_cache: true
    vocab_size: 4096
    z_loss_coefficient: 0.0001
    z_loss_enabled: false
optimizer:
  accumulate_grad_in_fp32: true
  clip_grad: 1.0
  learning_rate_scheduler:
    learning_rate: 0.003
    lr_decay_starting_step: null
    lr_decay_steps: 8
    lr_decay_style: cosine
    lr_warmup_steps: 2
    lr_warmup_style: linear
    min_decay_lr: 1.0e-05
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
    adam_eps: 1.0e-08
    name: adamW
    torch_adam_is_fused: true
  weight_decay: 0.01
  weight_decay_exclude_named_params: []
  zero_stage: 0
parallelism:
  context_parallel_size: 1
  dp: 2
  expert_parallel_size: 2
  moe_layer_recompute: false
  pp: 1
  pp_engine: 1f1b
  recompute_layer: false
  tp: 1
  tp_linear_async_communication: false
  tp_mode: ALL_REDUCE
  tp_recompute_allgather: true
profiler: null
tokens:
  batch_accumulation_per_replica: 1
  limit_test_batches: 0
  limit_val_batches: 0
  micro_batch_size: 4
  sequence_length: 64
  train_steps: 10
  val_check_interval: -1
"""


def test_the_yaml_of_a_qwen2_moe_trains_with_experts_shared_by_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "qwen_moe.yaml").write_text(QWEN2_MOE)
    moe = check(tmp_path / "qwen_moe.yaml").model.model_config.moe_config
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.shared_expert_gate, moe.normalize_top_k) == (8, 2, True, False)
    ran = nanotron(tmp_path, "train", "qwen_moe.yaml", "--plain", "--override=general.threads_per_rank=1")
    assert ran.returncode == 0, ran.stderr
    rows = [json.loads(line) for line in (tmp_path / "checkpoints" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["lm_loss"] < rows[0]["lm_loss"] - 0.1
    assert (tmp_path / "checkpoints" / "10" / "index.json").exists()

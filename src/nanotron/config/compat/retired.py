"""Keys of Hugging Face's Nanotron that do nothing here: taken without effect, or refused; section by section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import ArgsKwargs, PydanticCustomError

from nanotron.config.document import show
from nanotron.config.keys import in_any_case

T = TypeVar("T")


@dataclass(frozen=True)
class Retired:
    """A key that does nothing here, with the reason; a `refused` one may only be null or one of `allowed`.

    `instead`: values, all of them allowed, that ask for what is done here in another way, which a notice says.
    """

    reason: str
    refused: bool = False
    allowed: tuple[Any, ...] = ()
    instead: Mapping[str, str] = field(default_factory=dict)

    def notice(self, value: Any) -> str:
        """Say what becomes of a legal value that asks for something; empty where there is nothing to say."""
        if value is None or not self.refused:
            return "" if value is None else f"no effect: {self.reason}"
        return self.instead.get(str(value).lower(), "")

    def problem(self, value: Any) -> str:
        """Say what is wrong with a value; empty where it is legal."""
        legal = not self.refused or value is None or str(value).lower() in self._allowed_names
        return "" if legal else f"{show(value)} is refused: {self.reason}"

    @property
    def verdict(self) -> str:
        """What happens to the key, in a word or two: `no effect`, ``refused, unless `1` ``."""
        unless = f", unless {' or '.join(f'`{show(value)}`' for value in self.allowed)}" if self.allowed else ""
        return f"refused{unless}" if self.refused else "no effect"

    @property
    def json_schema(self) -> JsonSchemaValue:
        """The key in JSON Schema."""
        if not self.refused:
            return {"deprecated": True, "description": f"No effect: {self.reason}."}
        names = [in_any_case(self._allowed_names)] if self.allowed else []
        legal = {"anyOf": [{"enum": [None, *self.allowed]}, *names]}
        return {"deprecated": True, "description": f"Refused: {self.reason}.", **legal}

    @property
    def _allowed_names(self) -> list[str]:
        return [str(value).lower() for value in self.allowed]


def no_effect(reason: str) -> Retired:
    """Declare a key that is taken and does nothing."""
    return Retired(reason)


def refused(reason: str, *allowed: Any) -> Retired:
    """Declare a key that is refused, unless it is null or has a value that asks for nothing."""
    return Retired(reason, True, allowed)


def retires(keys: Mapping[str, Retired]) -> Callable[[type[T]], type[T]]:
    """Let a section (below `@section`) take these keys in scripts and dicts, and leave them out."""

    def mark(cls: type[T]) -> type[T]:
        cls.__retired__ = keys  # type: ignore[attr-defined]
        cls.__leave_out_retired__ = model_validator(mode="before")(leave_out)  # type: ignore[attr-defined]
        return cls

    def leave_out(values: Any) -> Any:
        given = values.kwargs if isinstance(values, ArgsKwargs) else values
        if not isinstance(given, dict):
            return values
        for name in given.keys() & keys.keys():
            if problem := keys[name].problem(given[name]):
                raise PydanticCustomError("rule", "{key}: {text}", {"key": name, "text": problem})
        kept = {name: value for name, value in given.items() if name not in keys}
        return ArgsKwargs(values.args, kept) if isinstance(values, ArgsKwargs) else kept

    return mark


def retired_of(cls: type[Any]) -> Mapping[str, Retired]:
    """Return the keys that a section takes and that do nothing."""
    keys: Mapping[str, Retired] = getattr(cls, "__retired__", {})
    return keys


_KERNELS = no_effect("which kernel runs is decided by what the device offers; results are the same")
_RING = ("ring", "ring_flash_triton", "llama3_ring_attention")
_S5CMD = no_effect("s5cmd is not used")
_MUP = "µP's learning rates go with its initial weights, and not with those of a checkpoint; leave it out"

TOP_LEVEL = {
    "lighteval": refused(
        "evaluations are not started from a training run; export a checkpoint and evaluate that",
    ),
}
GENERAL = {
    "step": no_effect("a checkpoint keeps its step in its own state.json"),
    "consumed_train_samples": no_effect("a checkpoint keeps its data position in its own state.json"),
    "benchmark_csv_path": no_effect(
        "there is no benchmark mode; the run directory's metrics.jsonl holds every step's numbers"
    ),
    "ignore_sanity_checks": no_effect(
        "replicas are equal by construction and tested to be; there are no checks at run time to switch"
    ),
}
PARALLELISM = {
    "moe_layer_recompute": no_effect("recompute_layer covers every layer, those with experts too"),
}
MODEL = {"make_vocab_size_divisible_by": no_effect("the vocabulary is never padded: its shards may be uneven")}
MODEL_CONFIG = {
    "rope_seq_len_interpolation_factor": refused(
        "use rope_scaling: {rope_type: linear, factor: …}, which is the same",
    ),
    "initializer_range": no_effect("model.init_method.std is the one that counts"),
    "pretraining_tp": no_effect("nothing depends on it"),
    "use_cache": no_effect("training keeps no cache"),
    "_attn_implementation": Retired(
        "attention runs through torch's scaled_dot_product_attention, which picks flash attention where it can;"
        " use sdpa",
        True,
        ("sdpa", "flash_attention_2", *_RING),
        dict.fromkeys(_RING, "sequences are cut by parallelism.context_parallel_size, and no ring passes them on"),
    ),
    "_fused_rotary_emb": _KERNELS,
    "_fused_rms_norm": _KERNELS,
    "_use_qkv_packed": _KERNELS,
    "log_attn_probs": no_effect("attention probabilities are not kept"),
    "flex_attention_mask": refused(
        "use _use_doc_masking: true for document masks, sliding_window_size for windows, and both for both",
    ),
    "no_rope_layer": refused("every layer has rotary positions"),
    "ring_attn_heads_k_stride": no_effect("keys and values of all heads are gathered at once"),
    "is_starcoder2_config": refused(
        "the Starcoder2 family is not available; use is_llama_config, is_mistral_config, is_qwen2_config or"
        " is_qwen3_config",
        False,
    ),
}
MOE = {"token_dispatcher_type": no_effect("tokens travel to their experts by all-to-all; results are the same")}
INIT_METHOD = {"use_mup": refused(_MUP, False)}
TOKENIZER = {
    "tokenizer_revision": no_effect("only the name is used; put the revision you want in a folder"),
    "tokenizer_max_length": no_effect(
        "texts are cut into windows of tokens.sequence_length, however long they are",
    ),
}
TOKENS = {"limit_test_batches": no_effect("there is no test run")}
OPTIMIZER = {"torch_adam_is_fused": no_effect("the update always runs in one kernel per flat buffer")}
DATASET = {
    "return_positions": no_effect("positions restart at documents wherever boundaries are known"),
    "skip_in_stream": no_effect("any sample is reached at once"),
    "pad_samples_to_global_batch_size": no_effect("batches run on across epochs; nothing is padded"),
    "shuffle_files": no_effect("windows are shuffled one by one, over all files"),
    "use_old_brrr_dataloader": no_effect("there is one reader"),
    "dataset_overwrite_cache": no_effect(
        "tokens are kept in data/hf/, keyed by the data set's files, the tokenizer and these keys; delete to redo"
    ),
}
CHECKPOINTS = {
    "checkpoints_path_is_shared_file_system": no_effect(
        "whether it does is found out when the run starts, and it has to"
    ),
}
PROFILER = {"export_chrome_trace": no_effect("the trace is always written in Chrome's format")}
S3_UPLOAD = {"s5cmd_numworkers": _S5CMD, "s5cmd_concurrency": _S5CMD, "s5cmd_path": _S5CMD}


class SpectralMupInit:
    """A name that scripts import: `init_method=SpectralMupInit(…)` is `RandomInit(use_mup=…)`."""

    def __new__(cls, use_mup: bool = True) -> Any:
        from nanotron.config.model import RandomInit

        return RandomInit(use_mup=use_mup)

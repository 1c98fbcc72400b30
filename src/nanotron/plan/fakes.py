"""What stands in for a cluster: process groups without peers, and the kernels of an accelerator on a CPU build.

Tensors are on "meta": they have shapes and no data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from inspect import unwrap
from itertools import pairwise, product
from math import comb, prod
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import HashStore, ProcessGroup  # type: ignore[attr-defined]
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.models import experts
from nanotron.models.decoder import DecoderChunk
from nanotron.ops import attention, fp8, gemm, recompute
from nanotron.ops import experts as expert_ops
from nanotron.ops.experts import Numbers, count
from nanotron.ops.fused import Function
from nanotron.ops.kernels import Kernels
from nanotron.optim import owners
from nanotron.optim.buckets import Bucket
from nanotron.optim.owners import OWNERS, Held, Matrix, Part, held_by
from nanotron.parallel.mesh import AxisSizes, Mesh, Purpose
from nanotron.parallel.params import Box, ParamSpec
from nanotron.plan.counting import Counting, Work, tensors_in
from nanotron.training import build
from nanotron.training.topology import parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config

META = torch.device("meta")


class FakeMesh(Mesh):
    """A mesh whose groups answer at once, made when they are first asked for, and named after their axes."""

    def __init__(self, axes: AxisSizes | None = None, rank: int = 0) -> None:
        super().__init__(axes, rank)
        self._fakes: dict[str, ProcessGroup | None] = {}

    def group(self, *axes: str, purpose: Purpose = "compute") -> ProcessGroup | None:
        name = "+".join(axis for axis in axes if self.size(axis) > 1)
        if name not in self._fakes:
            self._fakes[name] = fake_group(name, prod(self.size(axis) for axis in axes))
        return self._fakes[name]

    def world_group(self) -> ProcessGroup | None:
        return fake_group("world", self.world)

    def tied_group(self, stages: Sequence[int]) -> ProcessGroup | None:
        return fake_group("tied", len(set(stages)))


def fake_group(name: str, size: int) -> ProcessGroup | None:
    """A group of so many ranks that answers at once; None for one."""
    if size == 1:
        return None
    group = ProcessGroup(HashStore(), 0, size)
    backend = FakeProcessGroup._create_internal(0, size)
    group._register_backend(META, ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


@contextmanager
def counting(own: Counting | None = None) -> Iterator[Counting]:
    """Count what is inside, whose tensors are on "meta"; with a counter of one's ``own``, which then sees all chunks of
    the loss.
    """
    attention._triangles.cache_clear()  # no real tensor may be met inside, and no fake one afterwards
    with ExitStack() as stack:
        stack.callback(attention._triangles.cache_clear)
        counter, room = own or Counting(imagined=True), torch.empty(16, dtype=torch.uint8, device=META)
        counter.overlook(room)
        stand_ins: list[tuple[Any, str, Any]] = [
            (expert_ops, "_add_grouped_gemm", partial(_weight_gradient_of_one, counter, expert_ops._add_grouped_gemm)),
            (recompute, "without_memory", partial(_in, room)),
        ]
        if own is None:
            as_second = _as_the_second(counter, DecoderChunk.loss_and_gradient)
            stand_ins.append((DecoderChunk, "loss_and_gradient", as_second))
        for module, name, stand_in in [*_STAND_INS, *stand_ins]:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        stack.enter_context(_Shapes())  # type: ignore[no-untyped-call]
        yield stack.enter_context(counter)


class _Shapes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says what operators give of tensors on "meta": asks torch once for each operator and shapes.

    Torch's own answer is often made in Python, and takes a fifth of a millisecond.
    """

    _makers: ClassVar[dict[Any, Callable[[], Any] | None]] = {}
    """By operator and arguments: what makes the like of its result anew; None where that is a view, or has values."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # there is nothing to skip, and to import it takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func.namespace == "c10d":
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return _written(func, args, kwargs)
        key = func, _described(args), _described(tuple(kwargs.items()))
        make = self._makers.get(key)
        if make is not None:
            return make()
        result = func(*args, **kwargs)
        if key not in self._makers:
            self._makers[key] = _maker(result, tensors_in((*args, *kwargs.values())))
        return result


def _described(x: Any) -> Any:
    """What the shape of an operator's result may depend on."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device
    return tuple(map(_described, x)) if isinstance(x, list | tuple) else (type(x), x)


def _maker(result: Any, arguments: Sequence[Tensor] = ()) -> Callable[[], Any] | None:
    tensors = tensors_in(result)
    given = {x.untyped_storage()._cdata for x in arguments}
    if not tensors or any(not x.is_meta or x.untyped_storage()._cdata in given for x in tensors):
        return None
    if isinstance(result, Tensor):
        options: dict[str, Any] = {"dtype": result.dtype, "device": META}
        return partial(torch.empty_strided, result.shape, result.stride(), **options)
    parts = [_maker(part, arguments) for part in result]
    return lambda: tuple(make and make() for make in parts)


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """The arguments that an operator returns after writing into them: without data there is nothing to write."""
    if not func._schema.returns:
        return None
    arguments = enumerate(func._schema.arguments)
    places = [(place, known.name) for place, known in arguments if known.alias_info and known.alias_info.is_write]
    written = [args[place] if place < len(args) else kwargs[name] for place, name in places]
    return written[0] if len(written) == 1 else tuple(written)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As an accelerator's kernel: neither copies of heads that share keys, nor a mask where it is causal."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b, s, h, e] -> [b, h, s, e]
    options = {} if mask is None else {"attn_mask": mask}
    causal = mask is None and q.shape[2] > 1
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return cast(Tensor, kernel(q, k, v, 0.0, causal, **options)[0].transpose(1, 2))


def _weight_gradient_of_one(
    counter: Counting,
    add: Callable[..., None],
    buffer: Tensor,
    first: bool,
    grad: Tensor,
    rows: Tensor,
    sizes: list[int],
    kernels: Kernels,
) -> None:
    """An expert's weight gradient, counted as often as experts have rows: they are alike, and may be very many."""
    most = max(sizes)
    with counter.times(sum(map(bool, sizes))):
        add(buffer[:1], first, grad[:most], rows[:most], [most], kernels)


def _as_the_second(counter: Counting, loss_and_gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The loss of tokens in chunks, of which there may be very many: the third and later ones count as the second."""
    runs: dict[Any, list[tuple[Work, int, Callable[[], Any] | None]]] = {}

    def run(chunk: DecoderChunk, x: Tensor, labels: Tensor) -> Any:
        known = runs.setdefault((id(chunk), x.shape), [])
        if len(known) < 2:
            most, before = counter.peak, counter.alive
            with counter.section() as work:
                result = loss_and_gradient(chunk, x, labels)
            known.append((work, counter.peak - before, _maker(result)))
            counter.add(work, most)
            return result
        work, more, make = known[1]
        counter.add(work, counter.alive + more)
        assert chunk.head is not None
        chunk.hooks.weight_grads.add_now(chunk.head, lambda buffer, first: None)
        return make and make()

    return run


def even_numbers(chosen: Tensor, ranks: Tensor, here: int, mesh: Mesh) -> Numbers:
    """Those of a router that uses all experts alike: nobody can read what one says on tensors without values.

    Ranks tell each other how many tokens come, as in a run.
    """
    count(chosen, ranks, here, mesh)
    ep, (tokens, top_k) = mesh.size("ep"), chosen.shape
    num_experts = here * ep * mesh.size("tp")
    elsewhere = comb(num_experts - here, top_k) / comb(num_experts, top_k)  # that all of a token's experts are
    travel = [round(tokens * (1 - elsewhere))] * ep
    total, first = ep * tokens * top_k, here * (mesh.coord("ep") * mesh.size("tp") + mesh.coord("tp"))
    ends = [total * expert // num_experts for expert in range(first, first + here + 1)]
    return Numbers(travel, travel, [end - start for start, end in pairwise(ends)])


def even_holdings(buckets: Sequence[Bucket], mesh: Mesh) -> list[Held]:
    """What each rank of a stage holds of its matrices, if all hold as much: nobody can tell the others here.

    Of each matrix every rank gives some of the rows, and takes as many times more as this rank does.
    """
    mine, ranks = held_by(buckets), mesh.ranks_along(*OWNERS)
    specs = [slot.spec for bucket in buckets for slot in bucket.slots]
    matrices = [
        Matrix((spec.shape[-2], spec.shape[-1]), spec.name, which)
        for spec in specs
        for which in product(*map(range, spec.shape[:-2]))
    ]
    total = sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)
    takes = len(ranks) * sum(box.numel for _, box in mine.takes) / total

    def rows(which: int, times: float) -> list[Part]:
        found = []
        for matrix in matrices:
            length, columns = matrix.shape
            first = int(length * which / len(ranks))
            last = min(length, int(length * (which + times) / len(ranks)))
            found.append((matrix, Box((first, 0), (last - first, columns))))
        return found

    everyone = [Held(rows(which, 1.0), rows(which, takes)) for which in range(len(ranks))]
    everyone[ranks.index(mesh.rank)] = mine
    return everyone


@contextmanager
def _out_of_sight() -> Iterator[None]:
    """What goes to host memory takes none of the device's; it comes back as a copy."""

    def leave(x: Tensor) -> Any:
        return x if isinstance(x, torch.nn.Parameter) else (x.shape, x.dtype)

    def come_back(kept: Any) -> Tensor:
        return kept if isinstance(kept, torch.nn.Parameter) else torch.empty(kept[0], dtype=kept[1], device=META)

    with torch.autograd.graph.saved_tensors_hooks(leave, come_back):
        yield


def known_specs(config: Config) -> dict[str, ParamSpec]:
    """The parameters of a model, of which many chunks are built."""
    key = repr(config.model), repr(config.optimizer), config.parallelism.sequence_parallel
    if key not in _specs:
        _specs[key] = parameter_specs(config)
    return _specs[key]


_specs: dict[tuple[str, str, bool], dict[str, ParamSpec]] = {}


def _in(room: Tensor, x: Tensor) -> Tensor:
    """A tensor of x's shape in the memory of one number."""
    return room.view(x.dtype)[:1].expand(x.shape)


_STAND_INS: tuple[tuple[Any, str, Any], ...] = (
    (recompute, "on_host", _out_of_sight),
    (attention, "_fused", _attended),
    (attention, "_has_flash", lambda device: False),
    (gemm, "adds_in", lambda total, factors, device: False),
    (experts, "numbers_of", even_numbers),
    (owners, "everyones", even_holdings),
    (build, "parameter_specs", known_specs),
    (recompute, "checkpoint", unwrap(checkpoint.checkpoint)),  # what is around them imports torch._dynamo: a second
    (checkpoint, "_run_fn_with_dynamo_disabled", unwrap(checkpoint._run_fn_with_dynamo_disabled)),
)


def on_accelerator(function: Function, /, *, compiled: bool) -> Function:
    """A way to run elementwise functions (ops/fused.py): with norms in one kernel, which on a CPU are several.

    ``compiled``: rounding to fp8 too, of which four passes over memory would take most of what fp8 gains.
    """
    if compiled and function is fp8.quantise:
        return cast(Function, _quantise_at_once)

    @wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with _FusedNorms():
            return function(*args, **options)

    return cast(Function, run)


def _quantise_at_once(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The memory and traffic of ``fp8.quantise`` in one kernel; a matrix is read once more, for its blocks' largest."""
    scales = blocks.new_empty(len(blocks), 1, blocks.shape[2], 1, dtype=torch.float32)
    if blocks.shape[1] > 1:
        torch.linalg.vector_norm(blocks, torch.inf, (1, 3))
    return blocks.to(fp8.E4M3), scales


class _FusedNorms(TorchFunctionMode):
    """Has torch's RMS norm take one kernel, as on an accelerator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_fused_rms_norm if func is F.rms_norm else func)(*args, **(kwargs or {}))


def _fused_rms_norm(x: Tensor, normalized_shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    result: Tensor = _FusedRmsNorm.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


class _FusedRmsNorm(torch.autograd.Function):
    """The memory and traffic of torch's fused RMS norm: it keeps its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.mul(x, grad), torch.zeros_like(weight)

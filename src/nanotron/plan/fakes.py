"""What stands in for a cluster: process groups without peers, and the kernels of an accelerator on a CPU build."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import pairwise, product
from math import comb, prod
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanotron.models import experts
from nanotron.ops import attention, fp8, recompute
from nanotron.ops import experts as expert_ops
from nanotron.ops.experts import Numbers, count
from nanotron.ops.fused import Function
from nanotron.ops.kernels import Kernels
from nanotron.optim import owners
from nanotron.optim.buckets import Bucket
from nanotron.optim.owners import OWNERS, Held, Matrix, Part, held_by
from nanotron.parallel.mesh import AxisSizes, Mesh, Purpose
from nanotron.parallel.params import Box
from nanotron.plan.counting import Counting


class FakeMesh(Mesh):
    """A mesh whose groups answer at once, made when they are first asked for, and named after their axes."""

    def __init__(self, axes: AxisSizes | None = None, rank: int = 0) -> None:
        super().__init__(axes, rank)
        self._fakes: dict[str, ProcessGroup | None] = {}

    def group(self, *axes: str, purpose: Purpose = "compute") -> ProcessGroup | None:
        name = "+".join(axis for axis in axes if self.size(axis) > 1)
        if name not in self._fakes:
            self._fakes[name] = _fake_group(name, prod(self.size(axis) for axis in axes))
        return self._fakes[name]

    def world_group(self) -> ProcessGroup | None:
        return _fake_group("world", self.world)

    def tied_group(self, stages: Sequence[int]) -> ProcessGroup | None:
        return _fake_group("tied", len(set(stages)))


def _fake_group(name: str, size: int) -> ProcessGroup | None:
    if size == 1:
        return None
    group = ProcessGroup(FakeStore(), 0, size)
    backend = FakeProcessGroup._create_internal(0, size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)  # type: ignore[arg-type]
    return group


@contextmanager
def counting() -> Iterator[Counting]:
    """Run what is inside on fake tensors and count it.

    Their device is "cpu", also where kernels are an accelerator's: "meta" would take the attention path that keeps
    s × s scores, and a fake "cuda" needs a build for it.
    """
    attention._triangles.cache_clear()  # no real tensor may be met inside, and no fake one afterwards
    with ExitStack() as stack:
        stack.callback(attention._triangles.cache_clear)
        counter = Counting()
        one_for_all = partial(_weight_gradient_of_one, counter, expert_ops._add_grouped_gemm)
        for module, name, stand_in in [*_STAND_INS, (expert_ops, "_add_grouped_gemm", one_for_all)]:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, stand_in)
        stack.enter_context(FakeTensorMode())
        yield stack.enter_context(counter)


def _last_queries(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool) -> Tensor:
    """As an accelerator's kernel, which needs no mask; torch's own bias is no fake tensor."""
    attended, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return cast(Tensor, attended)


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

    def leave(x: Tensor) -> Tensor:
        return x if isinstance(x, torch.nn.Parameter) else torch.empty_like(x, device="meta")

    def come_back(x: Tensor) -> Tensor:
        return x if isinstance(x, torch.nn.Parameter) else torch.empty_like(x, device="cpu")

    with torch.autograd.graph.saved_tensors_hooks(leave, come_back):
        yield


_STAND_INS = (
    (recompute, "on_host", _out_of_sight),
    (attention, "last_queries", _last_queries),
    (experts, "numbers_of", even_numbers),
    (owners, "everyones", even_holdings),
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

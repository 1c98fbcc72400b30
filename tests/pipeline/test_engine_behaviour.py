"""What the engine does besides the right numbers: order, memory, use of waiting time, and who failed."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.engine import Pipeline
from nanotron.pipeline.schedules import SCHEDULE_NAMES
from nanotron.pipeline.simulate import simulate
from tests.pipeline.toy import ToyBatch, ToyStage, toy_batches, toy_pipeline, toy_schedule, without_pipeline
from tests.pool import CaseFailed, Pool

Forward = Callable[[Tensor | None, ToyBatch], tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]]


def make_pipeline(name: str, rank: int, world: int) -> Pipeline:
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    return toy_pipeline(toy_schedule(name, world), mesh)


class Saved(Function):
    """Identity that lives as long as autograd needs it, and tells when its backward runs."""

    alive: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()
    on_backward: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Saved.alive.add(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Saved.on_backward()
        return grad


def wrap(chunk: ToyStage, around: Callable[[Forward, Tensor | None, ToyBatch], Any]) -> None:
    """Call `around(forward, x, batch)` instead of the chunk's forward."""
    forward = chunk.forward
    chunk.forward = lambda x, batch: around(forward, x, batch)


# ------------------------------------------------------------------ memory


def outputs_gone_before_backward(
    rank: int, world: int, saved_by_autograd: bool
) -> tuple[list[bool], dict[str, Tensor]]:
    pipeline = make_pipeline("afab", rank, world)
    outputs: list[StorageWeakRef] = []
    gone: list[bool] = []

    def around(forward: Forward, x: Tensor | None, batch: ToyBatch) -> Any:
        y, losses, metrics = forward(x, batch)
        y = torch.tanh(Saved.apply(y)) if saved_by_autograd else Saved.apply(y) + 1
        outputs.append(StorageWeakRef(y.untyped_storage()))
        return y, losses, metrics

    def look() -> None:  # rank 1 has received everything by now; the thread that saw it leave may be a moment behind
        deadline = time.monotonic() + (0.2 if saved_by_autograd else 5)
        while not all(output.expired() for output in outputs) and time.monotonic() < deadline:
            time.sleep(0.01)
        gone.extend(output.expired() for output in outputs)
        Saved.on_backward = lambda: None

    if rank == 0:
        wrap(pipeline.chunks[0], around)
        Saved.on_backward = look
    pipeline.run(toy_batches(4), 1.0)
    return gone, pipeline.chunks[0].gradients()


def test_a_sent_output_keeps_only_its_graph(pool: Pool) -> None:
    (gone, _), _ = pool.run(2, outputs_gone_before_backward, False)
    assert gone == [True] * 4


def test_an_output_that_autograd_saved_is_kept_and_its_gradient_is_right(pool: Pool) -> None:
    (gone, first), (_, second) = pool.run(2, outputs_gone_before_backward, True)
    assert gone == [True, False, False, False]  # the first one's backward is under way
    stages = [ToyStage(stage, 2) for stage in range(2)]
    for batch in toy_batches(4):
        _, losses, _ = stages[1](torch.tanh(stages[0](None, batch)[0]), batch)
        (losses["lm"] + losses["z"]).backward()
    for stage, found in zip(stages, [first, second], strict=True):
        for name, gradient in stage.gradients().items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-12)


def peak_alive(rank: int, world: int, name: str) -> int:
    pipeline = make_pipeline(name, rank, world)
    counts = []
    Saved.alive.clear()

    def around(forward: Forward, x: Tensor | None, batch: ToyBatch) -> Any:
        y, losses, metrics = forward(x, batch)
        saved = {loss: Saved.apply(value) for loss, value in losses.items() if loss == "lm"}
        y = y if losses else Saved.apply(y)
        counts.append(len(Saved.alive))
        return y, losses | saved, metrics

    for chunk in pipeline.chunks:
        wrap(chunk, around)
    pipeline.run(toy_batches(6), 1.0)
    return max(counts)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_microbatches_alive_at_once_are_what_simulate_says(pool: Pool, name: str) -> None:
    found = pool.run(3, peak_alive, name)
    assert found == [peak.activations for peak in simulate(toy_schedule(name, 3), 6).peaks]


# ------------------------------------------------------------------- order


class MatmulsByAction(TorchDispatchMode):
    """Counts matmuls by the kind of the action that runs."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm_", "addmm"):
            self.counts[self.pipeline.current_action.split(" of ")[0], name] += 1
        return func(*args, **(kwargs or {}))


def count_matmuls(rank: int, world: int, name: str) -> Counter[tuple[str, str]]:
    pipeline = make_pipeline(name, rank, world)
    with MatmulsByAction(pipeline) as mode:
        pipeline.run(toy_batches(4), 1.0)
    return mode.counts


@pytest.mark.parametrize("name", ["zb_h1", "1f1b"])
def test_b_computes_no_weight_gradient_and_w_all_of_them(pool: Pool, name: str) -> None:
    first, last = pool.run(2, count_matmuls, name)
    weight_gradient, input_gradient = "addmm_", "mm"
    assert last["W", weight_gradient] == 4 * 2  # microbatches × weights
    assert last["B", input_gradient] == 4 * 2
    assert last["B", weight_gradient] == last["W", input_gradient] == 0
    where = "W" if name == "zb_h1" else "BW"  # nobody waits for a gradient of the first stage's input
    assert first[where, weight_gradient] == 4 * 3
    assert sum(count for (_, kind), count in first.items() if kind == weight_gradient) == 4 * 3


def order_of_events(rank: int, world: int, name: str, slow: int | None) -> tuple[list[str], list[dict[str, Tensor]]]:
    """What the rank starts to do, in order; rank 0 sleeps in the forward of microbatch `slow`."""
    pipeline = make_pipeline(name, rank, world)
    events: list[str] = []
    calls = Counter[str]()

    def around(forward: Forward, x: Tensor | None, batch: ToyBatch) -> Any:
        if rank == 0 and calls["F"] == slow:
            time.sleep(0.4)
        events.append(f"F{calls['F']}")
        calls["F"] += 1
        return forward(x, batch)

    chunk = pipeline.chunks[0]
    wrap(chunk, around)
    take = chunk.hooks.weight_grads.take

    def named(job: Callable[[], None], name: str) -> Callable[[], None]:
        def run() -> None:
            events.append(name)
            job()

        return run

    def take_and_note() -> list[Callable[[], None]]:
        jobs = take()
        calls["B"] += 1
        return [named(job, f"W{calls['B'] - 1}") for job in jobs]

    chunk.hooks.weight_grads.take = take_and_note
    pipeline.run(toy_batches(5), 1.0)
    return events, [chunk.gradients()]


def test_a_rank_that_waits_takes_pending_weight_gradients(pool: Pool) -> None:
    _, (waited, gradients) = pool.run(2, order_of_events, "zb_h1", 2)
    assert waited.index("W1") < waited.index("F2")  # the schedule itself has it behind B2
    assert [event for event in waited if event[0] == "W"] == [f"W{i}" for i in range(5) for _ in range(2)]
    _, expected = without_pipeline(2, toy_batches(5), 1.0)
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in expected[1].items())


# ------------------------------------------------------------------ failures


def failing(rank: int, world: int) -> None:
    pipeline = make_pipeline("1f1b", rank, world)
    seen: list[Sequence[int]] = []

    def around(forward: Forward, x: Tensor | None, batch: ToyBatch) -> Any:
        seen.append(batch.tokens.shape)
        if len(seen) == 3:
            raise RuntimeError("no such luck")
        return forward(x, batch)

    if rank == 1:
        wrap(pipeline.chunks[0], around)
    try:
        pipeline.run(toy_batches(4), 1.0)
    except RuntimeError as error:
        raise RuntimeError(f"{error} in [{pipeline.current_action}]") from error


def test_a_failure_leaves_stage_and_action_for_the_report(pool: Pool) -> None:
    with pytest.raises(CaseFailed, match=r"no such luck in \[F of microbatch 2 in stage 1\]"):
        pool.run(2, failing)


def test_a_pipeline_of_one_rank_needs_no_process_group() -> None:
    pipeline = toy_pipeline(toy_schedule("1f1b", 1), Mesh())
    losses = pipeline.run(toy_batches(3), 1.0)
    expected, gradients = without_pipeline(1, toy_batches(3), 1.0)
    assert losses == expected
    assert all(torch.equal(pipeline.chunks[0].gradients()[name], grad) for name, grad in gradients[0].items())

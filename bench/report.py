"""From seconds to the table: medians, ratios of each round, and the share of what matrix products alone reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log
from statistics import quantiles
from typing import Any, NamedTuple

from bench.contenders import Contender, Subject
from bench.limit import flops
from bench.runner import Measured
from bench.shapes import Shape
from nanotron.models.flops import decoder_layer_flops, head_flops

LIMIT = Contender("matrix products alone", "bench.limit", batch_policy=True)
HEADER = ("", "tokens/s", "quartiles", "ours ÷ it", "quartiles", "of limit", "in use MB", "peak MB", "first loss")
LOSS_TOLERANCE = 0.5


class Spread(NamedTuple):
    """Quartiles of what was seen in the rounds."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return Spread(*(quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3))


@dataclass(frozen=True)
class Line:
    """One contender's results."""

    name: str
    failure: str | None
    rate: Spread | None
    """Tokens per second."""
    ratio: Spread | None
    """Ours over this one, both of the same round."""
    share: float | None
    """Model FLOPs per second over those of the matrix products alone."""
    in_use_bytes: int | None
    peak_bytes: int | None
    first_loss: float | None
    doubtful: bool
    """The first loss is not that of an untrained model."""


def lines(
    subject: Subject, contenders: Sequence[Contender], shape: Shape, measured: Mapping[str, Measured]
) -> list[Line]:
    """Results of all contenders but the limit, in their order."""
    peak = matmul_rate(subject, shape, measured)
    return [_line(contender, shape, measured, peak) for contender in contenders if contender is not LIMIT]


def matmul_rate(subject: Subject, shape: Shape, measured: Mapping[str, Measured]) -> float | None:
    """FLOP/s of the matrix products alone, of all processes together, in the best of the rounds."""
    limit = measured.get(LIMIT.name)
    return flops(shape, subject.world) / min(limit.seconds) if limit and limit.seconds else None


def flops_per_token(shape: Shape) -> float:
    """Model FLOPs of forward and backward."""
    layers = shape.num_hidden_layers * decoder_layer_flops(shape, "dense", shape.sequence_length)
    return 3 * (layers + head_flops(shape, shape.sequence_length)) / shape.sequence_length


def _line(contender: Contender, shape: Shape, measured: Mapping[str, Measured], peak: float | None) -> Line:
    mine, ours = measured[contender.name], measured.get(contender.against)
    memory = mine.in_use_bytes, mine.peak_bytes
    if mine.failure or not mine.seconds:
        return Line(contender.name, mine.failure, None, None, None, *memory, mine.first_loss, False)
    rate = Spread.of([shape.tokens_per_step / seconds for seconds in mine.seconds])
    ratio = None
    if ours is not None and ours is not mine and not ours.failure:
        ratio = Spread.of([its / our for its, our in zip(mine.seconds, ours.seconds, strict=True)])
    share = None if peak is None else rate.median * flops_per_token(shape) / peak
    loss = mine.first_loss
    doubtful = loss is not None and not abs(loss - log(shape.vocab_size)) < LOSS_TOLERANCE
    return Line(contender.name, None, rate, ratio, share, *memory, loss, doubtful)


def table(title: str, found: Sequence[Line]) -> list[str]:
    """The results as lines to print."""
    rows = [HEADER, *map(_cells, found)]
    widths = [max(len(row[column]) for row in rows if column == 0 or len(row) > 2) for column in range(len(HEADER))]
    printed = [title]
    for row in rows:
        if len(row) == 2:
            printed.append(f"  {row[0]:<{widths[0]}}  {row[1]}")
            continue
        numbers = "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        printed.append(f"  {row[0]:<{widths[0]}}  {numbers}".rstrip())
    return printed


def _cells(line: Line) -> tuple[str, ...]:
    if line.rate is None:
        return line.name, f"failed: {line.failure}"
    loss = "–" if line.first_loss is None else f"{line.first_loss:.2f}{' !' if line.doubtful else ''}"
    return (
        line.name,
        f"{line.rate.median:,.0f}",
        f"{line.rate.low:,.0f} – {line.rate.high:,.0f}",
        f"{line.ratio.median:.3f}" if line.ratio else "",
        f"{line.ratio.low:.3f} – {line.ratio.high:.3f}" if line.ratio else "",
        f"{line.share:.0%}" if line.share is not None else "",
        *("" if found is None else f"{found / 1e6:,.0f}" for found in (line.in_use_bytes, line.peak_bytes)),
        loss,
    )


def as_json(subject: Subject, shape: Shape, found: Sequence[Line], measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Everything that the table shows, and what it was made from."""
    contenders = {}
    for line in found:
        contenders[line.name] = {
            "failure": line.failure,
            "tokens_per_second": line.rate and line.rate._asdict(),
            "ours_over_it": line.ratio and line.ratio._asdict(),
            "share_of_limit": line.share,
            "in_use_bytes": line.in_use_bytes,
            "peak_bytes": line.peak_bytes,
            "first_loss": line.first_loss,
            "seconds_per_step": measured[line.name].seconds,
            "warm_up_seconds": measured[line.name].warm_up_s,
        }
    return {
        "title": subject.title,
        "dtype": subject.dtype,
        "processes": subject.world,
        "threads_each": subject.threads,
        "shape": asdict(shape),
        "matmul_flops_per_second": matmul_rate(subject, shape, measured),
        "model_flops_per_token": flops_per_token(shape),
        "contenders": contenders,
    }

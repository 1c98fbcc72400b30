"""The learning rate of every update of a run, as text. No torch."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from nanotron.optim.lr import learning_rate

if TYPE_CHECKING:
    from nanotron.config import Config

BARS = " ▁▂▃▄▅▆▇█"
WIDTH, HEIGHT = 64, 8  # characters


def lr_chart(config: Config) -> list[str]:
    """Columns of equal stretches of updates, each as high as the mean of its learning rates, and what they mean."""
    schedule, steps = config.optimizer.learning_rate_scheduler, config.tokens.train_steps
    width = min(WIDTH, steps)
    ends = [steps * column // width for column in range(width + 1)]
    means = [
        sum(learning_rate(schedule, update) for update in range(start + 1, stop + 1)) / (stop - start)
        for start, stop in pairwise(ends)
    ]
    highest = max(means) or 1.0
    eighths = [round(8 * HEIGHT * mean / highest) for mean in means]
    labels = {HEIGHT - 1: f"{highest:.3g}", 0: f"{0:.3g}"}
    lines = [
        f"{labels.get(row, ''):>9} │" + "".join(BARS[min(8, max(0, height - 8 * row))] for height in eighths)
        for row in reversed(range(HEIGHT))
    ]
    first, last = (learning_rate(schedule, update) for update in (1, steps))
    return [
        *lines,
        f"{'':>9} └{'─' * width}",
        f"{'':>11}1{steps:>{max(1, width - 1)}} updates",
        f"learning rate: {first:.4g} in the first update, {last:.4g} in the last",
    ]

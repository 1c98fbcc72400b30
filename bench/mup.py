"""µP on this machine's corpus: do activations and the best learning rate stay where they are when the model is wider?

    python -m bench.mup coordinates [--widths 64,256,1024]     after ten steps: how far each layer's output has come
    python -m bench.mup sweep [--widths 64,128,256,512]        the loss at each learning rate, as a table
    python -m bench.mup picture                                docs/mup.svg, from the tables in docs/optimizers.md

The first two with µP and without. One process, whose numbers do not depend on what else the machine does;
docs/optimizers.md has what they gave.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from math import ceil, floor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanotron.batch import Batch
from nanotron.config import Config, get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.data.tokenize.prepare import prepare_data
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training

RATES = tuple(2.0**-power for power in range(11, 4, -1))
HEAD_DIM = 16
DOCS = Path(__file__).parents[1] / "docs"
COLOURS = ("#2a6fb0", "#3b8f57", "#d9a02b", "#c2452d")
STEPS, LAST = 40, 10  # of a run of the sweep, and of those the steps whose mean loss counts


def config_of(width: int, rate: float, *, mup: bool, steps: int, data: bool = True, **optimizer: Any) -> Config:
    """Two layers on 256 tokens a step; at width 64 µP learns as fast as without at equal rates."""
    dataset = {"corpus": "stdlib"} if data else None
    return get_config_from_dict(
        {
            "model": {
                "dtype": "float32",
                "init_method": {"use_mup": mup, "mup_base_width": 64},
                "model_config": {
                    "hidden_size": width,
                    "num_hidden_layers": 2,
                    "num_attention_heads": width // HEAD_DIM,
                    "intermediate_size": 3 * width,
                    "vocab_size": 4096 if data else 256,
                },
            },
            "tokens": {
                "sequence_length": 64,
                "micro_batch_size": 4,
                "batch_accumulation_per_replica": 1,
                "train_steps": steps,
            },
            "optimizer": {
                "learning_rate_scheduler": {
                    "learning_rate": rate,
                    "lr_warmup_steps": steps // 10,
                    "lr_decay_style": "linear",
                    "min_decay_lr": 0.0,
                },
                **optimizer,
            },
            "data_stages": [{"name": "all", "start_training_step": 1, "data": {"dataset": dataset}}],
        }
    )


def trained(config: Config) -> tuple[Training, list[float], list[Batch]]:
    """A run's model after its last step, the losses, and the rows of its first step."""
    mesh, steps = Mesh(), config.tokens.train_steps
    prepare_data(config)
    training = Training(config, mesh, "cpu")
    training.initialize()
    feed = Feed(config, mesh, device=torch.device("cpu"))
    rows, losses = feed.step(1).microbatches, []
    for update in range(1, steps + 1):
        losses.append(training.step(update, feed.step(update).microbatches if update > 1 else rows).read().lm_loss)
    feed.close()
    training.buckets.wait_gather()
    return training, losses, list(rows)


def coordinates(config: Config) -> dict[str, float]:
    """How far the outputs of layers and head are from where they began, as the root mean square of their elements."""
    training, _, (batch,) = trained(config)
    after = outputs(training, batch)
    training.initialize()
    before = outputs(training, batch)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in after}


@torch.no_grad()
def outputs(training: Training, batch: Batch) -> dict[str, Tensor]:
    """What each layer adds up to, and the logits, of a batch."""
    (chunk,), found = training.chunks, dict[str, Tensor]()
    handles = [
        block.register_forward_hook(lambda block, _, output: found.update({block.name: output[0].clone()}))
        for block in chunk.layers
    ]
    found["logits"] = chunk(None, batch)[0].clone()
    for handle in handles:
        handle.remove()
    return found


def show_coordinates(widths: Sequence[int], rate: float = 2.0**-7, steps: int = 10) -> None:
    """A row for each width, with µP and without."""
    for mup in (True, False):
        print(f"{'with' if mup else 'without'} µP, learning rate {rate:g}, change after {steps} steps")
        for width in widths:
            found = coordinates(config_of(width, rate, mup=mup, steps=steps))
            print(f"{width:>6}  " + "  ".join(f"{name} {value:.4f}" for name, value in found.items()), flush=True)


def show_sweep(widths: Sequence[int]) -> None:
    """Two tables of losses: a row for each width, a column for each learning rate."""
    for mup in (True, False):
        print(f"\n| {'µP' if mup else 'without'}, width | " + " | ".join(f"2^{_power(rate)}" for rate in RATES) + " |")
        print("|---|" + "---|" * len(RATES))
        for width in widths:
            losses = [sum(trained(config_of(width, rate, mup=mup, steps=STEPS))[1][-LAST:]) / LAST for rate in RATES]
            cells = (f"**{loss:.3f}**" if loss == min(losses) else f"{loss:.3f}" for loss in losses)
            print(f"| {width} | " + " | ".join(cells) + " |", flush=True)


def sweeps(page: str) -> dict[str, dict[int, list[float]]]:
    """The tables of a page: with µP and without, the losses of each width at RATES."""
    found: dict[str, dict[int, list[float]]] = {}
    for line in page.splitlines():
        name, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        if name.endswith(", width"):
            found[name.removesuffix(", width")] = table = dict[int, list[float]]()
        elif found and name.isdigit() and len(cells) == len(RATES):
            table[int(name)] = [float(cell) for cell in cells]
    return found


def drawing(found: Mapping[str, Mapping[int, Sequence[float]]]) -> str:
    """Loss over learning rate as SVG: a panel for each table, a line for each width, its lowest point marked."""
    losses = [loss for table in found.values() for line in table.values() for loss in line]
    low, high = floor(2 * min(losses)) / 2, ceil(2 * max(losses)) / 2

    def y(loss: float) -> str:
        return f"{250 - 210 * (loss - low) / (high - low):.1f}"

    body = []
    for panel, (name, table) in enumerate(found.items()):
        xs = [50 + 470 * panel + 70 * column for column in range(len(RATES))]
        body.append(f'<text class="title" x="{xs[0]}" y="20">{"with" if name == "µP" else name} µP</text>')
        for tick in (low, (low + high) / 2, high):
            body.append(f'<path class="grid" d="M{xs[0]} {y(tick)}H{xs[-1]}"/>')
            body.append(f'<text x="{xs[0] - 34}" y="{y(tick)}">{tick:g}</text>')
        body += [f'<text x="{x - 10}" y="270">2^{_power(rate)}</text>' for x, rate in zip(xs, RATES, strict=True)]
        for x, colour, (width, line) in zip(xs, COLOURS, table.items(), strict=False):
            points = [f"{x},{y(loss)}" for x, loss in zip(xs, line, strict=True)]
            best_x, best_y = points[line.index(min(line))].split(",")
            body.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="2"/>')
            body.append(f'<circle cx="{best_x}" cy="{best_y}" r="4" fill="{colour}"/>')
            body.append(f'<text x="{x}" y="294" style="fill:{colour}">width {width}</text>')
    style = "text{font:12px system-ui,sans-serif;fill:#777}.title{font-weight:600}.grid{stroke:#8884}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {50 + 470 * len(found)} 300">'
    return "\n".join([head, f"<style>{style}</style>", *body, "</svg>\n"])


def _power(rate: float) -> int:
    return round(torch.tensor(rate).log2().item())


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.mup")
    parser.add_argument("what", choices=["coordinates", "sweep", "picture"])
    parser.add_argument("--widths", help="comma-separated; multiples of 16")
    asked = parser.parse_args()
    if asked.what == "picture":
        page = (DOCS / "optimizers.md").read_text(encoding="utf-8")
        (DOCS / "mup.svg").write_text(drawing(sweeps(page)), encoding="utf-8")
        return
    torch.set_num_threads(1)
    default = "64,256,1024" if asked.what == "coordinates" else "64,128,256,512"
    widths = [int(width) for width in (asked.widths or default).split(",")]
    (show_coordinates if asked.what == "coordinates" else show_sweep)(widths)


if __name__ == "__main__":
    main()

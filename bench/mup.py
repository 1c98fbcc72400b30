"""µP on this machine's corpus: do activations and the best learning rate stay where they are when the model is wider?

    python -m bench.mup coordinates [--widths 64,256,1024]     after ten steps: how far each layer's output has come
    python -m bench.mup sweep [--widths 64,128,256,512]        the loss at each learning rate, as a table

Both with µP and without. One process, whose numbers do not depend on what else the machine does; docs/optimizers.md has
what they gave.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanotron.batch import Batch
from nanotron.config import Config, get_config_from_dict
from nanotron.data.feed import Feed
from nanotron.data.tokenize.prepare import prepare_data
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training

RATES = tuple(2.0**-power for power in (9, 8, 7, 6, 5))
HEAD_DIM = 16
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


def _power(rate: float) -> int:
    return round(torch.tensor(rate).log2().item())


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench.mup")
    parser.add_argument("what", choices=["coordinates", "sweep"])
    parser.add_argument("--widths", help="comma-separated; multiples of 16")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    default = "64,256,1024" if asked.what == "coordinates" else "64,128,256,512"
    widths = [int(width) for width in (asked.widths or default).split(",")]
    (show_coordinates if asked.what == "coordinates" else show_sweep)(widths)


if __name__ == "__main__":
    main()

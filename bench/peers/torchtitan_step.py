"""torchtitan: its own Trainer and train step; torchtitan_setup.py says how it is configured and what differs."""

from __future__ import annotations

from typing import Any

from bench.peers.torchtitan_setup import trainer_config
from bench.serve import options, prepare, serve


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    from torchtitan.observability import structured_logger  # after torchtitan_setup, which names the device

    structured_logger.init_structured_logger("training", "", enable=False)
    trainer = trainer_config(asked).build()
    batches = trainer.batch_generator(trainer.dataloader)
    losses: list[float] = []

    def log(step: int, loss: float, *_: Any, **__: Any) -> None:
        losses.append(loss)

    trainer.metrics_processor.log = log  # instead of its line, which it would write at every step

    def step() -> float | None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(batches)
        return losses.pop() if trainer.config.parallelism.pipeline_parallel_degree == 1 else None

    serve(step, imported)
    trainer.close()


if __name__ == "__main__":
    main()

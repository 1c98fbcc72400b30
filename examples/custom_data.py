"""Your own data in a run: point `dataset.python` at a function like one of these.

    data_stages:
      - name: mine
        start_training_step: 1
        data:
          dataset: {python: "examples/custom_data.py:counting", arguments: {step: 3}}

Token ids come with no tokenizer that could tell their number: set `model.model_config.vocab_size: 256` too.

Give either kind. A *stream* is read in order, once per replica, and its position is saved with every checkpoint. *Rows*
can be asked for by number, so they are shuffled anew every epoch and cost nothing to resume.

Several of one kind are blended: `{python: [a.py:one, b.py:two], arguments: [{}, {}], dataset_weights: [3, 1]}`.
`data.shuffle_block: 1000` shuffles streams too, within blocks of 1000 samples of each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator


def counting(step: int = 1, documents: int = 1000) -> Iterator[list[int]]:
    """A stream of documents, each a list of token ids (a text would be tokenized with the run's tokenizer).

    It has no state of its own: a resumed run calls it again and skips the documents that were read.
    """
    for start in range(documents):
        yield [(start + step * number) % 256 for number in range(40)]


class RandomWalks:
    """A stream that can say where it is: with these two methods nothing is skipped on resume."""

    def __init__(self, seed: int = 0, documents: int = 1000) -> None:
        self._seed = seed
        self._documents = documents
        self._next = 0

    def __iter__(self) -> Iterator[list[int]]:
        while self._next < self._documents:
            walk = random.Random(f"{self._seed} {self._next}")
            self._next += 1
            place = 128
            yield [place := (place + walk.choice((-1, 1))) % 256 for _ in range(60)]

    def state_dict(self) -> dict[str, int]:
        """The number of the next document."""
        return {"next": self._next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self._next = state["next"]


class Squares:
    """Rows: item i is one row of sequence_length + 1 token ids."""

    def __init__(self, sequence_length: int, rows: int = 500) -> None:
        self._sequence_length = sequence_length
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> list[int]:
        return [(index + number * number) % 256 for number in range(self._sequence_length + 1)]

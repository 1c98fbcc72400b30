"""The learning rate against sequences measured on Hugging Face's Nanotron (its step 0, a zero, left out)."""

from types import SimpleNamespace

import pytest

from nanotron.optim.lr import learning_rate


def schedule(style: str, *, warmup: int, start: int, decay: int, floor: float, warmup_style="linear", **more):
    return SimpleNamespace(
        learning_rate=1.0,
        lr_warmup_steps=warmup,
        lr_warmup_style=warmup_style,
        lr_decay_style=style,
        lr_decay_steps=decay,
        lr_decay_starting_step=start,
        min_decay_lr=floor,
        **{"lr_rewarm_steps": 0, "lr_steps": [], **more},
    )


@pytest.mark.parametrize(
    ("style", "start", "decay", "floor", "golden"),
    [
        ("linear", 2, 8, 0.1, [0.5, 1, 0.8875, 0.775, 0.6625, 0.55, 0.4375, 0.325, 0.2125, 0.1, 0.1]),
        ("cosine", 2, 8, 0.1, [0.5, 1, 0.96575, 0.8682, 0.72221, 0.55, 0.37779, 0.2318, 0.13425, 0.1, 0.1]),
        ("1-sqrt", 6, 4, 0.0, [0.5, 1, 1, 1, 1, 1, 0.5, 0.29289, 0.13397, 0, 0]),
    ],
)
def test_learning_rate_follows_the_golden_sequences(style, start, decay, floor, golden):
    rates = [
        learning_rate(schedule(style, warmup=2, start=start, decay=decay, floor=floor), update)
        for update in range(1, len(golden) + 1)
    ]
    assert rates == pytest.approx(golden, abs=5e-6)


def test_first_update_without_warmup_runs_at_the_full_rate():
    assert learning_rate(schedule("linear", warmup=0, start=0, decay=10, floor=0.0), 1) == pytest.approx(0.9)
    assert learning_rate(schedule("linear", warmup=0, start=5, decay=5, floor=0.0), 1) == 1.0


def test_constant_warmup_is_the_peak_from_the_first_update():
    constant = schedule("linear", warmup=4, start=4, decay=4, floor=0.0, warmup_style="constant")
    assert [learning_rate(constant, update) for update in (1, 4, 6)] == [1.0, 1.0, 0.5]


def test_no_decay_steps_means_the_floor_right_after_the_plateau():
    assert learning_rate(schedule("cosine", warmup=2, start=2, decay=0, floor=0.25), 3) == 0.25


def test_a_rewarmed_rate_rises_stays_and_falls_as_before_again_and_again():
    rewarmed = schedule("linear", warmup=2, start=4, decay=4, floor=0.0, lr_rewarm_steps=1)
    rates = [learning_rate(rewarmed, update) for update in range(1, 23)]
    first, cycle = [0.5, 1, 1, 1, 0.75, 0.5, 0.25, 0], [1, 1, 1, 0.75, 0.5, 0.25, 0]
    assert rates == pytest.approx([*first, *cycle, *cycle])
    slowly = schedule("cosine", warmup=1, start=1, decay=2, floor=0.2, lr_rewarm_steps=4)
    assert [learning_rate(slowly, update) for update in range(3, 10)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 1.0, 0.6, 0.2]
    )


def test_an_inverse_square_root_goes_on_from_where_it_starts_down_to_its_floor():
    falls = schedule("inverse-sqrt", warmup=2, start=4, decay=0, floor=0.3)
    rates = [learning_rate(falls, update) for update in (1, 2, 3, 4, 16, 25, 64)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 0.5, 0.4, 0.3])
    assert learning_rate(schedule("inverse-sqrt", warmup=0, start=0, decay=0, floor=0.0), 4) == 0.5


def test_steps_are_what_the_list_says():
    steps = [SimpleNamespace(step=4, learning_rate=0.3), SimpleNamespace(step=6, learning_rate=0.0)]
    falls = schedule("steps", warmup=2, start=2, decay=0, floor=0.0, lr_steps=steps)
    assert [learning_rate(falls, update) for update in range(1, 8)] == [0.5, 1, 1, 0.3, 0.3, 0, 0]

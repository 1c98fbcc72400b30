"""How a token is chosen from the logits."""

import pytest
import torch

from nanotron.errors import ConfigError
from nanotron.generate.sampling import Sampling, choose

LOGITS = torch.tensor([0.0, 3.0, 2.0, -1.0])


def chosen(sampling: Sampling, draws: int = 200) -> set[int]:
    generator = torch.Generator().manual_seed(0)
    return {choose(LOGITS, sampling, generator) for _ in range(draws)}


def test_temperature_zero_is_greedy() -> None:
    assert chosen(Sampling()) == {1}


def test_a_temperature_reaches_every_token() -> None:
    assert chosen(Sampling(temperature=3.0)) == {0, 1, 2, 3}


def test_top_k_keeps_the_most_likely() -> None:
    assert chosen(Sampling(temperature=3.0, top_k=2)) == {1, 2}


def test_top_p_keeps_the_fewest_tokens_of_that_mass() -> None:
    masses = (LOGITS / 2.0).softmax(0)
    assert masses[1] < 0.75 < masses[1] + masses[2]
    assert chosen(Sampling(temperature=2.0, top_p=0.75)) == {1, 2}
    assert chosen(Sampling(temperature=2.0, top_p=0.01)) == {1}


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_a_prompt_draws_by_seed_and_number_alone() -> None:
    def draws(seed: int, number: int) -> list[int]:
        generator = Sampling(seed=seed).generator(number)
        return torch.randint(1000, (8,), generator=generator).tolist()

    assert draws(1, 0) == draws(1, 0)
    assert len({tuple(draws(seed, number)) for seed in (1, 2) for number in (0, 1)}) == 4

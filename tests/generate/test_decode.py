"""Tokens made one after another: with a cache, in batches, and over ranks, they are what the model says."""

from pathlib import Path

import pytest
import torch

from nanotron.generate.decode import Decoder
from nanotron.generate.sampling import Sampling
from nanotron.generate.source import open_source
from nanotron.parallel.mesh import Mesh
from tests.generate.tiny import CPU, PROMPTS, decoder_of, made, rank_tokens, training_logits, whole_model
from tests.pool import Pool

DRAWN = Sampling(temperature=1.0, top_k=50, top_p=0.95, seed=3)


def test_greedy_tokens_are_the_argmax_of_a_forward_without_cache(run: Path) -> None:
    source = open_source(str(run))
    model, decoder = whole_model(source), decoder_of(source)
    for prompt in PROMPTS:
        ids = source.encode(prompt)
        (continuation,) = made(decoder, [ids], 33, Sampling())
        assert len(ids) + len(continuation) > 32, "it goes past the trained length too"
        expected = training_logits(model, [*ids, *continuation]).argmax(-1).tolist()
        assert continuation == expected[len(ids) - 1 : -1]


@pytest.mark.parametrize("sampling", [Sampling(), DRAWN], ids=["greedy", "drawn"])
def test_prompts_of_different_lengths_in_one_batch_go_on_as_each_alone(run: Path, sampling: Sampling) -> None:
    source = open_source(str(run))
    decoder = decoder_of(source)
    prompts = [source.encode(prompt) for prompt in PROMPTS]
    assert len({len(ids) for ids in prompts}) == 3
    alone = [made(decoder, [ids], 12, sampling, first_number=row)[0] for row, ids in enumerate(prompts)]
    assert made(decoder, prompts, 12, sampling) == alone


def test_the_same_seed_draws_the_same_and_another_seed_or_prompt_number_another(run: Path) -> None:
    source = open_source(str(run))
    decoder, ids = decoder_of(source), source.encode("import")
    one, again, other_seed = (made(decoder, [ids], 12, Sampling(1.0, seed=seed)) for seed in (1, 1, 2))
    other_number = made(decoder, [ids], 12, Sampling(1.0, seed=1), first_number=1)
    assert one == again
    assert one != other_seed
    assert one != other_number


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 3), (2, 2), (4, 1)])
def test_every_layout_makes_the_tokens_of_one_device_on_every_rank(run: Path, pool: Pool, tp: int, pp: int) -> None:
    source = open_source(str(run))
    expected = made(decoder_of(source), [source.encode(prompt) for prompt in PROMPTS], 12, DRAWN)
    ranks = pool.run(tp * pp, rank_tokens, str(run), tp, pp, DRAWN)
    assert ranks == [expected] * (tp * pp)


def test_a_tied_embedding_is_on_both_ends_of_the_pipeline(tied_run: Path, pool: Pool) -> None:
    source = open_source(str(tied_run))
    expected = made(decoder_of(source), [source.encode(prompt) for prompt in PROMPTS], 12, Sampling())
    assert pool.run(2, rank_tokens, str(tied_run), 1, 2, Sampling()) == [expected] * 2


def test_a_row_ends_at_the_end_token_while_others_go_on(run: Path) -> None:
    source = open_source(str(run))
    prompts = [source.encode(prompt) for prompt in PROMPTS[:2]]
    free = made(decoder_of(source), prompts, 12, Sampling())
    end = next(token for token in free[0] if token not in free[1])
    decoder = Decoder(whole_model(source), Mesh(), CPU, [end, 10**6])
    stopped = made(decoder, prompts, 12, Sampling())
    assert stopped == [free[0][: free[0].index(end)], free[1]]
    steps = list(decoder.tokens(prompts[:1], 12, Sampling()))
    assert steps[-1] == [None], "the loop ends with the last row"
    assert len(steps) == free[0].index(end) + 1


def test_the_forward_that_trains_keeps_nothing(run: Path) -> None:
    model = whole_model(open_source(str(run)))
    first, again = training_logits(model, [1, 2, 3]), training_logits(model, [1, 2, 3])
    assert torch.equal(first, again)


def test_no_kernel_that_plans_for_a_length_attends_to_a_growing_cache(run: Path) -> None:
    source = open_source(str(run))
    decoder = decoder_of(source)
    allowed: list[bool] = []
    handle = decoder._model.register_forward_pre_hook(
        lambda *_: allowed.append(torch.backends.cuda.cudnn_sdp_enabled())
    )
    made(decoder, [source.encode("import")], 3, Sampling())
    handle.remove()
    assert allowed == [False] * 3
    assert torch.backends.cuda.cudnn_sdp_enabled(), "training may use it"

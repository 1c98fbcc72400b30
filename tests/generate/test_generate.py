"""Text from a checkpoint: how a token is chosen, and the whole way from a folder to characters."""

from pathlib import Path

import pytest
import torch

from nanotron.checkpoint.format import Piece
from nanotron.checkpoint.write import Saver
from nanotron.config import get_config_from_dict
from nanotron.data.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.generate import Generator, Sampling, choose, run_generate
from nanotron.mesh import Mesh
from nanotron.models.llama import Llama
from nanotron.models.specs import llama_specs

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


TEXT = "import os\nfor name in os.listdir('é€'):\n    print(name)\n" * 20


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of steps as a run leaves it: config and tokenizer beside one checkpoint of drawn weights."""
    folder = tmp_path_factory.mktemp("run")
    tokenizer = train_bpe([TEXT], 280)
    save_tokenizer(tokenizer, str(folder), eos=END_OF_TEXT)
    config = get_config_from_dict(
        {
            "parallelism": {"dp": 1, "tp": 2, "pp": 1},
            "model": {
                "dtype": "float32",
                "model_config": {
                    "hidden_size": 32,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "intermediate_size": 64,
                    "vocab_size": tokenizer.get_vocab_size(),
                },
            },
            "tokens": {"sequence_length": 16, "micro_batch_size": 1, "batch_accumulation_per_replica": 1},
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )
    shape, mesh = config.model.model_config, Mesh()
    specs = llama_specs(shape, std=0.3)
    model = Llama(shape, specs, mesh, layers=(0, 2), embed=True, head=True, dtype=torch.float32, device="cpu")
    model.initialize(seed=1)
    pieces = [
        Piece("weight", name, specs[name].shape, specs[name].local_box(mesh), weight.data)
        for name, weight in model.weights.items()
    ]
    config.save_as_yaml(folder / "config.yaml")
    saver = Saver(str(folder), 0, 1, None)
    saver.save(7, pieces, {"step": 7}, {"config.yaml": (folder / "config.yaml").read_text()})
    assert saver.wait()
    return folder


def test_greedy_text_is_the_argmax_of_the_whole_models_logits(steps: Path) -> None:
    generator = Generator(str(steps), torch.device("cpu"))
    ids = generator.tokenizer.encode("import os").ids
    made = list(generator.tokens(ids, 20, Sampling()))
    assert len(ids) + len(made) > 16, "it goes past the trained length too"
    for length in (0, 1, len(made) - 1):
        window = [*ids, *made[:length]][-16:]
        assert int(generator._last_logits(window).argmax()) == made[length]


def test_the_same_seed_gives_the_same_text_and_another_seed_another(steps: Path) -> None:
    generator = Generator(str(steps / "7"), torch.device("cpu"))
    texts = ["".join(generator.text("import", 20, Sampling(1.0, seed=seed))) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_pieces_of_text_hold_whole_characters(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(str(steps), torch.device("cpu"))
    ids = [token for letter in "a€b" for token in generator.tokenizer.encode(letter).ids]
    assert len(ids) > 3, "the euro sign is more than one token"
    monkeypatch.setattr(generator, "tokens", lambda *arguments: iter(ids))
    assert list(generator.text("x", 9, Sampling())) == ["a", "€", "b"]


def test_generation_stops_at_the_end_of_the_text(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = Generator(str(steps), torch.device("cpu"))
    assert generator._end is not None
    logits = torch.zeros(generator.config.model.model_config.vocab_size)
    logits[generator._end] = 1.0
    monkeypatch.setattr(generator, "_last_logits", lambda ids: logits)
    assert list(generator.tokens([1], 9, Sampling())) == []


def test_the_command_writes_prompt_and_continuation(steps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(["--ckpt-path", str(steps), "--prompt", "import os", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("import os")


def test_a_folder_without_a_checkpoint_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(["--ckpt-path", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{tmp_path / 'nothing'} holds no complete checkpoint; name a step's folder or the folder of the steps"
    ]

"""Config files that no person wrote: deep, endless, exploding, or no files at all. Each is a line, and soon."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from nanotron.check import check
from nanotron.config.load import LARGEST, lasting, read_file
from nanotron.errors import ConfigError
from tests.config.test_mistakes import RIGHT, problems

LINE = RIGHT.count("\n") + 1  # where what is appended begins
GROWING = "a0: &a0 {x0: 1}\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 11))
CHAIN = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 900))


@pytest.mark.parametrize(
    ("appended", "said"),
    [
        (f"x: {'[' * 990}{']' * 990}\n", "nested more than 100 deep; no config needs it"),
        ("x:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 900)), "nested more than 100 deep; no config needs it"),
        (CHAIN, "nested more than 100 deep; no config needs it"),
        (GROWING, "more than 100,000 values, with aliases written out; no config needs as many"),
    ],
    ids=["flow", "block", "chain of aliases", "aliases of aliases"],
)
def test_a_file_deeper_or_larger_than_any_config_is_one_line(tmp_path: Path, appended: str, said: str) -> None:
    (line,) = problems(tmp_path, RIGHT + appended)
    assert line.partition(": ")[2] == said
    assert int(line.partition(":")[0]) >= LINE


def test_deep_overrides_are_one_short_line(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, RIGHT, [f"general.project={'[' * 5000}{']' * 5000}"])
    assert line.endswith("…: general.project: the value is not YAML: nested more than 100 deep; no config needs it")
    (line,) = problems(tmp_path, RIGHT, [".".join(["a"] * 5000) + "=1"])
    assert line.endswith("…: more than 100 names; no key lies so deep")
    assert len(line) < 200


def test_half_a_character_and_endless_digits_are_named_with_their_key(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, RIGHT + 'general: {project: "\\ud800"}\n')
    assert line.endswith(
        r"general.project: \ud800 holds half of a character's code (a lone surrogate); write the whole character"
    )
    (line,) = problems(tmp_path, RIGHT + f"general: {{seed: {'9' * 5000}}}\n")
    assert line.endswith("general.seed: a number of 5000 digits; no key needs as many")


def test_a_config_has_a_largest_size(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(RIGHT + "#" * LARGEST)
    for name in (str(file), "/dev/zero"):
        with pytest.raises(ConfigError, match=f"^{name}: larger than 1 MiB; no config is"):
            check(name)


def test_a_pipe_is_read_once_and_its_text_lasts(tmp_path: Path) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "x.yaml"
    os.mkfifo(pipe)
    file.write_text(RIGHT)
    writer = threading.Thread(target=pipe.write_text, args=[RIGHT])
    writer.start()
    with lasting(str(pipe)) as copy:
        assert [read_file(copy).value() for _ in range(2)] == 2 * [read_file(file).value()]
    writer.join()
    assert not os.path.exists(copy)
    with lasting(str(file)) as own:
        assert own == str(file)
    with pytest.raises(ConfigError, match="a pipe that gives nothing"):
        check(os.devnull)

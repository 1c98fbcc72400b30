"""What `make setup` shows of pip: a bar, and its own words only where it fails; what `make train` proposes next."""

from __future__ import annotations

import os
import pty
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from nanotron.check import check
from nanotron.cli import app
from tools.install import Progress, packages

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tools" / "install.py"
SAID = """\
Looking in indexes: https://index.example/simple
Collecting numpy==2.4.1 (from -r requirements.lock (line 70))
  Downloading numpy-2.4.1-cp311-cp311-linux_x86_64.whl (16.7 MB)
Requirement already satisfied: pip in ./.venv/lib (24.0)
Collecting torch==2.13.0 (from -r requirements.lock (line 90))
  Downloading https://index.example/torch-2.13.0.whl.metadata (29 kB)
"""


def test_the_bar_says_which_package_and_how_many_and_names_no_index() -> None:
    progress = Progress(4)
    bars = []
    for line in SAID.splitlines(keepends=True):
        progress.line(line)
        bars.append(progress.bar(0, 7.4))
    assert bars[2] == f"{'━' * 4}{'─' * 26}   7 s  1 of 4  numpy (16.7 MB)"
    assert bars[-1] == f"{'━' * 11}{'─' * 19}   7 s  3 of 4  torch"
    progress.line("Installing collected packages: numpy, torch\n")
    assert progress.bar(2, 60) == f"{'━' * 22}{'─' * 8}  60 s  2 of 4  unpacking"
    assert not any("example" in bar for bar in bars)


def test_packages_are_the_lines_that_name_one(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("# why\nnumpy==2\n\ntomli==2 ; python_version < '3.11'\n    # via x\n")
    assert packages(tmp_path / "lock") == 2


def install(folder: Path, requirement: str, stdout: int) -> subprocess.Popen[str]:
    (folder / "lock").write_text(requirement + "\n")
    command = [sys.executable, str(SCRIPT), str(folder / "lock")]
    without = os.environ | {"PIP_NO_INDEX": "1"}
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=without)


def test_pip_s_own_words_are_told_where_it_fails(tmp_path: Path) -> None:
    failed = install(tmp_path, "no-such-package-anywhere==1", subprocess.PIPE)
    said, words = failed.communicate()
    assert (failed.returncode, said) == (1, ""), "a bar is for a terminal"
    assert "No matching distribution found for no-such-package-anywhere==1" in words


def test_a_terminal_sees_a_bar_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    started = install(tmp_path, "numpy", theirs)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # at the end of a terminal
        while more := os.read(ours, 4096):
            seen += more
    os.close(ours)
    assert (started.wait(), started.communicate()[1]) == (0, "")
    assert "─" * 15 in seen.decode()
    assert seen.endswith(b"\r\033[K")


def test_what_make_train_proposes_next_can_be_done() -> None:
    made = (ROOT / "Makefile").read_text()
    proposed = made.partition("define TRY\n")[2].partition("endef")[0]
    commands = [shlex.split(line) for line in proposed.splitlines() if line.startswith("    ")]
    assert [command[0] for command in commands] == 3 * ["$(BIN)/nanotron"]
    assert {command[1] for command in commands} <= {info.callback.__name__ for info in app.registered_commands}
    (example,) = re.findall("^CONFIG := (.*)$", made, flags=re.MULTILINE)
    (run,) = re.findall("^RUN := (.*)$", made, flags=re.MULTILINE)
    assert str(check(ROOT / example).checkpoints.checkpoints_path) == run
    (overrides,) = (command[4::2] for command in commands if command[1] == "train")
    longer = check(ROOT / example, overrides)
    assert longer.tokens.train_steps > check(ROOT / example).tokens.train_steps
    assert str(longer.checkpoints.checkpoints_path) != run, "the same run would go on, past the end of its schedule"

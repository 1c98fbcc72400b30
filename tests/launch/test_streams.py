"""Standard streams that somebody closed, filled up or gave another alphabet."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanotron.errors import complain, say
from nanotron.generate.text import write

COMMAND = "import sys; sys.argv = ['nanotron', 'schema', '--markdown']; from nanotron.cli import main; main()"
RUN = (
    "import sys; from nanotron.logging import get_logger, set_up_logging; from nanotron.parallel.mesh import Mesh\n"
    "from nanotron.launch.streams import open_streams\n"
    "open_streams(); set_up_logging('info', 'info', Mesh()); print('begun', file=sys.stderr)\n"
    "for step in range(3): get_logger('x').info(f'step {step}: é·日本')\n"
    "print('gone on', file=sys.stderr); sys.exit(75)"
)


@pytest.fixture(params=["closed pipe", "full disk"])
def unwritable(request: pytest.FixtureRequest) -> Iterator[int]:
    """A file descriptor to which nothing can be written."""
    if request.param == "full disk":
        if not Path("/dev/full").exists():
            pytest.skip("needs /dev/full")
        descriptor = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, descriptor = os.pipe()
        os.close(reader)
    yield descriptor
    os.close(descriptor)


def ended(code: str, **streams: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], text=True, check=False, **streams)  # type: ignore[call-overload]


def test_a_command_whose_output_nobody_takes_ends_with_a_line(unwritable: int) -> None:
    done = ended(COMMAND, stdout=unwritable, stderr=subprocess.PIPE)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("standard output cannot be written (")


def test_a_run_goes_on_without_its_output_and_ends_as_it_would(unwritable: int) -> None:
    done = ended(RUN, stdout=unwritable, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (75, "begun\ngone on\n")
    done = ended(RUN, stdout=unwritable, stderr=unwritable)
    assert done.returncode == 75


def test_a_closed_stream_is_nothing_to_write_to_and_no_other_file_gets_its_number(tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'file')!r}, 'w').write('x')\nimport os; os.write(1, b'lost')\n"
    closed = ["/bin/sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, RUN.replace("for step", f"{code}for step")]
    assert subprocess.run(closed, check=False).returncode == 75
    assert (tmp_path / "file").read_text() == "x"


def test_what_a_terminal_would_obey_is_shown_and_what_a_model_wrote_goes_to_files_as_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\x1b]0;title\x07\r\u202eb\tc\n"
    shown = r"a\x1b]0;title\x07\r\u202eb" + "\tc\n"
    say(text, end="")
    complain(text, "next")
    assert capsys.readouterr() == (shown, f"{shown}\nnext\n")
    write(text)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    write(text)
    assert capsys.readouterr().out == text + shown


def test_an_alphabet_without_the_letters_is_written_in_escapes() -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = ended(RUN, capture_output=True, env=ascii_only)
    assert done.returncode == 75
    assert [line.partition("] ")[2] for line in done.stdout.splitlines()] == [
        rf"step {step}: \xe9\xb7\u65e5\u672c" for step in range(3)
    ]
    done = ended(COMMAND, capture_output=True, env=ascii_only)
    assert done.returncode == 0, done.stderr
    assert r"\u2265" in done.stdout

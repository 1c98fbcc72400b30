"""What the pages say can be done: links lead somewhere, commands parse, Python runs, and code that is named is there.

YAML of pages is taken by the config's loader in tests/config/test_schema.py. Nothing here needs mkdocs or a network.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import runpy
import shlex
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
import yaml

from nanotron.cli import app
from nanotron.generate.command import parser as generate_parser
from nanotron.launch.run import parser as train_parser
from tests.commands import nanotron

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / ".github").rglob("*.md")]
SITE = runpy.run_path(str(ROOT / "tools" / "docs_site.py"))
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SHELLS = ("", "sh")


class Fence(NamedTuple):
    """A fenced block: its page and line, its language, its text."""

    where: str
    language: str
    text: str


def fences(page: Path) -> Iterator[Fence]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```(\w*)[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
        yield Fence(f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 2}", found[1], found[2])


FENCES = [fence for page in PAGES for fence in fences(page)]


def commands(fence: Fence) -> Iterator[list[str]]:
    """The commands of a block of shell lines, as words; what a pipe or a file does with their output is left out."""
    for line in fence.text.replace("\\\n", " ").splitlines():
        if re.match(r"(nanotron|torchrun|python|make|pip|bash) ", line):
            yield shlex.split(re.split(r" [|>] ?", line)[0], comments=True)


SHOWN = [(fence.where, words) for fence in FENCES if fence.language in SHELLS for words in commands(fence)]


def without_code(page: Path) -> str:
    """A page's text less its blocks and inline code, which hold no links."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]+`", "`code`", text)


def anchors(page: Path) -> set[str]:
    """What a link can name within a page: its headings, as mkdocs and code hosts call them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    plain = [unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode() for heading in headings]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    dead = []
    for target, anchor in re.findall(r"\]\(([^)\s#]*)(#[^)\s]*)?\)", without_code(page)):
        if re.match(r"\w+:", target):
            continue
        file = (page.parent / target) if target else page
        if not file.exists():
            dead.append(target)
        elif anchor and file.suffix == ".md" and anchor[1:] not in anchors(file):
            dead.append(f"{target}{anchor}")
    assert not dead


def test_pages_show_commands() -> None:
    assert len(SHOWN) > 80
    assert {words[1] for _, words in SHOWN if words[0] == "nanotron"} >= set(COMMANDS) - {"schema"}


@pytest.mark.parametrize(("where", "words"), SHOWN, ids=[f"{where} {' '.join(words)[:40]}" for where, words in SHOWN])
def test_a_command_is_one_that_there_is(where: str, words: list[str]) -> None:
    program, arguments = words[0], [word for word in words[1:] if word != "…"]
    if program == "nanotron":
        COMMANDS[arguments[0]].make_context(arguments[0], arguments[1:])  # raises what the user would be told
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets)
    elif program == "pip":
        extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), flags=re.MULTILINE))
        assert set(re.findall(r"\[(\w+)\]", " ".join(arguments))) <= extras
    elif arguments[0] == "-m":
        assert importlib.util.find_spec(arguments[1])
    elif program != "torchrun" or "…" not in words:
        script = next(word for word in arguments if word.endswith((".py", ".sh")))
        assert (ROOT / script).exists()
        parsers = {"run_train.py": train_parser, "run_generate.py": generate_parser}
        if script in parsers:
            parsers[script]().parse_args(arguments[arguments.index(script) + 1 :])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_command_in_a_sentence_has_the_options_that_it_is_said_to_have(page: Path) -> None:
    for command in re.findall(r"`(nanotron [^`\n]+)`", page.read_text(encoding="utf-8")):
        _, name, *words = command.split()
        if name == "COMMAND" or name.startswith("-"):
            continue
        options = {option for parameter in COMMANDS[name].params for option in parameter.opts} | {"--help"}
        assert {word.partition("=")[0] for word in words if word.startswith("-")} <= options, command


@pytest.mark.parametrize(
    "fence", [fence for fence in FENCES if fence.language == "python"], ids=lambda fence: fence.where
)
def test_python_on_a_page_runs(fence: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(fence.text, fence.where, "exec"), {"__name__": "page"})


@pytest.mark.parametrize(
    "fence", [fence for fence in FENCES if fence.language == "source"], ids=lambda fence: fence.where
)
def test_code_that_a_page_names_is_there_and_is_not_much(fence: Fence) -> None:
    found = list(SITE["sources"](fence.text))
    assert 5 < sum(code.count("\n") + 1 for _, code in found) < 130
    for _, code in found:
        ast.parse(code)


def test_every_kind_of_parallelism_has_its_page_with_picture_and_code() -> None:
    folder = ROOT / "docs" / "concepts"
    kinds = {"data", "tensor", "sequence", "pipeline", "context", "experts", "sharding"}
    assert {page.stem for page in folder.glob("*.md")} == {"index", *kinds}
    for kind in kinds:
        text = (folder / f"{kind}.md").read_text()
        assert f"]({kind}.svg)" in text
        assert "```source\n" in text


def test_links_of_the_repository_lead_to_pages_of_the_site() -> None:
    within_site = SITE["within_site"]
    assert within_site("README.md", "index.md", "docs/plan.md") == "plan.md"
    assert within_site("docs/sharding.md", "sharding.md", "../examples/a.yaml") == "examples/a.yaml.txt"
    assert within_site("docs/howto/sft.md", "howto/sft.md", "../data.md") == "../data.md"
    assert within_site("docs/decisions.md", "decisions.md", "../CONTRIBUTING.md") == "contributing.md"


def test_the_site_has_every_page_and_every_command() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = re.findall(r"[\w/-]+\.md", str(site["nav"]))
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*written, *SITE["PAGES"].values(), "cli.md"})
    page = SITE["commands_page"]()
    assert [name for name in COMMANDS if f"\n## nanotron {name}\n" not in page] == []
    assert "| `--train-bpe` | Train a byte-level BPE of this many tokens on the input instead. |  |" in page


@pytest.mark.nightly
def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    """Each command of it in turn; the one that shows a mistake ends with exit code 2."""
    data = ROOT / "data"
    data.mkdir(exist_ok=True)
    os.symlink(data, tmp_path / "data")  # the corpus is prepared once for all tests
    for where, words in SHOWN:
        if where.startswith("docs/tutorial.md"):
            ran = nanotron(tmp_path, *words[1:], *["--plain"] * (words[1] == "train"))
            assert ran.returncode == (2 if "parallelism.tp=3" in words else 0), f"{where}: {words}: {ran.stderr}"
    assert (tmp_path / "runs" / "tiny" / "60" / "index.json").exists()
    assert (tmp_path / "tutorial-model" / "config.json").exists()

"""What mkdocs is told about this repository, beyond the pages in docs/ (mkdocs.yml names this file as a hook).

1  README.md, CONTRIBUTING.md and CHANGELOG.md are pages, files of examples/ are there to be looked at
2  cli.md: every command with its options, as `--help` has them
3  links from docs/ to these files lead to them within the site
4  a block that names code becomes that code, so that a page cannot tell of another than there is:

       ```source
       src/nanotron/ops/context.py: in_order, by_rank
       ```
"""

from __future__ import annotations

import ast
import posixpath
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files of the repository -> pages of the site."""
SHOWN = ("examples", "src", "bench", "LICENSE")
"""What else of the repository pages may link to."""
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
SOURCE = re.compile(r"^```source\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside docs/."""
    from mkdocs.structure.files import File

    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for shown in SHOWN:
        found = (ROOT / shown).rglob("*") if (ROOT / shown).is_dir() else [ROOT / shown]
        for path in found:
            if path.is_file() and path.suffix != ".pyc":
                # as text, which browsers show; of a .yaml or .py they would make a download
                uri = f"{path.relative_to(ROOT).as_posix()}.txt"
                files.append(File.generated(config, uri, content=path.read_bytes()))
    files.append(File.generated(config, "cli.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give a page its code, and its links."""
    uri = page.file.src_uri
    here = next((path for path, of_site in PAGES.items() if of_site == uri), f"docs/{uri}")
    markdown = SOURCE.sub(lambda block: "\n\n".join(_code_blocks(block[1])), markdown)
    return LINK.sub(lambda link: within_site(here, uri, link[1]), markdown)


def within_site(here: str, uri: str, target: str) -> str:
    """Where a link of the repository's file ``here``, which is the page ``uri``, leads within the site."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
    if path.startswith("docs/"):
        found = path.removeprefix("docs/")
    elif path.split("/")[0] in SHOWN:
        found = f"{path}.txt"
    else:
        found = PAGES.get(path, target)  # one that is not here is mkdocs' to complain about
    return posixpath.relpath(found, posixpath.dirname(uri) or ".")


def _code_blocks(named: str) -> Iterator[str]:
    for path, code in sources(named):
        yield f'```python title="{path}"\n{code}\n```'


def sources(named: str) -> Iterator[tuple[str, str]]:
    """(path, code) of each line of a `source` block: ``path: name, Class.name``. Raises KeyError for what is not there.

    What stands one after the other in the file is separated as it is there.
    """
    for line in named.splitlines():
        path, _, names = line.partition(": ")
        text = (ROOT / path).read_text(encoding="utf-8")
        lines = text.splitlines()
        parts = [_lines_of(ast.parse(text), name.strip()) for name in names.split(",")]
        yield path, "\n\n\n".join(textwrap.dedent("\n".join(lines[first:last])) for first, last in parts)


def _lines_of(tree: ast.Module, name: str) -> tuple[int, int]:
    """The lines [first, last) of a function or class, its decorators included."""
    node: Any = tree
    for part in name.split("."):
        defined = {each.name: each for each in node.body if isinstance(each, (ast.FunctionDef, ast.ClassDef))}
        node = defined[part]
    return min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1, node.end_lineno


def commands_page() -> str:
    """Every command of `nanotron`, from its own declaration."""
    import typer

    from nanotron.cli import app

    group = typer.main.get_command(app)
    lines = ["# Commands", "", f"{group.help} `nanotron COMMAND --help` prints what is here.", ""]
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(["nanotron", name, *(each.name.upper() for each in arguments), "[OPTIONS]"])
        lines += [f"## nanotron {name}", "", command.help, "", f"```sh\n{usage}\n```", ""]
        lines += ["| | | default |", "|---|---|---|"]
        for each in command.params:
            said = each.name.upper() if each in arguments else ", ".join(each.opts)
            lines.append(f"| `{said}` | {_cell(each.help)} | {_cell(_default(each))} |")
        lines.append("")
    return "\n".join(lines)


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    if parameter.show_default is False or parameter.default in (None, False, ()):
        return ""
    return f"`{parameter.default}`"


def _cell(text: str | None) -> str:
    return (text or "").replace("|", "\\|").replace("\n", " ")

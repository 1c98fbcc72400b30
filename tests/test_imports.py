"""Who may import whom, and who must stay light: the architecture's dependency table, enforced on the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "nanotron"

EVERYONE_MAY = {"errors", "batch", "logging", "untrusted"}

# room of the house -> what it may import. A module with a line of its own (`training.topology`) is allowed only where
# it, or its whole room, is named; `config.model` is only that section, `config` is all of it.
MAY_IMPORT = {
    "errors": set(),
    "untrusted": set(),
    "batch": set(),
    "logging": {"parallel"},
    "config": {"models.families", "models.specs", "pipeline.schedules"},
    "parallel": set(),
    "ops": {"parallel", "config.model"},
    "models": {"parallel", "ops", "config.model", "config.keys"},
    "pipeline": {"parallel", "ops"},
    "optim": {"parallel", "ops"},
    "checkpoint": {"parallel", "ops.host_memory"},
    "data": {"config", "parallel", "checkpoint.storage"},
    "metrics": {"config", "parallel", "models.families", "checkpoint.storage"},
    "convert": {"config", "parallel", "models", "checkpoint", "data"},
    "training.groups": {"config", "parallel", "models"},
    "training.mup": {"config", "parallel", "models"},
    "training.topology": {"config", "parallel", "models", "pipeline", "training.groups", "training.mup"},
    "check": {"config", "parallel", "models", "pipeline", "data", "checkpoint", "training.topology", "launch"},
    "training": {"*", "launch"},
    "training.trainer": {"*", "launch"},
    "plan": {
        "config",
        "parallel",
        "ops",
        "models",
        "pipeline",
        "optim",
        "metrics",
        "training",
        "data.context",
        "launch",
    },
    "generate": {"*", "launch"},
    "doctor": {"*", "launch"},
    "report": {"*", "launch"},
    "explain": {"*"},
    "launch": {"*", "training.trainer", "check"},
    "cli": {"*", "training.trainer", "launch", "check"},
}
ONLY_WHEN_NAMED = {"training.trainer", "cli", "launch", "check"}  # what "*" leaves out: entry points, what they start

TORCH_FREE = [
    "nanotron",
    "nanotron.errors",
    "nanotron.batch",
    "nanotron.config",
    "nanotron.parallel.mesh",
    "nanotron.parallel.params",
    "nanotron.training.topology",
    "nanotron.models.specs",
    "nanotron.pipeline.schedules",
    "nanotron.pipeline.simulate",
    "nanotron.pipeline.split",
    "nanotron.data.probe",
    "nanotron.plan.timeline",
    "nanotron.report.page",
    "nanotron.convert.folders",
    "nanotron.checkpoint.inspect",
    "nanotron.data.inspect",
    "nanotron.check",
    "nanotron.cli",
]

NEVER_AT_MODULE_LEVEL = {
    "transformers",
    "datasets",
    "wandb",
    "trackio",
    "tensorboard",
    "torch.utils.tensorboard",
    "datatrove",
}


class Import(NamedTuple):
    """One imported module and where it is written."""

    module: str
    where: str
    runs_on_import: bool


def imports_of(path: Path, root: Path = PACKAGE) -> Iterator[Import]:
    """Every import statement of a file, wherever it stands; `from a import b` yields a.b, which may be a module."""
    package = ["nanotron", *path.relative_to(root).parent.parts]
    for node, runs in walk(ast.parse(path.read_text()), runs=True):
        where = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, where, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{origin}.{alias.name}", where, runs) for alias in node.names)


def walk(node: ast.AST, runs: bool) -> Iterator[tuple[ast.AST, bool]]:
    """All nodes below one, each with whether it runs when the module is imported."""
    for child in ast.iter_child_nodes(node):
        for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        deferred = for_types or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, runs
        yield from walk(child, runs and not deferred)


def part_of(path: Path, root: Path = PACKAGE) -> str:
    """A file's line of the table: `models/decoder.py` -> models, `training/trainer.py` -> training.trainer."""
    names = path.relative_to(root).with_suffix("").parts[:2]
    return ".".join(names) if ".".join(names) in MAY_IMPORT else names[0]


def is_allowed(part: str, module: str) -> bool:
    """Whether a file of `part` may import the module `nanotron.…`."""
    names = module.split(".")[1:]
    room, dotted = names[0] if names else "", ".".join(names[:2])
    target, allowed = dotted if dotted in MAY_IMPORT else room, MAY_IMPORT[part]
    if target in ONLY_WHEN_NAMED:
        return target == part or target in allowed
    if room in {"", part} | EVERYONE_MAY or {room, dotted} & allowed:
        return True
    return "*" in allowed and target in MAY_IMPORT


def sources() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{part} is a new part of the house: say in MAY_IMPORT what it may import"
    wrong = [
        f"{where}: {part} may not import {module}"
        for module, where, _ in imports_of(path)
        if module.split(".")[0] == "nanotron" and not is_allowed(part, module)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_only_where_used(path: Path) -> None:
    wrong = [
        f"{where}: {module} is imported with the module"
        for module, where, runs_on_import in imports_of(path)
        if runs_on_import and any((module + ".").startswith(heavy + ".") for heavy in NEVER_AT_MODULE_LEVEL)
    ]
    assert not wrong, "\n".join(wrong)


def test_what_check_needs_imports_no_torch() -> None:
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    done = subprocess.run([sys.executable, "-c", script, *TORCH_FREE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_rules_catch_what_they_forbid(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "bad.py"
    path.write_text(
        "from typing import TYPE_CHECKING\n"
        "import transformers\n"
        "from nanotron import parallel, pipeline\n"
        "from nanotron.config.model import LlamaConfig\n"
        "from ..config import Config\n"
        "if TYPE_CHECKING:\n"
        "    import datasets\n"
        "def late():\n"
        "    from nanotron.training.trainer import train\n"
        "    import wandb\n"
    )
    found = list(imports_of(path, tmp_path))
    refused = [module for module, _, _ in found if module.startswith("nanotron") and not is_allowed("models", module)]
    assert refused == ["nanotron.pipeline", "nanotron.config.Config", "nanotron.training.trainer.train"]
    assert [module for module, _, runs in found if runs and module in NEVER_AT_MODULE_LEVEL] == ["transformers"]
    assert is_allowed("launch", "nanotron.training.trainer.train")
    assert not is_allowed("generate", "nanotron.training.trainer.train")
    assert is_allowed("check", "nanotron.training.topology.mesh_axes")
    assert not is_allowed("check", "nanotron.training.step.Training")
    assert not is_allowed("training.topology", "nanotron.training.step.Training")


ASKS_ABOUT_AN_AXIS = {"size", "coord", "ranks_along", "group", "parts", "rank_at"}


def asked_axes(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(axis, line) of each literal that a call like mesh.size("tp") or mesh.rank_at(pp=0) is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKS_ABOUT_AN_AXIS:
            yield from ((str(word.arg), word.value.lineno) for word in node.keywords)
            yield from ((arg.value, arg.lineno) for arg in node.args if isinstance(arg, ast.Constant))


def test_only_the_mesh_knows_what_the_data_axes_are() -> None:
    """dp may be a product whose parts cut some parameters: everyone else asks for replicas, or for data parts."""
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sources()
        if path.relative_to(PACKAGE).parts[0] != "config" and path.name != "mesh.py"
        for axis, line in asked_axes(ast.parse(path.read_text()))
        if axis == "dp"
    ]
    assert not wrong, f"an axis argument that says dp: {', '.join(wrong)}"
    assert [axis for axis, _ in asked_axes(ast.parse("mesh.size('dp') + mesh.rank_at(dp=0)"))] == ["dp", "dp"]

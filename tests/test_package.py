"""What others get: a wheel with all that the code needs, workflows that call targets there are, a changelog."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "nanotron"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = (ROOT / "pyproject.toml").read_text()


def pip(*arguments: str, folder: Path) -> None:
    """pip, without a network."""
    quiet = ("--disable-pip-version-check", "--quiet")
    subprocess.run([sys.executable, "-m", "pip", *quiet, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of what it is made of, so that nothing is written beside the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", "dist", ".", folder=folder)
    (built,) = (folder / "dist").glob("nanotron-*.whl")
    return built


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert inside == {str(path.relative_to(PACKAGE.parent)) for path in files}


def test_an_installed_wheel_runs_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """In an environment that sees this one's packages, but not what an editable install adds to them."""
    venv.create(tmp_path / "env", symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    packages = next((tmp_path / "env" / "lib").glob("python*")) / "site-packages"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel), folder=tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    command = str(tmp_path / "env" / "bin" / "nanotron")
    assert str(packages) in run(str(python), "-c", "import nanotron; print(nanotron.__file__)")
    run(command, "init", "--preset", "tiny", "-o", "tiny.yaml")
    assert "parameters" in run(command, "check", "tiny.yaml")
    devices = "from nanotron.metrics.devices import known_devices; print(*known_devices())"  # a file beside the code
    assert "h100" in run(str(python), "-c", devices).lower()


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"].values()
    return [step | {"matrix": job.get("strategy", {}).get("matrix", {})} for job in jobs for step in job["steps"]]


def test_workflows_call_targets_that_there_are() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    called: set[str] = set()
    for workflow in WORKFLOWS:
        for step in steps(workflow):
            for target in re.findall(r"make ([\w-]+|\$\{\{ matrix.target \}\})", step.get("run", "")):
                called |= set(step["matrix"]["target"]) if target.startswith("$") else {target}
    assert called <= targets
    assert called >= {"setup", "test", "lint", "docs", "parity", "torture", "nightly-tests"}


def test_workflows_test_every_python_that_is_supported() -> None:
    (matrix,) = [
        step["matrix"] for step in steps(ROOT / ".github/workflows/tests.yml") if step.get("run") == "make setup"
    ]
    supported = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    assert matrix["python"] == supported
    assert re.search(r'requires-python = ">=(.*)"', PROJECT)[1] == supported[0]  # type: ignore[index]
    assert {matrix["torch"][0], matrix["include"][0]["torch"]} == {"lowest", "newest"}


def test_the_changelog_begins_with_this_version() -> None:
    version = re.search(r'^version = "(.*)"', PROJECT, flags=re.MULTILINE)
    assert version is not None
    assert re.findall(r"^## (.*)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[0] == version[1]

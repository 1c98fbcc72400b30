"""The peers' own virtual environments, made when first needed and again when their requirements change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENTS = Path(__file__).parent / "peers" / "requirements"
FOLDER = ROOT / ".bench"
"""Ignored by git; may be deleted at any time."""


class CannotInstall(Exception):
    """pip could not make an environment; the message is its last line."""


def python_of(environment: str | None) -> str:
    """The interpreter of an environment, which is made if need be; None is the one that runs the bench."""
    if environment is None:
        return sys.executable
    folder, wanted = FOLDER / environment, (REQUIREMENTS / f"{environment}.txt").read_text()
    python, stamp = folder / "bin" / "python", folder / "requirements.txt"
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"making {folder.relative_to(ROOT)} ({', '.join(wanted.split())}) …", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        run([sys.executable, "-m", "venv", str(folder)])
        run([str(python), "-m", "pip", "install", "-q", "-r", str(REQUIREMENTS / f"{environment}.txt")])
        stamp.write_text(wanted)
    return str(python)


def run(command: list[str]) -> None:
    """Run a command to its end. Raises CannotInstall."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotInstall(f"{' '.join(command)}: {said[-1] if said else f'exit code {done.returncode}'}")


def versions(environment: str | None) -> dict[str, str]:
    """What is installed of the packages that the peers' requirements name."""
    named = {line.split("==")[0] for path in REQUIREMENTS.glob("*.txt") for line in path.read_text().split()}
    script = (
        "import sys\nfrom importlib.metadata import PackageNotFoundError, version\n"
        "for name in sys.argv[1:]:\n"
        "    try: print(name, version(name))\n"
        "    except PackageNotFoundError: pass\n"
    )
    command = [python_of(environment), "-c", script, *sorted(named)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return dict(line.split() for line in lines)


def process_environment(*, threads: int, keep_freed_memory: bool) -> dict[str, str]:
    """What a contender's processes inherit: this one's variables, without those that say how it was started."""
    found = {name: value for name, value in os.environ.items() if name not in {"VIRTUAL_ENV", "PYTHONHOME"}}
    found |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": str(threads)}
    if keep_freed_memory:  # glibc 2.35 and newer; the values are those of nanotron.launch.place
        found |= {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}
    return found

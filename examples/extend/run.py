"""Train with a family, a schedule and a data source that nanotron does not have: python examples/extend/run.py

    plain_mlp.py   the family; it becomes a part of the package, with one line in its table: here, of a copy
    own.py         the schedule and the data source; the config names them, the package need not know them
    config.yaml    asks for all three

Run it in the repository. What follows run.py goes to `nanotron train`: --override tokens.train_steps=4
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parents[1] / "src" / "nanotron"
TABLE = "FAMILIES: dict[str, Family] = {\n"
NEXT_IMPORT = "from nanotron.models.specs"


def add_family(folder: Path) -> Path:
    """Make a copy of the package in ``folder`` that has the family; returns the copy."""
    package = folder / "nanotron"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(HERE / "plain_mlp.py", package / "models")
    table = package / "models" / "families.py"
    text = table.read_text(encoding="utf-8")
    text = text.replace(NEXT_IMPORT, f"from nanotron.models.plain_mlp import FAMILY as PLAIN_MLP\n{NEXT_IMPORT}", 1)
    table.write_text(text.replace(TABLE, f'{TABLE}    "plain_mlp": PLAIN_MLP,\n', 1), encoding="utf-8")
    return package


def main(arguments: list[str]) -> int:
    """Prepare the tokenizer, and train on two ranks."""
    with tempfile.TemporaryDirectory(prefix="extended-") as folder:
        add_family(Path(folder))
        environment = {**os.environ, "PYTHONPATH": folder}
        nanotron = [sys.executable, "-c", "from nanotron.cli import main; main()"]
        subprocess.run([*nanotron, "tokenize", "--stdlib"], env=environment, check=True)
        train = [*nanotron, "train", str(HERE / "config.yaml"), "--plain", *arguments]
        return subprocess.run(train, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

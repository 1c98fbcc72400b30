"""A hundred sums as questions and answers, and marks for a model's answers.

python sums.py write FOLDER      FOLDER/sums, a data set to fine-tune on, and FOLDER/questions.jsonl
python sums.py mark ANSWERS      how many lines of `nanotron generate --json` go on with the right sum
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

SUMS = {f"Q: {a} + {b}\nA:": f" {a + b}" for a in range(10) for b in range(10)}


def write(folder: Path) -> None:
    """Write the questions, and the data set with the answers."""
    from datasets import Dataset

    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": question}) for question in SUMS]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    Dataset.from_dict({"prompt": list(SUMS), "completion": list(SUMS.values())}).save_to_disk(str(folder / "sums"))


def mark(answers: Path) -> int:
    """Count and tell the right ones."""
    given = [json.loads(line) for line in answers.read_text().splitlines()]
    right = sum(bool(re.match(rf"{SUMS[one['prompt']]}(?!\d)", one["text"])) for one in given)
    print(f"{answers.stem}: {right} of {len(given)} sums are right")
    return right


if __name__ == "__main__":
    {"write": write, "mark": mark}[sys.argv[1]](Path(sys.argv[2]))

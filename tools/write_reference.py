"""Write what is generated from the code, after it has changed: `make reference`.

python tools/write_reference.py        docs/config.md, the table of docs/compatibility.md, examples/config.schema.json,
                                       the figures in the headers of those examples that say what was planned
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nanotron.check import examine
from nanotron.config.reference import reference, status_table
from nanotron.config.schema import json_schema
from nanotron.pipeline.schedules import SCHEDULE_NAMES

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- keys:.*?-->\n\n).*?(\n<!-- end of keys -->)", flags=re.DOTALL)
PLANNED = re.compile(r"(?<=^# `nanotron plan` for h100:\n)(?:#   .*\n)*", flags=re.MULTILINE)
"""What an example's header says of it."""


def planned(example: Path) -> str:
    """The lines of a plan that a header shows."""
    from nanotron.plan.hardware import find_cluster
    from nanotron.plan.predict import Planner
    from nanotron.plan.text import plan_text

    config = examine(example, files=False).config
    lines = plan_text(Planner(find_cluster("h100", 8)).plan(config)).splitlines()
    shown = [lines[0], *(line for line in lines if line.startswith(("step ", "throughput ", "whole run ", "It ")))]
    return "".join(f"#   {line}\n" for line in shown)


def main() -> None:
    """Write them all."""
    for example in sorted((ROOT / "examples").glob("*.yaml")):
        text = example.read_text(encoding="utf-8")
        if PLANNED.search(text):
            example.write_text(PLANNED.sub(lambda _, file=example: planned(file), text), encoding="utf-8")  # type: ignore[misc]
    (ROOT / "docs" / "config.md").write_text(reference(), encoding="utf-8")
    schema = json.dumps(json_schema(SCHEDULE_NAMES), indent=1, ensure_ascii=False)
    (ROOT / "examples" / "config.schema.json").write_text(schema + "\n", encoding="utf-8")
    page = ROOT / "docs" / "compatibility.md"
    text = TABLE.sub(lambda found: found[1] + status_table() + found[2], page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""Write what is generated from the declarations of the config's keys, after any of them has changed.

python tools/write_reference.py        docs/config.md, the table of docs/compatibility.md, examples/config.schema.json
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nanotron.config.reference import reference, status_table
from nanotron.config.schema import json_schema
from nanotron.pipeline.schedules import SCHEDULE_NAMES

ROOT = Path(__file__).parents[1]
TABLE = re.compile(r"(<!-- keys:.*?-->\n\n).*?(\n<!-- end of keys -->)", flags=re.DOTALL)


def main() -> None:
    """Write the three files."""
    (ROOT / "docs" / "config.md").write_text(reference(), encoding="utf-8")
    schema = json.dumps(json_schema(SCHEDULE_NAMES), indent=1, ensure_ascii=False)
    (ROOT / "examples" / "config.schema.json").write_text(schema + "\n", encoding="utf-8")
    page = ROOT / "docs" / "compatibility.md"
    text = TABLE.sub(lambda found: found[1] + status_table() + found[2], page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The core can be read in an afternoon: the README names its files and how long they are, and this holds it to that."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CEILING = 5_800
"""Lines. A capability may raise it in its own commit, and says so; beyond 6,000 something has to go."""


def rooms() -> dict[str, tuple[list[str], int]]:
    """Room -> (its files, its lines) as the README's table has them."""
    table = (ROOT / "README.md").read_text().partition("## The core")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)/`[^|]*\| ([^|]*) \| (\d+) \|$", table, re.MULTILINE)
    return {room: (re.findall(r"`(\w+\.py)`", files), int(lines)) for room, files, lines in rows}


def test_the_readme_says_how_long_the_core_is() -> None:
    assert set(rooms()) == {"parallel", "ops", "models", "pipeline", "optim", "training"}
    total = 0
    for room, (files, stated) in rooms().items():
        found = sum(len((ROOT / "src" / "nanotron" / room / file).read_text().splitlines()) for file in files)
        assert abs(found - stated) <= 0.03 * stated, f"{room}/ has {found} lines now, not {stated}"
        total += found
    assert total <= CEILING


def test_a_room_names_all_of_its_files_or_the_rest_is_around_the_core() -> None:
    around = {
        "parallel": {"agreement.py", "gloo.py", "store.py"},
        "ops": {"experts.py", "fp8.py", "host_memory.py"},
        "models": {
            "cache.py",
            "experts.py",
            "flops.py",
            "latent_attention.py",
            "latent_decoder.py",
            "olmoe.py",
            "olmoe_decoder.py",
            "hf_config.py",
            "hf_deepseek.py",
            "hf_facts.py",
            "hf_nanotron_names.py",
            "hf_tensors.py",
        },
        "pipeline": {"custom.py", "draw.py", "trace.py"},
        "optim": {"muon.py", "norms.py", "owners.py", "sharding.py"},
        "training": {
            "balance.py",
            "diagnostics.py",
            "evaluate.py",
            "groups.py",
            "host_copy.py",
            "init_or_resume.py",
            "mup.py",
            "replicas.py",
            "rollback.py",
        },
    }
    for room, (files, _) in rooms().items():
        there = {path.name for path in (ROOT / "src" / "nanotron" / room).glob("*.py")} - {"__init__.py"}
        assert there == {*files} | around[room]

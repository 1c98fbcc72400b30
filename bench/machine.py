"""What a figure was measured on: processor, cores, load, versions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.environments import versions

TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "bf16", "sve")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_facts(environments: Iterable[str | None]) -> dict[str, Any]:
    """Facts of the machine as it is now, and the versions in each environment."""
    info = Path("/proc/cpuinfo")
    lines = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line] if info.exists() else []
    found = {key.strip(): value.strip() for key, value in lines}
    flags = set(found.get("flags", found.get("Features", "")).split())
    return {
        "processor": found.get("model name", platform.processor() or platform.machine()),
        "flags": [flag for flag in TELLING_FLAGS if flag in flags],
        "cores": cores(),
        "load_average": os.getloadavg()[0],
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name or "ours": versions(name) for name in sorted(set(environments), key=str)},
    }


def describe(facts: dict[str, Any]) -> list[str]:
    """The facts as lines to print."""
    flags = f" ({', '.join(facts['flags'])})" if facts["flags"] else ""
    lines = [
        f"{facts['date']}  {facts['processor']}{flags}, {facts['cores']} cores, {facts['system']}, "
        f"Python {facts['python']}, load average at start {facts['load_average']:.2f}"
    ]
    for name, found in facts["versions"].items():
        lines.append(f"  {name}: {', '.join(f'{package} {version}' for package, version in found.items())}")
    if was_busy(facts):
        lines.append("The machine was busy when this began: take the ratios with care and the figures not at all.")
    return lines


def was_busy(facts: dict[str, Any]) -> bool:
    """Whether other programs ran when the facts were taken."""
    return bool(facts["load_average"] > 0.25 * facts["cores"])

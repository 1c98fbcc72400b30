"""What is known of accelerators: ``devices.toml`` as frozen facts."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Device:
    """One accelerator. Bandwidths are bytes/s, peaks FLOP/s, memory bytes."""

    name: str
    match: tuple[str, ...]
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    peak_flops: dict[str, float]
    source: str
    multiplies_blocks: bool = False
    """Whether torch has a kernel there for fp8 with scales of blocks."""


@cache
def known_devices() -> dict[str, Device]:
    """All devices of ``devices.toml`` by their short name."""
    table = tomllib.loads(files("nanotron.metrics").joinpath("devices.toml").read_text(encoding="utf-8"))
    return {name: Device(name=name, **{**facts, "match": tuple(facts["match"])}) for name, facts in table.items()}


def find_device(reported_name: str) -> Device | None:
    """The device behind the name that PyTorch reports ("NVIDIA H100 80GB HBM3"); None when it is not in the table."""
    lowered = reported_name.lower()
    fitting = [device for device in known_devices().values() if all(word.lower() in lowered for word in device.match)]
    return max(fitting, key=lambda device: sum(map(len, device.match)), default=None)

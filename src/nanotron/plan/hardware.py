"""How long counted work takes on a cluster: device facts from ``devices.toml``, and a few constants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.metrics.devices import Device, known_devices
from nanotron.plan.counting import Traffic, Work

if TYPE_CHECKING:
    from nanotron.config import Config

# The two constants that are fitted to published runs (bench/published.py, docs/plan.md).
MATMUL_EFFICIENCY = 0.66
"""Share of the peak that matrix products reach."""
NETWORK_EFFICIENCY = 0.4
"""Share of the adapters' rate that collectives between nodes reach in a large job."""

# Not fitted: round numbers of the right size.
MEMORY_EFFICIENCY = 0.8  # of the memory bandwidth, for kernels that only move data
LINK_EFFICIENCY = 0.8  # of one direction of the links inside a node
HOST_SECONDS = 8e-6  # that Python and PyTorch need to launch a kernel, forward or backward
LINK_LATENCY, NETWORK_LATENCY = 10e-6, 30e-6  # of a collective inside a node; per doubling of the nodes
_STEPS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}  # times each byte goes around the ring


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. World rank r is device r mod ``per_node`` of node r // ``per_node``."""

    device: Device
    per_node: int

    @property
    def memory_bytes(self) -> float:
        """What a rank may use; ranks on a CPU share the machine's memory."""
        if self.is_accelerator:
            return self.device.memory_bytes
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / self.per_node

    @property
    def is_accelerator(self) -> bool:
        """Whether the device has a memory and links of its own."""
        return self.device.name != "cpu"

    def peak_flops(self, config: Config) -> float:
        """Dense peak for the model's dtype. Raises ConfigError for a dtype that the device does not list."""
        dtype = config.model.dtype
        if dtype not in self.device.peak_flops:
            known = ", ".join(self.device.peak_flops)
            raise ConfigError(f"model.dtype={dtype}: no peak is known for {self.device.name}; use one of {known}")
        return self.device.peak_flops[dtype]

    def compute_seconds(self, work: Work, peak_flops: float) -> float:
        """Time of the kernels: matrix products at a share of the peak, the rest at memory speed, or launching them."""
        busy = (work["matmul"] + work["attention"]) / (MATMUL_EFFICIENCY * peak_flops)
        busy += work["moved"] / (MEMORY_EFFICIENCY * self.device.memory_bandwidth)
        return max(busy, work["kernels"] * HOST_SECONDS) if self.is_accelerator else busy

    def traffic_seconds(self, kind: str, num_bytes: float, calls: float, ranks: int, stride: int) -> float:
        """Time of collectives over ``ranks`` ranks that are ``stride`` apart, of ``num_bytes`` in total."""
        if ranks == 1:
            return 0.0
        seconds = _STEPS[kind] * (ranks - 1) / ranks * num_bytes / self.ring_bandwidth(ranks, stride)
        return seconds + calls * self.latency(ranks, stride)

    def ring_bandwidth(self, ranks: int, stride: int) -> float:
        """Bytes per second that each rank of a ring passes on: the links', or the adapters' of all its ranks on a node."""
        links = LINK_EFFICIENCY * self.device.link_bandwidth / 2  # one direction
        on_a_node = max(1, self.per_node // stride)
        if ranks <= on_a_node:
            return links
        return min(links, NETWORK_EFFICIENCY * self.device.network_bandwidth * min(on_a_node, ranks))

    def latency(self, ranks: int, stride: int) -> float:
        """Seconds that a collective of no bytes takes."""
        on_a_node = max(1, self.per_node // stride)
        if ranks <= on_a_node:
            return LINK_LATENCY
        return LINK_LATENCY + NETWORK_LATENCY * log2(2 * ranks / on_a_node)

    def transfer_seconds(self, num_bytes: float, stride: int) -> float:
        """Time of a message between two ranks that are ``stride`` apart."""
        if stride < self.per_node:
            return LINK_LATENCY + num_bytes / (LINK_EFFICIENCY * self.device.link_bandwidth / 2)
        return NETWORK_LATENCY + num_bytes / (NETWORK_EFFICIENCY * self.device.network_bandwidth)


def find_cluster(name: str, per_node: int) -> Cluster:
    """The cluster of a device's short name. Raises ConfigError for an unknown one."""
    devices = known_devices()
    if name.lower() not in devices:
        raise ConfigError(f"--gpu {name}: not one of {', '.join(sorted(devices))}")
    return Cluster(devices[name.lower()], per_node)

"""How long counted work takes on a cluster: device facts from ``devices.toml``, and a few constants."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import ceil, log2
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.metrics.devices import Device, known_devices
from nanotron.plan.counting import Work

if TYPE_CHECKING:
    from nanotron.config import Config

MATMUL_EFFICIENCY, NETWORK_EFFICIENCY = 0.6, 0.8  # the two that are fitted to published runs (docs/plan.md)

MEMORY_EFFICIENCY = 0.8  # of the memory bandwidth, for kernels that only move data
LINK_EFFICIENCY = 0.8  # of one direction of the links inside a node
HOST_SECONDS = 8e-6  # that Python and PyTorch take to launch a kernel
# Seconds of a collective before its first byte, and of each hop: NCCL's own model (src/graph/tuning.cc, Simple).
BASE_LATENCY, LINK_HOP, NETWORK_HOP = 8.4e-6, 3.4e-6, 14e-6


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. World rank r is device r mod ``per_node`` of node r // ``per_node``."""

    device: Device
    per_node: int
    matmul_efficiency: float = MATMUL_EFFICIENCY
    """Share of the peak that matmuls reach."""
    network_efficiency: float = NETWORK_EFFICIENCY
    """Share of the adapters' rate that collectives between nodes reach."""

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
        """Dense peak for the model's dtype. Raises ConfigError for one that it does not list, or no fp8 for."""
        dtype, fp8 = config.model.dtype, config.model.fp8
        if fp8 and self.is_accelerator and not self.device.multiplies_blocks:
            able = ", ".join(name for name, device in known_devices().items() if device.multiplies_blocks)
            raise ConfigError(f"model.fp8={fp8}: torch has no kernel for it on {self.device.name}; plan for {able}")
        if dtype not in self.device.peak_flops:
            known = ", ".join(self.device.peak_flops)
            raise ConfigError(f"model.dtype={dtype}: no peak is known for {self.device.name}; use one of {known}")
        return self.device.peak_flops[dtype]

    def compute_seconds(self, work: Work, peak_flops: float) -> float:
        """Time of the kernels: matmuls at a share of the peak, the rest at memory speed, or launching them."""
        busy = (work["matmul"] + work["attention"]) / (self.matmul_efficiency * peak_flops)
        if work["fp8"]:
            busy += work["fp8"] / (self.matmul_efficiency * self.device.peak_flops["float8"])
        busy += work["moved"] / (MEMORY_EFFICIENCY * self.device.memory_bandwidth)
        return max(busy, work["kernels"] * HOST_SECONDS) if self.is_accelerator else busy

    def collective_seconds(self, kind: str, num_bytes: float, calls: float, ranks: int, on_a_node: int) -> float:
        """Time of ``calls`` collectives of ``num_bytes`` together, over ``ranks`` ranks of which these share a node."""
        if ranks == 1:
            return 0.0
        latency = calls * self.latency(kind, ranks, on_a_node)
        if kind == "all_to_all":  # each rank's own bytes to each other one, at once over links and its adapter
            share, others = num_bytes / ranks, ranks - on_a_node
            return latency + share * max((on_a_node - 1) / self.links, others / self.adapter)
        rounds = 2 if kind == "all_reduce" else 1  # times that each byte goes around the ring
        return latency + rounds * (ranks - 1) / ranks * num_bytes / self.ring_bandwidth(ranks, on_a_node)

    @property
    def links(self) -> float:
        """Bytes per second from a device to others of its node."""
        return LINK_EFFICIENCY * self.device.link_bandwidth / 2

    @property
    def adapter(self) -> float:
        """Bytes per second from a device to other nodes."""
        return self.network_efficiency * self.device.network_bandwidth

    def ring_bandwidth(self, ranks: int, on_a_node: int) -> float:
        """Bytes per second that a rank of a ring passes on: the links', or the adapters' of all its ranks on a node."""
        return self.links if ranks <= on_a_node else min(self.links, self.adapter * on_a_node)

    def latency(self, kind: str, ranks: int, on_a_node: int) -> float:
        """Seconds that a collective of no bytes takes: around a ring, or, for an all-reduce, up and down a tree.

        The messages of an all-to-all leave at once.
        """
        nodes = -(-ranks // on_a_node)
        if kind == "all_to_all":
            return BASE_LATENCY + (NETWORK_HOP if nodes > 1 else LINK_HOP)
        ring = (ranks - nodes) * LINK_HOP + (nodes if nodes > 1 else 0) * NETWORK_HOP
        tree = (on_a_node - 1) * LINK_HOP + ceil(log2(nodes)) * NETWORK_HOP
        return BASE_LATENCY + (2 * min(ring, tree) if kind == "all_reduce" else ring)

    def transfer_seconds(self, num_bytes: float, stride: int) -> float:
        """Time of a message between two ranks that are ``stride`` apart."""
        if stride < self.per_node:
            return BASE_LATENCY + num_bytes / self.links
        return BASE_LATENCY + NETWORK_HOP + num_bytes / self.adapter


def find_cluster(name: str, per_node: int) -> Cluster:
    """The cluster of a device's short name. Raises ConfigError for an unknown one."""
    devices = known_devices()
    if name.lower() not in devices:
        raise ConfigError(f"--gpu {name}: not one of {', '.join(sorted(devices))}")
    return Cluster(devices[name.lower()], per_node)

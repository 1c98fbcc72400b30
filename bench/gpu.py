"""`python -m bench.gpu`: what only an accelerator can show, as one script that ends within 7 minutes.

    versions      what is installed, and which kernels are chosen
    parity        tiny models on the device and on the CPU: losses and gradient norms of three steps, side by side
    fp8           products of numbers in 8 bits, and a model's steps, beside the same on the CPU
    waits         a step during which the host may not wait for the device
    collectives   every word of `parallel/comm.py` in a group of one rank, awaited at once and later
    resume        a run killed and started again: the same bits
    1.3B          ours, as written and compiled: tokens/s, MFU, peak memory beside what `nanotron plan` says
    kernels       times of single GEMMs, attention, elementwise work, copies
    0.3B          ours beside transformers, as written and compiled, taking turns

Everything found is a line of JSON as soon as it is known, in a file too with ``--out``. A section that raises, or takes
longer than its share of the time, ends there with a line that says so, and the others go on. Without an accelerator the
script says so and ends with exit code 2; ``--dry-run`` goes through the same lines on a CPU with tiny models and all
the time they take, and its figures mean nothing. Nobody has run it on a GPU yet.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import torch

from bench import gpu_checks, gpu_speed
from bench.gpu_subject import Found, Subject
from nanotron.metrics.devices import find_device, known_devices

FAILED, NO_ACCELERATOR = 1, 2  # exit codes
LIMIT_S = 420.0
SECTIONS: dict[str, tuple[Callable[[Subject], Generator[Found]], float]] = {
    "versions": (gpu_checks.versions, 10.0),
    "parity": (gpu_checks.parity, 75.0),
    "fp8": (gpu_checks.fp8, 20.0),
    "waits": (gpu_checks.waits, 20.0),
    "collectives": (gpu_checks.collectives, 15.0),
    "resume": (gpu_checks.resume, 60.0),
    "1.3B": (gpu_speed.alone, 100.0),
    "kernels": (gpu_speed.kernels, 30.0),
    "0.3B": (gpu_speed.in_turns, 90.0),
}
"""Each with the seconds after which nothing more of it begins."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="What only an accelerator can show.")
    parser.add_argument("--section", choices=SECTIONS, action="append", help="only this one; may be repeated")
    parser.add_argument("--out", type=Path, help="a file that every line of JSON is appended to as well")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU: shows that the script runs")
    asked = parser.parse_args(arguments)
    if not (asked.dry_run or torch.accelerator.is_available()):
        print("bench.gpu: this machine has no accelerator; --dry-run shows on a CPU that it runs", file=sys.stderr)
        return NO_ACCELERATOR
    subject = _dry() if asked.dry_run else _accelerator()

    def tell(section: str, found: Found) -> None:
        line = json.dumps({"section": section, **found})
        print(line, flush=True)
        if asked.out is not None:
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    end, sound = time.perf_counter() + LIMIT_S, True
    for name in asked.section or SECTIONS:
        section, seconds = SECTIONS[name]
        until = math.inf if subject.dry else min(end, time.perf_counter() + seconds)
        sound &= _run(section(subject), until, partial(tell, name))
    return 0 if sound else FAILED


def _run(section: Generator[Found], end: float, tell: Callable[[Found], None]) -> bool:
    """Tell what a section finds until ``end``, a moment of `time.perf_counter`; whether nothing was wrong with it."""
    sound = True
    try:
        while time.perf_counter() < end:
            found = next(section, None)
            if found is None:
                return sound
            tell(found)
            sound &= found.get("ok", True)
        tell({"stopped": "its time is over"})
    except Exception as error:
        tell({"error": f"{type(error).__name__}: {error}"})
        traceback.print_exception(error)
        error.__traceback__ = None  # its frames hold models
        sound = False
    finally:
        section.close()
        gc.collect()
    return sound


def _accelerator() -> Subject:
    device = torch.device(torch.accelerator.current_accelerator() or "cpu", 0)
    name = str(torch.get_device_module(device).get_device_name(device))
    return Subject(device, name, find_device(name), dry=False)


def _dry() -> Subject:
    torch.set_num_threads(1)  # more would wait for one another on a busy machine, and find nothing
    return Subject(torch.device("cpu"), "cpu", known_devices().get("cpu"), dry=True)


if __name__ == "__main__":
    sys.exit(main())

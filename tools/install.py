"""Install the packages of a requirements file with pip, as one bar that says which and how many.

    .venv/bin/python tools/install.py requirements.lock

pip's own words, which name package indexes and what they lack, are shown only where it fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections import deque
from importlib.metadata import distributions
from pathlib import Path

WIDTH, TICK_S, KEPT = 30, 0.25, 40  # characters of the bar, seconds between drawings, lines told of a failure
PIP = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-color", "--progress-bar", "off"]
FOUND = re.compile(r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)")
FETCHED = re.compile(r"\s+(?:Downloading|Using cached) ([\w.]+)-\S+ (\([\d.]+ \w+\))")


class Progress:
    """How far pip has come, by what it prints."""

    def __init__(self, total: int) -> None:
        self.total, self.found, self.doing, self.unpacking = total, 0, "", False

    def line(self, text: str) -> None:
        """Take the next line."""
        if found := FOUND.match(text):
            self.found, self.doing = self.found + 1, found[1]
        elif fetched := FETCHED.match(text):
            self.doing = f"{fetched[1]} {fetched[2]}"
        elif text.startswith("Installing collected packages"):
            self.unpacking = True

    def bar(self, unpacked: int, seconds: float) -> str:
        """Finding and fetching is the first half of the way, unpacking the second."""
        count, total = (unpacked if self.unpacking else self.found), max(self.total, self.found)
        filled = round(WIDTH * (count / max(total, 1) + self.unpacking) / 2)
        doing = "unpacking" if self.unpacking else self.doing
        return f"{'━' * filled}{'─' * (WIDTH - filled)} {seconds:3.0f} s  {count} of {total}  {doing}"


def packages(requirements: Path) -> int:
    """Lines that name one."""
    return sum(bool(re.match(r"\w", line)) for line in requirements.read_text(encoding="utf-8").splitlines())


def install(requirements: Path) -> int:
    """Run pip, and return its exit code."""
    progress, last = Progress(packages(requirements)), deque[str](maxlen=KEPT)
    pip = subprocess.Popen(
        [*PIP, "-r", str(requirements)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )

    def read() -> None:
        for line in pip.stdout or ():
            last.append(line)
            progress.line(line)

    reader = threading.Thread(target=read)
    reader.start()
    began, there = time.monotonic(), sum(1 for _ in distributions())
    while reader.is_alive():
        if sys.stdout.isatty():
            unpacked = max(0, sum(1 for _ in distributions()) - there) if progress.unpacking else 0
            print(f"\r\033[K{progress.bar(unpacked, time.monotonic() - began)[:100]}", end="", flush=True)
        reader.join(TICK_S)
    if sys.stdout.isatty():
        print("\r\033[K", end="")
    if pip.wait():
        sys.stderr.writelines(last)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(install(Path(sys.argv[1])))

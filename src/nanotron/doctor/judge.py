"""What all ranks measured, as lines for a person, and what is out of line: each number against the median. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanotron.errors import shorten
from nanotron.launch.alike import VARIABLE, VERSION_OF, Facts, differences
from nanotron.logging import human_format

Account = Mapping[str, Any]
"""Of a rank: ``host``, ``facts``, ``variables``, ``numbers``, ``sources`` (of links), ``clock``, ``problems``."""


class Measure(NamedTuple):
    """How a number is shown and judged; ``limit``: of how many times worse than the median is out of line."""

    unit: str
    scale: float
    limit: float
    advice: str
    least: float = 0.0
    """Less than this beyond the median is never out of line."""
    is_rate: bool = True


MEASURES = {
    "matmul": Measure("TFLOP/s", 1e-12, 1.3, "its device is throttled, shared with others, or faulty"),
    "bandwidth": Measure("GB/s", 1e-9, 2.0, "look at that link and its adapters, and at the interface in use"),
    "latency": Measure("ms", 1e3, 5.0, "look at that link, and at what else those machines do", 1e-3, is_rate=False),
    "write": Measure("MB/s", 1e-6, 3.0, "look at how that host reaches the storage"),
    "read": Measure("MB/s", 1e-6, 3.0, "look at how that host reaches the storage"),
}
"""By the first word of what was measured."""
MOST_SKEW_S = 0.5  # the order of failures on several hosts is told by their clocks


class Spread(NamedTuple):
    """One measure over all ranks that have it."""

    what: str
    median: float
    """With two ranks, the better of both."""
    worst: float
    rank: int
    source: int | None
    """Where the worst one's link comes from."""

    @property
    def measure(self) -> Measure:
        return MEASURES[self.what.split()[0]]

    @property
    def ratio(self) -> float:
        """How many times worse than the median the worst is."""
        return self.median / self.worst if self.measure.is_rate else self.worst / self.median

    def where(self, accounts: Sequence[Account]) -> str:
        """`rank 3 on b`, `rank 2 on a to rank 3 on b`; no hosts where there is only one."""
        several = len({account["host"] for account in accounts}) > 1
        path = [rank for rank in (self.source, self.rank) if rank is not None]
        return " to ".join(f"rank {rank}" + f" on {accounts[rank]['host']}" * several for rank in path)


def spread_of(what: str, accounts: Sequence[Account], rank: int | None = None) -> Spread:
    """A measure's spread; with ``rank``, that rank's number in the worst one's place."""
    numbers = {rank: account["numbers"][what] for rank, account in enumerate(accounts) if what in account["numbers"]}
    is_rate = MEASURES[what.split()[0]].is_rate
    usual = statistics.median_high(numbers.values()) if is_rate else statistics.median_low(numbers.values())
    if rank is None:
        rank = (min if is_rate else max)(numbers, key=numbers.__getitem__)
    return Spread(what, usual, numbers[rank], rank, accounts[rank]["sources"].get(what))


def problems_of(accounts: Sequence[Account]) -> list[str]:
    """What is out of line, a line each."""
    problems = [line for account in accounts for line in account["problems"]]
    problems += differences([Facts(account["facts"], list(account["facts"]), account["host"]) for account in accounts])
    usual = statistics.median(account["clock"][0] for account in accounts)
    skews = {account["host"]: (account["clock"][0] - usual, account["clock"][1]) for account in accounts}
    for host, (offset, error) in skews.items():
        if abs(offset) - error > MOST_SKEW_S:
            problems.append(
                f"clock of {host}: {abs(offset):.1f} s {'ahead' if offset > 0 else 'behind'}; set it by NTP"
            )
    for what in measured(accounts):
        outliers = [
            found
            for rank, account in enumerate(accounts)
            if what in account["numbers"] and is_out_of_line(found := spread_of(what, accounts, rank))
        ]
        problems += shorten([_outlier(found, accounts) for found in sorted(outliers, key=lambda found: -found.ratio)])
    return problems


def is_out_of_line(found: Spread) -> bool:
    """Whether a number is so much worse than the median that somebody should look."""
    return found.ratio > found.measure.limit and abs(found.worst - found.median) > found.measure.least


def _outlier(found: Spread, accounts: Sequence[Account]) -> str:
    _, scale, limit, advice, *_ = found.measure
    mine, usual = human_format(found.worst * scale), human_format(found.median * scale)
    return (
        f"{found.what}: {mine} {found.measure.unit}, {found.where(accounts)}, {found.ratio:.1f} times worse than the "
        f"median of {usual} (more than {limit:g} is out of line); {advice}"
    )


def measured(accounts: Sequence[Account]) -> list[str]:
    """What any rank has measured, in the order of MEASURES."""
    found = dict.fromkeys(what for account in accounts for what in account["numbers"])
    return sorted(found, key=lambda what: list(MEASURES).index(what.split()[0]))


def table(accounts: Sequence[Account], storage: str) -> list[str]:
    """What was found, for a person; ``storage``: what there is to say of it."""
    hosts, facts = dict.fromkeys(account["host"] for account in accounts), accounts[0]["facts"]
    versions = [f"{key.removeprefix(VERSION_OF)} {facts[key]}" for key in facts if key.startswith(VERSION_OF)]
    lines = [
        f"{len(accounts)} rank{'s' * (len(accounts) > 1)} on {', '.join(shorten([*hosts]))}: {facts['kind of device']}",
        ", ".join(versions),
        f"{'':30}{'':>8}{'median':>10}{'worst':>10}",
    ]
    for what in measured(accounts):
        found = spread_of(what, accounts)
        usual, worst = (human_format(number * found.measure.scale) for number in (found.median, found.worst))
        lines.append(f"{what:30}{found.measure.unit:>8}{usual:>10}{worst:>10}  {found.where(accounts)}")
    offsets = [account["clock"][0] for account in accounts]
    if len(hosts) > 1:
        error = max(account["clock"][1] for account in accounts)
        lines.append(f"clocks: {max(offsets) - min(offsets):.2g} s apart, give or take {error:.2g}")
    lines.append(storage)
    variables = [f"{name}={value}" for name, value in accounts[0]["variables"].items()]
    lines += [f"environment: {' '.join(variables)}"] if variables else []
    return lines + notes_of(accounts)


def notes_of(accounts: Sequence[Account]) -> list[str]:
    """Variables that are not the same everywhere, which may be right: interfaces have names of their own."""
    everyones = [{f"{VARIABLE}{name}": value for name, value in a["variables"].items()} for a in accounts]
    facts = [Facts(values, list(values), a["host"]) for values, a in zip(everyones, accounts, strict=True)]
    return [f"note: {line}" for line in differences(facts)]

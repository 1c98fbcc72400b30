"""Every layout against one device, as a table: `python -m tests.parity [words]` keeps the cases that have all words."""

from __future__ import annotations

import sys
import time

from tests.parity.cases import Case, every_case
from tests.parity.compare import difference
from tests.parity.run import Record, record
from tests.parity.selection import selection
from tests.pool import CaseFailed, Pool

HEADER = f"{'':4}{'dp tp pp, then what differs from the default':58}{'loss':>9}{'norm':>9}{'gradient':>9}  of"


def main(words: list[str]) -> int:
    """Run all cases; print one line each and return 1 if any differs from one device."""
    cases = list(dict.fromkeys([*every_case(), *selection()]))
    cases = [case for case in cases if all(word in str(case).split() for word in words)]
    pool, references, problems, start = Pool(), dict[Case, Record](), list[str](), time.monotonic()
    print(HEADER)
    for case in cases:
        problems += compare(pool, references, case)
    pool.close()
    print(f"{len(cases)} layouts, {len(problems)} differences, {time.monotonic() - start:.0f} s")
    print("\n".join(problems))
    return 1 if problems else 0


def compare(pool: Pool, references: dict[Case, Record], case: Case) -> list[str]:
    """Run one case, print its line, return its problems."""
    one_device = case.same_numbers()
    if one_device not in references:
        references[one_device] = record(pool, one_device)
    try:
        found = difference(record(pool, case), references[one_device])
    except (CaseFailed, AssertionError) as failure:
        print(f"BAD {case!s:58}{'did not finish':>27}", flush=True)
        return [f"{case}: {failure}"]
    problems = found.problems(case)
    errors = [max(loss.error for loss in found.losses), found.norm.error, found.grad.error]
    numbers = "".join(f"{error:9.0e}" for error in errors) + "  " + found.grad.where.split()[-1]
    print(f"{'BAD' if problems else 'ok':4}{case!s:58}{numbers}", flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

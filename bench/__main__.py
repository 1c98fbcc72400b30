"""Ours and what a user would pick instead, on the same work, taking turns in one run.

    python -m bench [SUBJECT ...] [--shape reference] [--rounds 9] [--steps 2] [--only WORD ...] [--json FILE]
    python -m bench first [--rounds 3] [--steps 20] [--json FILE]
    python -m bench compare OLD.json NEW.json [--worse 0.95]

``first`` is about starting and memory: bench/first_step.py; ``compare`` is about two earlier runs: bench/compare.py.
The other subjects are in bench/contenders.py; without any, all of those run. docs/benchmarks.md says what is compared
and how.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import compare as earlier_runs
from bench import first_step
from bench.contenders import SUBJECTS, Contender, Subject
from bench.environments import FOLDER
from bench.machine import describe, machine_facts
from bench.report import LIMIT, as_json, lines, table
from bench.runner import compare
from bench.shapes import SHAPES, Shape


def say(line: str) -> None:
    """Tell how far the run has come, on standard error: standard output is the result's."""
    print(line, file=sys.stderr, flush=True)


def chosen(subject: Subject, words: Sequence[str]) -> list[Contender]:
    """The limit, and the contenders whose name has one of the words; without words all of them."""
    found = [one for one in subject.contenders if not words or any(word in one.name for word in words)]
    return [LIMIT, *found]


def run_subject(name: str, shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one subject, print its table, and return what it says."""
    subject = SUBJECTS[name]
    contenders = chosen(subject, options.only)
    shape = replace(shape, **subject.shape)
    measured = compare(
        subject, contenders, shape, FOLDER / "logs" / name, rounds=options.rounds, steps=options.steps, say=say
    )
    found = lines(subject, contenders, shape, measured)
    result = as_json(subject, shape, found, measured)
    cut = f"{subject.world} × {subject.threads} threads" if subject.world > 1 else f"{subject.threads} threads"
    rate = result["matmul_flops_per_second"]
    limit = f"limit: matrix products alone {rate / 1e9:.1f} GFLOP/s" if rate else "the limit was not measured"
    title = (
        f"\n{name}: {subject.title}, {cut}; {limit}, model {result['model_flops_per_token'] / 1e6:.1f} MFLOP a token"
    )
    print("\n".join(table(title, found)), flush=True)
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subjects; 1 when a contender failed or ours fell behind an earlier run's, else 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["first"]:
        return first_step.main(arguments[1:])
    if arguments[:1] == ["compare"]:
        return earlier_runs.main(arguments[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", nargs="*", choices=[[], *SUBJECTS], help=f"any of {', '.join(SUBJECTS)}")
    parser.add_argument("--shape", choices=SHAPES, default="reference")
    parser.add_argument("--rounds", type=int, default=9, help="turns of each contender that are counted")
    parser.add_argument("--steps", type=int, default=2, help="steps of one turn")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="contenders with such a name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    kept = "write that, under its date, to this folder too, and compare it with the newest like it that is there"
    parser.add_argument("--history", type=Path, metavar="FOLDER", help=kept)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the contenders are ended on the way out
    names, shape = options.subject or list(SUBJECTS), SHAPES[options.shape]
    contenders = [one for name in names for one in chosen(SUBJECTS[name], options.only)]
    facts = machine_facts(one.environment for one in contenders)
    print("\n".join(describe(facts)), flush=True)
    size = f"{shape.num_hidden_layers} layers of {shape.hidden_size}, vocabulary {shape.vocab_size}"
    batch = f"{shape.num_microbatches} microbatches of {shape.micro_batch_size} × {shape.sequence_length} tokens"
    print(f"shape {options.shape}: Llama, {size}; {batch}; medians of {options.rounds} rounds of {options.steps} steps")
    results = {name: run_subject(name, shape, options) for name in names}
    told = {"machine": facts, "shape": options.shape, "rounds": options.rounds, "steps": options.steps}
    told["subjects"] = results
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")
    failed = [one for result in results.values() for one in result["contenders"].values() if one["failure"]]
    earlier = earlier_runs.keep(told, options.history) if options.history else None
    fell = earlier is not None and earlier_runs.report(earlier, told)
    return 1 if failed or fell else 0


if __name__ == "__main__":
    sys.exit(main())

"""What ranks must have alike before they train: a config without mistakes, the same config and versions. No torch.

    every rank     its mistakes and a hash ──► rank 0: nothing is wrong, these mistakes, or the hashes differ
    if they do     config, versions, code ───► rank 0: which key differs, and what each rank of which host has

The same question is put to the ranks' data once it is open: data_disagreements.

One round through the store when all is well.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.parallel.agreement import Agreement

if TYPE_CHECKING:
    from nanotron.config import Config
    from nanotron.launch.place import Place

VERSION_OF, DATA_OF, KIND_OF, VARIABLE = "version of ", "data of ", "kind of ", "environment variable "
SHOWN = 8  # ranks or lines that are listed before the rest is counted
LONGEST_VALUE = 120


class Facts(NamedTuple):
    """What a rank trains with: every key's value by its dotted name, versions too, and the keys that somebody wrote."""

    values: dict[str, Any]
    written: list[str]
    host: str = ""

    @property
    def digest(self) -> str:
        """A hash of the values."""
        return hashlib.sha256(json.dumps(self.values).encode()).hexdigest()


def disagreements(agreement: Agreement, place: Place, config: Config | None, mistakes: Sequence[str]) -> list[str]:
    """What keeps the ranks from training together, the same lines on every rank.

    ``mistakes`` are this rank's own, and ``config`` is None when there are any. Raises LostPeers that names the ranks
    which say nothing.
    """
    facts = None if config is None else facts_of(config)
    account = {"host": socket.gethostname(), "mistakes": list(mistakes), "digest": facts and facts.digest}

    def judge(accounts: list[Any]) -> dict[str, Any]:
        lines = told(accounts, place.local_world)
        return {"lines": lines, "differ": not lines and len({account["digest"] for account in accounts}) > 1}

    answer: dict[str, Any] = agreement.decide("accounts", account, judge)
    if answer["differ"]:
        answer["lines"] = agreement.decide("facts", facts, lambda ranks: differences([Facts(*rank) for rank in ranks]))
    return list(answer["lines"])


def data_disagreements(agreement: Agreement, fingerprints: Mapping[str, Any]) -> list[str]:
    """Which data the ranks have different versions of, the same lines on every rank; in one round when it is the same.

    ``fingerprints``: what identifies each source, by data stage.
    """
    values = json.loads(json.dumps(_flat({f"{DATA_OF}{stage}": found for stage, found in fingerprints.items()})))
    facts = Facts(values, [], socket.gethostname())
    if not agreement.decide("digests", facts.digest, lambda digests: len(set(digests)) > 1):
        return []
    return list(agreement.decide("facts", facts, lambda ranks: differences([Facts(*rank) for rank in ranks])))


def device_problems(devices: Sequence[tuple[str, str | None]]) -> list[str]:
    """What is wrong with the ranks' devices, each given by its kind and what no other one is called."""
    holders: dict[str, list[int]] = {}
    kinds: dict[str, list[int]] = {}
    for rank, (kind, identity) in enumerate(devices):
        kinds.setdefault(kind, []).append(rank)
        if identity is not None:
            holders.setdefault(identity, []).append(rank)
    if len(kinds) > 1:
        found = ", ".join(f"{kind} on {named(ranks)}" for kind, ranks in sorted(kinds.items(), key=lambda i: len(i[1])))
        return [f"the ranks run on different devices: {found}; let each rank see an accelerator, or none of them"]
    return [
        f"{named(ranks)} have one {devices[ranks[0]][0]} device ({identity}) between them; start at most one rank per "
        "device, or show each rank another one"
        for identity, ranks in holders.items()
        if len(ranks) > 1
    ]


def facts_of(config: Config) -> Facts:
    """All keys that count. The run's name is not compared: its date may differ by a second, and rank 0's is taken."""
    values = _flat(config.to_dict())
    values.pop("general.run", None)
    values[f"{VERSION_OF}python"] = ".".join(platform.python_version_tuple()[:2])
    values |= {f"{VERSION_OF}{package}": version(package) for package in ("nanotron", "torch")}
    values[f"{VERSION_OF}nanotron's code"] = _hash_of_code()
    written = list(_flat(config.to_dict(resolved=False)))
    return Facts(json.loads(json.dumps(values, default=str)), written, socket.gethostname())


def _hash_of_code() -> str:
    """Of every file of this package: a checkout that somebody works on has one version number all the while."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def told(accounts: Sequence[Mapping[str, Any]], local_world: int) -> list[str]:
    """Each mistake once, with who found it: all ranks, whole machines, or some ranks."""
    finders: dict[str, list[int]] = {}
    for rank, account in enumerate(accounts):
        for line in account["mistakes"]:
            finders.setdefault(line, []).append(rank)
    lines = []
    for line, ranks in finders.items():
        nodes = {rank // local_world for rank in ranks}
        if len(ranks) == len(accounts):
            lines.append(line)
        elif len(ranks) == len(nodes) * local_world:
            hosts = dict.fromkeys(accounts[rank]["host"] for rank in ranks)
            lines.append(f"on {', '.join(hosts)}: {line}")
        else:
            lines.append(f"{named(ranks)}: {line}")
    return lines


def differences(facts: Sequence[Facts]) -> list[str]:
    """A line per key that the ranks have different values of, those that follow from other keys left out."""
    keys = list(dict.fromkeys(key for rank in facts for key in rank.values))
    differing = [key for key in keys if any(rank.values.get(key) != facts[0].values.get(key) for rank in facts)]
    written = {key for rank in facts for key in rank.written}
    causes = [key for key in differing if key in written or key.startswith(VERSION_OF)] or differing
    lines = [_difference(key, facts) for key in causes[:SHOWN]]
    return lines if len(causes) <= SHOWN else [*lines, f"and {len(causes) - SHOWN} more keys"]


def _difference(key: str, facts: Sequence[Facts]) -> str:
    """`key: 2 on rank 1, 3 on ranks 0, 2, 3; …`, the rarest value first."""
    holders: dict[str, list[int]] = {}
    for rank, (values, *_) in enumerate(facts):
        holders.setdefault(json.dumps(values[key]) if key in values else "absent", []).append(rank)
    rarest_first = sorted(holders.items(), key=lambda item: len(item[1]))
    hosts = [rank.host for rank in facts]
    shown = ", ".join(f"{value[:LONGEST_VALUE]} on {_of_hosts(ranks, hosts)}" for value, ranks in rarest_first)
    fixes = {
        VERSION_OF: "install the same on every machine",
        DATA_OF: "let every rank read the same files",
        KIND_OF: "the slowest sets the pace of all",
        VARIABLE: "export the same on every machine, unless they should differ",
    }
    fix = next((fix for start, fix in fixes.items() if key.startswith(start)), "give every rank the same config")
    return f"{key}: {shown}; {fix}"


def _of_hosts(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`ranks 2, 3 (node7)`; no host where there is only one."""
    theirs = list(dict.fromkeys(hosts[rank] for rank in ranks))
    more = f" and {len(theirs) - SHOWN} more hosts" if len(theirs) > SHOWN else ""
    return named(ranks) + (f" ({', '.join(theirs[:SHOWN])}{more})" if len(set(hosts)) > 1 else "")


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2`; many are counted."""
    shown = ", ".join(map(str, ranks[:SHOWN]))
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + shown + more


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The leaves of nested mappings and lists of them, by dotted name."""
    if isinstance(value, Mapping):
        parts = {f"{name}.{key}" if name else str(key): item for key, item in value.items()}
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value):
        parts = {f"{name}[{index}]": item for index, item in enumerate(value)}
    else:
        return {name: value}
    return {leaf: found for part, item in parts.items() for leaf, found in _flat(item, part).items()}

"""Fingerprints: enough of a source's files to notice, on resume, that the data is no longer the same."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from nanotron.data.sources.partial_files import ensure

MEBIBYTE = 2**20


def fingerprint_files(paths: Sequence[str]) -> dict[str, Any]:
    """Names and sizes of the files, and one hash of the first file's first MiB and the last file's last MiB."""
    import xxhash

    digest = xxhash.xxh3_64()
    ensure(paths[0], 0, MEBIBYTE)
    ensure(paths[-1], os.path.getsize(paths[-1]) - MEBIBYTE)
    with open(paths[0], "rb") as file:
        digest.update(file.read(MEBIBYTE))
    with open(paths[-1], "rb") as file:
        file.seek(max(0, os.path.getsize(paths[-1]) - MEBIBYTE))
        digest.update(file.read(MEBIBYTE))
    root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths])
    return {
        "files": {os.path.relpath(path, root): os.path.getsize(path) for path in paths},
        "hash": digest.hexdigest(),
    }


def fingerprint_changes(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line per difference between two results of `Feed.fingerprints`; a stage only one of them has is no change."""
    lines = []
    for stage in saved.keys() & current.keys():
        old_sources, new_sources = saved[stage], current[stage]
        if len(old_sources) != len(new_sources):
            lines.append(f"stage {stage!r} had {len(old_sources)} sources and now has {len(new_sources)}")
        for number, (old, new) in enumerate(zip(old_sources, new_sources, strict=False)):
            lines += [f"stage {stage!r} source {number} ({new['name']}): {line}" for line in _source_changes(old, new)]
    return sorted(lines)


def _source_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    lines = []
    old_files, new_files = old.get("files", {}), new.get("files", {})
    for path in sorted(old_files.keys() | new_files.keys()):
        before, after = old_files.get(path), new_files.get(path)
        if before != after:
            size = {None: "absent"}
            lines.append(f"{path} was {size.get(before, f'{before} bytes')}, is {size.get(after, f'{after} bytes')}")
    for key in sorted((old.keys() | new.keys()) - {"files", "name"}):
        if old.get(key) != new.get(key) and not lines:
            lines.append(f"{key} was {old.get(key)}, is {new.get(key)}")
    return lines

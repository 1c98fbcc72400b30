"""Folders of token files behind URLs, opened here: their files stand for the remote ones and fill up as they are read.

    s3://bucket/web/                        data/remote/s3/bucket/web/        or dataset_read_path
      00000_unshuffled.ds      ─ ranges ─►    00000_unshuffled.ds             see partial_files.py
      tokenizer.json           ─ at once ─►   tokenizer.json

All that reads token files reads these; what has changed there since is begun anew, what is gone goes here too. A
dataset_read_path with token files of its own is a copy that somebody made: it is read, and nothing else is asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.checkpoint.storage import RemoteFolder
from nanotron.data.sources.partial_files import MARK, Origin, PartialFile, begin
from nanotron.data.sources.token_files import FORMATS, KINDS_OF_FILES
from nanotron.data.tokenize.corpus import file_lock
from nanotron.data.tokenize.tokenizer import FILES
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from nanotron.config import NanosetDatasetsArgs

KEPT = "data/remote"
TOKENS = (*FORMATS, ".ds.index", ".ds.loss")
TEXTS = (".metadata", *FILES)


def local_folder(dataset: NanosetDatasetsArgs, number: int) -> str:
    """Where a folder of the data set is read: itself, or for a URL the folder here that stands for it.

    Raises ConfigError when nothing is there that could be read, or it cannot be reached.
    """
    places = dataset.dataset_read_path or []
    return local_path(dataset.dataset_folder[number], places[number] if number < len(places) else None)


def local_path(path: str, place: str | None = None) -> str:
    """Where a folder, a file or Megatron's prefix is read; of a URL in ``place``, None: in a folder named after it."""
    if path.startswith("file://"):
        return path.removeprefix("file://")
    return _stand_in(path.rstrip("/"), place) if "://" in path else path


@cache  # in one process the data stay as they were found
def _stand_in(url: str, place: str | None) -> str:
    if place is not None and _has_tokens_of_its_own(place):
        return place
    try:
        folder, name, found = _listed(url)
        place = place or os.path.join(KEPT, re.sub(r"[^\w.\-/]|\.\.", "_", folder.path.replace("://", "/")))
        with file_lock(f"{place}.lock"):
            _update(folder, place, found, only=name)
    except OSError as error:
        raise ConfigError(f"{url}: cannot be read ({error.filename}: {error.strerror})") from error
    return os.path.join(place, name) if name else place


def _listed(url: str) -> tuple[RemoteFolder, str, dict[str, Origin]]:
    """The folder of a URL, the name of the file or files in it that it means (all: ""), and these."""
    folder, name = RemoteFolder(url), ""
    found = folder.find()
    if not found:
        parent, _, name = url.rpartition("/")
        folder = RemoteFolder(parent)
        found = {file: facts for file, facts in folder.find(depth=1).items() if file.startswith(name)}
    files = {
        file: Origin(folder.path, file, size, version)
        for file, (size, version) in found.items()
        if file.endswith((*TOKENS, *TEXTS)) and ".." not in file.split("/")
    }
    if not any(file.endswith(TOKENS) for file in files):
        inside = ", ".join(sorted(found)[:5]) or "nothing"
        raise ConfigError(
            f"{url} holds no token files: looked for {KINDS_OF_FILES}, found "
            f"{inside}; write some with `nanotron tokenize INPUT --output {url}`"
        )
    return folder, name, files


def _has_tokens_of_its_own(place: str) -> bool:
    """Whether a folder holds token files that stand for no others: a copy, which is read as it is."""
    paths = (path for path in Path(place).rglob("*") if path.name.endswith(TOKENS))
    return any(not Path(f"{path}{MARK}").exists() for path in paths)


def _update(folder: RemoteFolder, place: str, found: Mapping[str, Origin], *, only: str) -> None:
    """Begin files that are new or have changed, with the whole of small ones, and remove those that are gone."""
    for mark in Path(place).rglob(f"*{MARK}"):
        name = os.path.relpath(mark, place).removesuffix(MARK)
        if name.startswith(only) and name not in found:
            mark.unlink()
            mark.with_name(mark.name.removesuffix(MARK)).unlink(missing_ok=True)
    new = {name: origin for name, origin in found.items() if _known(os.path.join(place, name)) != origin}
    texts = folder.read_all([name for name in new if name.endswith(TEXTS)])
    for name, origin in new.items():
        file = begin(os.path.join(place, name), origin)
        if name in texts:
            file.fill(0, texts[name])


def _known(path: str) -> Origin | None:
    with suppress(ValueError):
        return PartialFile(path).origin
    return None

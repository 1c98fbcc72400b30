"""Documents without a token: legal in an index, harmless to training, and worth one line that says where they are.

A data set's first documents are looked through when a run is checked; an index may be longer than that is cheap for.
Beyond them, the first one that a window meets is named when it is read (windows.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from nanotron.data.sources.megatron import MegatronFile
from nanotron.data.sources.nanoset import NanosetFile

IndexedFile = NanosetFile | MegatronFile
IS_EMPTY = "has no tokens; empty documents are skipped"
MOST_DOCUMENTS = 2**18  # looked at of a data set: 2 MiB of its index, however long that is


def first_empty_document(files: Iterable[object]) -> str | None:
    """Where the first empty one of the files' first MOST_DOCUMENTS documents is; no file after them is asked for."""
    left = MOST_DOCUMENTS
    for file in files:
        if not isinstance(file, IndexedFile) or file.num_tokens == 0:
            continue
        count = min(left, file.num_documents)
        if count:
            empty = np.flatnonzero(np.diff(file.ends(0, count), prepend=0) == 0)
            if empty.size:
                return file.document_place(int(empty[0]))
        left -= count
        if left == 0:
            break
    return None

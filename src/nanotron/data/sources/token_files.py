"""Which token files a folder or path holds: Nanosets, Megatron's .bin/.idx, or flat .npy and .bin arrays."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable

import numpy as np

from nanotron.data.order.permutation import Indices
from nanotron.data.order.windows import TokenFile
from nanotron.data.sources.megatron import MegatronFile
from nanotron.data.sources.nanoset import MappedTokens, find_nanoset_files, open_nanoset_file
from nanotron.data.sources.partial_files import ensure
from nanotron.errors import ConfigError

MOST_HEADER_BYTES = 2**16  # of a .npy file, by its format
KINDS_OF_FILES = ".ds (Nanoset), .idx with .bin (Megatron), .npy and .bin"


class FlatTokens(MappedTokens):
    """An array of tokens in a `.npy` or raw `.bin` file; it has no index of documents."""

    knows_documents = False

    def starts(self, start: int, stop: int) -> Indices | None:
        """Unknown: only an end-of-document token can tell."""
        return None


def open_token_files(path: str, *, token_bytes: int | None = None) -> list[TokenFile]:
    """The token files at `path` (a folder, a file, or Megatron's prefix), in the order of concatenation.

    `token_bytes` is for files that do not say it themselves. A folder holds one format; the first of FORMATS is taken.
    """
    found = find_token_files(path)
    if not found:
        raise ConfigError(_nothing_found(path))
    if token_bytes not in (None, 2, 4):
        raise ConfigError(f"{path}: {token_bytes} bytes per token; use 2 or 4")
    return [FORMATS[os.path.splitext(name)[1]](name, token_bytes) for name in found]


def find_token_files(path: str) -> list[str]:
    """The names of the token files at `path`, all of the first format that there is."""
    return next((found for suffix in FORMATS if (found := _find(path, suffix))), [])


def _find(path: str, suffix: str) -> list[str]:
    if os.path.isdir(path):
        return find_nanoset_files(path) if suffix == ".ds" else sorted(glob.glob(f"{glob.escape(path)}/*{suffix}"))
    if suffix == ".idx":
        prefix = path.removesuffix(".bin").removesuffix(".idx")
        return [f"{prefix}.idx"] if os.path.isfile(f"{prefix}.idx") else []
    return [path] if os.path.isfile(path) and path.endswith(suffix) else []


def _open_megatron(path: str, token_bytes: int | None) -> TokenFile:
    bin_path = f"{path.removesuffix('.idx')}.bin"
    if not os.path.isfile(bin_path):
        raise ConfigError(f"{path} has no {bin_path} beside it")
    return MegatronFile(bin_path)


def _open_npy(path: str, token_bytes: int | None) -> TokenFile:
    ensure(path, 0, MOST_HEADER_BYTES)
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)  # reads the header; checks that the file is as long
    except Exception as error:  # numpy's parser of headers raises whatever it meets
        raise ConfigError(f"{path} ({os.path.getsize(path)} bytes) is truncated or not a .npy file: {error}") from None
    if array.ndim != 1 or array.dtype.kind not in "ui":
        raise ConfigError(f"{path} holds {array.dtype} of shape {array.shape}; one row of integers is needed")
    return _not_empty(FlatTokens(path, array.dtype, offset=os.path.getsize(path) - array.nbytes))


def _open_flat(path: str, token_bytes: int | None) -> TokenFile:
    if token_bytes is None:
        raise ConfigError(f"{path} does not say how wide its tokens are; set dataset.token_size_in_bytes to 2 or 4")
    return _not_empty(FlatTokens(path, f"<u{token_bytes}"))


FORMATS: dict[str, Callable[[str, int | None], TokenFile]] = {
    ".ds": lambda path, token_bytes: open_nanoset_file(path, token_bytes=token_bytes),
    ".idx": _open_megatron,
    ".npy": _open_npy,
    ".bin": _open_flat,
}
"""How files of each suffix are opened: (path, bytes per token where the file does not say) -> the file."""


def _not_empty(file: FlatTokens) -> FlatTokens:
    if file.num_tokens == 0:
        raise ConfigError(f"{file.path} is empty; remove it or write it again")
    return file


def _nothing_found(path: str) -> str:
    if not os.path.exists(path):
        return f"dataset folder {path!r} does not exist; write one with `nanotron tokenize INPUT --output {path}`"
    inside = sorted(os.listdir(path))[:5] if os.path.isdir(path) else [os.path.basename(path)]
    return (
        f"{path!r} holds no token files: looked for {KINDS_OF_FILES}, found "
        f"{', '.join(inside) or 'nothing'}; convert text with `nanotron tokenize {path} --output FOLDER`"
    )

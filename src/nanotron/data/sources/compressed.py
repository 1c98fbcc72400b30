"""Files that may be compressed (.gz, .zst), read from front to back; a damaged one is named, never read in part."""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING

from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from typing_extensions import Buffer

COMPRESSED_SUFFIXES = (".gz", ".zst")
CHUNK = 2**17


@contextmanager
def open_decompressed(path: str) -> Iterator[IO[bytes]]:
    """The file's content, decompressed as its name asks; reading it raises ConfigError where it is damaged."""
    try:
        with _open(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        kind = "zstandard" if path.endswith(".zst") else "gzip"
        raise ConfigError(f"{path} ({os.path.getsize(path)} bytes) is truncated or not {kind}: {error}") from None


def _open(path: str) -> IO[bytes]:
    if path.endswith(".gz"):
        return io.BufferedReader(gzip.open(path, "rb"))
    if path.endswith(".zst"):
        return io.BufferedReader(_ZstandardFile(path), buffer_size=CHUNK)
    return open(path, "rb")


class _ZstandardFile(io.RawIOBase):
    """All frames of a .zst file. zstandard's own reader ends silently where a file was cut within a frame."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard
        except ImportError:
            raise ConfigError(f"reading {path} needs zstandard: pip install zstandard") from None
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
        self._error = zstandard.ZstdError
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._file = open(path, "rb")  # noqa: SIM115 (closed with this one)
        self._read = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Buffer) -> int:
        """Fill the buffer, or a part of it; raises EOFError where the file ends within a frame or is damaged."""
        while not self._ready:
            self._read = self._read or self._file.read(CHUNK)
            if not self._read:
                if self._frame is not None:
                    raise EOFError("it ends within a frame")
                return 0
            self._decompress()
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _decompress(self) -> None:
        """Decompress what was read, up to the end of a frame."""
        frame = self._frame or self._decompressor.decompressobj()
        try:
            self._ready = memoryview(frame.decompress(self._read))
        except self._error as error:
            raise EOFError(str(error)) from None
        self._frame, self._read = (None, frame.unused_data) if frame.eof else (frame, b"")

    def close(self) -> None:
        """Close the file too."""
        self._file.close()
        super().close()

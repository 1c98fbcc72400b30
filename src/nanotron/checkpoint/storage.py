"""Where files live: a local folder or an object store, behind the few operations that a checkpoint needs.

    write(name, chunks)      a file appears whole or not at all, and survives a power cut once ``write`` returns
    read(name, start, stop)  bytes; memory-mapped when local, a ranged request when remote

POSIX: temporary name, fsync of the file, rename, fsync of the folder. Object stores make an upload visible only when
it is complete. Remote folders are fsspec URLs (``s3://bucket/run``); fsspec is imported only for them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from nanotron.checkpoint.format import Damaged, Entry, parse_header
from nanotron.errors import ConfigError

OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "adl", "oss", "r2"}
VERSIONS = ("ETag", "etag", "md5", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
"""What file systems call that which changes with a file's content."""
Chunk = bytes | bytearray | memoryview
CHUNK_BYTES = 4 << 20  # per write, read and checksum call


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """The folder of a path or fsspec URL; nothing is created."""
    text = os.fspath(path)
    if text.startswith("file://"):
        return LocalFolder(text.removeprefix("file://"))
    return RemoteFolder(text) if "://" in text else LocalFolder(text)


def read_text(folder: Folder, name: str) -> str:
    """A small text file; raises FileNotFoundError, and ``Damaged`` when it is no text."""
    try:
        return bytes(folder.read(name)).decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"{folder.path}/{name} is no text ({error.reason} at byte {error.start})") from error


def read_header(folder: Folder, name: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors and metadata of a safetensors file; raises ``Damaged`` when it is none."""
    try:
        length = int.from_bytes(folder.read(name, 0, 8), "little")
        size = folder.size(name)
        if not 0 < length <= size - 8:
            raise Damaged(f"{folder.path}/{name} is no safetensors file, or was cut short")
        entries, metadata = parse_header(bytes(folder.read(name, 8, 8 + length)))
    except FileNotFoundError as error:
        raise Damaged(f"{folder.path}/{name} is missing") from error
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{folder.path}/{name} has a damaged header ({error})") from error
    end = max((entry.stop for entry in entries.values()), default=8 + length)
    if end != size:
        raise Damaged(f"{folder.path}/{name} {'was cut short' if end > size else f'has {size - end} bytes too many'}")
    return entries, metadata


def _chunks(file: IO[bytes], start: int, stop: int | None) -> Iterator[bytes]:
    """What an open file holds in [start, stop)."""
    file.seek(start)
    left = CHUNK_BYTES if stop is None else stop - start
    while left > 0 and (chunk := file.read(min(left, CHUNK_BYTES))):
        yield chunk
        left -= 0 if stop is None else len(chunk)


class LocalFolder:
    """A folder of a POSIX file system; ``_open``, ``_write``, ``_sync`` and ``_rename`` are all that changes it."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or "/"
        self._maps: dict[str, mmap.mmap] = {}

    def join(self, name: str) -> LocalFolder:
        return type(self)(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Files and folders in it; none when it does not exist or is a file."""
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make(self) -> None:
        """Create it with its parents, durably."""
        missing = []
        path = os.path.abspath(self.path)
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        os.makedirs(self.path, exist_ok=True)
        for created in missing:
            self._sync_folder(os.path.dirname(created))

    def size(self, name: str) -> int:
        return os.stat(f"{self.path}/{name}").st_size

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        """A view of the mapped file: pages are read when they are touched, and copied when they are written to."""
        if name not in self._maps:
            with self._open_to_read(name) as file:
                if os.fstat(file.fileno()).st_size == 0:
                    return memoryview(b"")
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return memoryview(self._maps[name])[start:stop]

    def stream(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes [start, stop) of the file, in chunks."""
        with self._open_to_read(name) as file:
            yield from _chunks(file, start, stop)

    def _open_to_read(self, name: str) -> IO[bytes]:
        """Open a file; of a pipe or a device, which may have nobody at its other end, raise ``Damaged`` at once."""
        path = f"{self.path}/{name}"
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise Damaged(f"{path} is no regular file")
        return open(file, "rb", buffering=0)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        target, temporary = f"{self.path}/{name}", f"{self.path}/{name}.tmp"
        try:
            file = self._open(temporary)
            try:
                for chunk in chunks:
                    self._write_all(file, chunk)
                self._sync(file)
            finally:
                os.close(file)
            self._rename(temporary, target)
        except BaseException as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            if isinstance(error, OSError) and error.errno and not error.filename:  # say which file
                raise OSError(error.errno, error.strerror, target) from error
            raise
        self._sync_folder(self.path)

    def remove(self, name: str) -> None:
        """Delete a file, durably; it may be gone already."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self.path}/{name}")
            self._sync_folder(self.path)

    def remove_folder(self) -> None:
        """Delete the folder if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.path)

    def _write_all(self, file: int, chunk: Chunk) -> None:
        view = memoryview(chunk).cast("B")
        while len(view):
            written = self._write(file, view)
            if written <= 0:
                raise OSError(errno.EIO, f"wrote {written} of {len(view)} bytes")
            view = view[written:]

    def _sync_folder(self, path: str) -> None:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._sync(folder)
        finally:
            os.close(folder)

    def _open(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)

    def _write(self, file: int, view: memoryview) -> int:
        return os.write(file, view)

    def _sync(self, file: int) -> None:
        os.fsync(file)

    def _rename(self, source: str, target: str) -> None:
        os.replace(source, target)


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn whatever a file system raises (each has its own for no answer and no permission) into OSError of the URL."""
    try:
        yield
    except Exception as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else OSError
        number = getattr(error, "errno", None) or (errno.ENOENT if kind is FileNotFoundError else errno.EIO)
        text = getattr(error, "strerror", None) or " ".join(str(error).split()) or type(error).__name__
        raise kind(number, text, url) from error


class RemoteFolder:
    """A folder of any file system that fsspec opens; uploads become visible when they are complete."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/")
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]
        except ImportError as error:
            raise ConfigError(f"{path}: remote folders need fsspec; pip install 'nanotron[remote]'") from error
        try:
            # Listings are never cached: other ranks write too.
            self._files, self._root = url_to_fs(self.path, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be opened ({error})") from error

    def join(self, name: str) -> RemoteFolder:
        return type(self)(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Files and folders in it; none when it does not exist."""
        try:
            with _reaching(self.path):
                found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rsplit("/", 1)[-1] for path in found if path.rstrip("/") != self._root.rstrip("/"))
        return sorted(names)

    def find(self, depth: int | None = None) -> dict[str, tuple[int, str]]:
        """Every file in it, and in its folders down to ``depth``, by its path: size, and what tells a changed one."""
        with _reaching(self.path):
            found = self._files.find(self._root, maxdepth=depth, detail=True)
        root = self._root.rstrip("/") + "/"
        return {
            path.removeprefix(root): (int(facts["size"]), str([facts[key] for key in VERSIONS if key in facts]))
            for path, facts in found.items()
            if path.startswith(root)
        }

    def read_all(self, names: Sequence[str]) -> dict[str, bytes]:
        """Small files by their names, many at a time where the file system can."""
        with _reaching(self.path):
            found = self._files.cat([f"{self._root}/{name}" for name in names]) if names else {}
        return {name: found[f"{self._root}/{name}"] for name in names}

    def make(self) -> None:
        """Folders of an object store exist with their first file; file systems behind a URL want them made."""
        if self.path.partition("://")[0] not in OBJECT_STORES:  # there it would create a bucket
            with _reaching(self.path):
                self._files.makedirs(self._root, exist_ok=True)

    def size(self, name: str) -> int:
        with _reaching(f"{self.path}/{name}"):
            return int(self._files.size(f"{self._root}/{name}"))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Any:
        with _reaching(f"{self.path}/{name}"):
            return bytearray(self._files.cat_file(f"{self._root}/{name}", start=start, end=stop))

    def stream(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """The bytes [start, stop) of the file, in chunks."""
        with _reaching(f"{self.path}/{name}"):
            file = self._files.open(f"{self._root}/{name}", "rb", block_size=CHUNK_BYTES)
        with file:
            yield from _chunks(file, start, stop)

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        url = f"{self.path}/{name}"
        with _reaching(url):
            file = self._files.open(f"{self._root}/{name}", "wb")
        try:
            for chunk in chunks:
                with _reaching(url):
                    file.write(chunk)
        except BaseException:
            if hasattr(file, "discard"):
                file.discard()
                file.closed = True  # or its destructor would try to complete the upload
            raise
        with _reaching(url):
            file.close()

    def remove(self, name: str) -> None:
        """Delete a file; it may be gone already."""
        with contextlib.suppress(FileNotFoundError), _reaching(f"{self.path}/{name}"):
            self._files.rm_file(f"{self._root}/{name}")

    def remove_folder(self) -> None:
        """Delete the folder if it is empty; object stores have none."""
        with contextlib.suppress(OSError, NotImplementedError):
            self._files.rmdir(self._root)


Folder = LocalFolder | RemoteFolder
"""A folder of files, and of folders; what both have is what everybody may use."""

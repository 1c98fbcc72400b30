"""TensorBoard's event files, written without TensorBoard: its own writer imports some 350 modules, clouds' among them.

A file is a list of records: the length of some data (uint64), that length's checksum (uint32), the data, its checksum;
all little-endian. Data is an ``Event`` (tensorboard/compat/proto/event.proto) as protobuf encodes it: each field a key,
its number and the kind of what follows, and then a double, a float, a number of 7 bits a byte, or bytes of a length.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

VARINT, DOUBLE, BYTES, FLOAT = 0, 1, 2, 5
"""Kinds of fields."""
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
"""Fields of an Event."""
VALUE, TAG, SIMPLE_VALUE = 1, 1, 2
"""The field of a Summary, and those of its values."""
STATUS, START = 1, 1
"""The field of a SessionLog, and its word for: what the file's folder has of this step and later ones is void."""
CRC32C = 0x82F63B78  # the polynomial of Castagnoli, its bits reversed


class EventFile:
    """A new event file in ``folder``; what other files there have of ``first_step`` and later ones is void."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():017.6f}.{socket.gethostname()}"  # they are read in this order
        self._file = (folder / name).open("xb", buffering=0)
        self._write(_bytes(FILE_VERSION, b"brain.Event:2"))
        self._write(_varint(STEP, first_step) + _bytes(SESSION_LOG, _varint(STATUS, START)))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each value's curve, as float32."""
        named = (_bytes(TAG, tag.encode()) + _float(SIMPLE_VALUE, value) for tag, value in values.items())
        self._write(_varint(STEP, step) + _bytes(SUMMARY, b"".join(_bytes(VALUE, value) for value in named)))

    def close(self) -> None:
        self._file.close()

    def _write(self, fields: bytes) -> None:
        event = _key(WALL_TIME, DOUBLE) + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))


def _key(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _varint(field: int, value: int) -> bytes:
    return _key(field, VARINT) + _seven_bits(value)


def _float(field: int, value: float) -> bytes:
    return _key(field, FLOAT) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, BYTES) + _seven_bits(len(value)) + value


def _seven_bits(value: int) -> bytes:
    """Seven bits a byte, the lowest first; a byte that others follow has its eighth set."""
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _checksum(data: bytes) -> bytes:
    """CRC-32C, rotated and shifted, as record files have it."""
    table, crc = _table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _table() -> list[int]:
    """What each byte does to the checksum."""
    table = list(range(256))
    for _ in range(8):
        table = [crc >> 1 ^ CRC32C * (crc & 1) for crc in table]
    return table

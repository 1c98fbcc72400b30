"""Console, metrics.jsonl, TensorBoard and Weights & Biases agree to their last digit, also where a number is none."""

from __future__ import annotations

import json
import math
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanotron.metrics.record import Metrics
from nanotron.parallel.mesh import Mesh
from tests.metrics.test_record import config, values

THIRD = 1 / 3  # has no short decimal


@pytest.fixture
def console_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The rows that the console's lines are made of."""
    from nanotron.metrics import record

    rows: list[dict[str, Any]] = []
    line = record.step_line

    def kept(row: dict[str, Any], **options: Any) -> str:
        rows.append(dict(row))
        return line(row, **options)

    monkeypatch.setattr(record, "step_line", kept)
    return rows


def train(folder: Path, **logging_keys: Any) -> None:
    metrics = Metrics(config(**logging_keys), Mesh(), folder, device=torch.device("cpu"))
    for step in range(1, 4):
        more = {"grad_norm": math.nan if step == 2 else THIRD, "update_ratio/layers.0.attn.q.weight": THIRD / step}
        metrics.log(step, values(step, time_per_iteration_ms=THIRD, **more))
    metrics.close()


def same(one: Any, other: Any) -> bool:
    return one == other or (one != one and other != other)


def test_metrics_jsonl_is_the_consoles_row_with_null_for_what_json_cannot_say(
    tmp_path: Path, console_rows: list[dict[str, Any]]
) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    train(tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    written = [json.loads(line, parse_constant=refuse) for line in lines]
    assert written == [{key: None if value != value else value for key, value in row.items()} for row in console_rows]
    assert written[1]["grad_norm"] is None


def test_tensorboards_page_draws_the_consoles_row(tmp_path: Path, console_rows: list[dict[str, Any]]) -> None:
    train(tmp_path, tensorboard=True)
    drawn = drawn_by_tensorboard(tmp_path / "tensorboard")
    assert set(drawn) == {key for key, value in console_rows[0].items() if not isinstance(value, str)} - {"step"}
    for key, series in drawn.items():
        assert all(same(value, np.float32(row[key])) for value, row in zip(series, console_rows, strict=True)), key


def drawn_by_tensorboard(folder: Path) -> dict[str, list[float]]:
    """The values of each curve, as the server behind TensorBoard's page gives them: its default, and its strictest."""
    from tensorboard.context import RequestContext
    from tensorboard.data import server_ingester as shipped
    from tensorboard.util.grpc_util import ChannelCredsType

    server = shipped.SubprocessServerDataIngester(
        shipped.get_server_binary(), str(folder), reload_interval=0, channel_creds_type=ChannelCredsType.LOCAL
    )
    server.start()
    try:
        curves = server.data_provider.read_scalars(
            RequestContext(), experiment_id="", plugin_name="scalars", downsample=100
        )
    finally:
        server._stdin_handle.close()  # which it takes for the end
    return {key: [point.value for point in points] for key, points in curves["."].items()}


def test_weights_and_biases_is_the_consoles_row_when_offline(
    tmp_path: Path, console_rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, wandb: None
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tmp_path, wandb=True)
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = list(history(file))
    assert [row.pop("_step") for row in written] == [row["step"] for row in console_rows]
    for told, row in zip(written, console_rows, strict=True):
        for key, value in row.items():
            assert key == "step" or same(told[key], value), key


def history(file: Path) -> Iterator[dict[str, Any]]:
    """The rows of an offline run's own file, once it ends: a process of the package's own goes on writing it."""
    from wandb.proto.wandb_internal_pb2 import Record

    records, deadline = list[Record](), time.monotonic() + 60
    while not records or records[-1].WhichOneof("record_type") != "exit":
        assert time.monotonic() < deadline, f"{file} has no end"
        records = [Record.FromString(data) for data in log_records(file.read_bytes())]
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            yield {key: math.nan if value == "NaN" else value for key, value in items.items()}


def log_records(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format, after a header of 7 bytes: blocks of 32 KiB with pieces of records in them.

    A piece is a checksum (4 bytes), its length (2), its kind (1: whole, 2: first, 3: middle, 4: last), and its bytes.
    """
    position, record = 7, b""
    while position < len(data):
        left = 2**15 - position % 2**15
        if left < 7:  # too little for a piece: filled with zeros
            position += left
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        record += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record
            record = b""

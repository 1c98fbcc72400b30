"""Numbers for people, FLOPs, device facts."""

import pytest

from nanotron.config import LlamaConfig, MistralConfig
from nanotron.logging import human_duration, human_format
from nanotron.metrics.devices import find_device, known_devices
from nanotron.models.families import flops_per_step, layer_costs


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1024, "1.02K"),
        (12.3456, "12.3"),
        (3e-4, "0.0003"),
        (0, "0"),
        (999.4, "999"),
        (999.9, "1K"),
        (-2_500_000, "-2.5M"),
        (1.5e9, "1.5B"),
        (7e12, "7T"),
        (3e21, "3e+03E"),
        (float("nan"), "nan"),
    ],
)
def test_human_format_keeps_three_significant_digits(number: float, text: str) -> None:
    assert human_format(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (42, "42s"), (61, "1m01s"), (3725, "1h02m"), (90_000, "1d01h"), (float("inf"), "unknown")],
)
def test_human_duration_shows_the_two_largest_units(seconds: float, text: str) -> None:
    assert human_duration(seconds) == text


def test_flops_equal_the_golden_value_of_hugging_faces_nanotron() -> None:
    model = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=256,
    )
    assert flops_per_step(model, num_samples=8, sequence_length=32) == 150_994_944


def test_a_layer_with_a_window_shorter_than_the_sequence_has_so_many_keys_for_each_token() -> None:
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 256}
    full, long, some = (
        layer_costs(MistralConfig(**shape, **window), 32)
        for window in ({}, {"sliding_window_size": 32}, {"sliding_window_size": 5, "sliding_window_layers": [0, 2]})
    )
    assert full == long
    saved = 4 * 32 * (32 - 5) * 64  # 2 matmuls of 2 operations, tokens, keys, channels of all heads
    assert some == [full[0] - saved, full[0], full[0] - saved]


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_devices_are_found_by_the_name_pytorch_reports(reported: str, name: str) -> None:
    device = find_device(reported)
    assert device is not None
    assert device.name == name


def test_an_unknown_device_has_no_peak() -> None:
    assert find_device("Some Accelerator 9000") is None


def test_every_device_has_a_source_and_a_dense_bfloat16_peak() -> None:
    for device in known_devices().values():
        assert device.source
        assert device.peak_flops["bfloat16"] >= device.peak_flops["float32"]

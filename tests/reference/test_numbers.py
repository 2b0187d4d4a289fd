"""The number formats of the NumPy sentences against torch's."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.cpu.e4m3_values import all_bf16, edge_values, is_finite_in_bf16, rounded, same_numbers
from tests.reference import numpy_ops, rounded_cache, rounded_parts


def torch_fp8(values: np.ndarray) -> np.ndarray:
    """E4M3 values by torch's own conversion."""
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def test_decoding_all_values_is_torchs() -> None:
    fp8 = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(fp8).view(torch.float8_e4m3fn).to(torch.float64).numpy()
    np.testing.assert_array_equal(numpy_ops.decode_e4m3(fp8), expected)


def test_encoding_ties_neighbours_and_zeros_is_torchs() -> None:
    positive = numpy_ops.E4M3_VALUES[:127].astype(np.float32)
    middles = (positive[1:] + positive[:-1]) / 2
    values = np.concatenate([positive, middles, np.nextafter(middles, np.float32(0)), np.nextafter(middles, np.inf)])
    values = np.concatenate([values, -values]).astype(np.float32)
    np.testing.assert_array_equal(numpy_ops.encode_e4m3(values), torch_fp8(values))


def test_encoding_random_values_is_torchs() -> None:
    source = np.random.default_rng(0)
    sizes = 2.0 ** source.uniform(-12, 8.8, size=200_000)
    values = np.clip(sizes * source.choice([-1, 1], size=sizes.size), -448, 448).astype(np.float32)
    np.testing.assert_array_equal(numpy_ops.encode_e4m3(values), torch_fp8(values))


@pytest.mark.parametrize("numbers", [all_bf16, edge_values])
def test_what_a_page_keeps_is_what_torch_rounds(numbers: Callable[[], np.ndarray]) -> None:
    values = numbers()
    is_held = torch.isfinite(torch.from_numpy(values).to(torch.bfloat16)).numpy()
    kept = rounded_cache.round_e4m3(torch.from_numpy(values)).numpy()
    np.testing.assert_array_equal(is_finite_in_bf16(values), is_held)
    same_numbers(rounded(values), np.where(is_held, kept, np.float32(np.nan)))
    assert is_held.any() and not is_held.all()


def test_encoding_saturates_and_refuses_nan() -> None:
    assert numpy_ops.decode_e4m3(numpy_ops.encode_e4m3(np.array([449.0, 1e30, -1e30]))).tolist() == [448, 448, -448]
    with pytest.raises(ValueError, match="finite"):
        numpy_ops.encode_e4m3(np.array([1.0, np.nan]))


def test_bf16_rounding_is_torchs() -> None:
    source = np.random.default_rng(1)
    bits = source.integers(0, 0x7F7F0000, size=200_000, dtype=np.uint32)
    ties = (bits[:50_000] & 0xFFFF0000) | 0x8000
    values = np.concatenate([bits, ties]).view(np.float32)
    values = np.concatenate([values, -values])
    expected = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    np.testing.assert_array_equal(numpy_ops.round_bf16(values), expected)


def test_quantising_rows_is_torchs() -> None:
    source = np.random.default_rng(2)
    rows = (source.standard_normal((64, 192)) * 2.0 ** source.integers(-30, 20, size=(64, 1))).astype(np.float32)
    rows[3] = 0
    quantised = numpy_ops.quantise(rows)
    fp8, scales = rounded_parts.quantise(torch.from_numpy(rows))
    np.testing.assert_array_equal(numpy_ops.decode_e4m3(quantised.fp8), fp8.numpy())
    np.testing.assert_array_equal(quantised.scales.astype(np.float64), scales.numpy())
    assert quantised.scales[3, 0] == 1.0


@pytest.mark.parametrize("width", [64, 128, 320])
def test_quantising_groups_is_torchs(width: int) -> None:
    source = np.random.default_rng(4)
    rows = (source.standard_normal((16, width)) * 2.0 ** source.integers(-9, 9, size=(16, width))).astype(np.float32)
    rows[3, :128] = 0
    quantised = numpy_ops.quantise_groups(rows)
    parts = [rounded_parts.quantise(part) for part in torch.from_numpy(rows).split(128, dim=1)]
    np.testing.assert_array_equal(numpy_ops.decode_e4m3(quantised.fp8), torch.cat([part for part, _ in parts], 1))
    np.testing.assert_array_equal(quantised.scales.astype(np.float64), torch.cat([scale for _, scale in parts], 1))
    exact = torch.cat([part * scale for part, scale in parts], 1).numpy()
    np.testing.assert_array_equal(quantised.values(), exact)


def test_quantising_by_slices_is_quantising_each_slice() -> None:
    rows = np.random.default_rng(3).standard_normal((5, 96)).astype(np.float32)
    sliced = numpy_ops.quantise(rows, row_slices=4)
    for index in range(4):
        alone = numpy_ops.quantise(rows[:, index * 24 : (index + 1) * 24])
        np.testing.assert_array_equal(sliced.fp8[:, index * 24 : (index + 1) * 24], alone.fp8)
        np.testing.assert_array_equal(sliced.scales[:, index : index + 1], alone.scales)
    np.testing.assert_allclose(sliced.values(), rows, rtol=0.07, atol=0.01)
    with pytest.raises(ValueError, match="5 slices"):
        numpy_ops.quantise(rows, row_slices=5)

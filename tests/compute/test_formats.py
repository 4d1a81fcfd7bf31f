"""Number formats against DeepSeek's own results, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch

from compute import formats
from tests.golden.cases import unit


def same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    size = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[got.element_size()]
    different = (got.contiguous().view(size) != want.contiguous().view(size)).nonzero()
    assert different.numel() == 0, f"{len(different)} differ, first at {different[0].tolist()}"


@pytest.mark.parametrize("byte", range(256))
def test_every_scale_byte_is_its_power_of_two(byte: int) -> None:
    value = formats.decode_e8m0(torch.tensor([byte], dtype=torch.uint8)).item()
    if byte == formats.NAN_SCALE:
        assert math.isnan(value)
    else:
        assert value == 2.0 ** (byte - 127)


def test_every_e4m3_code_is_its_value() -> None:
    values = formats.decode_e4m3(torch.arange(256, dtype=torch.uint8))
    for code, value in enumerate(values.tolist()):
        sign, exponent, mantissa = -1 if code & 128 else 1, code >> 3 & 15, code & 7
        if exponent == 15 and mantissa == 7:
            assert math.isnan(value)
        elif exponent == 0:
            assert value == sign * mantissa * 2.0**-9
        else:
            assert value == sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def test_low_nibble_is_the_even_column() -> None:
    packed = torch.tensor([[0x71, 0x8F], [0xA0, 0x5D]], dtype=torch.uint8)
    want = [[0.5, 6.0, -6.0, -0.0], [0.0, -1.0, -3.0, 3.0]]
    assert formats.decode_e2m1(packed).tolist() == want


def test_activation_codes_and_scales_equal_the_reference() -> None:
    golden = unit("act_quant")
    codes, scale = formats.act_quant(golden["x"])
    same_bits(codes, golden["q"])
    same_bits(scale, golden["scale"].float())
    same_bits(formats.round_trip_fp8(golden["x"]), golden["dequant"])


def test_index_fp4_grid_equals_the_reference() -> None:
    golden = unit("fp4_act_quant_e8m0")
    same_bits(formats.round_trip_fp4_index(golden["x"]), golden["dequant"])
    scale = golden["scale"].view(torch.uint8)
    decoded = formats.dequantize_fp4_weight(golden["packed"], scale)
    same_bits(decoded.to(torch.bfloat16), golden["dequant"])


def test_compressed_kv_fp4_grid_equals_the_reference() -> None:
    golden = unit("fp4_act_quant_e4m3")
    same_bits(formats.round_trip_fp4_kv(golden["x"]), golden["dequant"])


def test_fp8_weight_blocks_that_do_not_fill_a_tile() -> None:
    torch.manual_seed(1)
    codes = torch.randint(0, 127, (70, 40), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 2), dtype=torch.uint8)
    got = formats.dequantize_fp8_weight(codes, scales)
    for row, column in ((0, 0), (31, 31), (32, 31), (64, 32), (69, 39)):
        scale = 2.0 ** (int(scales[row // 32, column // 32]) - 127)
        value = codes[row, column].view(torch.float8_e4m3fn).float().item()
        assert got[row, column].item() == value * scale


def test_engram_rows_take_one_scale_per_32_columns() -> None:
    codes = torch.full((2, 3, 64), 0x38, dtype=torch.uint8)
    scales = torch.arange(120, 132, dtype=torch.uint8).reshape(2, 3, 2)
    rows = formats.dequantize_engram_rows(codes, scales)
    assert rows.dtype == torch.bfloat16 and rows.shape == (2, 3, 64)
    assert rows[1, 2, 31].item() == 2.0 ** (130 - 127)
    assert rows[1, 2, 32].item() == 2.0 ** (131 - 127)

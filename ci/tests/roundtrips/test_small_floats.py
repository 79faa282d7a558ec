"""The arithmetic of round trips against torch's and against the references' tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pagefuzz.oracles import fp8
from pagefuzz.oracles.layout import Dtype
from pagefuzz.oracles.small_floats import codes_of, narrowed, values_of, widened

FORMATS = {Dtype.E4M3: torch.float8_e4m3fn, Dtype.E5M2: torch.float8_e5m2}
HALVES = {Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16}


def around(dtype: Dtype) -> np.ndarray:
    """float32: every number of a format, every midpoint, and their neighbours, of both signs."""
    numbers = np.sort(np.abs(values_of(np.arange(256, dtype=np.uint8), dtype).astype(np.float64)))
    numbers = numbers[np.isfinite(numbers)]
    points = np.concatenate((numbers, (numbers[1:] + numbers[:-1]) / 2)).astype(np.float32)
    near = [np.nextafter(points, np.float32(to)) for to in (0, np.inf)]
    every = np.concatenate((points, *near, np.array([np.inf, 1e-45, 3e38, 448.1, 480, 57345.0])))
    return np.concatenate((every, -every)).astype(np.float32)


def by_torch(values: np.ndarray, dtype: Dtype) -> np.ndarray:
    largest = fp8.FP8_MAX[dtype]
    return (
        torch.from_numpy(values).clamp(-largest, largest).to(FORMATS[dtype]).view(torch.uint8)
    ).numpy()


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_code_is_read_as_torch_reads_it(dtype):
    """All 256 codes, the sign of zero included."""
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(FORMATS[dtype]).float().numpy()
    got = values_of(codes, dtype)
    assert np.array_equal(got, wanted, equal_nan=True)
    assert np.array_equal(np.signbit(got), np.signbit(wanted)) or np.isnan(got).any()
    assert np.signbit(got[0x80])


@pytest.mark.parametrize("dtype", FORMATS)
def test_boundaries_are_rounded_as_torch_rounds_them(dtype):
    """Codes, ties, their neighbours, saturation and infinities; and as the references do."""
    values = around(dtype)
    assert np.array_equal(codes_of(values, dtype), by_torch(values, dtype))
    assert np.array_equal(codes_of(values, dtype), fp8.encode_fp8(values, dtype))


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_all_sixteen_bit_inputs(dtype, source):
    """Every fp16 and bf16 becomes the code that torch makes of it; a NaN a NaN code."""
    values = widened(np.arange(2**16, dtype=np.uint16).view(np.uint8)[None], source)[0]
    codes = codes_of(values, dtype)
    nan = np.isnan(values)
    assert np.array_equal(codes[~nan], by_torch(values, dtype)[~nan])
    assert np.isnan(values_of(codes[nan], dtype)).all()


@pytest.mark.parametrize("dtype", HALVES)
def test_results_are_rounded_as_torch_rounds_them(dtype):
    """float32 of any bits to fp16 and bf16; a NaN stays one."""
    words = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    values = np.concatenate((words.view(np.float32), np.float32([65519.9, 65520, 1e-8, -0.0])))
    got = narrowed(values[None], dtype).view(np.uint16)[0]
    wanted = torch.from_numpy(values).to(HALVES[dtype]).view(torch.int16).numpy().view(np.uint16)
    nan = np.isnan(values)
    assert np.array_equal(got[~nan], wanted[~nan])
    assert np.isnan(widened(got[nan].view(np.uint8)[None], dtype)).all()

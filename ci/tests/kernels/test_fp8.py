"""The kernels' conversions, the oracles' and torch's agree, bit for bit but for NaNs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from ci.tests.kernels.conftest import load

from pagefuzz.oracles import fp8
from pagefuzz.oracles.layout import Dtype

SHIM = Path(__file__).with_name("fp8_shim.cu")
KINDS = (Dtype.E4M3, Dtype.E5M2)
TORCH = {
    Dtype.E4M3: torch.float8_e4m3fn,
    Dtype.E5M2: torch.float8_e5m2,
    Dtype.F16: torch.float16,
    Dtype.BF16: torch.bfloat16,
}
ALL_WORDS = np.arange(2**16, dtype=np.uint16)
SCALES = np.array(
    (
        *(0, -0.0, 1e-45, 2**-126, 2**-149 * 3, 1, 448, 1 / 448, 0.3, 1e30, 3.4e38),
        *(np.inf, np.nan, -1, -2.5, -np.inf, -1e-40),
    ),
    dtype=np.float32,
)


def call(name: str, out: Any, first: int, *arrays: npt.NDArray[Any]) -> Any:
    """Calls a function of the shim; gives the array it filled."""
    shim = load(SHIM, "checked")
    pointers = [shim.ffi.from_buffer(array.data.cast("B")) for array in (*arrays, out)]
    types = {"float32": "float *", "uint16": "uint16_t *", "uint8": "uint8_t *"}
    cast = [
        shim.ffi.cast(types[array.dtype.name], pointer)
        for array, pointer in zip((*arrays, out), pointers, strict=True)
    ]
    getattr(shim.lib, name)(first, *cast, out.size)
    return out


def encoded(values: npt.NDArray[np.float32], dtype: Dtype) -> npt.NDArray[np.uint8]:
    out = np.empty(values.size, np.uint8)
    result: npt.NDArray[np.uint8] = call("pf_encode", out, dtype is Dtype.E5M2, values)
    return result


def narrowed(values: npt.NDArray[np.float32], dtype: Dtype) -> npt.NDArray[np.uint16]:
    out = np.empty(values.size, np.uint16)
    result: npt.NDArray[np.uint16] = call("pf_narrow", out, dtype is Dtype.BF16, values)
    return result


def from_bits(bits: npt.ArrayLike) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(bits, dtype=np.uint32).view(np.float32)


def same_floats(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> bool:
    """Equal bits, the sign of zero included; NaN by NaN-ness."""
    nan = np.isnan(a)
    equal = a.view(np.uint32) == b.view(np.uint32)
    return bool((nan == np.isnan(b)).all() and (equal | nan).all())


def same_codes(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8], dtype: Dtype) -> bool:
    """Equal codes; any NaN code for another."""
    above = 0x7E if dtype is Dtype.E4M3 else 0x7C
    nan = (a & 0x7F) > above
    return bool((nan == ((b & 0x7F) > above)).all() and ((a == b) | nan).all())


def same_words(a: npt.NDArray[np.uint16], b: npt.NDArray[np.uint16], dtype: Dtype) -> bool:
    above = 0x7C00 if dtype is Dtype.F16 else 0x7F80
    nan = (a & 0x7FFF) > above
    return bool((nan == ((b & 0x7FFF) > above)).all() and ((a == b) | nan).all())


def by_torch(values: npt.NDArray[np.float32], dtype: Dtype) -> npt.NDArray[np.uint8]:
    """torch's cast of values clamped to the finite range: it saturates E4M3 from some version on,
    and E5M2 never."""
    limit = fp8.FP8_MAX[dtype]
    tensor = torch.from_numpy(values.copy()).clamp(-limit, limit)  # a NaN stays
    codes: npt.NDArray[np.uint8] = tensor.to(TORCH[dtype]).view(torch.uint8).numpy()
    return codes


def around(points: npt.NDArray[np.float64], steps: int = 3) -> npt.NDArray[np.float32]:
    """fp32 numbers at and `steps` to either side of points that fp32 holds, of both signs."""
    bits = points.astype(np.float32).view(np.uint32).astype(np.int64)
    near = np.unique(bits[:, None] + np.arange(-steps, steps + 1))
    near = near[(near >= 0) & (near <= 0x7FFFFFFF)]
    return from_bits(np.concatenate((near, near + 2**31)))


def boundaries(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The finite magnitudes of a format, the midpoints between them, what lies past the largest,
    and the ends of fp32's own ranges."""
    finite = np.unique(np.abs(values[np.isfinite(values)]).astype(np.float64))
    past = finite[-1] + (finite[-1] - finite[-2]) * np.array([0.5, 1, 2])
    ends = np.array([2**-149, 2**-126, 2.0**127, np.finfo(np.float32).max])
    return np.concatenate((finite, (finite[1:] + finite[:-1]) / 2, past[past < 3.4e38], ends))


def specials() -> npt.NDArray[np.float32]:
    return from_bits(
        (
            *(0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
            *(0xFF800001, 0x7FFFFFFF, 0x7F7FFFFF, 1, 0x80000001, 0x007FFFFF, 0x00800000),
        )
    )


@pytest.mark.parametrize("dtype", KINDS)
def test_every_code_is_read(dtype: Dtype) -> None:
    """All 256 codes: kernel, oracle and torch."""
    codes = np.arange(256, dtype=np.uint8)
    kernel = call("pf_decode", np.empty(256, np.float32), dtype is Dtype.E5M2, codes)
    assert same_floats(kernel, fp8.decode_fp8(codes, dtype))
    torch_values = torch.from_numpy(codes.copy()).view(TORCH[dtype]).float().numpy()
    assert same_floats(kernel, torch_values)
    assert np.isnan(kernel).sum() == (2 if dtype is Dtype.E4M3 else 6)
    assert np.nanmax(np.abs(kernel[np.isfinite(kernel)])) == fp8.FP8_MAX[dtype]


@pytest.mark.parametrize("dtype", KINDS)
def test_every_number_that_is_read_is_written_as_its_code(dtype: Dtype) -> None:
    """Reading and writing are inverse but for infinities, which saturate."""
    codes = np.arange(256, dtype=np.uint8)
    values = fp8.decode_fp8(codes, dtype).copy()
    finite = np.isfinite(values)
    assert (encoded(values, dtype)[finite] == codes[finite]).all()
    assert (fp8.encode_fp8(values, dtype)[finite] == codes[finite]).all()
    infinite = np.isinf(values)
    largest = 0x7E if dtype is Dtype.E4M3 else 0x7B
    assert ((encoded(values, dtype)[infinite] & 0x7F) == largest).all()


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("source", [Dtype.BF16, Dtype.F16])
def test_every_16_bit_number_is_written(dtype: Dtype, source: Dtype) -> None:
    """All 65,536 bf16 and fp16 inputs: kernel, oracle and torch."""
    widen = fp8.from_bf16 if source is Dtype.BF16 else fp8.from_fp16
    values = widen(ALL_WORDS)
    kernel = encoded(values, dtype)
    assert same_codes(kernel, fp8.encode_fp8(values, dtype), dtype)
    assert same_codes(kernel, by_torch(values, dtype), dtype)


@pytest.mark.parametrize("dtype", KINDS)
def test_fp32_around_every_boundary_is_written(dtype: Dtype) -> None:
    """Numbers, ties and saturation, with their nearest neighbours, and all special values."""
    values = np.concatenate((around(boundaries(fp8.fp8_table(dtype))), specials()))
    kernel = encoded(values, dtype)
    assert same_codes(kernel, fp8.encode_fp8(values, dtype), dtype)
    assert same_codes(kernel, by_torch(values, dtype), dtype)
    assert encoded(from_bits([0x80000001]), dtype)[0] == 0x80  # negative underflow


@pytest.mark.parametrize(
    ("dtype", "value", "code"),
    [
        (Dtype.E4M3, 464.0, 0x7E),
        (Dtype.E4M3, 400.0, 0x7C),  # a tie between 384 and 416
        (Dtype.E4M3, 432.0, 0x7E),  # a tie between 416 and 448
        (Dtype.E4M3, 431.99997, 0x7D),
        (Dtype.E4M3, 300.0, 0x79),
        (Dtype.E4M3, -(2.0**-10), 0x80),  # a tie with 0
        (Dtype.E4M3, 2.0**-10 * 3, 0x02),
        (Dtype.E5M2, 61440.0, 0x7B),
        (Dtype.E5M2, 1e38, 0x7B),
        (Dtype.E5M2, -np.inf, 0xFB),
        (Dtype.E5M2, 2.0**-17, 0x00),
        (Dtype.E5M2, 2.0**-17 * 3, 0x02),
    ],
)
def test_known_codes(dtype: Dtype, value: float, code: int) -> None:
    """Codes worked out by hand."""
    values = np.array([value], np.float32)
    assert encoded(values, dtype)[0] == code
    assert fp8.encode_fp8(values, dtype)[0] == code


@pytest.mark.parametrize("dtype", KINDS)
def test_scales_divide_as_ieee_says(dtype: Dtype) -> None:
    """Scales zero, subnormal, 1, 448, huge, infinite, NaN and negative, on the way in and out."""
    random = np.random.default_rng(1).integers(0, 2**32, 2000, dtype=np.uint32)
    values = np.concatenate((around(boundaries(fp8.fp8_table(dtype)), 1), specials()))
    values = np.concatenate((values, from_bits(random)))
    for scale in SCALES:
        scales = np.full(values.size, scale, np.float32)
        kernel = np.empty(values.size, np.uint8)
        call("pf_quantise", kernel, dtype is Dtype.E5M2, values, scales)
        assert same_codes(kernel, fp8.quantise_fp8(values, scale, dtype), dtype)
        divided = (torch.from_numpy(values.copy()) / torch.from_numpy(scales)).numpy()
        assert same_codes(kernel, by_torch(divided, dtype), dtype)
        read = fp8.dequantise_fp8(kernel, scale, dtype)
        decoded = torch.from_numpy(kernel.copy()).view(TORCH[dtype]).float()
        assert same_floats(read, (decoded * torch.from_numpy(scales)).numpy())


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
def test_every_16_bit_number_widens_and_narrows(dtype: Dtype) -> None:
    """All 65,536 words there and back: kernel, oracle and torch."""
    is_bf16 = dtype is Dtype.BF16
    kernel = call("pf_widen", np.empty(2**16, np.float32), is_bf16, ALL_WORDS)
    oracle = (fp8.from_bf16 if is_bf16 else fp8.from_fp16)(ALL_WORDS)
    by_torch = torch.from_numpy(ALL_WORDS.view(np.int16).copy()).view(TORCH[dtype])
    assert same_floats(kernel, oracle)
    assert same_floats(kernel, by_torch.float().numpy())
    assert same_words(narrowed(kernel, dtype), ALL_WORDS, dtype)
    assert same_words(fp8.to_dtype(oracle, dtype), ALL_WORDS, dtype)


def torch_words(values: npt.NDArray[np.float32], dtype: Dtype) -> npt.NDArray[np.uint16]:
    words: npt.NDArray[np.int16] = (
        torch.from_numpy(values.copy()).to(TORCH[dtype]).view(torch.int16).numpy()
    )
    return words.view(np.uint16)


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16])
def test_fp32_around_every_boundary_narrows(dtype: Dtype) -> None:
    """Around every 16-bit number, every tie, and where fp16 and bf16 become infinite."""
    numbers = (fp8.from_bf16 if dtype is Dtype.BF16 else fp8.from_fp16)(ALL_WORDS)
    values = np.concatenate((around(boundaries(numbers), 1), specials()))
    kernel = narrowed(values, dtype)
    assert same_words(kernel, fp8.to_dtype(values, dtype), dtype)
    assert same_words(kernel, torch_words(values, dtype), dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*KINDS, Dtype.BF16, Dtype.F16])
def test_all_of_fp32(dtype: Dtype) -> None:
    """Every fp32 number, 2^24 at a time, kernel against torch; the oracle on one part in 16."""
    for part in range(256):
        values = from_bits(np.arange(part << 24, (part + 1) << 24, dtype=np.uint32))
        if dtype in KINDS:
            codes = encoded(values, dtype)
            assert same_codes(codes, by_torch(values, dtype), dtype), part
            assert same_codes(codes[::16], fp8.encode_fp8(values[::16], dtype), dtype), part
        else:
            words = narrowed(values, dtype)
            assert same_words(words, torch_words(values, dtype), dtype), part
            assert same_words(words[::16], fp8.to_dtype(values[::16], dtype), dtype), part

"""(b) gather_and_maybe_dequant_cache: copies cache entries to rows, or dequantises them.

The contract, with src [num_pages, page_size_tokens, H] and dst [dst_rows, H]; rows, pages and slots
as in (a):

    auto    dst[row] = src[B, o], bit for bit; the scale is not read
    fp8     dst[row, j] = cvt(fp32(decode(src[B, o, j])) * scale)

One fp32 multiplication, rounded to nearest even, then one rounding to fp32, fp16 or bf16. NaN
results are any NaN; every other bit is fixed.

Decisions where contracts.md is open, beside those of all gathers (`oracles/gather.py`):

* `kv_dtype` is 0 (auto), 1 (fp8_e4m3) or 2 (fp8_e5m2). `dst_dtype` is the code of F32, F16 or BF16
  and dst has that dtype. src has it too with `auto`; with fp8 it is of the fp8 type or of U8, since
  engines keep such caches as bytes.
* `entry_elements`, H, is any integer in 1..2^31-1.
* `scale` is rank 1, one element F32. Given, it is examined whatever `kv_dtype` is, as any optional
  buffer; with fp8 it must be given, even if there is nothing to do.
* With fp8 the scale is readable in every launch that has a request and a token, even if no row is
  mapped. It has no hostile values.
* Required bytes: as in (a), with entries of H source elements and rows of H destination elements.
  src has rank 3 and dst rank 2; rows must nest: dst_row_stride_bytes >= row bytes if dst_rows > 1.
* Base and strides of src are multiples of its element, those of dst of its own.
* A dequantised row on which starts decrease holds, element by element, an old or a claimant's one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pagefuzz.oracles import fp8
from pagefuzz.oracles.entry_references import EntryReferences
from pagefuzz.oracles.expectation import Footprint, Refusal
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS
from pagefuzz.oracles.intervals import IntervalSet
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Plan, Role
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_rows,
    check_stride_alignment,
    is_absent,
)

if TYPE_CHECKING:
    import torch

#: kv_dtype -> type of the codes; 0 is auto.
_CODES = {1: Dtype.E4M3, 2: Dtype.E5M2}
_RESULTS = (Dtype.F32, Dtype.F16, Dtype.BF16)


class GatherAndMaybeDequantCache(EntryReferences):
    """Operation (b)."""

    name = "gather_and_maybe_dequant_cache"
    summary = "copy or dequantisation of cache entries through a block table"
    sizes = (
        "num_requests",
        "num_tokens",
        "page_size_tokens",
        "num_pages",
        "table_width",
        "table_row_stride",
        "page_stride_bytes",
        "slot_stride_bytes",
        "dst_rows",
        "dst_row_stride_bytes",
        "entry_elements",
        "kv_dtype",
        "dst_dtype",
        "has_terminal",
    )
    buffers = (
        BufferRole("src", Role.SOURCE),
        BufferRole("dst", Role.DESTINATION),
        BLOCK_TABLE,
        STARTS,
        SEQ_STARTS,
        BufferRole("scale", Role.INDEX, optional=True),
        COUNTS,
    )
    words = MappingProxyType({"scale": (Dtype.F32, 1)})
    unmeasurable: ClassVar[frozenset[str]] = frozenset({"entry_elements", "kv_dtype", "dst_dtype"})

    # ---- arguments -----------------------------------------------------------------------------

    def element_sizes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        result = sizes["dst_dtype"]
        result_bytes = Dtype(result).size_bytes if result in _RESULTS else 1
        return 1 if sizes["kv_dtype"] in _CODES else result_bytes, result_bytes

    def entry_bytes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        src_element, dst_element = self.element_sizes(sizes)
        return sizes["entry_elements"] * src_element, sizes["entry_elements"] * dst_element

    def element_text(self, plan: Plan) -> str:
        arguments = plan.arguments
        codes, result = arguments["kv_dtype"], arguments["dst_dtype"]
        result_name = Dtype(result).name if result in _RESULTS else f"dtype {result}"
        if codes not in _CODES:
            return f" of {result_name}"
        return f" of {_CODES[codes].name} to {result_name}, scale {_scale(plan):.9g}"

    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        result = sizes["dst_dtype"] if sizes["dst_dtype"] in _RESULTS else Dtype.BF16
        return {"src": (_CODES.get(sizes["kv_dtype"], result), 3), "dst": (result, 2)}

    def clamped(self, sizes: Mapping[str, int]) -> dict[str, int]:
        elements = min(max(sizes["entry_elements"], 1), 2**31 - 1)
        return {**super().clamped(sizes), "entry_elements": elements}

    def payload_refusals(self, found: Found, plan: Plan) -> None:
        arguments, buffers = plan.arguments, plan.buffers
        elements, kind = arguments["entry_elements"], arguments["kv_dtype"]
        result = arguments["dst_dtype"]
        if elements not in range(1, 2**31):
            found.append(
                Refusal("entry_elements", f"entry_elements={elements} lies outside 1..2^31-1")
            )
        if kind != 0 and kind not in _CODES:
            found.append(Refusal("kv_dtype", f"kv_dtype={kind} must be 0, 1 or 2"))
        if result not in _RESULTS:
            found.append(Refusal("dst_dtype", f"dst_dtype={result} is none of F32, F16 and BF16"))
        check_rows(found, arguments, "dst_rows")
        if kind in _CODES and is_absent(buffers["scale"]):
            found.append(Refusal("null_scale", "scale is null, fp8 codes need one"))
        results = (Dtype(result),) if result in _RESULTS else _RESULTS
        check_dtype(found, buffers["dst"], results)
        if kind in _CODES:
            check_dtype(found, buffers["src"], (_CODES[kind], Dtype.U8))
        elif kind == 0:
            check_dtype(found, buffers["src"], results)
        check_rank(found, buffers["src"], 3)
        check_rank(found, buffers["dst"], 2)
        src_element, dst_element = self.element_sizes(arguments)
        check_pointer(found, plan, "src", src_element)
        check_pointer(found, plan, "dst", dst_element)
        strides = self.strides(arguments)
        row_stride = strides.pop("dst_row_stride_bytes", None)
        check_stride_alignment(found, strides, src_element)
        if row_stride is not None:
            check_stride_alignment(found, {"dst_row_stride_bytes": row_stride}, dst_element)
            row_bytes = self.entry_bytes(arguments)[1]
            if 0 <= row_stride < row_bytes:
                found.append(
                    Refusal(
                        "not_nested",
                        f"dst_row_stride_bytes={row_stride} is below {row_bytes} bytes of a row",
                    )
                )
        others = ("src", "block_table", "starts", "seq_starts", "scale", "counts")
        check_overlaps(found, plan, "dst", others)

    # ---- rows ------------------------------------------------------------------------------------

    def converted(self, plan: Plan, entries: Bytes) -> Bytes:
        if (codes := _CODES.get(plan.arguments["kv_dtype"])) is None:
            return entries
        every = np.arange(256, dtype=np.uint8)
        products = fp8.dequantise_fp8(every, _scale(plan), codes)
        table = fp8.to_dtype(products, Dtype(plan.arguments["dst_dtype"]))
        rows: Bytes = np.ascontiguousarray(table[entries]).view(np.uint8)
        return rows.reshape(len(entries), entries.shape[1] * table.itemsize)

    def converted_alone(self, plan: Plan, entry: bytes) -> bytes:
        if (codes := _CODES.get(plan.arguments["kv_dtype"])) is None:
            return entry
        scale, result = _scale(plan), Dtype(plan.arguments["dst_dtype"])
        return b"".join(_element(_product(code, scale, codes), result) for code in entry)

    def converted_by_torch(self, plan: Plan, entries: torch.Tensor) -> torch.Tensor:
        import torch

        arguments = plan.arguments
        if arguments["kv_dtype"] not in _CODES or not len(entries):
            return entries
        codes = (torch.float8_e4m3fn, torch.float8_e5m2)[arguments["kv_dtype"] - 1]
        results = {Dtype.F32: torch.float32, Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16}
        product = entries.contiguous().view(codes).float() * torch.tensor(_scale(plan))
        return product.to(results[Dtype(arguments["dst_dtype"])]).view(torch.uint8)

    def free_nans(self, plan: Plan, rows: Bytes) -> FreeNans | None:
        if plan.arguments["kv_dtype"] not in _CODES:
            return None
        return FreeNans.of(rows, Dtype(plan.arguments["dst_dtype"]))

    def reads_words(self, sizes: Mapping[str, int]) -> bool:
        return sizes["kv_dtype"] in _CODES

    def word_footprints(self, plan: Plan) -> dict[str, Footprint]:
        if not self.reads_words(plan.arguments):
            return {}
        return {"scale": Footprint(IntervalSet([0], [4]))}


def _scale(plan: Plan) -> float:
    """The fp32 that lies in memory; NaN where there is none."""
    values = plan.buffers["scale"].image.values
    return float(values.reshape(-1).view(np.float32)[0]) if values.size else math.nan


# ---- one element at a time, on Python's floats ---------------------------------------------------


def _product(code: int, scale: float, dtype: Dtype) -> float:
    """decode(code) * scale, rounded to fp32. A float holds the exact product: 4 and 24 bits."""
    mantissa_bits, bias = (3, 7) if dtype is Dtype.E4M3 else (2, 15)
    exponent, mantissa = divmod(code & 0x7F, 2**mantissa_bits)
    if dtype is Dtype.E4M3 and code & 0x7F == 0x7F:
        return math.nan
    if dtype is Dtype.E5M2 and exponent == 31:
        value = math.nan if mantissa else math.inf
    elif exponent:
        value = math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)
    else:
        value = math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return _rounded(math.copysign(value, -1.0 if code & 0x80 else 1.0) * scale, 23, -126, 127)


def _rounded(value: float, mantissa_bits: int, least_exponent: int, most_exponent: int) -> float:
    """The nearest number of a format with those exponents, ties to even."""
    if value == 0 or not math.isfinite(value):
        return value
    exponent = max(math.frexp(value)[1] - 1, least_exponent)
    unit = exponent - mantissa_bits
    nearest = math.ldexp(round(math.ldexp(abs(value), -unit)), unit)  # round: half to even
    if nearest >= math.ldexp(1.0, most_exponent + 1):
        nearest = math.inf
    return math.copysign(nearest, value)


def _element(value: float, dtype: Dtype) -> bytes:
    """The bytes of an fp32 number as an element of `dtype`."""
    if dtype is Dtype.F32:
        return struct.pack("<f", value)
    if dtype is Dtype.F16:
        return struct.pack("<e", _rounded(value, 10, -14, 15))
    return struct.pack("<f", _rounded(value, 7, -126, 127))[2:]

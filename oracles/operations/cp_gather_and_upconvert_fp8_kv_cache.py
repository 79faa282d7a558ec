"""(c) cp_gather_and_upconvert_fp8_kv_cache: records of 656 bytes become rows of 576 bf16.

The contract, with src [num_pages, page_size_tokens, 656] and dst [dst_rows, 576]:

    b = clamp(starts[r], 0, num_tokens)
    e = clamp(starts[r + 1], 0, num_tokens)     # the last request without a terminal: num_tokens
    for row in [b, e):
        p = seq_starts[r] + (row - starts[r])
        q, o = divmod(p, page_size_tokens)
        B = block_table[r * table_row_stride + q]
        codes, scales, rope = src[B, o][:512], fp32(src[B, o][512:528]), src[B, o][528:]
        dst[row][j] = bf16(fp32(codes[j]) * scales[j div 128])      for j < 512, codes are E4M3
        dst[row][512:] = rope                                       64 raw values of 16 bits

Decisions where contracts.md is open, beside those of all gathers (`oracles/gather.py`):

* Production has no terminal value; the flag exists as in the other gathers.
* page_stride_bytes below 656 is refused where num_pages > 1, as slot_stride_bytes is where
  page_size_tokens > 1. Above that, records may overlap in any way.
* src has rank 3 and dtype U8, dst rank 2 and dtype BF16.
* Base and strides of src are multiples of 4; those of dst, which is no byte tensor, of its element
  of 2. Bases and strides that are not ignored are, even where an extent is 0.
* The destination must nest: dst_row_stride_bytes >= 1152 when dst_rows > 1.
* A NaN result is any bf16 NaN, the sign included; rope values keep every bit.
* Where rows are contested, the element that may not be torn has 2 bytes.

The payload of a case is random bytes, scales included, so that these have any bits. Values of `src`
replace the scales alone: the fp32 word at byte 4 w of src is values[w mod n], bits as an unsigned
integer, where w is a scale of a mapped record.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.entry_references import EntryReferences
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.fp8 import dequantise_fp8
from pagefuzz.oracles.free_nans import FreeNans
from pagefuzz.oracles.gather import BLOCK_TABLE, COUNTS, SEQ_STARTS, STARTS
from pagefuzz.oracles.layout import BufferRole, Bytes, Dtype, Image, Plan, Role
from pagefuzz.oracles.refusals import (
    Found,
    check_dtype,
    check_overlaps,
    check_pointer,
    check_rank,
    check_rows,
    check_stride_alignment,
)
from pagefuzz.oracles.rows import Int64s

if TYPE_CHECKING:
    import torch

RECORD_BYTES, ROW_BYTES = 656, 1152
CODES, GROUPS = 512, 4
_SCALES_AT, _ROPE_AT = 512, 528
_MOST_SCALES = 4096
_BITS = range(2**32)

_COMPUTED = np.arange(ROW_BYTES // 2) < CODES
_NAN_WORD, _INFINITY_WORD = 0x7FC0, 0x7F80


class CpGatherAndUpconvertFp8KvCache(EntryReferences):
    """Operation (c)."""

    name = "cp_gather_and_upconvert_fp8_kv_cache"
    summary = "656-byte fp8 records to rows of 576 bf16 through a block table"
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
        "has_terminal",
    )
    buffers = (
        BufferRole("src", Role.SOURCE),
        BufferRole("dst", Role.DESTINATION),
        BLOCK_TABLE,
        STARTS,
        SEQ_STARTS,
        COUNTS,
    )
    payload_values = frozenset({"src"})
    alignments = MappingProxyType({"src": 4})

    #: Stride -> (least bytes, reason tag); where it is not ignored.
    least_strides: ClassVar[Mapping[str, tuple[int, str]]] = MappingProxyType(
        {
            "page_stride_bytes": (RECORD_BYTES, "record_stride"),
            "slot_stride_bytes": (RECORD_BYTES, "record_stride"),
            "dst_row_stride_bytes": (ROW_BYTES, "not_nested"),
        }
    )

    # ---- arguments -----------------------------------------------------------------------------

    def entry_bytes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return RECORD_BYTES, ROW_BYTES

    def element_sizes(self, sizes: Mapping[str, int]) -> tuple[int, int]:
        return 1, 2

    def payload_types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        return {"src": (Dtype.U8, 3), "dst": (Dtype.BF16, 2)}

    def payload_refusals(self, found: Found, plan: Plan) -> None:
        arguments, buffers = plan.arguments, plan.buffers
        check_rows(found, arguments, "dst_rows")
        check_dtype(found, buffers["src"], (Dtype.U8,))
        check_dtype(found, buffers["dst"], (Dtype.BF16,))
        check_rank(found, buffers["src"], 3)
        check_rank(found, buffers["dst"], 2)
        check_pointer(found, plan, "src", 4)
        check_pointer(found, plan, "dst", 2)
        for name, stride in self.strides(arguments).items():
            least, reason = self.least_strides[name]
            check_stride_alignment(found, {name: stride}, 2 if name.startswith("dst") else 4)
            if 0 <= stride < least:
                found.append(Refusal(reason, f"{name}={stride} is below {least}"))
        others = ("src", "block_table", "starts", "seq_starts", "counts")
        check_overlaps(found, plan, "dst", others)

    def element_text(self, plan: Plan) -> str:
        values = plan.case.values.get("src")
        bits = values.parameters.get("values") if values is not None else None
        if not isinstance(bits, tuple):
            return " with any scales"
        scales = ", ".join(f"{_float(word):g}" for word in bits[:6])
        return f" with scales {scales}" + (", ..." if len(bits) > 6 else "")

    # ---- payload -------------------------------------------------------------------------------

    def _images(self, plan: Plan, sizes: Mapping[str, int], refused: bool) -> dict[str, Image]:
        images = super()._images(plan, sizes, refused)
        if "src" not in plan.case.values:
            return images
        bits = self._scale_bits(plan)
        if not refused and sizes["num_requests"] and sizes["num_tokens"]:
            words = self._scale_words(plan.with_images(images))
            images["src"] = Image.of_elements(words, bits[words % bits.size])
        return images

    def _scale_bits(self, plan: Plan) -> npt.NDArray[np.uint32]:
        values = plan.case.values["src"]
        bits = values.parameters.get("values")
        if values.recipe != "literal" or not isinstance(bits, tuple) or values.edits:
            raise CaseError("src holds payload; its values are 'literal' scales without edits")
        if not 0 < len(bits) <= _MOST_SCALES:
            raise CaseError(f"src has {len(bits)} scales; there must be 1..{_MOST_SCALES}")
        if wrong := [word for word in bits if word not in _BITS]:
            raise CaseError(f"src has a scale {wrong[0]}; scales are fp32 bits, 0..2^32-1")
        return np.array(bits, dtype=np.uint32)

    def _scale_words(self, plan: Plan) -> Int64s:
        """Index in src, in words of 4 bytes, of every scale of a mapped record; ascending."""
        rows = self.row_map(plan)
        pages = self.pages(plan, rows)
        page_stride, slot_stride, _ = self.effective_strides(plan.arguments)
        records = pages.page_id[rows.page] * page_stride + rows.slot * slot_stride
        records = records[pages.valid[rows.page]]
        words = (records // 4)[:, None] + (_SCALES_AT // 4 + np.arange(GROUPS))
        return np.unique(words)

    # ---- a record becomes a row ----------------------------------------------------------------

    def converted(self, plan: Plan, entries: Bytes) -> Bytes:
        rows = np.empty((entries.shape[0], ROW_BYTES), dtype=np.uint8)
        scales = np.ascontiguousarray(entries[:, _SCALES_AT:_ROPE_AT]).view(np.float32)
        codes = entries[:, :CODES].reshape(-1, GROUPS, CODES // GROUPS)
        products = dequantise_fp8(codes, scales[:, :, None], Dtype.E4M3)
        rows[:, : 2 * CODES] = _to_bf16(products).reshape(-1, CODES).view(np.uint8)
        rows[:, 2 * CODES :] = entries[:, _ROPE_AT:]
        return rows

    def converted_alone(self, plan: Plan, entry: bytes) -> bytes:
        """One element at a time, in Python's own floats."""
        scales = struct.unpack("<4f", entry[_SCALES_AT:_ROPE_AT])
        words = [
            _element(code, scales[j // (CODES // GROUPS)]) for j, code in enumerate(entry[:CODES])
        ]
        return struct.pack(f"<{CODES}H", *words) + entry[_ROPE_AT:]

    def converted_by_torch(self, plan: Plan, entries: torch.Tensor) -> torch.Tensor:
        """torch's own float8_e4m3fn, float32 and bfloat16."""
        import torch

        codes = entries[:, :CODES].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        scales = entries[:, _SCALES_AT:_ROPE_AT].contiguous().view(torch.float32)
        values = codes.view(-1, GROUPS, CODES // GROUPS) * scales[:, :, None]
        rows = values.to(torch.bfloat16).view(-1, CODES).view(torch.uint8)
        return torch.cat((rows, entries[:, _ROPE_AT:]), dim=1)

    def free_nans(self, plan: Plan, rows: Bytes) -> FreeNans | None:
        return FreeNans.of(rows, Dtype.BF16, _COMPUTED)


def _float(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bf16 bits, nearest even: `fp8.to_bf16` of so many values would be most of a case's time."""
    bits = values.view(np.uint32)
    kept, dropped = bits >> 16, bits & 0xFFFF
    kept += (dropped > 0x8000) | ((dropped == 0x8000) & (kept % 2 == 1))
    words = kept.astype(np.uint16)
    words[np.isnan(values)] = _NAN_WORD
    return words


def _element(code: int, scale: float) -> int:
    """bf16 bits of the product of an E4M3 code and a scale, rounded to fp32 first.

    Their significands have 4 and 24 bits: Python's float holds the product exactly.
    """
    if code & 0x7F == 0x7F:
        return _NAN_WORD
    exponent, mantissa = divmod(code & 0x7F, 8)
    value = (mantissa + 8) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
    product = (-value if code & 0x80 else value) * scale
    if math.isnan(product):
        return _NAN_WORD
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", product))[0]
    except OverflowError:
        rounded = math.copysign(math.inf, product)
    # The two bf16 numbers around it: the upper halves of fp32 words.
    magnitude = abs(rounded)
    low: int = struct.unpack("<I", struct.pack("<f", magnitude))[0] >> 16
    if low < _INFINITY_WORD:
        above = _float((low + 1) << 16) if low + 1 < _INFINITY_WORD else 2.0**128
        down, up = magnitude - _float(low << 16), above - magnitude
        low += int(up < down or (up == down and low % 2 == 1))
    return low | (math.copysign(1.0, rounded) < 0) << 15

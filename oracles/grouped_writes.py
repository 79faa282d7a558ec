"""Writers that store bf16 as E4M3 codes with scales of their own, one for each group of values.

The contract, for a group x of elements of one token:

    amax  = the largest |x[i]|, NaNs left out; 0 if there is nothing else
    scale = what the operation makes of amax, in float32; stored
    code  = E4M3 of x[i] / scale, a float32 division

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`):

* scale_kind is 0 (plain) or 1 (pow2).
* The cache is U8 of rank 3, a byte tensor: its base and its strides that are not ignored are
  multiples of 4, even where an extent is 0. Inputs are BF16 of rank 2, aligned to 2.
* A scale word is exact: it is never a NaN. A NaN code may be any.
* Where several tokens name one slot, the codes, the scales and the raw values of the cell are
  judged apart: those of which all tokens store the same are exact, whatever the others do.

`values` of the quantised input replace its payload: element i of the readable ones, counted from
the base of the input, is values[i mod n], bits as an unsigned integer.
"""

from __future__ import annotations

import math
import struct
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pagefuzz.oracles import contents
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.cells import Part, Slots
from pagefuzz.oracles.exact import float32_of, fp8_code
from pagefuzz.oracles.fp8 import Float32s, fp8_table, from_bf16, quantise_fp8
from pagefuzz.oracles.grouped_values import grouped
from pagefuzz.oracles.layout import Bytes, Dtype, Image, Plan
from pagefuzz.oracles.refusals import Found, check_dtype, check_rank
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.writes import WriteOperation

if TYPE_CHECKING:
    import torch

PLAIN, POW2 = 0, 1
LARGEST = 448.0
#: The float32 nearest to 1e-4.
SMALL = float(np.float32(1e-4))
ELEMENT_BYTES, WORD_BYTES = 2, 4
CACHE_ALIGNMENT_BYTES = 4

_NAN_CODE = 0x7F
_WORDS = range(2**16)


class GroupedWrite(WriteOperation):
    """A writer with scale_kind among its sizes; its cache is called `cache`."""

    #: The input whose groups are quantised.
    quantised: ClassVar[str]

    ranges = MappingProxyType(
        {**WriteOperation.ranges, "scale_kind": ("scale_kind", range(POW2 + 1))}
    )

    @abstractmethod
    def group_elements(self, sizes: Mapping[str, int]) -> int:
        """Elements that share a scale; they divide the row of the quantised input."""

    @abstractmethod
    def scales(self, amax: Float32s, kind: int) -> Float32s:
        """What is stored, of float32s >= 0."""

    @abstractmethod
    def scale_by_loop(self, amax: float, kind: int) -> float:
        """The same of one number, in exact arithmetic."""

    @abstractmethod
    def scales_by_torch(self, amax: torch.Tensor, kind: int) -> torch.Tensor: ...

    # ---- arguments -------------------------------------------------------------------------------

    def scalars(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        return {}

    def reads_scalars(self, sizes: Mapping[str, int]) -> bool:
        return False

    def types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        types: dict[str, tuple[int, int]] = {
            rows.name: (Dtype.BF16, 2) for rows in self.inputs(sizes)
        }
        return types | {"cache": (Dtype.U8, 3)}

    def own_refusals(self, found: Found, plan: Plan) -> None:
        buffers = plan.buffers
        for rows in self.inputs(self.clamped(plan.arguments)):
            check_dtype(found, buffers[rows.name], (Dtype.BF16,))
            check_rank(found, buffers[rows.name], 2)
        check_dtype(found, buffers["cache"], (Dtype.U8,))
        check_rank(found, buffers["cache"], 3)

    def computed_dtype(self, plan: Plan, part: Part) -> Dtype | None:
        return part.computed

    # ---- contents --------------------------------------------------------------------------------

    def own_images(
        self, plan: Plan, sizes: Mapping[str, int], slots: Slots | None
    ) -> dict[str, Image]:
        given = self._given(plan)
        if slots is None:
            return {}
        (rows,) = (rows for rows in self.inputs(sizes) if rows.name == self.quantised)
        stride = rows.stride_bytes(sizes)
        begin = slots.token * stride
        offsets = (
            begin[:, None] + np.arange(0, rows.row_bytes, ELEMENT_BYTES, dtype=np.int64)
        ).ravel()
        if stride < rows.row_bytes:
            offsets = np.unique(offsets)
        if given is not None:
            words = given[offsets // ELEMENT_BYTES % given.size]
            return {self.quantised: Image(offsets, words.view(np.uint8).reshape(-1, 2))}
        origin = plan.buffers[self.quantised].payload_origin_bytes
        # Where rows overlap an element is of several; its value is made for one of them.
        within = offsets % stride if stride else offsets
        size = self.group_elements(sizes)
        group, inside = np.divmod(within, size * ELEMENT_BYTES)
        values = grouped(
            contents.payload_at(plan.case.seed, offsets + origin, ELEMENT_BYTES),
            contents.payload_at(plan.case.seed, offsets - inside + origin, WORD_BYTES),
            group,
            inside // ELEMENT_BYTES,
            size,
        )
        return {self.quantised: Image(offsets, values)}

    def _given(self, plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.uint16]] | None:
        if (values := plan.case.values.get(self.quantised)) is None:
            return None
        words = values.parameters.get("values")
        if values.recipe != "literal" or not isinstance(words, tuple) or values.edits:
            raise CaseError(f"{self.quantised} holds payload; its values are 'literal' bf16 bits")
        if not 0 < len(words) <= len(_WORDS):
            raise CaseError(
                f"{self.quantised} has {len(words)} values; there must be 1..{len(_WORDS)}"
            )
        if wrong := [word for word in words if word not in _WORDS]:
            raise CaseError(f"{self.quantised} has a value {wrong[0]}; bf16 bits are 0..65535")
        return np.array(words, dtype=np.uint16)

    # ---- what is stored --------------------------------------------------------------------------

    def rows_of(self, plan: Plan, name: str, token: Int64s) -> Bytes:
        """uint8 [tokens, bytes]: what the rows of an input hold."""
        (rows,) = (rows for rows in self.inputs(plan.arguments) if rows.name == name)
        begin = token * rows.stride_bytes(plan.arguments)
        return self.input_bytes(plan, name, begin, rows.row_bytes)

    def encoded(self, plan: Plan, token: Int64s) -> tuple[Bytes, Bytes]:
        """uint8 [tokens, elements] and uint8 [tokens, 4 * groups]: codes and scales."""
        a = plan.arguments
        raw = np.ascontiguousarray(self.rows_of(plan, self.quantised, token))
        values = from_bf16(raw.view(np.uint16))
        size = self.group_elements(a)
        groups = values.reshape(token.size, values.shape[1] // size, size)
        magnitude = np.where(np.isnan(groups), np.float32(0), np.abs(groups))
        scales = self.scales(magnitude.max(axis=2, initial=0), a["scale_kind"])
        codes = quantise_fp8(groups, scales[:, :, None], Dtype.E4M3).reshape(values.shape)
        codes[np.isnan(fp8_table(Dtype.E4M3)[codes])] = _NAN_CODE
        words = np.ascontiguousarray(scales.astype("<f4")).view(np.uint8)
        return codes, words.reshape(token.size, groups.shape[1] * WORD_BYTES)

    def encoded_by_loop(self, plan: Plan, token: int) -> tuple[bytes, bytes]:
        """Codes and scales of one token, an element at a time, by exact fractions."""
        a = plan.arguments
        raw = self.rows_of(plan, self.quantised, np.array([token], dtype=np.int64))[0].tobytes()
        row = [_value(raw[at : at + 2]) for at in range(0, len(raw), 2)]
        size = self.group_elements(a)
        codes, words = bytearray(), b""
        for at in range(0, len(row), size):
            values = row[at : at + size]
            amax = max((abs(value) for value in values if not math.isnan(value)), default=0.0)
            scale = self.scale_by_loop(amax, a["scale_kind"])
            words += struct.pack("<f", scale)
            codes += bytes(fp8_code(_quotient(value, scale), Dtype.E4M3) for value in values)
        return bytes(codes), words

    def encoded_by_torch(self, plan: Plan, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """uint8 [elements] and uint8 [4 * groups]: the same by torch's own operations."""
        import torch  # seconds, that a campaign need not wait for

        a = plan.arguments
        raw = self.rows_of(plan, self.quantised, np.array([token], dtype=np.int64))[0].copy()
        values = torch.from_numpy(raw).view(torch.bfloat16).float().view(-1, self.group_elements(a))
        amax = values.abs().masked_fill(values.isnan(), 0).amax(dim=1)
        scales = self.scales_by_torch(amax, a["scale_kind"])
        quotient = values / scales[:, None]
        codes = quotient.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
        codes[quotient.isnan()] = _NAN_CODE
        return codes.flatten(), scales.view(torch.uint8)

    def payload_text(self, plan: Plan) -> str:
        kind = {PLAIN: "plain", POW2: "pow2"}.get(plan.arguments["scale_kind"], "unknown")
        return f"bf16 -> e4m3 with {kind} scales"


# ---- scales, in three ways -----------------------------------------------------------------------


def power_of_two(values: Float32s) -> Float32s:
    """The least power of two not below positive, normal float32s, by their bits."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    mantissa = bits & np.uint32(0x7FFFFF)
    raised: Float32s = np.where(mantissa > 0, bits - mantissa + np.uint32(0x800000), bits).view(
        np.float32
    )
    return raised


def power_of_two_by_loop(value: float) -> float:
    """The same of one number, by trying."""
    if math.isinf(value):
        return value
    power = Fraction(1, 2**126)
    while power < value:
        power *= 2
    return float(power)


def power_of_two_by_torch(values: torch.Tensor) -> torch.Tensor:
    """The same by torch's frexp: values are m * 2^e with m in [1/2, 1)."""
    import torch

    m, e = torch.frexp(values)
    powers = [math.ldexp(1.0, n) for n in (e - (m == 0.5).int()).tolist()]
    return torch.where(values.isinf(), values, torch.tensor(powers, dtype=torch.float32))


def _value(raw: bytes) -> float:
    """A bf16 is the upper half of a float32."""
    value: float = struct.unpack("<f", b"\0\0" + raw)[0]
    return value


def _quotient(value: float, scale: float) -> float:
    """value / scale rounded to float32; scale > 0."""
    if math.isnan(value) or (math.isinf(value) and math.isinf(scale)):
        return math.nan
    if math.isinf(value):
        return value
    magnitude = 0.0 if math.isinf(scale) else float32_of(abs(Fraction(value)) / Fraction(scale))
    return math.copysign(magnitude, value)


def divided_by_loop(value: float, by: float) -> float:
    """value / by rounded to float32; value >= 0, by > 0 and finite."""
    return value if math.isinf(value) else float32_of(Fraction(value) / Fraction(by))

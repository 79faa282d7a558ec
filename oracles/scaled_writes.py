"""Writers that store their inputs as they are, or as fp8 codes of value / scale.

Decisions where contracts.md is open, beside those of all writers (`oracles/writes.py`):

* kv_dtype is 0 (auto), 1 (fp8_e4m3) or 2 (fp8_e5m2); input_dtype is the code of F32, F16 or BF16.
  Every input has that dtype; caches have it too with auto, and with fp8 are of the fp8 type or U8,
  since engines keep such caches as bytes.
* A scale is F32 of rank 1. Given, it is examined whatever kv_dtype is, like any optional buffer;
  with fp8 it must be given, even if there is nothing to do, and is readable in every launch that
  has a token.
* `values` holds the bits of each scale as an int32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from pagefuzz.oracles import contents, index_values
from pagefuzz.oracles.cells import Part, Rows, Slots
from pagefuzz.oracles.exact import fp8_code
from pagefuzz.oracles.expectation import Refusal
from pagefuzz.oracles.fp8 import FP8_MAX, Float32s, fp8_table, from_bf16, from_fp16, quantise_fp8
from pagefuzz.oracles.layout import Bytes, Dtype, Image, Plan
from pagefuzz.oracles.refusals import Found, check_dtype, check_rank, is_absent
from pagefuzz.oracles.rows import Int64s
from pagefuzz.oracles.scaled_values import shaped
from pagefuzz.oracles.write_text import dtype_text
from pagefuzz.oracles.writes import WriteOperation

if TYPE_CHECKING:
    import torch

AUTO = 0
#: kv_dtype -> type of the codes.
CODES = {1: Dtype.E4M3, 2: Dtype.E5M2}
KV_DTYPES = (AUTO, *CODES)
INPUT_DTYPES = (int(Dtype.F16), int(Dtype.BF16), int(Dtype.F32))
_NAN_CODE = 0x7F


class ScaledWrite(WriteOperation):
    """A writer with kv_dtype and input_dtype among its sizes."""

    #: Its scale buffers.
    scales: ClassVar[tuple[str, ...]]
    #: Dimensions of every input and of every cache.
    input_rank: ClassVar[int]
    cache_rank: ClassVar[int]

    @abstractmethod
    def scale_count(self, sizes: Mapping[str, int]) -> int:
        """Values in each scale buffer."""

    @abstractmethod
    def scale_of(self, plan: Plan, rows: Rows, within: Int64s) -> tuple[str, Int64s]:
        """Which scale belongs to the elements `within` bytes from the beginning of an input's row:
        the buffer, and the index in it. Past the row: any."""

    # ---- arguments -------------------------------------------------------------------------------

    def input_dtype(self, sizes: Mapping[str, int]) -> Dtype:
        """That of a refused case may be none: F32 in its place."""
        known = sizes["input_dtype"] in INPUT_DTYPES
        return Dtype(sizes["input_dtype"]) if known else Dtype.F32

    def fp8(self, sizes: Mapping[str, int]) -> Dtype | None:
        """The format of the codes; None with auto. That of a refused case may be none: auto."""
        return CODES.get(sizes["kv_dtype"])

    def cache_dtype(self, sizes: Mapping[str, int]) -> Dtype:
        return self.fp8(sizes) or self.input_dtype(sizes)

    def computed_dtype(self, plan: Plan, part: Part) -> Dtype | None:
        return self.fp8(plan.arguments)

    def scalars(self, sizes: Mapping[str, int]) -> Mapping[str, int]:
        return dict.fromkeys(self.scales, 4 * self.scale_count(sizes))

    def reads_scalars(self, sizes: Mapping[str, int]) -> bool:
        return self.fp8(sizes) is not None

    def types(self, sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        types: dict[str, tuple[int, int]] = {
            rows.name: (self.input_dtype(sizes), self.input_rank) for rows in self.inputs(sizes)
        }
        for cells in self.caches(sizes):
            types[cells.name] = (self.cache_dtype(sizes), self.cache_rank)
        return types | dict.fromkeys(self.scales, (Dtype.F32, 1))

    def own_refusals(self, found: Found, plan: Plan) -> None:
        a, buffers = plan.arguments, plan.buffers
        for name, legal in (("kv_dtype", KV_DTYPES), ("input_dtype", INPUT_DTYPES)):
            if a[name] not in legal:
                found.append(
                    Refusal(name, f"{name}={a[name]} must be one of {', '.join(map(str, legal))}")
                )
        known_input = a["input_dtype"] in INPUT_DTYPES
        for rows in self.inputs(a):
            if known_input:
                check_dtype(found, buffers[rows.name], (self.input_dtype(a),))
            check_rank(found, buffers[rows.name], self.input_rank)
        fp8 = self.fp8(a)
        for cells in self.caches(a):
            if fp8 is not None:
                check_dtype(found, buffers[cells.name], (Dtype.U8, fp8))
            elif known_input and a["kv_dtype"] == AUTO:
                check_dtype(found, buffers[cells.name], (self.input_dtype(a),))
            check_rank(found, buffers[cells.name], self.cache_rank)
        for name in self.scales:
            if not is_absent(buffers[name]):
                check_dtype(found, buffers[name], (Dtype.F32,))
                check_rank(found, buffers[name], 1)
            elif fp8 is not None:
                found.append(Refusal("null_scale", f"{name} is null, fp8 codes need it"))

    # ---- contents --------------------------------------------------------------------------------

    def own_images(
        self, plan: Plan, sizes: Mapping[str, int], slots: Slots | None
    ) -> dict[str, Image]:
        images = {}
        fp8 = self.fp8(sizes)
        count = self.scale_count(sizes)
        for name in self.scales:
            if name not in plan.case.values or (slots is None and count not in range(2**16)):
                continue
            bits = index_values.vector(plan.case.values[name], count, index_values.INT32, name)
            if slots is not None and fp8 is None:
                continue  # poison, so that a launch that reads it all the same is seen
            images[name] = Image.of_elements(
                np.arange(count, dtype=np.int64), bits.astype(np.int32)
            )
        if slots is None or fp8 is None:
            return images
        for rows in self.inputs(sizes):
            images[rows.name] = self._shaped(plan, rows, slots, images, fp8)
        return images

    def _shaped(
        self, plan: Plan, rows: Rows, slots: Slots, scales: Mapping[str, Image], fp8: Dtype
    ) -> Image:
        """The elements of an input that may be read."""
        unit, row_bytes = rows.element_bytes, rows.row_bytes
        begin = slots.token * rows.stride_bytes(plan.arguments)
        offsets = np.unique(begin[:, None] + np.arange(0, row_bytes, unit, dtype=np.int64))
        origin = plan.buffers[rows.name].payload_origin_bytes
        payload = contents.payload_at(plan.case.seed, offsets + origin, unit)
        # Where rows overlap an element is of several; its value is made for one of them.
        stride = rows.stride_bytes(plan.arguments)
        name, index = self.scale_of(plan, rows, offsets % stride if stride else offsets)
        scale = _float32s(scales[name])[index]
        return Image(offsets, shaped(payload, self.input_dtype(plan.arguments), scale, fp8))

    # ---- what is stored --------------------------------------------------------------------------

    def encoded(self, plan: Plan, rows: Rows, token: Int64s) -> Bytes:
        """uint8 [tokens, bytes]: what the rows of an input become."""
        begin = token * rows.stride_bytes(plan.arguments)
        raw = self.input_bytes(plan, rows.name, begin, rows.row_bytes)
        fp8 = self.fp8(plan.arguments)
        if fp8 is None:
            return raw
        values = _widened(np.ascontiguousarray(raw), self.input_dtype(plan.arguments))
        within = np.arange(values.shape[1], dtype=np.int64) * rows.element_bytes
        name, index = self.scale_of(plan, rows, within)
        scale = _float32s(plan.buffers[name].image)[index]
        codes = quantise_fp8(values, scale, fp8)
        codes[np.isnan(fp8_table(fp8)[codes])] = _NAN_CODE
        return codes

    def encoded_by_loop(self, plan: Plan, rows: Rows, token: int) -> bytes:
        """One row, an element at a time: float32 division, then the nearest code by exact
        fractions."""
        begin = token * rows.stride_bytes(plan.arguments)
        at = np.array([begin], dtype=np.int64)
        raw: bytes = self.input_bytes(plan, rows.name, at, rows.row_bytes)[0].tobytes()
        fp8 = self.fp8(plan.arguments)
        if fp8 is None:
            return raw
        dtype, out = self.input_dtype(plan.arguments), bytearray()
        for i in range(0, len(raw), rows.element_bytes):
            value = _number(raw[i : i + rows.element_bytes], dtype)
            name, index = self.scale_of(plan, rows, np.array([i], dtype=np.int64))
            word = plan.buffers[name].image.values[int(index[0])].tobytes()
            with np.errstate(all="ignore"):
                out.append(fp8_code(float(value / _number(word, Dtype.F32)), fp8))
        return bytes(out)

    def encoded_by_torch(self, plan: Plan, rows: Rows, token: int) -> torch.Tensor:
        """uint8 [bytes]: the same by torch's own division and conversion."""
        import torch  # seconds, that a campaign need not wait for

        a = plan.arguments
        begin = token * rows.stride_bytes(a)
        at = np.array([begin], dtype=np.int64)
        raw = self.input_bytes(plan, rows.name, at, rows.row_bytes)[0].copy()
        fp8 = self.fp8(a)
        if fp8 is None:
            return torch.from_numpy(raw)
        kinds = {Dtype.F32: torch.float32, Dtype.F16: torch.float16, Dtype.BF16: torch.bfloat16}
        values = torch.from_numpy(raw).view(kinds[self.input_dtype(a)]).float()
        within = np.arange(len(values), dtype=np.int64) * rows.element_bytes
        name, index = self.scale_of(plan, rows, within)
        words = torch.from_numpy(plan.buffers[name].image.values.copy()).view(torch.float32)
        quotient = values / words.ravel()[torch.from_numpy(index)]
        largest = FP8_MAX[fp8]
        kind = torch.float8_e4m3fn if fp8 is Dtype.E4M3 else torch.float8_e5m2
        codes = quotient.clamp(-largest, largest).to(kind).view(torch.uint8)
        codes[quotient.isnan()] = _NAN_CODE
        return codes

    def payload_text(self, plan: Plan) -> str:
        a = plan.arguments
        kind = "auto" if a["kv_dtype"] == AUTO else dtype_text(CODES.get(a["kv_dtype"], 0))
        parts = [f"{dtype_text(a['input_dtype'])} -> {kind}"]
        for name in self.scales:
            image = plan.buffers[name].image
            if image.offsets.size:
                shown = [f"{value:.9g}" for value in _float32s(image)[:4].tolist()]
                parts.append(
                    f"{name}={', '.join(shown)}{', ...' if len(image.offsets) > 4 else ''}"
                )
        return "  ".join(parts)


def _float32s(image: Image) -> Float32s:
    return np.ascontiguousarray(image.values).view(np.float32).ravel()


def _widened(raw: Bytes, dtype: Dtype) -> Float32s:
    """float32 [n, elements] of uint8 [n, bytes]."""
    if dtype is Dtype.F32:
        return raw.view(np.float32)
    return (from_fp16 if dtype is Dtype.F16 else from_bf16)(raw.view(np.uint16))


def _number(raw: bytes, dtype: Dtype) -> np.float32:
    """One element; bf16 is the upper half of a float32."""
    if dtype is Dtype.BF16:
        raw, dtype = b"\0\0" + raw, Dtype.F32
    return np.float32(np.frombuffer(raw, np.float32 if dtype is Dtype.F32 else np.float16)[0])

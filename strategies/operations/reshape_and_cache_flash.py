"""Cases of (e) reshape_and_cache_flash."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import skewed, weighted
from pagefuzz.strategies.classes import check_limit, classes
from pagefuzz.strategies.corners import Corners
from pagefuzz.strategies.gathers import DEFAULT_LIMIT_BYTES
from pagefuzz.strategies.oddities import drawn, oddly
from pagefuzz.strategies.placements import placements
from pagefuzz.strategies.quantising import (
    cache_dtype,
    float_bits,
    input_dtypes,
    kv_dtypes,
    null_scale_lies,
    scale_vectors,
    type_lies,
    units,
)
from pagefuzz.strategies.refusals import Argument, Lie, Surface, lies, reach, rows_bytes, wrong_size
from pagefuzz.strategies.write_corners import flash_corners
from pagefuzz.strategies.writes import (
    COUNTS,
    Write,
    index_arguments,
    row_lies,
    write_choices,
)

OPERATION = "reshape_and_cache_flash"

#: Layout of keys, of values -> weight. `interleaved`: values behind the keys of each page.
KEY_LAYOUTS = {"tokens first": 50, "heads first": 30, "padded heads": 20}
VALUE_LAYOUTS = {"as keys": 40, "interleaved": 25, "heads first": 15, "padded slots": 20}

#: Legal but unusual -> weight.
ODDITIES = {
    "none": 74,
    "ignored strides": 10,  # strides of dimensions of size <= 1 hold nonsense
    "codes as bytes": 10,  # fp8 caches of U8, as engines keep them
    "unread scale": 6,  # with auto scales are given
}

#: Page size, heads, elements of one, types of inputs and caches, as engines run it.
PRODUCTION = (
    (16, 8, 128, Dtype.BF16, 0),
    (16, 8, 128, Dtype.BF16, 1),
    (16, 8, 128, Dtype.F16, 0),
    (32, 8, 128, Dtype.BF16, 0),
)

#: Of the keys of all tokens together; there are as many of values.
_MOST_ELEMENTS = 2**15

_KEY_LAYOUTS, _VALUE_LAYOUTS = weighted(KEY_LAYOUTS), weighted(VALUE_LAYOUTS)
_ODDITIES = weighted(ODDITIES)
_JUNK = st.sampled_from(range(19))
_HEADS = skewed((30, (1,)), (50, range(2, 9)), (20, (16, 17, 32, 33, 64, 128)))
_HEAD_ELEMENTS = skewed(
    (40, range(1, 9)), (30, range(9, 66)), (30, (64, 128, 128, 80, 96, 256, 512, 576))
)
_PER_HEAD = weighted({False: 65, True: 35})
_KV_DTYPES, _INPUT_DTYPES = kv_dtypes(), input_dtypes()


def cases(
    *, hostile: bool = True, refused: bool = True, limit_bytes: int = DEFAULT_LIMIT_BYTES
) -> SearchStrategy[Case]:
    """Cases of reshape_and_cache_flash: three in five in contract (a quarter of them at overflow
    scale), one in four hostile, the others refused; about 30 draws each.

    Shrinks towards one token of one head of one element, F32 stored as it is, in a pool of one
    page of one slot.

    Arguments, and what it raises: see `registry.cases_for`.
    """
    check_limit(limit_bytes)
    return _cases(classes(hostile=hostile, refused=refused), limit_bytes)


@dataclass(frozen=True)
class _Strides:
    page: int
    slot: int
    head: int

    def sizes(self, side: str) -> dict[str, int]:
        return {
            f"{side}_page_stride_bytes": self.page,
            f"{side}_slot_stride_bytes": self.slot,
            f"{side}_head_stride_bytes": self.head,
        }


@st.composite
def _cases(draw: st.DrawFn, classes: SearchStrategy[str], limit_bytes: int) -> Case:
    case_class = draw(classes)
    event(f"class: {case_class}")
    drawn_choices = draw(write_choices(case_class=case_class, limit_bytes=limit_bytes))
    choices, shape = drawn_choices.produced(PRODUCTION)
    kv_dtype, input_type = draw(_KV_DTYPES), draw(_INPUT_DTYPES)
    heads, head_elements = draw(_HEADS), draw(_HEAD_ELEMENTS)
    if shape is not None:
        heads, head_elements, input_type, kv_dtype = shape
    input_dtype = Dtype(input_type)
    key_layout, value_layout = draw(_KEY_LAYOUTS), draw(_VALUE_LAYOUTS)
    event(f"keys: {key_layout}")
    event(f"values: {value_layout}")
    per_head = draw(_PER_HEAD)
    oddity, junk = drawn(draw, case_class, _ODDITIES, _JUNK)
    unit = input_dtype.size_bytes
    stored = 1 if kv_dtype else unit
    if choices.crossing is not None:
        if choices.crossing.quantity == "slot index":
            heads, head_elements = 1, 1
        elif choices.crossing.quantity == "slot stride" and key_layout != "tokens first":
            heads = max(heads, 2)
    scale_count = heads if per_head else 1
    scales = {}
    if kv_dtype or oddity == "unread scale":
        for name in ("k_scale", "v_scale"):
            scales[name] = Values.literal(*draw(scale_vectors(scale_count)))
    elements = heads * head_elements
    tokens = min(choices.mapping.num_tokens, max(1, _MOST_ELEMENTS // elements))
    write = Write(
        choices.with_tokens(tokens),
        limit_bytes,
        entry_bytes=elements * stored,
        element_bytes=stored,
        input_bytes=elements * unit,
        input_element_bytes=unit,
        caches=2,
    )
    key = _key_strides(write, key_layout, heads, head_elements * stored)
    value, over = _value_strides(write, value_layout, key, heads, head_elements * stored)
    row = elements * unit
    sizes = {
        **write.inputs(key=row, value=row),
        "num_heads": heads,
        "head_elements": head_elements,
        "scale_count": scale_count,
        "page_size_tokens": write.page_size_tokens,
        "num_pages": write.num_pages,
        **key.sizes("key"),
        **value.sizes("value"),
        "input_dtype": int(input_dtype),
        "kv_dtype": kv_dtype,
    }
    placed = draw(placements(_alignments(unit, stored), "key_cache"))
    case = write.case(OPERATION, sizes, placed, scales)
    if case_class == "refused":
        return draw(lies(surface(case)))
    if over and write.num_pages:
        case = _interleaved(case, over)
    if oddity == "codes as bytes" and kv_dtype:
        code = int(Dtype.U8)
        case = replace(case, overrides={"key_cache.dtype": code, "value_cache.dtype": code})
    return oddly(surface(case), oddity, junk)


def _key_strides(write: Write, layout: str, heads: int, run: int) -> _Strides:
    size = write.page_size_tokens
    page, slot = write.page_stride_bytes, write.slot_stride_bytes
    if layout != "tokens first" and write.quantity == "slot stride" and heads > 1:
        head = write.stride_at_boundary(heads - 1, write.unit)  # in place of the slot stride
        return _Strides(size * run, run, head)
    if layout == "heads first" and page >= size * slot:
        return _Strides(page, run, size * run)
    if layout == "padded heads" and not write.quantity:
        head = run + write.unit
        page = max(page, heads * size * head)
        return _Strides(page, heads * head, head)
    return _Strides(page, slot, run)


def _value_strides(
    write: Write, layout: str, key: _Strides, heads: int, run: int
) -> tuple[_Strides, int]:
    """The strides of value_cache, and how far behind the keys of a page its values lie; 0 if it
    has a buffer of its own. Interleaving widens pages only at ordinary scale."""
    size = write.page_size_tokens
    if write.quantity:
        return key, 0
    if layout == "heads first":
        return _Strides(heads * size * run, run, size * run), 0
    if layout == "padded slots":
        slot = heads * run + write.unit
        return _Strides(size * slot, slot, run), 0
    # Values in the second half of each page, where there is one; Write's pages have no such half.
    half = key.page // 2 // write.unit * write.unit
    inside = (size - 1) * key.slot + (heads - 1) * key.head + run
    if layout == "interleaved" and half >= inside:
        return key, half
    return key, -1 if layout == "interleaved" else 0


def _interleaved(case: Case, over: int) -> Case:
    """Values in the memory of key_cache: in each page behind its keys."""
    sizes = dict(case.sizes)
    if over < 0:  # pages become twice as large, unless slots or heads lie further apart
        inside = sizes["head_elements"] * units(case)[1]
        inside += (sizes["page_size_tokens"] - 1) * sizes["key_slot_stride_bytes"]
        inside += (sizes["num_heads"] - 1) * sizes["key_head_stride_bytes"]
        if sizes["key_page_stride_bytes"] < inside and sizes["num_pages"] > 1:
            return case
        over = max(inside, sizes["key_page_stride_bytes"])
        page = {"key_page_stride_bytes": 2 * over, "value_page_stride_bytes": 2 * over}
        case = case.with_sizes(**page)
    needed = required_bytes(case)["value_cache"]
    now = case.placement("key_cache")
    placed = {name: p for name, p in case.placements.items() if name != "value_cache"}
    behind = replace(now, after_bytes=max(now.after_bytes, over + needed))
    placed |= {"key_cache": behind, "value_cache": Placement(over=("key_cache", over))}
    return replace(case, placements=placed)


def _alignments(unit: int, stored: int) -> dict[str, int]:
    inputs = {"key": unit, "value": unit, "slot_mapping": 8, "k_scale": 4, "v_scale": 4}
    return {**inputs, "key_cache": stored, "value_cache": stored, "counts": 8}


# ---- reports -------------------------------------------------------------------------------------


def _reported(
    slots: tuple[int, ...],
    *,
    heads: int = 3,
    head_elements: int = 16,
    scales: tuple[float, float] | None = None,
    num_pages: int = 4,
    page_size_tokens: int = 4,
    spare_rows: int = 0,
    **strides: int,
) -> Case:
    """Both caches alike: tokens first, of bf16, or of E4M3 codes with `scales` of keys and values;
    dense where `strides` (page, slot, head: bytes) say nothing else."""
    run = head_elements * (2 if scales is None else 1)
    head = strides.get("head", run)
    slot = strides.get("slot", heads * head)
    both = _Strides(strides.get("page", page_size_tokens * slot), slot, head)
    rows, row_bytes = len(slots) + spare_rows, 2 * heads * head_elements
    values = {"slot_mapping": Values.literal(*slots)}
    if scales is not None:
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            values[name] = Values.literal(float_bits(scale))
    return Case(
        operation=OPERATION,
        sizes={
            "num_tokens": len(slots),
            "key_rows": rows,
            "value_rows": rows,
            "key_row_stride_bytes": row_bytes,
            "value_row_stride_bytes": row_bytes,
            "num_heads": heads,
            "head_elements": head_elements,
            "scale_count": 1,
            "page_size_tokens": page_size_tokens,
            "num_pages": num_pages,
            **both.sizes("key"),
            **both.sizes("value"),
            "input_dtype": int(Dtype.BF16),
            "kv_dtype": 0 if scales is None else 1,
        },
        values={**values, "counts": Values.literal(0, 0)},
    )


def _fp16_pool(page: int) -> Case:
    """The page's first slot, in pages of 16 tokens of 32 heads of 128 fp16: 65,536 elements."""
    case = _reported(
        (page * 16,), heads=32, head_elements=128, page_size_tokens=16, num_pages=page + 1
    )
    return case.with_sizes(input_dtype=int(Dtype.F16))


def _far_page(page: int) -> Case:
    """The page's first slot, in pages 2^30 elements of one byte apart."""
    return _reported((4 * page,), scales=(1.0, 1.0), num_pages=page + 1, page=2**30)


def _one_buffer() -> Case:
    """In each page the values lie behind the keys."""
    case = _reported((5, 0, 10), page=768)
    placed = {
        "key_cache": Placement(after_bytes=384),
        "value_cache": Placement(over=("key_cache", 384)),
    }
    return replace(case, placements=placed)


def _many(tokens: int) -> Case:
    """Padding, but for the first and the last token."""
    case = _reported((3,), heads=1, head_elements=2)
    case = case.with_sizes(num_tokens=tokens, key_rows=tokens, value_rows=tokens)
    slots = Values("constant", {"value": -1}, {0: 3, tokens - 1: 7})
    return replace(case, values={**case.values, "slot_mapping": slots})


#: Inputs of public reports, by the number of the report. 6: the element that a page begins at
#: passes 2^31. 12: a page stride of 2^30 elements, of which two wrap to a negative number and four
#: to zero. 15: a padded tail. 16: inputs longer than slot_mapping. 17: keys and values are views of
#: one buffer. 18: one stride that sizes do not tell; rows of values may lie further apart than
#: those of keys. 24: ties, and codes above 256. 25: scales that are not 1, and values above 448
#: times them. 30: more tokens than a grid's y axis has room for. 33: heads lie one after another in
#: a page whose shape says tokens first.
REPORTED: Mapping[str, Callable[[], Case]] = {
    "6-fp16-pool-good": lambda: _fp16_pool(32_767),
    "6-fp16-pool-bad": lambda: _fp16_pool(32_768),
    "12-page-1-good": lambda: _far_page(1),
    "12-page-2-bad": lambda: _far_page(2),
    "12-page-4-bad": lambda: _far_page(4),
    "15-padded-tail": lambda: _reported((5, 0, -1, -1)),
    "16-longer-inputs": lambda: _reported((5, 0, 10), spare_rows=5),
    "17-one-buffer": _one_buffer,
    "18-page-stride": lambda: _reported((5, 0, 10), page=512),
    "18-row-stride": lambda: _reported((5, 0, 10)).with_sizes(value_row_stride_bytes=160),
    "18-slot-stride": lambda: _reported((5, 0, 10), slot=128),
    "18-head-stride": lambda: _reported((5, 0, 10), head=48),
    "24-every-magnitude": lambda: _reported((5, 0, 10, 3, 7), scales=(1.0, 1.0)),
    "25-scales-differ": lambda: _reported((5, 0, 10, 3, 7), scales=(0.5, 4.0)),
    "30-65535-tokens": lambda: _many(65_535),
    "30-65536-tokens": lambda: _many(65_536),
    "33-heads-first": lambda: _reported(
        (70, 0, 131),
        heads=2,
        head_elements=128,
        page_size_tokens=64,
        slot=256,
        head=16_384,
        page=32_768,
    ),
}


# ---- refusals ------------------------------------------------------------------------------------


def _strides(case: Case) -> dict[str, tuple[str, int]]:
    """Stride -> (size that must exceed 1 for it to count, alignment in bytes)."""
    unit, stored = units(case)
    out = {}
    for side in ("key", "value"):
        out[f"{side}_row_stride_bytes"] = (f"{side}_rows", unit)
        out[f"{side}_page_stride_bytes"] = ("num_pages", stored)
        out[f"{side}_slot_stride_bytes"] = ("page_size_tokens", stored)
        out[f"{side}_head_stride_bytes"] = ("num_heads", stored)
    return out


def required_bytes(case: Case) -> dict[str, int]:
    """What every buffer needs; absent ones 0."""
    sizes, (unit, stored) = case.sizes, units(case)
    reached, tokens = reach(case, _strides(case)), sizes["num_tokens"]
    row = sizes["num_heads"] * sizes["head_elements"] * unit
    needed = rows_bytes(case, key=row, value=row)
    needed["slot_mapping"] = 8 * tokens
    for name in ("k_scale", "v_scale"):
        needed[name] = 4 * sizes["scale_count"] if name in case.values else 0
    for side in ("key", "value"):
        pool = sum(reached[f"{side}_{part}_stride_bytes"] for part in ("page", "slot", "head"))
        pool += sizes["head_elements"] * stored
        needed[f"{side}_cache"] = pool if sizes["num_pages"] else 0
    return {**needed, "counts": 16 if "counts" in case.values else 0}


def surface(case: Case) -> Surface:
    """What launchers of this operation must see through, for a sound case."""
    sizes, needed = case.sizes, required_bytes(case)
    unit, stored = units(case)
    input_dtype, stored_dtype = sizes["input_dtype"], cache_dtype(case)
    index = index_arguments(case)
    f32 = int(Dtype.F32)
    arguments: Mapping[str, Argument] = {
        "key": Argument(input_dtype, 3, needed["key"], unit),
        "value": Argument(input_dtype, 3, needed["value"], unit),
        "slot_mapping": index["slot_mapping"],
        **{
            name: Argument(f32, 1, needed[name], 4, is_absent=name not in case.values)
            for name in ("k_scale", "v_scale")
        },
        "key_cache": Argument(stored_dtype, 4, needed["key_cache"], stored),
        "value_cache": Argument(stored_dtype, 4, needed["value_cache"], stored),
        "counts": index["counts"],
    }
    run = sizes["head_elements"] * stored
    heads = sizes["num_heads"]
    own = {
        **type_lies(),
        "elements": [
            Lie("elements", {name: value})
            for name, past in (("num_heads", 65536), ("head_elements", 2**31))
            for value in (0, -1, past)
        ],
        "scale_count": wrong_size("scale_count", 0, -1, heads + 1, 2**32 + 1),
        "input_rows": row_lies(case, "key_rows", "value_rows"),
        "null_scale": null_scale_lies(case, "k_scale", "v_scale"),
        "not_nested": [
            Lie("not_nested", {f"{side}_{part}_stride_bytes": stride, size: max(sizes[size], 2)})
            for side in ("key", "value")
            for part, size in (
                ("page", "num_pages"),
                ("slot", "page_size_tokens"),
                ("head", "num_heads"),
            )
            for stride in (0, run - stored)
        ],
    }
    strides = _strides(case)
    return Surface(
        case=case,
        arguments=arguments,
        destinations=("key_cache", "value_cache"),
        strides=strides,
        extents={
            name: ("num_tokens", size) if "row" in name else (size, "num_pages")
            for name, (size, _) in strides.items()
        },
        counts=COUNTS,
        own=own,
    )


# ---- corners -------------------------------------------------------------------------------------

#: Name -> whether a case is in that corner.
CORNERS: Corners = flash_corners()

"""Views that the readers of round trips take of what a writer stored, by writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hypothesis import event
from hypothesis import strategies as st

from pagefuzz.oracles.case import Case, Values
from pagefuzz.oracles.layout import Dtype
from pagefuzz.strategies.choices import weighted
from pagefuzz.strategies.strides import rounded_up

#: Which caches, of a writer of two -> weight.
CACHES = {"first": 40, "second": 30, "both": 30}

_MOST_HEADS = 5  # that are gathered each by itself
CODES, ROPE, _RECORD = 512, 64, 656  # of the record that is up-converted

_CACHES = weighted(CACHES)
_WHOLE = weighted({True: 50, False: 51})


@dataclass(frozen=True)
class View:
    """What a reader sees of a cache.

    cache, first_byte  as of a `Gather`
    entry_bytes        of one slot; page and slot strides are the cache's
    unit               bytes of an element
    kv_dtype, dtype    of the codes, and of what was stored
    scale              bits of the one it was stored by; None if it was stored as it is
    """

    cache: str
    first_byte: int
    page_stride_bytes: int
    slot_stride_bytes: int
    entry_bytes: int
    unit: int
    kv_dtype: int
    dtype: int
    scale: int | None = None


def _mla_views(draw: st.DrawFn, case: Case) -> list[View]:
    sizes = case.sizes
    unit = stored_bytes(sizes)
    scale = literal_of(case, "scale")[0] if sizes["kv_dtype"] else None
    entry = (sizes["kv_c_elements"] + sizes["k_pe_elements"]) * unit
    return [
        View(
            "cache",
            0,
            sizes["page_stride_bytes"],
            sizes["slot_stride_bytes"],
            entry,
            unit,
            sizes["kv_dtype"],
            sizes["input_dtype"],
            scale,
        )
    ]


def _flash_views(draw: st.DrawFn, case: Case) -> list[View]:
    """Keys, values or both; as one entry where the heads of a slot are dense, else head by head."""
    sizes, heads = case.sizes, case.sizes["num_heads"]
    unit = stored_bytes(sizes)
    run = sizes["head_elements"] * unit
    which = draw(_CACHES)
    views = []
    for side in {"first": ("key",), "second": ("value",), "both": ("key", "value")}[which]:
        per_head = sizes["kv_dtype"] != 0 and sizes["scale_count"] > 1
        dense = heads == 1 or sizes[f"{side}_head_stride_bytes"] == run
        bits = literal_of(case, f"{side[0]}_scale") if sizes["kv_dtype"] else (None,)
        whole = dense and not per_head and draw(_WHOLE)
        event(f"{side}s: {'whole slots' if whole else 'head by head'}")
        chosen = range(heads) if heads <= _MOST_HEADS else (0, 1, heads // 2, heads - 2, heads - 1)
        views += [
            View(
                f"{side}_cache",
                head * run,
                sizes[f"{side}_page_stride_bytes"],
                sizes[f"{side}_slot_stride_bytes"],
                heads * run if whole else run,
                unit,
                sizes["kv_dtype"],
                sizes["input_dtype"],
                bits[head % len(bits)],
            )
            for head in ((0,) if whole else chosen)
        ]
    return views


def stored_bytes(sizes: Mapping[str, int]) -> int:
    return 1 if sizes["kv_dtype"] else Dtype(sizes["input_dtype"]).size_bytes


def literal_of(case: Case, name: str) -> tuple[int, ...]:
    found = case.values[name].parameters["values"]
    assert isinstance(found, tuple)
    return found


def _record_views(draw: st.DrawFn, case: Case) -> list[View]:
    sizes = case.sizes
    codes = sizes["kv_c_elements"]
    entry = codes + codes // 32 + 2 * sizes["k_pe_elements"]
    unit = 4 if entry % 4 == 0 else 2
    strides = (sizes["page_stride_bytes"], sizes["slot_stride_bytes"])
    return [View("cache", 0, *strides, entry, unit, 0, int(Dtype.BF16))]


def _indexer_views(draw: st.DrawFn, case: Case) -> list[View]:
    sizes = case.sizes
    entry = sizes["head_dim"] + 4 * (sizes["head_dim"] // sizes["quant_block"])
    return [View("cache", 0, sizes["page_stride_bytes"], 0, entry, 1, 0, int(Dtype.BF16))]


Views = Callable[[st.DrawFn, Case], list[View]]

#: By operation.
WRITERS: Mapping[str, Views] = {
    "concat_and_cache_mla": _mla_views,
    "reshape_and_cache_flash": _flash_views,
    "concat_and_cache_ds_mla": _record_views,
    "indexer_k_quant_and_cache": _indexer_views,
}

#: Writers of cells that are not torn by the element: of several tokens in one slot, one stays.
WHOLE_CELLS = ("concat_and_cache_ds_mla", "indexer_k_quant_and_cache")


def distinct(case: Case) -> Case:
    """Every slot is named once; further tokens of it are padding."""
    seen: set[int] = set()
    slots = []
    for slot in literal_of(case, "slot_mapping"):
        slots.append(-1 if slot in seen else slot)
        seen.add(slot)
    return replace(case, values={**case.values, "slot_mapping": Values.literal(*slots)})


def as_upconverted(case: Case) -> Case:
    """Records of the one size that is up-converted: 512 codes and 64 rope values. What lay between
    rows, slots or pages still does."""
    sizes, old = dict(case.sizes), case.sizes
    rows = {"kv_c": 2 * CODES, "k_pe": 2 * ROPE}
    for name, row_bytes in rows.items():
        gap = max(0, old[f"{name}_row_stride_bytes"] - 2 * old[f"{name}_elements"])
        if old[f"{name}_rows"] > 1:
            sizes[f"{name}_row_stride_bytes"] = row_bytes + gap
        sizes[f"{name}_elements"] = row_bytes // 2
    codes = old["kv_c_elements"]
    entry = rounded_up(codes + codes // 32 + 2 * old["k_pe_elements"], 4)
    size, pages = old["page_size_tokens"], old["num_pages"]
    page, slot = old["page_stride_bytes"], old["slot_stride_bytes"]
    if size > 1 and pages > 1 and page < slot:  # slots first
        page = _RECORD + max(0, page - entry)
        slot = pages * page
    else:
        gap = max(0, page - ((size - 1) * slot if size > 1 else 0) - entry)
        slot = _RECORD + max(0, slot - entry) if size > 1 else slot
        page = (size - 1) * slot + _RECORD + gap if size > 1 else _RECORD + gap
    if pages > 1:
        sizes["page_stride_bytes"] = page
    if size > 1:
        sizes["slot_stride_bytes"] = slot
    return replace(case, sizes=sizes)

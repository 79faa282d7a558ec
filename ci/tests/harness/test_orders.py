"""Missing barriers and stale shared memory on the host, found in at most eight launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from ci.tests.planted import case_of, twin

from pagefuzz import check
from pagefuzz.harness.check import Checker
from pagefuzz.harness.subjects import KERNELS
from pagefuzz.oracles.case import Values

MOST_ORDERS = 8

MISSING = KERNELS / "twins" / "missing-barrier.toml"
LOOKED_UP = "if (first_thread()) page_of_all = physical_page(g, owner.request, page);"


@pytest.mark.parametrize(
    ("name", "relation"),
    [
        ("missing-barrier", "order"),
        ("upconvert-missing-barrier", "order"),
        ("upconvert-stale-shared-memory", "order"),
        ("upconvert-stale-shared-memory", "repeat"),
    ],
)
def test_found_in_at_most_eight_launches(name: str, relation: str) -> None:
    """Beside the first two, by that judgement; without them it says nothing."""
    case = replace(case_of(name), relations=(relation,))
    with Checker(None, twin(name), "host", "release") as checker:
        verdict = checker.check(case)
        assert relation in {failure.judgement for failure in verdict.failures}
        assert verdict.launches - 2 <= MOST_ORDERS
        without = checker.check(replace(case, relations=()))
    assert relation not in without.checked
    assert without.clean is ("stale" not in name)


def test_the_same_broadcast_with_its_barrier_is_silent(tmp_path: Path) -> None:
    """What is found is the barrier that is missing, not the broadcast."""
    text = MISSING.read_text()
    assert text.count(LOOKED_UP) == 1
    sound = tmp_path / "sound.toml"
    sound.write_text(text.replace(LOOKED_UP, f"{LOOKED_UP} __syncthreads();"))
    case = replace(case_of("missing-barrier"), relations=("order", "repeat"))
    verdict = check(case, f"twin:{sound}", build="release")
    assert verdict.clean, verdict.failures
    assert verdict.launches == 2 + 5 + 3
    assert verdict.checked["order"] > 0
    assert verdict.checked["repeat"] > 0


def test_a_barrier_that_is_missed_in_one_order_only(tmp_path: Path) -> None:
    """Threads that are ahead of the first one leave on what it has not written yet."""
    text = MISSING.read_text()
    leaving = tmp_path / "leaving.toml"
    leaving.write_text(text.replace(LOOKED_UP, f"{LOOKED_UP} if (page_of_all == 0) return;"))
    verdict = check(case_of("missing-barrier"), f"twin:{leaving}", build="release")
    assert verdict.failures[0].identity in ("launch:BARRIER_FAULT", "output:dst:not written")
    (failure,) = (one for one in verdict.failures if one.judgement == "launch")
    assert "has ended" in failure.details["access"]
    assert "order" in failure.details["means"]


@pytest.mark.parametrize("pages", [1, 3])
def test_a_barrier_of_warps_in_place_of_the_blocks(tmp_path: Path, pages: int) -> None:
    """Warps wait for nobody at barriers of their own: one that is ahead of the first thread's reads
    the page of the last CTA."""
    text = MISSING.read_text()
    warps = tmp_path / "warps.toml"
    warps.write_text(text.replace(LOOKED_UP, f"{LOOKED_UP} __syncwarp();"))
    case = case_of("missing-barrier")
    tokens = 16 * pages  # of 64 bytes in vectors of 16: two warps a page
    sizes = {"num_requests": 1, "num_tokens": tokens, "dst_rows": tokens, "page_size_tokens": 16}
    sizes |= {"num_pages": pages, "page_stride_bytes": 16 * 64, "table_width": pages}
    values = {
        "block_table": Values.literal(*reversed(range(pages))),
        "starts": Values.literal(0, tokens),
    }
    case = replace(case, sizes=dict(case.sizes) | sizes, values=dict(case.values) | values)
    with Checker(None, f"twin:{warps}", "host", "release") as checker:
        verdict = checker.check(case)
    if pages == 1:  # the page of the last CTA is the right one
        assert verdict.clean, verdict.failures
        return
    assert [failure.judgement for failure in verdict.failures] == ["order"]
    assert "reverse order" in verdict.failures[0].details["means"]
    assert verdict.launches - 2 <= MOST_ORDERS

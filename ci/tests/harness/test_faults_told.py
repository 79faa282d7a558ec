"""What a report says of a launch that dies: which one it was, and what it is known to have done."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping

import pytest

from pagefuzz.harness.check import Checker
from pagefuzz.harness.running import Injection
from pagefuzz.oracles.case import Case, Placement, Values
from pagefuzz.oracles.verdict import Outcome

# What the twin does with entries of so many bytes.
SOUND, WILD, SENT = 32, 16, 24

TWIN = """
operation = "cp_gather_cache"
schedule = "page"
breaks = "writes nowhere, sends itself a signal, reads past a table that is wide"

[[replace]]
find = '''      const index64 to = slice.row_begin * g.dst_row_stride_bytes;'''
with = '''      const index64 to = slice.row_begin * g.dst_row_stride_bytes + \
index64(g.entry_bytes == 16 ? 0x7A7A7A7A7A7A7A7All : 0); if (g.entry_bytes == 24) raise(SIGSEGV); \
if (g.table_width > 1) { volatile int32_t x = g.block_table.load(g.table_width); (void)x; }'''
"""


def case_of(entry_bytes: int = SOUND, *relations: str, **placements: Placement) -> Case:
    sizes = {
        "num_requests": 1,
        "num_tokens": 2,
        "page_size_tokens": 2,
        "num_pages": 2,
        "table_width": 1,
        "table_row_stride": 1,
        "page_stride_bytes": 64,
        "slot_stride_bytes": 32,
        "dst_rows": 2,
        "dst_row_stride_bytes": 32,
        "entry_bytes": entry_bytes,
        "element_bytes": 8,
        "has_terminal": 1,
    }
    values = {"block_table": Values.literal(1), "starts": Values.literal(0, 2)}
    return Case("cp_gather_cache", sizes, values, relations=relations, placements=placements)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checker]:
    path = tmp_path_factory.mktemp("twin") / "tells.toml"
    path.write_text(TWIN)
    with Checker("cp_gather_cache", f"twin:{path}", "host", "release") as checker:
        yield checker


def told(checker: Checker, case: Case, injection: Injection | None = None) -> Mapping[str, str]:
    failure = checker.check(case, injection=injection).failures[0]
    assert failure.judgement == "death"
    return failure.details


def test_a_death_in_a_related_launch_names_that(faulty: Checker) -> None:
    """Its plan is another one, in whose words nothing may be said of the case's own."""
    assert faulty.check(case_of()).outcome is Outcome.CLEAN
    details = told(faulty, case_of(SOUND, "widening"))
    assert details["launch"].startswith("a launch for widening: the table has ")
    assert "means" not in details


@pytest.mark.skipif(platform.machine() != "x86_64", reason="others tell the address")
def test_a_wild_address_is_not_told_as_0(faulty: Checker) -> None:
    """x86 has no address for it, and no kind; the line is known all the same."""
    details = told(faulty, case_of(WILD))
    assert details["access"].startswith("SIGSEGV: access at an address that the processor does not")
    assert details["where"].startswith("kernels/operations/cp_gather_cache.cu:")
    assert "launch" not in details


def test_a_signal_that_was_sent_is_no_access(faulty: Checker) -> None:
    """It ends the process at once, as without a handler, and leaves nothing for a later fault."""
    details = told(faulty, case_of(SENT))
    assert details["access"] == "SIGSEGV"
    assert "where" not in details
    assert faulty.deaths >= 1


@pytest.fixture(scope="module")
def injected() -> Iterator[Checker]:
    with Checker("cp_gather_cache", "bundled:page", "host", "inject") as checker:
        yield checker


@pytest.mark.parametrize(
    ("at", "before_bytes", "page"),
    [
        (-8, 0, "mapped read-only"),  # in the far red zone
        (-64, 64, "mapped read-only"),  # in the workspace in front
        (8, 64, "mapped read-only"),
        (128, 0, "that nobody may touch"),
    ],
)
def test_a_write_says_what_page_it_met(
    injected: Checker, at: int, before_bytes: int, page: str
) -> None:
    """All of a source's region is mapped read-only, not its bytes alone."""
    case = case_of(src=Placement(before_bytes=before_bytes))
    details = told(injected, case, Injection("src", at, 8, "write"))
    assert details["access"] == f"writes src at byte {at} of 128: SIGSEGV, a page {page}"
    assert "launch" not in details


def test_a_fault_of_the_second_launch_says_so(injected: Checker) -> None:
    """The first one did not end at the guard: bytes far behind its end are still in its region."""
    case = case_of(src=Placement(guard="start"))
    details = told(injected, case, Injection("src", 128, 8, "read"))
    assert (
        details["launch"] == "the second launch, with every buffer at the other end of its memory"
    )
    assert (
        details["access"] == "reads src at byte 128 of 128: SIGSEGV, a page that nobody may touch"
    )

"""Reading what compute-sanitizer prints, in the forms that its manual documents."""

from __future__ import annotations

import pytest

from pagefuzz.harness.sanitizers.failures import verdict_of
from pagefuzz.harness.sanitizers.reports import by_identity, parse
from pagefuzz.harness.sanitizers.watched import Launched
from pagefuzz.oracles.verdict import CaseClass, Outcome, Severity

MEMCHECK = """\
========= COMPUTE-SANITIZER
[pagefuzz begin 0]
[pagefuzz end 0]
[pagefuzz begin 1]
========= Invalid __global__ read of size 4 bytes
=========     at int pf::load<int>(const int *)+0x1d0 in views.h:71
=========     by thread (32,0,0) in block (1,0,0)
=========     Access to 0x7f3c7ec00104 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00000 of size 260 bytes
=========         Device Frame: void gather<(int)4>(args)+0x90 in cp_gather_cache.cu:88
=========
========= Invalid __global__ read of size 4 bytes
=========     at int pf::load<int>(const int *)+0x1d0 in views.h:71
=========     by thread (33,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec00108 is out of bounds
=========         Device Frame: void gather<(int)4>(args)+0x90 in cp_gather_cache.cu:88
=========
[pagefuzz end 1]
========= ERROR SUMMARY: 2 errors
"""

RACECHECK = """\
========= COMPUTE-SANITIZER
[pagefuzz begin 3]
========= Error: Race reported between Write access at share(int *)+0x90 in copy_blocks.cu:41
=========     and Read access at share(int *)+0x100 in copy_blocks.cu:51 [508 hazards]
=========
[pagefuzz end 3]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""

HAZARD = """\
[pagefuzz begin 3]
========= Warning: Potential RAW hazard detected at __shared__ 0x8c in block (0,0,0) :
=========     Write Thread (35,0,0) at share(int *)+0x90 in copy_blocks.cu:44
=========     Read Thread (32,0,0) at share(int *)+0x120 in copy_blocks.cu:56
=========     Current Value : 35
[pagefuzz end 3]
========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)
"""

INITCHECK = """\
========= COMPUTE-SANITIZER
[pagefuzz begin 0]
========= Uninitialized __global__ memory read of size 4 bytes
=========     at gather(int *)+0x70 in /somewhere/kernels/cp_gather_cache.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
[pagefuzz end 0]
========= ERROR SUMMARY: 1 error
"""

SYNCCHECK = """\
========= COMPUTE-SANITIZER
[pagefuzz begin 0]
========= Barrier error detected. Divergent thread(s) in block.
=========     at [clone gather(int *, int *)] outlineSync()+0x11f0 in cp_gather_cache.cu:42
=========     by thread (32,0,0) in block (0,0,0)
=========     Device Frame: gather(int *, int *)+0xe40 in cp_gather_cache.cu:60
=========
[pagefuzz end 0]
========= ERROR SUMMARY: 1 error
"""

OLD_FORM = """\
========= Invalid __global__ write of size 2 bytes
=========     at 0xd80 in /build/kernels/copy_blocks.cu:162:void pf::copy<(bool)1>(T2 *, int)
=========     by thread (63,0,0) in block (506,0,0)
=========     Address 0x7fcd07a0312c is misaligned
========= ERROR SUMMARY: 1 error
"""

UNKNOWN = """\
[pagefuzz begin 7]
========= Tensor Memory column 32 being accessed is not allocated
========= Something that nobody has thought of yet
[pagefuzz end 7]
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize(
    ("text", "kind", "where", "case", "errors"),
    [
        (MEMCHECK, "Invalid __global__ read of size 4 bytes", "cp_gather_cache.cu:88", 1, 2),
        (RACECHECK, "Error: Race reported between Write access", "copy_blocks.cu:41", 3, 1),
        (HAZARD, "Warning: Potential RAW hazard detected", "copy_blocks.cu:44", 3, 1),
        (INITCHECK, "Uninitialized __global__ memory read of size 4 bytes",
         "cp_gather_cache.cu:41", 0, 1),
        (SYNCCHECK, "Barrier error detected. Divergent thread(s) in block",
         "cp_gather_cache.cu:42", 0, 1),
        (OLD_FORM, "Invalid __global__ write of size 2 bytes", "copy_blocks.cu:162", None, 1),
    ],
)  # fmt: skip
def test_a_documented_form_is_read(text, kind, where, case, errors):
    """What happened, at which line of the operation's source, during which case, how often."""
    output = parse(text)
    (identity,) = by_identity(output.reports)
    assert identity == (kind, f"kernels/operations/{where}")
    assert {report.case for report in output.reports} == {case}
    assert output.errors == errors
    assert output.complaints == ()


def test_a_form_that_nobody_knows_is_a_report():
    """Each block of lines counts, whatever it says."""
    output = parse(UNKNOWN)
    assert [report.case for report in output.reports] == [7, 7]
    assert output.reports[0].kind.startswith("Tensor Memory column 32")
    assert output.reports[0].where == ""


@pytest.mark.parametrize(
    "text",
    [
        "========= COMPUTE-SANITIZER\n[pagefuzz begin 0]\n========= ERROR SUMMARY: 0 errors\n",
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
        "= = =\n====\n========= LEAK SUMMARY: 0 bytes leaked\n========= ERROR SUMMARY: 0 errors\n",
    ],
)
def test_clean_output_holds_no_report(text):
    """Headers, summaries, empty lines and what the program prints are none."""
    output = parse(text)
    assert (output.reports, output.errors, output.complaints) == ((), 0, ())


@pytest.mark.parametrize("text", ["", "========= COMPUTE-SANITIZER\n", "Killed\n"])
def test_without_a_summary_nothing_is_known(text):
    """It is not the same as no errors."""
    assert parse(text).errors is None


@pytest.mark.parametrize(
    "said",
    [
        "Error: Target application terminated before first instrumented API call",
        "Target application returned an error",
        "Device not supported. Please refer to the release notes",
        "Internal Sanitizer Error: The application could not be attached",
        "Unable to find injection library libsanitizer-collection.so",
        "Error: No attachable process found. compute-sanitizer timed-out.",
    ],
)
def test_what_a_tool_says_of_itself_is_no_report(said):
    """It could not do its work, or the program did not end well."""
    output = parse(f"========= {said}\n========= ERROR SUMMARY: 0 errors\n")
    assert output.complaints == (said,)
    assert output.reports == ()


def test_errors_that_were_not_printed_are_counted_once():
    """The second summary line tells of part of the first one's number."""
    text = "========= X\n========= ERROR SUMMARY: 257 errors\n"
    text += "========= ERROR SUMMARY: 157 errors were not printed. Use --print-limit\n"
    assert parse(text).errors == 257


def test_a_marker_in_an_unfinished_line_is_seen():
    """Two processes write into one stream."""
    output = parse("========= Invalid rea[pagefuzz begin 4]\n=========     at x\n")
    assert output.begun == (4,)
    assert len(output.reports) == 1


LAUNCHED = Launched(
    1, "a GPU", 0, buffers={"src_cache": (0x7F0000000000, 64), "block_table": (0x7F3C7EC00000, 260)}
)


def test_a_report_becomes_a_failure_that_names_buffer_and_line():
    """The address is looked up among the buffers of the launch."""
    verdict = verdict_of(
        "memcheck", parse(MEMCHECK).reports, LAUNCHED, CaseClass.HOSTILE, contained=True
    )
    assert verdict.outcome is Outcome.FAILED
    (failure,) = verdict.failures
    assert failure.judgement == "memcheck"
    assert failure.title == "Invalid __global__ read of size 4 bytes, past block_table"
    assert failure.key[-2:] == ("block_table", "past")
    assert failure.details["access"] == "4 bytes at block_table, byte 260 of 260"
    line = "kernels/operations/cp_gather_cache.cu:88"
    assert failure.details["where"] == f"{line}  block (1,0,0) thread (32,0,0)"
    assert "2 reports" in failure.details["seen"]
    assert (verdict.checked, verdict.launches) == ({"memcheck": 1}, 1)


def test_hostile_values_against_no_promise_are_a_note():
    """As in every judgement's verdict."""
    verdict = verdict_of(
        "memcheck", parse(MEMCHECK).reports, LAUNCHED, CaseClass.HOSTILE, contained=False
    )
    assert verdict.outcome is Outcome.CLEAN
    assert [failure.severity for failure in verdict.failures] == [Severity.NOTE]


@pytest.mark.parametrize(("address", "side"), [("7f3c7ebffffc", "before"), ("7f3c7ec00010", "in")])
def test_sides_of_a_buffer(address, side):
    """Before it, or inside."""
    text = MEMCHECK.replace("7f3c7ec00104", address)
    failure = verdict_of("memcheck", parse(text).reports, LAUNCHED, None, contained=True).failures
    assert failure[0].key[-1].startswith(side)


def test_an_address_far_from_all_names_no_buffer():
    """It may belong to anything."""
    text = MEMCHECK.replace("7f3c7ec00104", "dead0000")
    failure = verdict_of("memcheck", parse(text).reports, LAUNCHED, None, contained=True).failures
    assert failure[0].title == "Invalid __global__ read of size 4 bytes"
    assert "access" not in failure[0].details

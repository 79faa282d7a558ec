"""Campaigns in real runner processes, on a fake subject."""

from __future__ import annotations

import os
import re
import resource
import signal
import time
from types import ModuleType, SimpleNamespace

import pytest

from pagefuzz.harness.campaign.engine import Campaign
from pagefuzz.harness.campaign.journal import Journal, read_journal
from pagefuzz.harness.campaign.plan import (
    SHORTEST_CUT_S,
    SHORTEST_PIECE_S,
    Job,
    Options,
    Shard,
    Unit,
    time_bound,
)
from pagefuzz.harness.campaign.search import HYPOTHESIS_SHARE, Search
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import load_finding
from pagefuzz.harness.reporters.ending import ending

TWO_FAULTS = {"faults": {"bounds:a": ["a", 100], "output:b": ["b", 77]}}


def test_clean_subject(run_campaign):
    """A subject without faults: exit 0, and exactly the cases that were asked for."""
    ran = run_campaign({}, cases=250)
    assert ran.result.exit_code == 0
    assert ran.result.totals.cases == 250
    assert ran.result.totals.launches == 500
    assert ran.result.totals.checked == {"death": 250, "output": 250, "bounds": 250}
    assert ran.result.totals.layers == dict.fromkeys(
        ("red zones", "guard pages", "checked build"), (500, 75000)
    )
    assert ran.result.totals.cases_a_second > 0
    assert not (ran.folder / "findings").exists()


def test_keep_going_lists_each_distinct_finding(run_campaign):
    """--keep-going finds both faults, each minimised to its own limit, and goes on to the end."""
    ran = run_campaign(TWO_FAULTS, keep_going=True)
    sizes = {finding.identity: finding.case.sizes for finding in ran.result.findings}
    assert sizes == {
        "bounds:a": {"a": 100, "b": 1, "c": 0},  # a size of 0 is not simpler than 1
        "output:b": {"a": 1, "b": 77, "c": 0},
    }
    assert ran.result.exit_code == 1
    assert ran.result.totals.cases == 200


def test_without_keep_going_one_finding_ends_the_unit(run_campaign):
    """The first finding ends the unit before its cases are used up."""
    ran = run_campaign(TWO_FAULTS)
    assert len(ran.result.findings) == 1
    assert ran.result.totals.cases < 200
    assert ran.result.exit_code == 1


def test_a_finding_is_repeated_and_stored(run_campaign):
    """A finding that always fails is stored with 10 of 10 repeats, beside its test."""
    ran = run_campaign({"faults": {"bounds:a": ["a", 100]}})
    (path,) = (ran.folder / "findings").glob("*.json")
    finding = load_finding(path)
    assert (finding.repeats, finding.runs, finding.minimised) == (10, 10, True)
    assert path.name.startswith("bounds-a-is-wrong-")
    assert path.with_name(f"test_{path.stem.replace('-', '_')}.py").is_file()


def test_a_finding_knows_how_long_a_launch_was_waited_for(run_campaign):
    """What was asked for goes into its file."""
    ran = run_campaign({"faults": {"bounds:a": ["a", 100]}}, hang_after_s=3.0)
    (path,) = (ran.folder / "findings").glob("*.json")
    assert load_finding(path).hang_after_s == 3.0


def test_a_finding_that_does_not_always_repeat_is_one(run_campaign):
    """Failing every second time is a finding that says so, and nothing is called flaky."""
    ran = run_campaign({"faults": {"bounds:a": ["a", 0]}, "flaky": ["bounds:a"]})
    (finding,) = ran.result.findings
    assert 0 < finding.repeats < 10
    assert ran.listener.problems == []


def test_repeats_are_in_fresh_workers(run_campaign):
    """What fails only after other cases in its worker is a finding, and 0 of 10 say so."""
    ran = run_campaign({"faults": {"bounds:a": ["a", 0]}, "stale_after": 3})
    (finding,) = ran.result.findings
    assert (finding.repeats, finding.runs) == (0, 10)
    assert ran.result.exit_code == 1


def test_the_most_that_a_worker_held_is_known(run_campaign):
    """Of all shards of all units; the fake's second worker grows with its cases."""
    ran = run_campaign({}, cases=1200, jobs=2)
    held = ran.result.totals.memory
    assert (held.address_bytes, held.arena_bytes) == (2**40, 2**20)
    assert held.resident_bytes == 2**28 + 1000
    text = ending(ran.result, {})
    assert "memory at most: buffers 1.0 MB in 1.1 TB of addresses, worker 268.4 MB" in text
    ran.result.backend = "cuda"
    text = ending(ran.result, {})
    assert (
        "buffers 1.0 MB of the GPU in 1.1 TB of addresses,\n  worker 268.4 MB of the host" in text
    )
    assert "contexts and modules on the GPU are not counted" in text


def test_a_torn_line_of_the_journal_spoils_nothing(tmp_path):
    """What follows half a line, of a crash or a full disk, begins on a line of its own."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'{"case": 1}\n{"case": {"si')
    journal = Journal(path)
    for number in (2, 3):
        journal.append({"case": number})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 4, before[1]))
    try:
        with pytest.raises(CannotCheckError, match="cannot store a failing case in"):
            journal.append({"case": "does not fit"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.append({"case": 4})
    journal.close()
    assert [entry["case"] for entry in read_journal(path)] == [1, 2, 3, 4]


def test_a_reported_case_is_minimised_without_hypothesis(run_campaign):
    """A reported case runs first; what it finds is minimised as data."""
    subject = {"faults": {"bounds:a": ["a", 100]}, "reported": {"a": 1999, "b": 1000, "c": 1}}
    ran = run_campaign(subject)
    (finding,) = ran.result.findings
    assert finding.case.sizes["a"] == 100
    assert finding.case.sizes["b"] == 1
    assert ran.result.totals.cases == 1


def test_a_finding_in_contract_is_preferred(run_campaign):
    """A fault first seen by a hostile case is reported by one in contract if there is one."""
    subject = {"faults": {"bounds:a": ["a", 100]}, "reported": {"a": 100, "b": 0, "c": 1}}
    ran = run_campaign(subject, keep_going=True)
    (finding,) = ran.result.findings
    assert str(finding.verdict.case_class) == "in contract"


def test_without_a_line_of_source_the_class_tells_findings_apart(run_campaign):
    """Two deaths, in contract and hostile, may be two faults: neither replaces the other."""
    subject = {
        "faults": {"bounds:a": ["a", 100]},
        "reported": {"a": 100, "b": 0, "c": 1},
        "nowhere": True,
    }
    ran = run_campaign(subject, keep_going=True)
    assert ran.identities == {"bounds:a:hostile", "bounds:a:in contract"}
    assert len({found.path for u in ran.result.units.values() for found in u.found.values()}) == 2


@pytest.mark.parametrize(
    ("faults", "identity"),
    [
        ({"bounds:a": ["a", 100]}, "bounds:a:in contract"),
        ({"output:c": ["c", 1], "bounds:a": ["a", 100]}, "output:c:hostile"),
    ],
)
def test_one_finding_is_of_the_class_that_says_most(run_campaign, faults, identity):
    """Where the first finding ends the unit, minimising goes from a hostile case to one in
    contract that fails in the same way, and not to one that fails in another."""
    subject = {"faults": faults, "reported": {"a": 1999, "b": 9, "c": 3}, "nowhere": True}
    ran = run_campaign(subject)
    assert ran.identities == {identity}
    assert ran.result.findings[0].minimised
    assert ran.result.totals.cases == 1


def test_minimising_follows_a_finding_into_contract(run_campaign):
    """A finding with a line of source is the same one in every class: it is minimised in the one
    that says most, with --keep-going too."""
    subject = {"faults": {"bounds:a": ["a", 100]}, "reported": {"a": 1999, "b": 9, "c": 3}}
    (finding,) = run_campaign(subject, keep_going=True, cases=5).result.findings
    assert str(finding.verdict.case_class) == "in contract"
    assert finding.case.sizes == {"a": 100, "b": 1, "c": 0}


def test_findings_do_not_depend_on_jobs(run_campaign):
    """With the same seed, 1 and 3 runners draw the same cases and find the same."""
    outcomes = []
    for jobs in (1, 3):
        ran = run_campaign(TWO_FAULTS, cases=2500, jobs=jobs, keep_going=True)
        found = {f.identity: f.case.dumps() for f in ran.result.findings}
        outcomes.append((ran.result.totals.cases, ran.result.totals.classes, found))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == 2500


def test_seeds_differ(run_campaign):
    """Another seed draws other cases."""
    classes = [run_campaign({}, seed=seed).result.totals.classes for seed in (1, 2)]
    assert classes[0] != classes[1]


def test_where_a_twin_lies_does_not_decide_what_is_drawn():
    """The gate draws the same cases in every checkout."""
    names = ("twin:x.toml", "twin:/one/x.toml", "twin:/two/of them/x.toml", "twin:y.toml")
    seeds = [Shard(Unit("fake", name, hostile=True), 0, None).seed(0) for name in names]
    assert seeds[0] == seeds[1] == seeds[2] != seeds[3]


def test_ci_does_not_derandomise(run_campaign, monkeypatch):
    """With CI set, Hypothesis' own derandomised profile changes nothing: seeds still differ."""
    before = run_campaign({}, seed=1).result.totals.classes
    monkeypatch.setenv("CI", "true")
    assert run_campaign({}, seed=1).result.totals.classes == before
    assert run_campaign({}, seed=2).result.totals.classes != before


def test_draws_depend_on_the_seed_alone(run_campaign, tmp_path, monkeypatch):
    """Numbers in the source of loaded modules, which Hypothesis likes to draw, change nothing."""
    (tmp_path / "some_numbers.py").write_text(f"SOME = {list(range(1001, 1999, 7))}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{os.environ['PYTHONPATH']}:{tmp_path}")
    plain = run_campaign({}, verbose=True, cases=150).listener.notes
    assert (
        run_campaign({"imports": "some_numbers"}, verbose=True, cases=150).listener.notes == plain
    )


def test_units_do_not_share_examples(run_campaign, tmp_path):
    """A sound subject does not drop the failing examples of a faulty one."""
    database = str(tmp_path / "examples")
    faulty = {"faults": {"bounds:a": ["a", 1900]}}
    run_campaign(faulty, seed=3, database=database, cases=1000, subjects=("bundled:faulty",))
    run_campaign({}, seed=3, database=database, subjects=("bundled:sound",))
    again = run_campaign(faulty, seed=4, database=database, subjects=("bundled:faulty",))
    assert again.result.totals.cases == 1
    assert again.identities == {"bounds:a"}


def test_time_bounds_the_run(run_campaign):
    """A run that is bound by time ends then, even while it minimises, and reports the best case."""
    began = time.monotonic()
    subject = {"faults": {"bounds:a": ["a", 1]}, "sleep_s": 0.4}
    ran = run_campaign(subject, time_s=3.0, shrink_s=60.0)
    assert time.monotonic() - began < 30
    (finding,) = ran.result.findings
    assert not finding.minimised
    assert "time was up" in finding.text()


@pytest.mark.parametrize("limit", [1, 1500])
def test_a_case_that_stalls_does_not_outlast_the_run(run_campaign, limit):
    """A worker that does not answer, in a drawn case, while minimising or while repeating, is
    ended soon after time is up; that is no finding."""
    began = time.monotonic()
    subject = {"faults": {"bounds:a": ["a", limit]}, "stalls_from": 1000}
    ran = run_campaign(subject, time_s=4.0, keep_going=True)
    assert time.monotonic() - began < 30
    assert ran.listener.problems == []
    assert ran.identities <= {"bounds:a"}
    for finding in ran.result.findings:
        assert finding.case.sizes["a"] == limit


def test_near_the_end_both_minimisers_get_their_part(tmp_path):
    """What is left of the run is shared as the budget would be."""
    shard = Shard(Unit("fake", "bundled:fake", hostile=True), 0, None)
    options = Options(backend="host", build="checked", seed=0, shrink_s=20.0)
    for left_s, part in ((None, 1.0), (100.0, 1.0), (5.0, 0.25), (-1.0, 0.0)):
        deadline = None if left_s is None else time.monotonic() + left_s
        search = Search(
            Job(shard, options, deadline),
            ModuleType("parts"),
            SimpleNamespace(hang_after_s=60.0),
            list,
            Journal(tmp_path / "journal.jsonl"),
        )
        share = part * HYPOTHESIS_SHARE
        assert search._hypothesis_share == pytest.approx(share, abs=0.01)


def test_shrinking_has_a_budget(run_campaign):
    """One finding is not minimised for ever: then the search goes on."""
    subject = {"faults": {"bounds:a": ["a", 1]}, "sleep_s": 0.06}
    ran = run_campaign(subject, cases=20, shrink_s=0.1, keep_going=True)
    (finding,) = ran.result.findings
    assert not finding.minimised
    assert ran.result.totals.cases == 20


def test_every_unit_gets_its_time(run_campaign):
    """Time is shared by all units, more of them than runners."""
    subjects = ("bundled:x", "bundled:y", "bundled:z")
    for time_s in (12.0, 60.0):  # a busy machine takes seconds to start a runner
        ran = run_campaign({}, subjects=subjects, time_s=time_s, jobs=1)
        cases = [unit.totals.cases for unit in ran.result.units.values()]
        if min(cases):
            break
    assert min(cases) > 0
    assert ran.result.exit_code == 0


@pytest.mark.parametrize("jobs", [1, 2, 4, 15, 20])
@pytest.mark.parametrize("time_s", [20.0, 60.0, 300.0])
def test_no_unit_is_cut_into_pieces_that_are_lost(jobs, time_s):
    """Each unit gets its share of the time, and one piece at least that is worth a runner."""
    units = [Unit("fake", f"bundled:{nth}", hostile=True) for nth in range(15)]
    lanes = time_bound(units, jobs, time_s)
    assert len(lanes) == jobs
    got = dict.fromkeys(units, 0.0)
    longest = dict.fromkeys(units, 0.0)
    for lane in lanes:
        begin = 0.0
        for shard in lane:
            piece = shard.end_s - begin
            got[shard.unit] += piece
            longest[shard.unit] = max(longest[shard.unit], piece)
            begin = shard.end_s
        assert begin <= time_s + 1e-6
    share = jobs * time_s / len(units)
    assert min(longest.values()) >= min(0.7 * share, SHORTEST_CUT_S / 2) - 1e-6
    # More than a share where a neighbour's short piece was left out, or a lane has fewer units.
    assert max(got.values()) < share + max(SHORTEST_PIECE_S, share) + 1e-6


def test_interrupted_without_findings(run_campaign):
    """Ctrl-C: the run ends soon, and is no pass."""
    sent: list[float] = []

    def interrupt(campaign: Campaign) -> None:
        if campaign.result.totals.cases and not sent:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    ran = run_campaign({}, time_s=60.0, on_tick=interrupt)
    assert time.monotonic() - sent[0] < 20
    assert ran.result.interrupted
    assert ran.result.totals.cases > 0
    assert ran.result.exit_code == 2


@pytest.mark.parametrize("times", [1, 3])
def test_the_terminal_is_closed(run_campaign, times):
    """SIGHUP, which comes more than once, ends the run like SIGTERM: soon, and as no pass."""

    began = time.monotonic()
    sent = []

    def hang_up(campaign: Campaign) -> None:
        if campaign.result.totals.cases and len(sent) < times:
            os.kill(os.getpid(), signal.SIGHUP)
            sent.append(time.monotonic())

    ran = run_campaign({}, time_s=60.0, on_tick=hang_up)
    assert time.monotonic() - began < 40
    assert time.monotonic() - sent[0] < 10
    assert ran.result.interrupted
    assert ran.listener.problems == []
    assert ran.result.totals.cases > 0
    assert ran.result.exit_code == 2


def test_interrupted_with_findings(run_campaign):
    """Ctrl-C after a finding: it is reported, exit 1."""

    def interrupt(campaign: Campaign) -> None:
        if campaign.result.findings and not campaign.result.interrupted:
            os.kill(os.getpid(), signal.SIGINT)

    ran = run_campaign(TWO_FAULTS, time_s=60.0, keep_going=True, on_tick=interrupt)
    assert ran.result.interrupted
    assert ran.result.exit_code == 1


def test_a_runner_that_dies_is_no_pass(run_campaign):
    """A runner killed half-way: exit 2, with the signal's name."""
    ran = run_campaign({"kill_after": 50})
    assert ran.result.exit_code == 2
    assert (
        "fake/bundled:fake: its runner died before it was done (SIGKILL)" in ran.listener.problems
    )


def test_what_a_dead_runner_found_is_kept(run_campaign):
    """A runner killed while it minimises: the best case so far is a finding, and in the journal."""
    ran = run_campaign({"faults": {"bounds:a": ["a", 100]}, "kill_after": 20})
    (finding,) = ran.result.findings
    assert finding.identity == "bounds:a"
    assert (finding.runs, finding.minimised) == (0, False)
    assert ran.result.exit_code == 1
    journaled = read_journal(ran.folder / "journal.jsonl")
    assert {entry["identity"] for entry in journaled} == {"bounds:a"}
    assert finding.case.to_json() in [entry["case"] for entry in journaled]


def test_a_judgement_that_examined_nothing_is_no_pass(run_campaign):
    """A clean run in which a judgement looked at nothing: exit 2, naming it."""
    ran = run_campaign({"blind": ["output"]})
    assert ran.result.exit_code == 2
    assert ran.listener.problems == ["fake/bundled:fake: output examined nothing in 200 cases"]


@pytest.mark.parametrize(
    ("layer", "text"),
    [("guard pages", "guard pages"), ("checked build", "checked build (bounds)")],
)
def test_a_layer_that_examined_nothing_is_no_pass(run_campaign, layer, text):
    """A clean run in which a layer in force did nothing: exit 2, naming it once."""
    ran = run_campaign({"idle": [layer]})
    assert ran.result.exit_code == 2
    assert ran.listener.problems == [f"fake/bundled:fake: {text} examined nothing in 200 cases"]
    assert re.search(rf"^{layer} +nothing$", ending(ran.result, {}), re.M)


def test_cases_that_were_not_run_are_no_pass(run_campaign):
    """Nothing but cases that do not fit: exit 2 with the reason, no case counted."""
    ran = run_campaign({"not_run": True})
    assert ran.result.exit_code == 2
    assert ran.result.totals.cases == 0
    assert ran.result.totals.not_run == 200
    assert ran.listener.problems == ["fake/bundled:fake: no case ran (it does not fit into memory)"]


def test_a_subject_that_cannot_be_built(run_campaign):
    """What stops one runner stops the unit, and is said once: exit 2."""
    ran = run_campaign({"missing": True}, cases=5000, jobs=2)
    assert ran.result.exit_code == 2
    assert ran.listener.problems == ["no C++ compiler was found; install g++"]


def test_an_internal_error_is_no_pass(run_campaign):
    """An error in a checker is exit 2 with one sentence, its traceback apart."""
    ran = run_campaign({"broken": True})
    assert ran.result.exit_code == 2
    (problem,) = ran.listener.problems
    assert "RuntimeError: the fake is broken" in problem
    assert "Traceback" in ran.listener.details[0]


def test_findings_survive_a_folder_that_cannot_be_written(run_campaign, tmp_path):
    """Where nothing can be stored the finding is still reported, and what went wrong."""
    (tmp_path / "findings").write_text("a file is in the way")
    ran = run_campaign(
        {"faults": {"bounds:a": ["a", 100]}}, journal=str(tmp_path / "findings" / "journal.jsonl")
    )
    assert len(ran.result.findings) == 1
    assert ran.result.exit_code == 1
    assert any("cannot store a finding" in problem for problem in ran.listener.problems)
    assert any("cannot store a failing case" in problem for problem in ran.listener.problems)


def test_example_database_brings_a_finding_back(run_campaign, tmp_path):
    """What failed in an earlier run comes first in the next one."""
    subject = {"faults": {"bounds:a": ["a", 1900]}}
    database = str(tmp_path / "examples")
    first = run_campaign(subject, seed=3, database=database, cases=1000)
    second = run_campaign(subject, seed=4, database=database, cases=1000)
    assert first.identities == second.identities == {"bounds:a"}
    assert second.result.totals.cases == 1


def test_statistics_are_printed_when_asked_for(run_campaign):
    """Events and targets that the verdicts feed reach Hypothesis' statistics."""
    (text,) = run_campaign({}, statistics=True, cases=50).listener.notes
    assert "class: in contract" in text
    assert "distance to 1000" in text


@pytest.mark.parametrize("verbose", [True, False])
def test_debug_prints_every_case(run_campaign, verbose):
    """Each case is a note in the debug profile, and none is otherwise."""
    ran = run_campaign({}, verbose=verbose, cases=20)
    assert len(ran.listener.notes) == (20 if verbose else 0)

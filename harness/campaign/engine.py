"""Runs a campaign: starts runners, gathers what they say, tells reporters, judges the whole."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import selectors
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from pagefuzz.harness.campaign.candidate import Candidate
from pagefuzz.harness.campaign.events import (
    Claim,
    Event,
    Failing,
    Note,
    Problem,
    Progress,
    Settled,
    Unended,
)
from pagefuzz.harness.campaign.plan import (
    Job,
    Options,
    Shard,
    Unit,
    count_bound,
    running_case_file,
    time_bound,
)
from pagefuzz.harness.campaign.process import RunnerProcess
from pagefuzz.harness.campaign.result import Found, Result, UnitResult
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.findings import Finding, write_whole
from pagefuzz.harness.reporters import Reporter
from pagefuzz.harness.workers.journal import last_entry

TICK_S = 0.2


def _leave_lost_streams() -> None:
    """What is still to be printed there goes nowhere, instead of raising errors."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        if not _can_write(number, stream):
            os.dup2(null, number)
    os.close(null)


def _can_write(number: int, stream: TextIO | None) -> bool:
    try:
        os.write(number, b"")  # a closed terminal
        if stream is not None:
            stream.flush()  # a full disk or a closed pipe: what could not be written is still there
    except OSError:
        return False
    return True


class Campaign:
    """What is to be run.

    cases, time_s  exactly one of them bounds it: generated cases a unit, or seconds in all
    jobs           runner processes at a time
    device         in words, for findings
    judgements     unit -> names of those that must have examined something by the end
    layers         unit -> names of the detection layers that must have, too
    flags          unit -> those of its object, for findings
    findings       folder that findings go to
    """

    def __init__(
        self,
        units: Sequence[Unit],
        options: Options,
        *,
        cases: int | None,
        time_s: float | None,
        jobs: int,
        findings: Path,
        reporters: Sequence[Reporter] = (),
        device: str = "host",
        judgements: Mapping[str, Sequence[str]] = MappingProxyType({}),
        layers: Mapping[str, Sequence[str]] = MappingProxyType({}),
        flags: Mapping[str, Collection[str]] = MappingProxyType({}),
        versions: Mapping[str, str] | None = None,
    ) -> None:
        if (cases is None) == (time_s is None):
            raise ValueError("a campaign is bound either by cases or by time")
        self.options = options
        self.time_s = time_s
        self.device = device
        self.versions = dict(versions or {})
        self.result = Result(
            {
                unit.name: UnitResult(unit, cases, layers=tuple(layers.get(unit.name, ())))
                for unit in units
            },
            options.backend,
        )
        self._findings = findings
        self._reporters = reporters
        self._judgements = judgements
        self._flags = flags
        self._lanes: list[deque[Shard]]
        if time_s is not None:
            self._lanes = [deque(shards) for shards in time_bound(units, jobs, time_s)]
        else:
            assert cases is not None
            # One queue for all lanes: whoever is free takes the next.
            self._lanes = [deque(count_bound(units, cases))] * jobs
        self._running: dict[int, RunnerProcess] = {}  # by lane
        self._began = 0.0
        self._signals = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    def run(self) -> Result:
        self._began = time.monotonic()
        self._tell(lambda reporter: reporter.begin(self))
        with self._signals_noted(), selectors.DefaultSelector() as selector:
            while self._start_runners(selector) or self._running:
                for key, _ in selector.select(TICK_S):
                    self._read(self._running[key.data])
                self._reap(selector)
                self._heed_signals()
                self._tell(lambda reporter: reporter.tick(self))
        self._finish()
        self._tell(lambda reporter: reporter.end(self))
        return self.result

    def _tell(self, what: Callable[[Reporter], None]) -> None:
        for reporter in self._reporters:
            try:
                what(reporter)
            except OSError as error:
                _leave_lost_streams()  # other reporters write files
                if error.errno != errno.EIO:  # a terminal that was closed tells by a signal
                    self._add_lost_output(error)

    def _add_lost_output(self, error: OSError) -> None:
        """The run goes on to its summary; that nobody could read along is told once."""
        sentence = f"cannot write {error.filename or 'the output'}: {error.strerror or error}"
        if sentence not in self.result.problems:
            self.result.problems.append(sentence)
            self._tell(lambda reporter: reporter.problem(self, sentence, ""))

    # ---- runners ------------------------------------------------------------------------------

    def _start_runners(self, selector: selectors.BaseSelector) -> bool:
        for lane, shards in enumerate(self._lanes):
            if lane in self._running or not shards:
                continue
            shard = shards.popleft()
            deadline = None if shard.end_s is None else self._began + shard.end_s
            if deadline is not None and deadline <= time.monotonic():
                continue
            try:
                runner = RunnerProcess(Job(shard, self.options, deadline))
            except OSError as error:
                self._close(lane, shard, error)
                continue
            self._running[lane] = runner
            self._unit(runner).running += 1
            selector.register(runner.handle, selectors.EVENT_READ, lane)
        return any(self._lanes)

    def _close(self, lane: int, shard: Shard, error: OSError) -> None:
        """Starts no further runner there: this machine did not let the one of that shard start.
        Others go on, also with what is left where they share it."""
        lost = [shard]
        if self.time_s is not None or not self._running:
            lost += self._lanes[lane]
            self._lanes[lane].clear()
        self._lanes[lane] = deque()
        for name in dict.fromkeys(shard.unit.name for shard in lost):
            why = f"a runner could not be started: {error.strerror or error}"
            self._add_problem(self.result.units[name], f"{name}: {why}")

    def _unit(self, runner: RunnerProcess) -> UnitResult:
        return self.result.units[runner.job.shard.unit.name]

    def _read(self, runner: RunnerProcess) -> None:
        unit = self._unit(runner)
        for event in runner.read():
            self._take(runner, unit, event)

    def _reap(self, selector: selectors.BaseSelector) -> None:
        for lane, runner in list(self._running.items()):
            if not runner.ended():
                continue
            self._read(runner)  # its last words
            selector.unregister(runner.handle)
            del self._running[lane]
            unit = self._unit(runner)
            unit.running -= 1
            if death := runner.bury():
                how, printed = death
                sentence = f"{unit.unit.name}: its runner died before it was done ({how})"
                if where := self._keep_running_case(runner):
                    sentence += f"; the case that it was checking {where}"
                self._add_problem(unit, sentence, printed)

    def _keep_running_case(self, runner: RunnerProcess) -> str:
        """Makes a case file of what a dead runner was checking, and says where it is; "" if that
        is not known."""
        journal = running_case_file(runner.job, runner.pid)
        if journal is None or not journal.exists():
            return ""
        entry = last_entry(journal)
        journal.unlink()
        if entry is None:
            return ""
        return self._keep_case(entry["case"], f"running-{runner.pid}-{runner.job.token}")

    def _keep_case(self, case: Mapping[str, Any], name: str) -> str:
        """Stores it, and says where it is."""
        path = self._findings / f"{name}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(case, indent=1) + "\n")
        except OSError as error:
            return f"cannot be stored in {self._findings} ({error.strerror or error})"
        return f"is in {path}"

    def _drop(self, unit: UnitResult) -> None:
        """No further shard of the unit is started, and those that run are asked to stop."""
        for shards in self._lanes:
            for shard in [shard for shard in shards if shard.unit == unit.unit]:
                shards.remove(shard)
        for runner in self._running.values():
            if self._unit(runner) is unit:
                runner.stop()

    # ---- signals ------------------------------------------------------------------------------

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and the end of the terminal end the campaign in an orderly way; a second
        one at once."""

        def note(number: int, _: object) -> None:
            # A terminal that closes tells more than once: kernel, shell.
            if number != signal.SIGHUP or not self._signals:
                self._signals += 1

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            numbers.append(signal.SIGHUP)
        before = [signal.signal(number, note) for number in numbers]
        try:
            yield
        finally:
            for runner in self._running.values():
                runner.kill()
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _heed_signals(self) -> None:
        if self._signals and not self.result.interrupted:
            self.result.interrupted = True
            for shards in self._lanes:
                shards.clear()
            for runner in self._running.values():
                runner.stop()
        if self._signals > 1:
            for runner in self._running.values():
                runner.kill()

    # ---- what runners say ---------------------------------------------------------------------

    def _take(self, runner: RunnerProcess, unit: UnitResult, event: Event) -> None:
        match event:
            case Progress():
                unit.totals.add(event)
            case Failing():
                self._take_failing(runner, unit, Candidate(event.case, event.verdict))
            case Settled():
                self._take_settled(unit, event)
            case Unended():
                self._take_unended(unit, event)
            case Note():
                self._tell(lambda reporter: reporter.note(self, event.text))
            case Problem():
                self._add_problem(unit, event.message, event.detail)
                if event.fatal:
                    self._drop(unit)  # what stops one shard stops them all

    def _take_failing(self, runner: RunnerProcess, unit: UnitResult, candidate: Candidate) -> None:
        identity = self._finding(unit, candidate).identity
        found = unit.found.get(identity)
        if self.time_s is not None and (found is None or candidate.rank < found.best.rank):
            # Who comes first minimises it. Not where runs must not depend on --jobs.
            for other in self._running.values():
                if other is not runner and self._unit(other) is unit:
                    other.tell(Claim(identity, candidate.rank))
        if found is None:
            unit.found[identity] = Found(candidate)
            self._tell(lambda reporter: reporter.failing(self, unit, candidate))
        elif candidate.better_than(found.best):
            found.best = candidate

    def _take_settled(self, unit: UnitResult, event: Settled) -> None:
        candidate = Candidate(event.case, event.verdict)
        finding = self._finding(unit, candidate, event)
        found = unit.found.setdefault(finding.identity, Found(candidate))
        if found.finding is not None and not candidate.better_than(
            Candidate(found.finding.case, found.finding.verdict)
        ):
            return
        self._settle(unit, found, finding)
        if self.time_s is not None and not self.options.keep_going:
            self._drop(unit)  # a unit bound by cases ends each shard by itself, whatever --jobs is

    def _finding(
        self, unit: UnitResult, candidate: Candidate, settled: Settled | None = None
    ) -> Finding:
        return Finding(
            operation=unit.unit.operation,
            subject=unit.unit.subject,
            backend=self.options.backend,
            device=self.device,
            build=self.options.build,
            case=candidate.case,
            verdict=candidate.verdict,
            minimised=settled.minimised if settled else False,
            repeats=settled.repeats if settled else 0,
            runs=settled.runs if settled else 0,
            repeats_hang_after_s=settled.repeats_hang_after_s if settled else None,
            not_minimised=settled.not_minimised if settled else "",
            versions=self.versions,
            hang_after_s=self.options.hang_after_s,
            flags=tuple(sorted(self._flags.get(unit.unit.name, ()))),
        )

    def _take_unended(self, unit: UnitResult, event: Unended) -> None:
        """Perhaps a hang, for which there was no time: no finding, and no pass."""
        digest = hashlib.sha256(event.case.dumps().encode()).hexdigest()[:4]
        where = self._keep_case(event.case.to_json(), f"unended-{digest}")
        self._add_problem(
            unit,
            f"{unit.unit.name}: a launch had not ended after {event.seconds:.0f} s, when time was "
            f"up; it may hang: give --hang-after less than --time. Its case {where}",
        )

    def _settle(self, unit: UnitResult, found: Found, finding: Finding) -> None:
        found.finding = finding
        try:
            found.path = finding.save(self._findings)
        except CannotCheckError as error:
            self._add_problem(unit, str(error))
        self._tell(lambda reporter: reporter.finding(self, unit, finding, found.path))

    def _add_problem(self, unit: UnitResult, message: str, detail: str = "") -> None:
        if message not in self.result.all_problems:
            self._tell(lambda reporter: reporter.problem(self, message, detail))
        unit.problems.append(message)

    # ---- the end ------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.result.seconds = self.elapsed_s
        for unit in self.result.units.values():
            lost = [found for found in unit.found.values() if found.finding is None]
            # Without --keep-going others seen on the way are not findings, unless they are all
            # there is: their runner died.
            if self.options.keep_going or not unit.findings:
                for found in lost:
                    self._settle(unit, found, self._finding(unit, found.best))
            if unit.findings or unit.problems or self.result.interrupted:
                continue
            for sentence in unit.vacuous(self._judgements.get(unit.unit.name, ())):
                self._add_problem(unit, sentence)

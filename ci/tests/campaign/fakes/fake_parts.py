"""Stands in for `pagefuzz.harness.campaign.parts`: a subject made of a few comparisons.

What it does wrong is said in the environment, as JSON in FAKE_SUBJECT:

    faults      identity -> size that is wrong from which value on, e.g. {"bounds:a": ["a", 100]}
    flaky       identities that fail every second time only
    stale_after  nothing fails in the first so many cases of a worker
    sleep_s     how long a case takes
    takes       launches that take long: [size, from which value on, seconds]; nobody waits for them
    longest_launch_s  of those that have come back
    unended_launch_s  how long a launch had lasted that was ended
    kill_after  the runner kills itself (SIGKILL) after so many cases
    not_run     no case is run
    nowhere     no failure names a line of source
    imports     a module that is imported before anything is drawn
    stalls_from  size a from which on the worker does not answer
    blind       judgements that examine nothing
    idle        detection layers that examine nothing
    missing     the subject cannot be built
    broken      the checker raises
    reported    sizes of a reported case
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager

from hypothesis import strategies as st

from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Failure, Outcome, Verdict

SIZES = ("a", "b", "c")
JUDGEMENTS = ("death", "output", "bounds")
LAYERS = ("red zones", "guard pages", "checked build")


class FakeChecker:
    def __init__(self, subject):
        self._subject = subject
        self._count = self._since_restart = 0
        self._worker = None
        self.hang_after_s = float(subject.get("hang_after_s", 60.0))
        self.longest_launch_s = subject.get("longest_launch_s", 0.001)
        self.unended_launch_s = subject.get("unended_launch_s", 0.0)

    @property
    def worker_pid(self):
        return self._worker and self._worker.pid

    @property
    def memory(self):
        return MemoryUse(2**40, 2**20, 2**28 + self._count)

    def restart(self):
        self._since_restart = 0

    def check(self, case):
        self._count += 1
        self._since_restart += 1
        time.sleep(self._subject.get("sleep_s", 0))
        if self._count == self._subject.get("kill_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        if case.sizes["a"] >= self._subject.get("stalls_from", 10**9):
            self._worker = subprocess.Popen(["sleep", "60"])
            self._worker.wait()
            self._worker = None
        if self._subject.get("broken"):
            raise RuntimeError("the fake is broken")
        if self._subject.get("not_run"):
            return Verdict(Outcome.NOT_RUN, None, not_run="it does not fit into memory")
        failures = []
        details = {} if self._subject.get("nowhere") else {"where": "fake.cu:1"}
        for identity, (size, limit) in self._subject.get("faults", {}).items():
            if identity in self._subject.get("flaky", ()) and self._count % 2:
                continue
            if self._since_restart <= self._subject.get("stale_after", 0):
                continue
            if case.sizes[size] >= limit:
                judgement, key = identity.split(":")
                failures.append(Failure(judgement, f"{size} is wrong", (key,), details))
        takes = [
            s for size, limit, s in self._subject.get("takes", ()) if case.sizes[size] >= limit
        ]
        if max(takes, default=0.0) > self.hang_after_s:
            details = {"access": f"no answer for {self.hang_after_s:g} s"}
            failures.append(Failure("hang", "the launch does not end", ("hang",), details))
        return Verdict(
            Outcome.FAILED if failures else Outcome.CLEAN,
            CaseClass.HOSTILE if case.sizes["c"] else CaseClass.IN_CONTRACT,
            failures=tuple(failures),
            checked={name: 1 for name in JUDGEMENTS if name not in self._subject.get("blind", ())},
            launches=2,
            layers={
                name: (0, 0) if name in self._subject.get("idle", ()) else (2, 300)
                for name in LAYERS
            },
            counters={"distance to 1000": abs(case.sizes["a"] - 1000)},
        )


def _subject():
    return json.loads(os.environ.get("FAKE_SUBJECT", "{}"))


@contextmanager
def open_checker(job):
    subject = _subject()
    if subject.get("missing"):
        raise CannotCheckError("no C++ compiler was found; install g++")
    if job.options.hang_after_s is not None:
        subject["hang_after_s"] = job.options.hang_after_s
    yield FakeChecker(subject)


def strategy(job):
    if module := _subject().get("imports"):
        importlib.import_module(module)
    sizes = st.fixed_dictionaries(
        {"a": st.integers(0, 2000), "b": st.integers(0, 2000), "c": st.integers(0, 1)}
    )
    return st.builds(Case, st.just(job.shard.unit.operation), sizes)


def reported(job):
    sizes = _subject().get("reported")
    return [Case(job.shard.unit.operation, sizes)] if sizes else []

"""Lets launches die and hang in every way there is, and counts what became of each case.

A lane is a process that runs one case after the other, as a runner of a campaign does: the running
case in a journal, a failing one in another, each answer in a ledger. Between harmless cases come
injected ones, in random order: launches that crash, hang or exhaust memory, workers and fork
servers that are killed, full disks, and lanes that are killed themselves. At the end each case must
have been answered exactly once, and as it should; every failing one must be in the journal; and no
process, file or mapping may be left.

SIGINT and SIGTERM end it: what was answered until then is examined and reported.

Exit status: 0 all so, 1 not, 2 could not check, or not all.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from pagefuzz.harness import devices
from pagefuzz.harness.campaign.journal import read_journal
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.versions import commit
from pagefuzz.harness.workers.journal import last_entry

sys.path.append(str(Path(__file__).parents[1]))  # last: folders of ours are named like packages

from ci.chaos_lane import (
    CLEAN,
    HARMLESS,
    KINDS,
    LANE_KILLED,
    NOT_RUN,
    ON_CUDA,
    ON_HOST,
    SLOW_KINDS,
    LaneJob,
)
from ci.misbehaving import compile_into
from ci.reports import exit_code, require_report, write_report

SCHEMA = 1

#: A restarted worker must answer in this time, by backend; the median of a run.
RESTART_S = {"host": 0.05, "cuda": 2.0}

#: After which a launch is taken for one that hangs, by backend: CUDA loads a module on first use.
TIMEOUT_S = {"host": 0.5, "cuda": 30.0}

#: Of all injections, those of each slow kind are one in so many.
_ONE_IN = 50

# ---- all of them ---------------------------------------------------------------------------------


class Supervisor:
    """Runs one lane after the other until every case has been answered, and examines what they
    left."""

    def __init__(
        self, backend: str, folder: Path, timeout_s: float, stop: threading.Event | None = None
    ) -> None:
        """`stop` is set once somebody wants an end: what was answered until then is kept."""
        self._backend, self._folder, self._timeout_s = backend, folder, timeout_s
        self._stop = stop or threading.Event()
        self._unfinished: int | None = None
        self.wrong: list[str] = []
        self.answers: list[dict[str, Any]] = []
        self.lanes = 0
        self.kinds: dict[int, str] = {}

    def run(self, cases: Sequence[tuple[int, str]]) -> None:
        """`cases` are [number, kind]. Raises `CannotCheckError`."""
        path = str(compile_into(self._folder)) if self._backend == "host" else ""
        self.kinds = dict(cases)
        rest = list(cases)
        while rest and not self._stop.is_set():
            self.lanes += 1
            ledger = self._folder / f"ledger-{self.lanes}.jsonl"
            running = self._folder / f"running-{self.lanes}.jsonl"
            failing = self._folder / "failing.jsonl"
            job = LaneJob(
                rest,
                self._backend,
                path,
                str(ledger),
                str(running),
                str(failing),
                self._timeout_s,
            )
            answers, left = self._lane(job)
            self.answers += answers
            done = {answer["number"] for answer in answers}
            rest = [(number, kind) for number, kind in rest if number not in done]
            if left is not None:
                self.wrong += [f"{count} {what} left" for what, count in left.items() if count > 0]
                if running.exists():
                    self.wrong.append(f"{running.name} is left, though nothing was running")
                if rest:
                    self.wrong.append(f"a lane ended without {len(rest)} of its cases")
                return

    def _lane(self, job: LaneJob) -> tuple[list[dict[str, Any]], dict[str, int] | None]:
        """The answers of one lane, and what it left; None for that if it was killed, as it should
        be, or because somebody wants an end. Raises `CannotCheckError` if it died by itself."""
        file = self._folder / f"job-{self.lanes}.json"
        file.write_text(json.dumps(asdict(job)))
        command = [sys.executable, str(Path(__file__).with_name("chaos_lane.py")), str(file)]
        said = self._folder / f"said-{self.lanes}.txt"
        with said.open("wb") as output:
            lane = subprocess.Popen(
                command, stdout=output, stderr=output, start_new_session=True, cwd=self._folder
            )
        victims = {number for number, kind in job.cases if kind == "lane killed"}
        running: int | None = None
        try:
            while lane.poll() is None:
                running = _running_case(Path(job.running))
                if running in victims or self._stop.is_set():
                    lane.kill()
                    lane.wait()
                    break
                time.sleep(0.02)
        finally:
            if lane.poll() is None:
                lane.kill()
                lane.wait()
        self._expect_no_process_of(lane.pid)
        lines = [json.loads(line) for line in _lines(Path(job.ledger))]
        answers = [line for line in lines if "number" in line]
        if lines and "left" in lines[-1]:
            return answers, lines[-1]["left"]
        survived = _running_case(Path(job.running))
        if self._stop.is_set() or running not in victims:
            if survived not in [answer["number"] for answer in answers]:
                self._unfinished = survived
            if self._stop.is_set():
                return answers, None
            self.answers += answers
            tail = " ".join(_lines(said)[-3:])
            raise CannotCheckError(f"a lane died by itself ({lane.returncode}): {tail}")
        if survived != running:
            self.wrong.append(f"case {running} was running when its lane was killed, and is lost")
        else:
            assert running is not None
            answers.append({"number": running, "became": LANE_KILLED, "said": "", "launches": 0})
        return answers, None

    def _expect_no_process_of(self, session: int, timeout_s: float = 10.0) -> None:
        """Server, workers and what these started end with their lane, within seconds."""
        deadline = time.monotonic() + timeout_s
        while left := _processes_of(session):
            if time.monotonic() > deadline:
                self.wrong.append(f"processes {left} are left of a lane")
                for pid in left:
                    os.kill(pid, signal.SIGKILL)
                return
            time.sleep(0.02)

    def examine(self) -> None:
        """Each case answered once, as it should; failing ones in the journal."""
        times = Counter(answer["number"] for answer in self.answers)
        for number, kind in self.kinds.items():
            if times[number] != 1 and not (times[number] == 0 and self._stop.is_set()):
                self.wrong.append(f"case {number} ({kind}) was answered {times[number]} times")
        for answer in self.answers:
            kind = self.kinds[answer["number"]]
            want = KINDS[kind].want if kind != HARMLESS else CLEAN
            if answer["became"] != want:
                self.wrong.append(
                    f"case {answer['number']} ({kind}): {answer['became']}, not {want}: "
                    f"{answer['said'] or 'nothing was said'}"
                )
            elif want == CLEAN and answer["launches"] != 2:
                self.wrong.append(f"case {answer['number']} ({kind}) passed half launched")
            elif want == NOT_RUN and not answer["said"]:
                self.wrong.append(f"case {answer['number']} ({kind}) was not run for no reason")
        failed = {
            answer["number"]
            for answer in self.answers
            if answer["became"].startswith("failed")
            and self.kinds[answer["number"]] != "full disk for failing cases"
        }
        entries = read_journal(self._folder / "failing.jsonl")
        journaled = {entry["case"]["seed"] for entry in entries}
        self.wrong += [f"case {n} failed and is in no journal" for n in sorted(failed - journaled)]
        for_nothing = journaled - failed - {self._unfinished}
        self.wrong += [f"case {n} is in a journal for nothing" for n in sorted(for_nothing)]


def _lines(path: Path) -> list[str]:
    """Of a file that need not exist."""
    if not path.exists():
        return []
    return path.read_text(encoding="utf-8", errors="replace").splitlines()


def _running_case(path: Path) -> int | None:
    """The number of the case that a lane is running, or was when it was killed."""
    try:
        entry = last_entry(path)
    except FileNotFoundError:
        return None
    return None if entry is None else int(entry["case"]["seed"])


def _processes_of(session: int) -> list[int]:
    """Those of a session that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def drawn(injections: int, kinds: Sequence[str], seed: int) -> list[tuple[int, str]]:
    """[number, kind] of so many injections, each kind about as often, with as many harmless cases
    among them; the same ones for the same seed."""
    slow = [kind for kind in kinds if kind in SLOW_KINDS]
    fast = [kind for kind in kinds if kind not in SLOW_KINDS] or slow
    chosen = [kind for kind in slow for _ in range(max(1, injections // _ONE_IN))]
    chosen += [fast[index % len(fast)] for index in range(injections - len(chosen))]
    chosen = chosen[:injections] + [HARMLESS] * injections
    random.Random(seed).shuffle(chosen)
    return list(enumerate(chosen, 1))


class Lanes:
    """Lanes side by side, each with a share of the cases.

    problems  why something could not be checked
    """

    def __init__(self, backend: str, folder: Path, timeout_s: float, jobs: int) -> None:
        self._stop = threading.Event()
        self._was_told = False
        self.problems: list[str] = []
        self.each = []
        for number in range(1, jobs + 1):
            own = folder / str(number)
            own.mkdir()
            self.each.append(Supervisor(backend, own, timeout_s, self._stop))

    def run(self, cases: Sequence[tuple[int, str]]) -> None:
        """Until all are answered or somebody wants an end; then looks at what became of them."""
        with ThreadPoolExecutor(len(self.each)) as threads:
            shares = [
                threads.submit(one.run, cases[first :: len(self.each)])
                for first, one in enumerate(self.each)
            ]
            for share in as_completed(shares):
                error = share.exception()
                if error is not None:
                    self._stop.set()  # the others keep what they have
                    if not isinstance(error, CannotCheckError):
                        raise error
                    self.problems.append(str(error))
        for one in self.each:
            one.examine()
        if self._was_told:
            self.problems.append(
                f"interrupted: {len(self.answers):,} of {len(cases):,} cases were answered"
            )

    def stop(self, *_: object) -> None:
        """A signal came."""
        self._was_told = True
        self._stop.set()

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for one in self.each for answer in one.answers]

    @property
    def wrong(self) -> list[str]:
        return [said for one in self.each for said in one.wrong]

    @property
    def lanes(self) -> int:
        return sum(one.lanes for one in self.each)

    @property
    def restarts_s(self) -> list[float]:
        """What new workers took."""
        found = [answer.get("restart_s") for answer in self.answers]
        return [restart_s for restart_s in found if restart_s is not None]


def chaos(options: argparse.Namespace, folder: Path) -> int:
    backend = devices.resolve_device(options.device)
    possible = ON_HOST if backend == "host" else ON_CUDA
    kinds = options.kind or possible
    if unknown := [kind for kind in kinds if kind not in possible]:
        raise CannotCheckError(
            f"no kind {unknown[0]!r} on {backend}; there is {', '.join(possible)}"
        )
    cases = drawn(options.injections, kinds, options.seed)
    lanes = Lanes(backend, folder, options.timeout or TIMEOUT_S[backend], options.jobs)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lanes.stop)
    began = time.monotonic()
    lanes.run(cases)
    seconds = time.monotonic() - began
    wrong, became = lanes.wrong, _became(dict(cases), lanes.answers)
    width = max(map(len, became), default=0)
    for kind, counts in sorted(became.items()):
        print(f"{kind:<{width}}  {', '.join(f'{n} {word}' for word, n in counts.items())}")
    restarts_s = lanes.restarts_s
    median_s, most_s = statistics.median(restarts_s or [0]), max(restarts_s, default=0)
    print(
        f"{options.injections:,} injections in {lanes.lanes} lanes, {seconds:.0f} s; "
        f"{len(restarts_s):,} restarts of a worker, median {1000 * median_s:.1f} ms, "
        f"at most {1000 * most_s:.1f} ms; {len(wrong)} wrong"
    )
    if not restarts_s and not lanes.problems:
        lanes.problems.append("no worker was started anew")
    if options.jobs == 1 and median_s > RESTART_S[backend]:  # more wait for one another
        limit_ms = 1000 * RESTART_S[backend]
        wrong.append(f"a restart takes {1000 * median_s:.1f} ms, not {limit_ms:.0f}")
    if options.report is not None:
        gpu = devices.machine().gpu if backend == "cuda" else None
        report = {
            "pagefuzz_chaos": SCHEMA,
            "commit": commit() or "unknown",
            "device": gpu.name if gpu else "host",
            "seed": options.seed,
            "injections": options.injections,
            "cases": len(cases),
            "answered": len(lanes.answers),
            "jobs": options.jobs,
            "lanes": lanes.lanes,
            "seconds": round(seconds, 1),
            "became": {kind: dict(counts) for kind, counts in sorted(became.items())},
            "restarts": len(restarts_s),
            "restart_median_s": round(median_s, 4),
            "restart_max_s": round(most_s, 4),
            "wrong": wrong,
            "problems": lanes.problems,
        }
        try:
            write_report(options.report, report)
        except CannotCheckError as error:
            lanes.problems.append(str(error))
    for said in [*wrong[:20], *lanes.problems]:
        print(f"chaos: {said}", file=sys.stderr)
    if wrong:  # it counts whatever else happened
        return 1
    return 2 if lanes.problems else 0


def _became(
    kinds: Mapping[int, str], answers: Sequence[Mapping[str, Any]]
) -> dict[str, Counter[str]]:
    """How many cases of each kind became what."""
    became: dict[str, Counter[str]] = {}
    for answer in answers:
        became.setdefault(kinds[answer["number"]], Counter())[answer["became"]] += 1
    return became


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="ci/chaos", description=__doc__.split("\n\n")[0])
    top.add_argument("--injections", type=int, default=1000, metavar="N", help="default: 1000")
    top.add_argument("--device", choices=("host", "cuda"), default="host", help="default: host")
    top.add_argument("--kind", action="append", metavar="K", help="of injection; default: all")
    top.add_argument("--seed", type=int, default=1, help="default: 1")
    top.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="after which a launch hangs; default: 0.5, on cuda 30",
    )
    top.add_argument(
        "--jobs",
        type=int,
        default=1,
        metavar="N",
        help="lanes side by side; default: 1, and only then the time of a restart is judged",
    )
    top.add_argument("--report", type=Path, metavar="FILE.json", help="write figures there")
    return top


def run(options: argparse.Namespace) -> int:
    for name, count in (("injection", options.injections), ("job", options.jobs)):
        if count < 1:
            raise CannotCheckError(f"there must be at least one {name}")
    if options.timeout is not None and not 0 < options.timeout < math.inf:
        raise CannotCheckError(f"--timeout {options.timeout:g} must be more than 0 seconds")
    require_report(options.report)
    with tempfile.TemporaryDirectory(prefix="pagefuzz-chaos-") as folder:
        return chaos(options, Path(folder))


def main() -> int:
    return exit_code(partial(run, parser().parse_args()), "chaos")


if __name__ == "__main__":
    sys.exit(main())

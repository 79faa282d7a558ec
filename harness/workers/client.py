"""The watching side: asks a fork server for workers, sends them cases, notices how they end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagefuzz.harness.errors import CannotCheckError, RuinedProcessError
from pagefuzz.harness.memory.use import MemoryUse
from pagefuzz.harness.running import Answer, FixedBytes, Injection
from pagefuzz.harness.workers.blackbox import BlackBox, NotedLaunch, Stage
from pagefuzz.harness.workers.ends import (
    BY_OTHERS,
    KILLERS,
    access_of,
    bad_end,
    in_a_line,
    last_words,
    name_of_end,
)
from pagefuzz.harness.workers.fork_server import (
    REAP_TIMEOUT_S,
    START_TIMEOUT_S,
    Assigned,
    ForkServer,
    shared_server,
)
from pagefuzz.harness.workers.journal import Journal, Recorded
from pagefuzz.harness.workers.oom import oom_kills
from pagefuzz.harness.workers.output import OutputFile
from pagefuzz.harness.workers.protocol import Message, ProtocolError, receive, send
from pagefuzz.oracles.case import CaseError
from pagefuzz.oracles.judgements.hang import HANG
from pagefuzz.oracles.observation import Death
from pagefuzz.oracles.verdict import Outcome, Verdict

if TYPE_CHECKING:
    from pagefuzz.harness.workers.inside import InsideWorker

#: How much longer than a launch everything else may take: planning, filling, comparing.
_PATIENCE = 10

_LOOK_EVERY_S = 0.1

#: What a process prints is looked at so often: a gigabyte a second is 20 MB in between.
_BOUND_EVERY_S = 0.02


@dataclass
class _Running:
    """A worker process that answers.

    oom_kills  processes that the kernel had ended before this one began
    is_asked   whether it has a case to answer
    end_file   descriptor that is readable once it has ended; -1 if it had when that was asked for
    launches   that had begun when it was asked last
    suspect    the last case that it has launched, if that passed: the process may be ruined since
    """

    pid: int
    channel: socket.socket
    output: OutputFile
    box: BlackBox
    server: ForkServer
    oom_kills: int | None
    end_file: int = -1
    is_asked: bool = False
    launches: int = 0
    suspect: Recorded | None = None

    @classmethod
    def fork(cls, server: ForkServer, assignment: Assigned) -> _Running:
        """Raises `CannotCheckError` if the server is gone or can fork no further process."""
        with contextlib.ExitStack() as always, contextlib.ExitStack() as on_failure:
            channel, theirs = socket.socketpair()
            always.callback(theirs.close)
            on_failure.callback(channel.close)
            output = on_failure.enter_context(OutputFile())
            box_file = BlackBox.create()
            always.callback(os.close, box_file)
            running = cls(0, channel, output, BlackBox(box_file), server, oom_kills())
            on_failure.callback(running.box.close)
            descriptors = (theirs.fileno(), output.descriptor, box_file)
            running.pid = server.fork(assignment, descriptors)
            with contextlib.suppress(ProcessLookupError):
                running.end_file = os.pidfd_open(running.pid)
            on_failure.pop_all()
        return running

    def wait(self, timeout_s: float) -> bool:
        """Whether it says something or ends within that time. What it has started may hold its
        channel open, which is then no sign of life."""
        files = [self.channel.fileno(), *([self.end_file] if self.end_file >= 0 else [])]
        return self._wait(files, timeout_s)

    def _wait(self, files: Sequence[int], timeout_s: float) -> bool:
        """Whether one of the files is readable within that time. Meanwhile it may print."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            if select.select(files, [], [], min(left_s, _BOUND_EVERY_S))[0]:
                return True
            self.output.bound()
            if not left_s:
                return False

    @property
    def has_ended(self) -> bool:
        return self.end_file < 0 or bool(select.select([self.end_file], [], [], 0)[0])

    def said(self, timeout_s: float) -> Message | None:
        """What it says, once `wait` has returned; None if it has ended. Raises `TimeoutError`."""
        if not select.select([self.channel], [], [], 0)[0]:
            return None
        return receive(self.channel, timeout_s)

    def end(self) -> int | None:
        """Waits until it has ended, which losing its channel makes it do; kills it if that takes
        long. Its wait status, if the server lives to tell."""
        self.channel.close()
        has_ended = self.end_file < 0 or self._wait([self.end_file], REAP_TIMEOUT_S)
        status = self.server.end_status(self.pid) if has_ended else None
        if status is None:
            self.server.kill(self.pid)
            status = self.server.end_status(self.pid)
        if status is None:
            self._kill_heirs()
        return status

    def _kill_heirs(self) -> None:
        """Ends what it has started, as its server would. They have its output for theirs."""
        own = os.fstat(self.output.descriptor)
        for process in filter(str.isdecimal, os.listdir("/proc")):
            for file in ("1", "2"):
                with contextlib.suppress(OSError):  # ended meanwhile, or somebody else's
                    if os.path.samestat(os.stat(f"/proc/{process}/fd/{file}"), own):
                        os.kill(int(process), signal.SIGKILL)

    def dismiss(self) -> Death | None:
        """Ends it in order; at once if it has a case, which may hang, and nobody waits for it. How
        it ended if not in order, by itself and after a launch."""
        if self.is_asked:
            self.server.kill(self.pid)
        death = bad_end(self.end(), self.output.text())
        self.close()
        return None if self.is_asked or self.suspect is None else death

    @property
    def has_launched(self) -> bool:
        """Whether it has begun a launch since it was asked last."""
        return self.box.launches() > self.launches

    def note_launches(self, case: Recorded, verdict: Mapping[str, Any] | None) -> None:
        """Once it has answered. verdict: as JSON, if that is what it answered."""
        if self.has_launched:
            failed = verdict is not None and verdict["outcome"] == Outcome.FAILED
            self.suspect = None if failed else case

    def close(self) -> None:
        if self.end_file >= 0:
            os.close(self.end_file)
            self.end_file = -1
        self.channel.close()
        self.output.close()
        self.box.close()


class Worker:
    """A worker and, when it dies, its successors. Not for several threads at once.

    deaths   how many processes have ended instead of answering
    device   what the last one said it runs on
    memory   the most that one has held
    hang_after_s      after which a launch is a hang; may be changed between cases
    longest_launch_s  of those that came back in a case that did; 0 before the first
    unended_launch_s  how long a launch of the last case had lasted that was ended; 0 if none was
    watches_ends      whether each case that passes is run again by the same process, which then
                      ends: if it dies meanwhile, that is a death of the case. Once one has died
                      after launches that came back, this is so
    """

    def __init__(
        self,
        assignment: Assigned,
        *,
        timeout_s: float,
        environment: Mapping[str, str] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._assignment, self._timeout_s, self.hang_after_s = assignment, timeout_s, timeout_s
        self.longest_launch_s = self.unended_launch_s = 0.0
        self._environment, self._journal = dict(environment or {}), journal
        self._running: _Running | None = None
        self._spare: _Running | None = None
        self.deaths = self._asked = 0
        self.device = ""
        self.memory = MemoryUse()
        self.watches_ends = self._has_shown = False
        self._ruin: RuinedProcessError | None = None

    @property
    def pid(self) -> int | None:
        return self._running.pid if self._running else None

    def start(self) -> None:
        """Starts a process if none is there. Raises `CannotCheckError`."""
        if self._running is not None:
            return
        message = self._greet_spare()
        if message is None:
            self._running = self._forked()
            message = self._greeting(self._running)
        if message is None:
            death = self._bury("start")
            raise CannotCheckError(f"a worker died while it loaded its subject: {in_a_line(death)}")
        if "cannot_check" in message:
            self._close_running()
            raise CannotCheckError(message["cannot_check"])
        self.device = message["ready"]
        if self.deaths:
            # Where one has died others will: the next one gets ready, on a GPU for a third of a
            # second, while this one works.
            with contextlib.suppress(CannotCheckError):  # that costs time only
                self._spare = self._forked()

    def _forked(self) -> _Running:
        try:
            return _Running.fork(shared_server(self._environment), self._assignment)
        except OSError as error:  # files, processes or memory that are limited
            raise CannotCheckError(f"no worker can be started: {error.strerror}") from None

    def _greeting(self, running: _Running) -> Message | None:
        """What a process says once it has started; None if it has ended instead."""
        try:
            if running.wait(START_TIMEOUT_S):
                return running.said(START_TIMEOUT_S)
        except TimeoutError:
            pass
        running.server.kill(running.pid)
        return None

    def _greet_spare(self) -> Message | None:
        """Lets the spare process take over; None if there is none, or none any more."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        message = None if spare.has_ended else self._greeting(spare)
        if message is None or "cannot_check" in message:
            # Somebody ended it while it waited, or it had no room beside the other.
            spare.dismiss()
            return None
        self._running, spare.oom_kills = spare, oom_kills()
        return message

    def run(
        self,
        case: Recorded,
        *,
        with_fixed_bytes: bool = False,
        injection: Injection | None = None,
    ) -> Answer | Death:
        """One case; how the process ended if it did so instead of answering.

        A process that died of something else than a launch, or that somebody else may have ended,
        is replaced once. Raises `CaseError` and `CannotCheckError`, the latter also if its
        successor does not get through either, and as a `RuinedProcessError` if it died of an
        earlier case, which had passed, and this one does not show what of.
        """
        message = {"case": case.to_json(), "with_fixed_bytes": with_fixed_bytes}
        if injection is not None:
            message["injection"] = injection.to_json()
        doubtful: _Doubtful | None = None
        self.unended_launch_s = 0.0
        for _ in range(2):
            self.start()
            answer = self._ask(case, message)
            if not isinstance(answer, _Doubtful):
                return self._shown(case, message, answer)
            doubtful = answer
            self._close_spare()  # what ended the one may have ended it too, or be about to
        assert doubtful is not None
        if doubtful.launching:
            return doubtful.death  # again: a launch that takes all memory ends like that
        if doubtful.short_of_memory:
            reason = "the kernel ended its worker, twice, being short of memory"
            return Answer(Verdict(Outcome.NOT_RUN, None, not_run=reason))
        raise CannotCheckError(
            f"a worker died twice, not of the launch: {in_a_line(doubtful.death)}"
        )

    def _shown(self, case: Recorded, message: Message, answer: Answer | Death) -> Answer | Death:
        """An answer; but a death if the process does not come to its end, as far as that is
        watched. Raises `RuinedProcessError` rather than let a case pass after one that did not."""
        passed = isinstance(answer, Answer) and answer.verdict.outcome is not Outcome.FAILED
        if self.watches_ends and passed:
            answer = self._end_of(case, message) or answer
        elif self.watches_ends:
            self._close_running()  # a launch that fails may ruin the process for the next one
        if isinstance(answer, Death):
            self._ruin = None  # shows it, as every further case would
            self._has_shown |= answer.later
            self.watches_ends |= answer.later
        elif self._ruin is not None and passed:
            raise self._ruin
        return answer

    def _end_of(self, case: Recorded, message: Message) -> Answer | Death | None:
        """How a case that has passed fails nevertheless, when its process runs it again and ends;
        None if it does not."""
        running = self._running
        if running is None or running.suspect is None:
            return None
        again = self._ask(case, message)
        if isinstance(again, Death):
            return again
        if isinstance(again, _Doubtful):
            return None if again.death.how in BY_OTHERS else replace(again.death, later=True)
        self._running, death = None, running.dismiss()
        return again if again.verdict.outcome is Outcome.FAILED else death

    def _note_ruin(self, case: Recorded, death: Death) -> None:
        self.watches_ends = True
        if self._has_shown:  # so that the case is one more that does what is known
            return
        self._ruin = RuinedProcessError(
            f"a process ended after a case had passed, by itself and not in order: "
            f"{in_a_line(death)}; the last case that it had launched, which a replay may show to "
            f"be why: {json.dumps(case.to_json(), separators=(',', ':'))}"
        )

    def _ask(self, case: Recorded, message: Message) -> Answer | Death | _Doubtful:
        running = self._running
        assert running is not None
        running.launches = running.box.launches()
        running.output.clear()
        running.box.reset()
        if self._journal is not None:
            self._journal.write(case)
        try:
            self._asked += 1
            running.is_asked = True
            send(running.channel, {**message, "number": self._asked})
            answer = self._awaited(running)
            running.is_asked = False
            if answer is not None and answer.get("number") != self._asked:
                raise ProtocolError("it is not of the case that was asked about")
        except TimeoutError:
            stage = running.box.stage
            running.server.kill(running.pid)
            death = self._bury(HANG)
            if stage is Stage.LAUNCHING:
                return death
            raise CannotCheckError(
                f"a worker was {stage.name.lower()} a case for more than "
                f"{_PATIENCE * self._timeout_s:g} s"
            ) from None
        except ProtocolError as error:
            running.server.kill(running.pid)
            self._bury("")
            raise CannotCheckError(f"a worker's answer cannot be read: {error}") from None
        except OSError:
            answer = None
        if answer is None:
            stage = running.box.stage
            death = self._bury("")
            short = _is_short_of_memory(running)
            # A launch may have ruined the process, so that judging it dies. SIGKILL, or an end that
            # the server did not live to see, need not be its doing: somebody, or the kernel short
            # of memory, ended the worker.
            if stage in (Stage.LAUNCHING, Stage.JUDGING) and death.how not in BY_OTHERS:
                return replace(death, later=stage is Stage.JUDGING)
            if running.suspect is not None and death.how not in BY_OTHERS:
                self._note_ruin(running.suspect, death)
            killed = death.how == "SIGKILL"
            return _Doubtful(death, stage is Stage.LAUNCHING and killed, killed and bool(short))
        has_launched = running.has_launched
        running.note_launches(case, answer.get("verdict"))
        self.longest_launch_s = max(self.longest_launch_s, running.box.longest_launch_s())
        if "memory" in answer:
            self.memory = self.memory.most(MemoryUse.from_json(answer["memory"]))
        if "verdict" in answer:
            fixed = answer["fixed_bytes"]
            return Answer(
                Verdict.from_json(answer["verdict"]), fixed and FixedBytes.from_json(fixed)
            )
        if "death" in answer:
            end, said = self._bury(""), answer["death"]["detail"]
            text = f"{said}\n{end.detail}" if end.detail else said
            death = replace(end, how=answer["death"]["how"], detail=text, access=None)
            if has_launched:
                return death
            if running.suspect is not None:  # the device was lost before this case launched
                self._note_ruin(running.suspect, death)
            return _Doubtful(death, launching=False, short_of_memory=False)
        if "case_error" in answer:
            raise CaseError(answer["case_error"])
        if "spoiled" in answer:
            running.suspect = None  # which is said already
            self._close_running()
        raise CannotCheckError(answer["cannot_check"])

    def _awaited(self, running: _Running) -> Message | None:
        """The answer. Raises `TimeoutError` once one stage has lasted too long."""
        entered, since = running.box.entered, time.monotonic()
        look_s = min(_LOOK_EVERY_S, self.hang_after_s)
        while not running.wait(look_s):
            now = running.box.entered
            if now != entered:
                entered, since = now, time.monotonic()
            is_launching = now[0] == Stage.LAUNCHING
            patience_s = self.hang_after_s if is_launching else _PATIENCE * self._timeout_s
            if time.monotonic() - since > patience_s:
                raise TimeoutError
        return running.said(_PATIENCE * self._timeout_s)

    def _bury(self, how: str) -> Death:
        """Waits for the end of the process and says how it ended."""
        running = self._running
        assert running is not None
        self.deaths += 1
        self.unended_launch_s = max(self.unended_launch_s, running.box.launch_s())
        status = running.end()
        detail = last_words(running.output.text())
        short = _is_short_of_memory(running)
        access, noted = access_of(running.box, detail), running.box.launch()
        # Afterwards nobody knows which of them was why.
        which = noted if running.box.stage is Stage.LAUNCHING else NotedLaunch()
        self.memory = self.memory.most(running.box.memory())
        self._running = None
        running.close()
        if how == HANG:
            said = f"no answer for {self.hang_after_s:g} s; the worker was killed"
            text = f"{said}\n{detail}" if detail else said
            return Death(HANG, text, launch=which.text, is_own=which.is_own)
        how = name_of_end(status, detail)
        if how == "SIGKILL":
            detail = f"{KILLERS[short]}\n{detail}".strip()
        return Death(how, detail, access, launch=which.text, is_own=which.is_own)

    def restart(self) -> None:
        """Ends the process in order: the next case gets a fresh one."""
        self._close_running()

    def _close_running(self) -> None:
        running, self._running = self._running, None
        if running is not None and (death := running.dismiss()) is not None:
            assert running.suspect is not None
            self._note_ruin(running.suspect, death)

    def _close_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.dismiss()

    def close(self) -> None:
        """Ends the process in order: it may write what it has gathered (coverage). Raises
        `RuinedProcessError`, once all is closed, if a process has died after a case that had
        passed, and no later one has shown what of."""
        self._close_running()
        self._close_spare()
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        ruin, self._ruin = self._ruin, None
        if ruin is not None:
            raise ruin


@dataclass(frozen=True)
class _Doubtful:
    """A process died, but perhaps not of the case it was given. `launching`: during the launch;
    `short_of_memory`: killed, and the kernel says that it has killed for lack of memory."""

    death: Death
    launching: bool
    short_of_memory: bool


def _is_short_of_memory(running: _Running) -> bool | None:
    """Whether the kernel has ended any process since this one began; None if it does not tell."""
    now = oom_kills()
    return None if now is None or running.oom_kills is None else now > running.oom_kills


def worker_for(
    assignment: Assigned,
    *,
    isolate: bool,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    journal: Journal | None = None,
) -> Worker | InsideWorker:
    """What launches: worker processes, or else this process."""
    if isolate:
        return Worker(assignment, timeout_s=timeout_s, environment=environment, journal=journal)
    from pagefuzz.harness.workers.inside import InsideWorker  # with all that a worker needs

    return InsideWorker(assignment, timeout_s=timeout_s, journal=journal)

"""The `pagefuzz` command: its options, its exit codes, and nothing that takes long to import.

Exit codes: 0 clean; 1 findings; 2 something that was asked for could not be checked, which is never
a pass.
"""

from __future__ import annotations

import argparse
import errno
import io
import math
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pagefuzz import __version__
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.patience import is_patience
from pagefuzz.harness.profiles import PROFILES
from pagefuzz.harness.sanitizers.tools import TOOLS

_EXAMPLES = """\
examples:
  pagefuzz fuzz                                   every sound bundled subject, 300 cases each
  pagefuzz fuzz --subject bundled:page-as-merged --keep-going --time 2m --device host
                                                  every distinct fault of one subject
  pagefuzz fuzz --profile nightly --time 8h --report out
                                                  new cases all night, results as JSON
  pagefuzz replay findings/bounds-block_table-1f3a.json
                                                  one finding again, here or on other hardware

exit codes: 0 clean, 1 findings, 2 could not check (never a pass)
"""

_DURATION = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[smh]?)")
_SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>([KMGT]i?B)?)")
_UNIT_BYTES = {"": 1} | {
    f"{letter}{i}B": base**power
    for power, letter in enumerate("KMGT", 1)
    for i, base in (("i", 1024), ("", 1000))
}
_MOST_DIGITS = 20  # of 2^64
_MOST_JOBS = 4096
#: A disk, a quota or a file that is full, of whatever was to be written.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

#: Files that may be open at once, of this process and of all.
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_UNIT_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration_s(text: str) -> float:
    """ "90s", "10m", "2h", or plain seconds."""
    match = _DURATION.fullmatch(text)
    seconds = float(match["number"]) * _UNIT_S[match["unit"]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a time such as 90s, 10m or 2h")
    return seconds


def natural(text: str) -> int:
    return _whole(text, ", 0 or more")


def patience_s(text: str) -> float:
    """As `duration_s`, within the limits of `patience`."""
    seconds = duration_s(text)
    if not is_patience(seconds):
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a time from 1s to 24h")
    return seconds


def positive(text: str) -> int:
    return _whole(text, ", 1 or more", least=1)


def seed(text: str) -> int:
    return _whole(text, " in 0..2^64-1")


def _whole(text: str, which: str, least: int = 0) -> int:
    """Below 2^64, so that nothing that counts it overflows."""
    number = int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else -1
    if not least <= number < 2**64:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be a whole number{which}")
    return number


def nonempty(text: str) -> str:
    """Not empty, as a variable of a script that is not set would be."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def path(text: str) -> Path:
    """Of a file or folder; the empty one would be the folder that the command runs in."""
    return Path(nonempty(text))


def size_bytes(text: str) -> int:
    """ "8GiB", "512MiB", or plain bytes."""
    match = _SIZE.fullmatch(text)
    size = float(match["number"]) * _UNIT_BYTES[match["unit"]] if match else 0.0
    if not 1 <= size < 2**63:
        raise argparse.ArgumentTypeError(
            f"{text!r:.60} must be a size such as 8GiB, 512MiB or bytes"
        )
    return int(size)


def jobs(text: str) -> int | None:
    """None: as many as suit the device."""
    return None if text == "auto" else job_count(text)


def job_count(text: str) -> int:
    """Of processes or threads; more than any machine lets run would fail in less clear ways."""
    if (count := positive(text)) > _MOST_JOBS:
        raise argparse.ArgumentTypeError(f"{text!r:.60} must be at most {_MOST_JOBS:,}")
    return count


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="pagefuzz",
        description="Fuzzes paged KV-cache kernels: the same CUDA source on a GPU and, without "
        "one, on the CPU.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"pagefuzz {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    commands.add_parser("doctor", help="what this machine can check, what it cannot and why")
    commands.add_parser("list", help="operations, subjects, judgements")
    _add_fuzz(commands)
    _add_replay(commands)
    _add_roundtrip(commands)
    _add_matrix(commands)
    return top


def _add_fuzz(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    profiles = "\n".join(f"  {p.name:<9} {p.summary}" for p in PROFILES.values())
    fuzz = commands.add_parser(
        "fuzz",
        help="draw cases, check them, minimise what fails",
        description="Draws cases, checks each on every subject, minimises and stores what fails.",
        epilog=f"profiles:\n{profiles}\n\n"
        "A unit is one subject of one operation. Cases that were reported against an operation\n"
        "run first, before any is drawn.\n\n"
        "Ctrl-C ends the run with what was found: exit 1 if that is anything, else 2, since the\n"
        "run was not finished.\n\n"
        f"{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fuzz.add_argument("--op", action="append", metavar="OP", help="operation; default: all")
    fuzz.add_argument(
        "--subject",
        action="append",
        metavar="S",
        help="such as bundled:page, twin:NAME or twin:FILE.toml; default: every bundled one that "
        "is not known to be faulty",
    )
    _add_device(fuzz, default="auto")
    _add_sanitizer(fuzz, "show the cases to a sanitizer, 100 of each unit unless --cases says "
                   "otherwise")  # fmt: skip
    fuzz.add_argument("--profile", choices=PROFILES, default="smoke", help="default: smoke")
    bound = fuzz.add_mutually_exclusive_group()
    bound.add_argument(
        "--time",
        type=duration_s,
        metavar="T",
        help="such as 90s, 10m, 2h: bounds the run, minimising included, in place of the "
        "profile's number of cases; split evenly over the units",
    )
    bound.add_argument(
        "--cases",
        type=positive,
        metavar="N",
        help="to draw a unit, in place of the profile's; reported cases, and what minimising and "
        "repeating launch, are more",
    )
    _add_hang_after(fuzz, "60s")
    fuzz.add_argument(
        "--seed", type=seed, metavar="S", help="default: 0; nightly: a new one, printed"
    )
    fuzz.add_argument(
        "--jobs",
        type=jobs,
        metavar="N|auto",
        help="runner processes; auto (default): one a core, on cuda at most 4",
    )
    fuzz.add_argument(
        "--hostile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="hostile values in device memory too; default: for subjects that promise containment",
    )
    fuzz.add_argument(
        "--keep-going",
        action="store_true",
        help="go on after a finding and list each distinct one",
    )
    fuzz.add_argument(
        "--report",
        type=path,
        metavar="DIR",
        help="write summary.json, findings/ and journal.jsonl there; default: findings/ here, "
        "no summary",
    )
    _add_workers(fuzz, "ends the run with exit code 2")


def _add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    replay = commands.add_parser(
        "replay",
        help="check one case or finding file again",
        description="Checks one case again. A finding file says on what; for a bare case file it "
        "is, unless given, every bundled subject that is not known to be faulty.",
    )
    replay.add_argument("case", type=path, metavar="CASE.json", help="case or finding file")
    replay.add_argument("--subject", type=nonempty, metavar="S", help="default: the finding's")
    _add_device(replay, default=None)
    _add_sanitizer(replay, "show the case to a sanitizer; default: the finding's, else none")
    _add_hang_after(replay, "the finding's, else 60s")
    _add_workers(replay, "ends this process by its signal")


def _add_hang_after(command: argparse.ArgumentParser, default: str) -> None:
    command.add_argument(
        "--hang-after",
        type=patience_s,
        metavar="T",
        help=f"a launch that takes longer is a finding; 1s to 24h, default: {default}",
    )


def _add_roundtrip(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    trip = commands.add_parser(
        "roundtrip",
        help="what a writer stores, a reader gathers: do they agree?",
        description="Launches a writer and then a reader on the cache it wrote, sometimes with "
        "copies of pages in between, or swaps to a second cache, and compares every row with what "
        "the contracts make of the writer's inputs. A unit is one subject of writer and reader; "
        "the first round trip of a unit that fails is minimised, repeated and stored.",
    )
    trip.add_argument(
        "trip", type=path, nargs="?", metavar="FILE.json", help="one round trip or finding again"
    )
    trip.add_argument(
        "--pair", action="append", metavar="W/R", help="writer and reader operation; default: all"
    )
    for side in ("writer", "reader"):
        trip.add_argument(
            f"--{side}",
            action="append",
            metavar="S",
            help="subject, such as bundled:token or twin:FILE.toml; default: every bundled one "
            "that is not known to be faulty",
        )
    trip.add_argument(
        "--mover",
        type=nonempty,
        metavar="S",
        help="subject of copy_blocks or swap_blocks, which move pages in between, such as "
        "twin:FILE.toml, of the operation it names; the other one, and default: the bundled one",
    )
    _add_device(trip, default=None, has_asan=False)
    bound = trip.add_mutually_exclusive_group()
    bound.add_argument(
        "--time",
        type=duration_s,
        metavar="T",
        help="such as 90s, 10m, 2h: split evenly over the units, minimising not included",
    )
    bound.add_argument(
        "--cases", type=positive, metavar="N", help="round trips of each unit; default: 100"
    )
    _add_hang_after(trip, "the finding's, else 60s")
    trip.add_argument("--seed", type=seed, metavar="S", help="default: 0")
    trip.add_argument(
        "--report", type=path, metavar="DIR", help="write findings/ there; default: here"
    )
    _add_workers(trip, "ends this process by its signal")


def _add_matrix(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    matrix = commands.add_parser(
        "matrix",
        help="inject wrong accesses, show which layer sees which",
        description="Lets sound kernels make one wrong access at a time, of each kind and to each "
        "buffer, and shows which layer of detection sees it. Exit code 1 if that is not what the "
        "layer promises.",
    )
    matrix.add_argument("--op", action="append", metavar="OP", help="operation; default: all")
    matrix.add_argument(
        "--subject", action="append", metavar="S", help="default: one sound one an operation"
    )
    matrix.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default="auto",
        help="auto: cuda where there is a GPU; default: auto",
    )
    matrix.add_argument(
        "--tries", type=positive, default=1, metavar="N", help="cases for each cell; default: 1"
    )
    matrix.add_argument(
        "--skip", type=natural, default=0, metavar="N", help="leave out the first N of these cases"
    )
    matrix.add_argument(
        "--jobs", type=job_count, default=1, metavar="N", help="launches at a time; default: 1"
    )
    matrix.add_argument(
        "--layer", action="append", metavar="L", help="guard, diff or checked; default: all"
    )
    matrix.add_argument(
        "--kind", action="append", metavar="K", help='such as "read past"; default: all'
    )
    matrix.add_argument(
        "--report",
        type=path,
        metavar="DIR",
        help="write matrix.json there, and findings/ with the cases of what is not as promised; "
        "default: findings/ here",
    )
    matrix.add_argument(
        "--resume",
        action="store_true",
        help="go on with matrix.json in --report DIR: what was tried is not tried again",
    )
    _add_gpu_memory(matrix)


def _add_device(
    command: argparse.ArgumentParser, *, default: str | None, has_asan: bool = True
) -> None:
    command.add_argument(
        "--device",
        choices=("auto", "host", "cuda"),
        default=default,
        help="auto: cuda where there is a GPU; "
        + (f"default: {default}" if default else "default: the finding's, else auto"),
    )
    command.add_argument(
        "--build",
        type=nonempty,
        metavar="FLAGS",
        help=f"checked, release, ubsan, {'asan, ' if has_asan else ''}coverage, or several, "
        "separated by commas; "
        + ("default: checked" if default else "default: the finding's, else checked"),
    )


def _add_sanitizer(command: argparse.ArgumentParser, does: str) -> None:
    command.add_argument(
        "--sanitizer",
        choices=TOOLS,
        metavar="TOOL",
        help=f"{does}. Of compute-sanitizer, on a GPU: memcheck, racecheck, initcheck, synccheck; "
        "of the compiler, on the host: asan, ubsan. The build is a release one, unless --build "
        "says otherwise",
    )


def _add_workers(command: argparse.ArgumentParser, fault: str) -> None:
    """fault: what one does without isolation."""
    command.add_argument(
        "--isolate",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="launch in worker processes, so that a launch that kills its process is a finding; "
        f"without, a fault {fault}, for a debugger to see; default: isolate",
    )
    _add_gpu_memory(command)


def _add_gpu_memory(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--gpu-memory",
        type=size_bytes,
        metavar="SIZE",
        help="such as 8GiB: what the buffers of a worker may take of a GPU; a case that needs more "
        "is not run; default: what is free",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code. Raises `SystemExit` for --help and the like."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _accept_any_stream()
    try:
        return _exit_code(given)
    finally:
        _leave_streams()


def _exit_code(given: Sequence[str]) -> int:
    """Also of a run that failed: an exception that got out would be exit code 1, a finding."""
    try:
        options = parser().parse_args(given)
        if threading.current_thread() is threading.main_thread():
            # Else a compiler that is running would be left behind.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(signal.SIGHUP, signal.default_int_handler)
        code = _run(options, given)
        sys.stdout.flush()
        return code
    except CannotCheckError as error:
        return _could_not(str(error))
    except KeyboardInterrupt:
        return _could_not("interrupted before anything was checked")
    except BrokenPipeError:
        return 2  # whoever read the output is gone
    except Exception as error:  # noqa: BLE001 - exit code 1 would mean findings
        if isinstance(error, OSError) and error.errno in _FULL:
            return _could_not(f"cannot write {error.filename or 'the output'}: {error.strerror}")
        if isinstance(error, OSError) and error.errno in _TOO_MANY:
            return _could_not(f"this machine does not let it go on: {error.strerror}")
        said = f"internal error: {type(error).__name__}: {error}; please report it"
        return _could_not(said, traceback.format_exc())


def _leave_streams() -> None:
    """What cannot be written is dropped, else Python's own attempt would decide the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _accept_any_stream() -> None:
    """A closed stream, or one that cannot encode a character, must not decide the exit code."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
            stream.reconfigure(errors="replace")


def _run(options: argparse.Namespace, given: Sequence[str]) -> int:
    # Each command is imported when it is asked for: `--help` needs neither NumPy nor torch.
    from pagefuzz.oracles.case import CaseError

    try:
        if options.command == "fuzz" and options.sanitizer is not None:
            from pagefuzz.harness.commands.second_opinion import fuzz_with_sanitizer

            return fuzz_with_sanitizer(options, given)
        if options.command == "fuzz":
            from pagefuzz.harness.commands.fuzz import fuzz

            return fuzz(options, given)
        if options.command == "replay":
            from pagefuzz.harness.commands.replay import replay

            return replay(options)
        if options.command == "roundtrip":
            from pagefuzz.harness.commands.roundtrip import roundtrip

            return roundtrip(options)
        if options.command == "matrix":
            from pagefuzz.harness.commands.matrix import matrix

            return matrix(options)
        if options.command == "list":
            from pagefuzz.harness.commands.listing import listing

            return listing()
        from pagefuzz.harness.commands.doctor import doctor

        return doctor()
    except CaseError as error:
        raise CannotCheckError(str(error)) from error


def _could_not(sentence: str, detail: str = "") -> int:
    with suppress(OSError):  # where nobody can be told, the exit code stays
        print(f"{detail}pagefuzz: {sentence}", file=sys.stderr)
    return 2

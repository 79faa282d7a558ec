"""Compares what a subject leaves in memory on the host and on a GPU, byte for byte.

Draws cases with a fixed seed, runs each on both backends and compares every byte that the contract
fixes: must-write bytes, counters whose counts it fixes, and statuses. The bytes themselves stay in
the workers; digests of them are compared.

Exit status: 0 all equal, 1 a difference or a failed case, 2 could not check.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

import pagefuzz
from pagefuzz.harness import devices
from pagefuzz.harness.check import Checker
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.subjects import check_registry
from pagefuzz.harness.versions import commit
from pagefuzz.oracles.case import Case
from pagefuzz.oracles.verdict import CaseClass, Outcome
from pagefuzz.strategies.gathers import LEAST_LIMIT_BYTES
from pagefuzz.strategies.registry import cases_for

sys.path.append(str(Path(__file__).parents[1]))  # last: folders of ours are named like packages

from ci.reports import exit_code, require_report, write_report

SCHEMA = 1
SHOWN = 5


class Comparison:
    """Both backends side by side, and what was compared so far."""

    def __init__(self, host: Checker, gpu: Checker) -> None:
        self._host, self._gpu = host, gpu
        self.cases: Counter[str] = Counter()
        self.byte_count = 0
        self.launches = 0
        self.differences: list[dict[str, Any]] = []

    @property
    def compared(self) -> int:
        return self.cases["in contract"] + self.cases["hostile"] + self.cases["refused"]

    def compare(self, case: Case) -> None:
        host, host_fixed = self._host.check_fixed_bytes(case)
        gpu, gpu_fixed = self._gpu.check_fixed_bytes(case)
        for where, verdict in (("host", host), ("cuda", gpu)):
            if verdict.outcome is Outcome.FAILED:
                self._differs(case, f"{where}: {verdict.failures[0].title}")
                return
            if verdict.outcome is Outcome.NOT_RUN:
                # Not equal, not different: not among the compared, and said at the end.
                self.cases[f"not run on {where}"] += 1
                return
        if host_fixed is None or gpu_fixed is None:
            raise CannotCheckError("a worker brought no digest back")
        if host_fixed != gpu_fixed:
            self._differs(case, f"host {host_fixed} but cuda {gpu_fixed}")
        self.cases[str(host.case_class or CaseClass.IN_CONTRACT)] += 1
        self.byte_count += host_fixed.byte_count
        self.launches += host.launches + gpu.launches

    def _differs(self, case: Case, what: str) -> None:
        self.cases["different"] += 1
        if len(self.differences) < SHOWN:
            self.differences.append({"what": what, "case": case.to_json()})
            print(f"DIFFERENT  {what}\n  {case.dumps()}", flush=True)


def drawn(operation: str, seed_: int, limit_bytes: int) -> Any:
    """An endless supply of cases; the same for the same seed."""
    strategy = cases_for(operation, hostile=True, refused=True, limit_bytes=limit_bytes)
    batch = 0
    while True:
        cases: list[Case] = []

        @seed(seed_ * 1_000_003 + batch)
        @settings(
            max_examples=1000,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def collect(case: Case) -> None:
            cases.append(case)  # noqa: B023 - called before the next round of the loop

        collect()
        yield from cases
        batch += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/equality",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit status: 0 all equal, 1 a difference or a failed case, 2 could not check.",
    )
    parser.add_argument("--op", default="cp_gather_cache", metavar="OP", help="operation")
    parser.add_argument("--subject", default="bundled:page", help="what to run (bundled:page)")
    parser.add_argument("--build", default="release", help="build flags of both (release)")
    parser.add_argument("--cases", type=int, default=10_000, metavar="N", help="how many (10,000)")
    parser.add_argument("--seed", type=int, default=1, help="of the cases (1)")
    parser.add_argument(
        "--limit",
        type=int,
        default=4 * 2**30,
        metavar="BYTES",
        help="memory of a case's buffers together, at least 64 MiB (4 GiB)",
    )
    parser.add_argument(
        "--against",
        default="cuda",
        choices=["cuda", "host"],
        help="the other backend; host compares the host with itself, to try this script",
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="write what was compared as JSON"
    )
    arguments = parser.parse_args()
    if arguments.cases < 1:
        parser.error(f"--cases {arguments.cases} must be at least 1")
    if arguments.limit < LEAST_LIMIT_BYTES:
        parser.error(f"--limit {arguments.limit} must be at least {LEAST_LIMIT_BYTES}")
    return arguments


def compare_all(comparison: Comparison, arguments: argparse.Namespace) -> None:
    """Raises `CannotCheckError` if too few cases can be run on both backends."""
    shown = time.monotonic()
    for number, case in enumerate(drawn(arguments.op, arguments.seed, arguments.limit)):
        if comparison.compared >= arguments.cases or comparison.cases["different"] >= SHOWN:
            return
        if number > 2 * arguments.cases + 1000:
            raise CannotCheckError(
                f"only {comparison.compared} of {number} cases could be run on both backends"
            )
        comparison.compare(case)
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"{comparison.compared:,} of {arguments.cases:,} cases", flush=True)


def run(arguments: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as `timeout` ends it
    check_registry()
    require_report(arguments.report)
    backend = devices.resolve_device(arguments.against)
    gpu = devices.machine().gpu if backend == "cuda" else None
    subject, build = arguments.subject, arguments.build
    start = time.monotonic()
    with (
        Checker(arguments.op, subject, "host", build) as on_host,
        Checker(arguments.op, subject, backend, build) as on_gpu,
    ):
        on_host.start()
        on_gpu.start()
        print(f"{arguments.op} · {subject} · {build}: host against {on_gpu.device}", flush=True)
        comparison = Comparison(on_host, on_gpu)
        was_interrupted = False
        try:
            compare_all(comparison, arguments)
        except KeyboardInterrupt:  # what was compared until then stands
            was_interrupted = True
        device = on_gpu.device
    elapsed_s = time.monotonic() - start
    if arguments.report:
        report = {
            "pagefuzz_equality": SCHEMA,
            "pagefuzz": pagefuzz.__version__,
            "commit": commit() or "unknown",
            "command": shlex.join(["ci/equality", *sys.argv[1:]]),
            "operation": arguments.op,
            "subject": subject,
            "build": build,
            "seed": arguments.seed,
            "device": device,
            "driver": gpu.driver if gpu else None,
            "cuda": gpu.cuda if gpu else None,
            "cases": dict(sorted(comparison.cases.items())),
            "cases_compared": comparison.compared,
            "launches": comparison.launches,
            "bytes_compared": comparison.byte_count,
            "differences": comparison.differences,
            "was_interrupted": was_interrupted,
            "seconds": round(elapsed_s, 1),
        }
        write_report(arguments.report, report)
    counted = ", ".join(f"{count:,} {kind}" for kind, count in sorted(comparison.cases.items()))
    print(f"{comparison.byte_count:,} bytes compared in {elapsed_s:.0f} s; cases: {counted}")
    if comparison.cases["different"]:
        print(f"{comparison.cases['different']} cases differ")
        return 1
    if was_interrupted:
        raise CannotCheckError(f"interrupted after {comparison.compared:,} equal cases")
    print(f"host and {device} are equal in every fixed byte of {comparison.compared:,} cases")
    return 0


def main() -> int:
    return exit_code(partial(run, parse_arguments()), "could not check")


if __name__ == "__main__":
    sys.exit(main())

"""Times launches in guarded memory against launches in plain memory, on a GPU.

One gather of 64 requests is launched by turns with its buffers between guard pages, as the cuda
backend places them, and in plain allocations of the same contents and alignment. Where memory
happens to lie changes the speed of a copy, so that both are placed anew for each round.

Exit status: 0 guards cost little enough, 1 they cost more, 2 could not measure.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pagefuzz.harness import devices
from pagefuzz.harness.build import BuildSpec, build
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.cuda import CudaArena, Scan
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.native import BuiltObject
from pagefuzz.harness.subjects import subject
from pagefuzz.oracles import registry
from pagefuzz.oracles.case import BASE_ALIGNMENT_BYTES, Case, Values
from pagefuzz.oracles.contents import FILLS, initial_bytes
from pagefuzz.oracles.expectation import Expectation
from pagefuzz.oracles.layout import Bytes, Plan

sys.path.append(str(Path(__file__).parents[1]))  # last: folders of ours are named like packages

from ci.reports import exit_code, require_report, write_report
from ci.timing import DeviceClock, Times, head, in_turn, timed

SCHEMA = 1
OPERATION, SUBJECT = "cp_gather_cache", "bundled:page"
REQUESTS, TOKENS, ENTRY_BYTES, PAGE_TOKENS = 64, 512, 1152, 64
WARM_UP = 20
MOST = 1.05

GUARDED, PLAIN = "guarded", "plain"
KINDS = (GUARDED, PLAIN)


def the_case(requests: int = REQUESTS, tokens: int = TOKENS) -> Case:
    """`requests` of `tokens` each, at unaligned starts in shuffled pages."""
    seq_starts = [13 + 17 * r % PAGE_TOKENS for r in range(requests)]
    width = -(-(tokens + max(seq_starts)) // PAGE_TOKENS)
    rows = requests * tokens
    return Case(
        OPERATION,
        {
            "num_requests": requests,
            "num_tokens": rows,
            "page_size_tokens": PAGE_TOKENS,
            "num_pages": requests * width,
            "table_width": width,
            "table_row_stride": width,
            "page_stride_bytes": PAGE_TOKENS * ENTRY_BYTES,
            "slot_stride_bytes": ENTRY_BYTES,
            "dst_rows": rows,
            "dst_row_stride_bytes": ENTRY_BYTES,
            "entry_bytes": ENTRY_BYTES,
            "element_bytes": 2,
            "has_terminal": 1,
        },
        {
            "block_table": Values("permuted", {"seed": 1}),
            "starts": Values.literal(*range(0, rows + 1, tokens)),
            "seq_starts": Values.literal(*seq_starts),
        },
    )


class PlainMemory:
    """Every buffer in an allocation of its own, nothing around it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._allocations: list[int] = []

    def place(self, plan: Plan, expectation: Expectation) -> dict[str, int]:
        addresses = {}
        for name, buffer in plan.buffers.items():
            if not buffer.memory_bytes:
                addresses[name] = 0
                continue
            address = self._driver.allocate(buffer.memory_bytes + BASE_ALIGNMENT_BYTES)
            self._allocations.append(address)
            addresses[name] = address + buffer.base_offset_bytes
            readable = expectation.footprint(name).may_read
            held = initial_bytes(buffer, readable, plan.case.seed, FILLS[0], 0, buffer.memory_bytes)
            self._driver.copy_in(addresses[name], held)
        self._driver.synchronise()
        return addresses

    def close(self) -> None:
        for address in self._allocations:
            self._driver.free(address)
        self._allocations = []


def measure(
    driver: Driver,
    natives: Mapping[str, BuiltObject],
    scan: Scan,
    case: Case,
    rounds: int,
    launches: int,
) -> list[dict[str, Times]]:
    """Launches of each kind, `launches` in each of `rounds`, by turns. `natives`: one a kind.

    Raises `CannotCheckError` if a launch fails or the two leave different bytes.
    """
    operation = registry.operation(case.operation)
    plan = operation.plan(case)
    expectation = operation.expect(plan)
    found = []
    for _ in range(rounds):
        arena, plain = CudaArena(driver, scan), PlainMemory(driver)
        try:
            addresses = {GUARDED: arena.place(plan, expectation)}
            arena.fill(FILLS[0])
            addresses[PLAIN] = plain.place(plan, expectation)
            for kind in KINDS:
                natives[kind].marshal(plan, addresses[kind])
            found.append(_round(driver, natives, launches))
            _require_equal(driver, plan, addresses)
        finally:
            plain.close()
            arena.close()
    return found


def _round(driver: Driver, natives: Mapping[str, BuiltObject], launches: int) -> dict[str, Times]:
    times = {kind: Times() for kind in KINDS}
    clock = DeviceClock(driver)
    for number in range(-WARM_UP, launches):
        for kind in in_turn(KINDS, number):
            device_us, host_us = timed(clock, natives[kind].launch, nullcontext())
            if number >= 0:
                times[kind].add(device_us, host_us)
    clock.close()
    return times


def _require_equal(driver: Driver, plan: Plan, addresses: Mapping[str, Mapping[str, int]]) -> None:
    left: dict[str, Bytes] = {}
    for kind in KINDS:
        left[kind] = np.empty(plan.buffers["dst"].required_bytes, np.uint8)
        driver.copy_out(left[kind], addresses[kind]["dst"])
    driver.synchronise()
    if not np.array_equal(left[GUARDED], left[PLAIN]):
        raise CannotCheckError("launches in guarded and in plain memory left different rows")


def report(rounds: list[dict[str, Times]]) -> dict[str, Any]:
    """Medians over all launches, and each round's ratio."""
    whole = {kind: Times() for kind in KINDS}
    for one in rounds:
        for kind in KINDS:
            whole[kind].extend(one[kind])
    medians = {kind: whole[kind].medians() for kind in KINDS}
    return {
        "launches_of_each": len(whole[PLAIN].device_us),
        "rounds": len(rounds),
        "medians": medians,
        "ratio": _ratio(medians),
        "ratio_of_each_round": [
            _ratio({kind: one[kind].medians() for kind in KINDS}) for one in rounds
        ],
    }


def _ratio(medians: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Guarded over plain."""
    return {
        unit: round(medians[GUARDED][unit] / medians[PLAIN][unit], 4) for unit in medians[PLAIN]
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/bench_guards",
        description=(__doc__ or "").split("\n\n")[0],
        epilog="Exit status: 0 guards cost little enough, 1 they cost more, 2 could not measure.",
    )
    parser.add_argument(
        "--launches", type=int, default=10_000, metavar="N", help="of each kind (10,000)"
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="with memory of their own (20)"
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures as JSON")
    arguments = parser.parse_args()
    if not 1 <= arguments.rounds <= arguments.launches:
        parser.error(f"--rounds {arguments.rounds} must be at least 1 and at most --launches")
    return arguments


def run(arguments: argparse.Namespace) -> int:
    require_report(arguments.report)
    devices.resolve_device("cuda")
    gpu = devices.machine().gpu
    assert gpu is not None, "resolve_device would have raised"
    page = subject(SUBJECT, OPERATION)
    path = build(page.source, BuildSpec.parse("cuda", "release"))
    driver = Driver()
    driver.use_device()
    natives = {kind: BuiltObject(path, page.source, page.operation, page.symbol) for kind in KINDS}
    each = -(-arguments.launches // arguments.rounds)
    rounds = measure(driver, natives, natives[GUARDED].scan, the_case(), arguments.rounds, each)
    figures = report(rounds)
    ratio = figures["ratio"]
    is_little = max(ratio.values()) <= MOST
    if arguments.report:
        about = head("pagefuzz_bench_guards", SCHEMA, "ci/bench_guards", gpu) | {
            "operation": OPERATION,
            "subject": SUBJECT,
            "requests": REQUESTS,
            "tokens_of_each": TOKENS,
            "entry_bytes": ENTRY_BYTES,
        }
        write_report(arguments.report, about | figures)
    for unit, where in (("device_us", "on the device"), ("host_us", "until it had ended")):
        both = ", ".join(f"{kind} {figures['medians'][kind][unit]:.2f} us" for kind in KINDS)
        print(
            f"median of {figures['launches_of_each']:,} launches {where}: {both}, "
            f"ratio {ratio[unit]:.4f}"
        )
    print(f"guards cost {'little enough' if is_little else 'too much'}: at most {MOST} is allowed")
    return 0 if is_little else 1


def main() -> int:
    return exit_code(partial(run, parse_arguments()), "could not measure")


if __name__ == "__main__":
    sys.exit(main())

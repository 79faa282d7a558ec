"""What scripts that time launches share: clocks, medians, the head of a report."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol, TypeVar

from pagefuzz.harness.devices import Gpu
from pagefuzz.harness.errors import CannotCheckError
from pagefuzz.harness.memory.driver import Driver
from pagefuzz.harness.versions import commit
from pagefuzz.oracles.observation import Status

T = TypeVar("T")


@dataclass
class Times:
    """Microseconds of each launch: of the launch alone, which is on the device where there is one,
    and on the host until it had ended, with all that belongs to it."""

    device_us: list[float] = field(default_factory=list)
    host_us: list[float] = field(default_factory=list)

    def add(self, device_us: float, host_us: float) -> None:
        self.device_us.append(device_us)
        self.host_us.append(host_us)

    def extend(self, others: Times) -> None:
        self.device_us += others.device_us
        self.host_us += others.host_us

    def medians(self) -> dict[str, float]:
        return {
            "device_us": round(median(self.device_us), 3),
            "host_us": round(median(self.host_us), 3),
        }


class Clock(Protocol):
    """Times one launch at a time: `around`, `wait`, `between_us`."""

    def around(self, launch: Callable[[], T]) -> T:
        """Calls it between two marks; what it returned."""

    def wait(self) -> None:
        """Until the launch has ended. Raises `DeviceFaultError`."""

    def between_us(self) -> float:
        """Microseconds between the two marks of a launch that has ended."""

    def close(self) -> None: ...


class DeviceClock:
    """Marks are events of the driver, on the default stream."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._start, self._end = driver.event(), driver.event()

    def around(self, launch: Callable[[], T]) -> T:
        self._driver.record(self._start)
        returned = launch()
        self._driver.record(self._end)
        return returned

    def wait(self) -> None:
        self._driver.synchronise()

    def between_us(self) -> float:
        return self._driver.elapsed_us(self._start, self._end)

    def close(self) -> None:
        self._driver.forget_event(self._start)
        self._driver.forget_event(self._end)


class HostClock:
    """For launches that have ended when they return."""

    def __init__(self) -> None:
        self._between_us = 0.0

    def around(self, launch: Callable[[], T]) -> T:
        begin = time.perf_counter()
        returned = launch()
        self._between_us = (time.perf_counter() - begin) * 1e6
        return returned

    def wait(self) -> None:
        """Nothing is left to wait for."""

    def between_us(self) -> float:
        return self._between_us

    def close(self) -> None:
        """Nothing is held."""


def timed(
    clock: Clock,
    launch: Callable[[], tuple[Status, str]],
    belonging: AbstractContextManager[object],
) -> tuple[float, float]:
    """Microseconds of one launch: of itself, and on the host until it had ended, entering and
    leaving `belonging` included. Raises `CannotCheckError` if it fails."""
    begin = time.perf_counter()
    with belonging:
        require_ok(*clock.around(launch))
    clock.wait()
    host_us = (time.perf_counter() - begin) * 1e6
    return clock.between_us(), host_us


def require_ok(status: Status, message: str) -> None:
    """Raises `CannotCheckError`: times of launches that fail say nothing."""
    if status is not Status.OK:
        raise CannotCheckError(f"a launch failed: {message or status.name}")


def in_turn(kinds: Sequence[T], number: int) -> Sequence[T]:
    """Who is launched in this order the `number`th time: none is always the first."""
    return kinds if number % 2 else kinds[::-1]


def head(name: str, schema: int, script: str, gpu: Gpu | None) -> dict[str, Any]:
    """What a report begins with: its schema, the device, and what was run. gpu: None on the
    host."""
    return {
        name: schema,
        "device": gpu.name if gpu else "host",
        "driver": gpu.driver if gpu else None,
        "cuda": gpu.cuda if gpu else None,
        "commit": commit() or "unknown",
        "command": shlex.join([script, *sys.argv[1:]]),
    }

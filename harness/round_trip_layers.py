"""The detection layers of round trips, and how much of one each of them examined.

A launch of a round trip is one of its writer, its moves or its readers; all of those with one fill
work on one memory, which is placed, filled and compared once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from pagefuzz.harness.layers import BY_NAME, ran
from pagefuzz.oracles.observation import CheckRecord, Status
from pagefuzz.oracles.operation import Operation
from pagefuzz.oracles.round_trip_judging import RoundTripLaunch

_ROWS, _DIFF, _LIMITS, _DEATHS = (
    "reference, bit-exact",
    "whole-buffer byte diff",
    "launch limits",
    "worker deaths",
)
_AROUND = ("red zones", "guard pages", "read-only sources")
_RECORDED = ("checked build", "checked index type", "UBSan")

#: What looks at round trips. The other layers compare launches of one case, or count what is judged
#: where a launch is by itself.
_NAMES = frozenset({_ROWS, _DIFF, _LIMITS, _DEATHS, *_AROUND, *_RECORDED})


def in_force(objects: Iterable[tuple[Operation, frozenset[str]]]) -> tuple[str, ...]:
    """Names of the layers that must examine something in a search, in the table's order.

    objects  operation and build flags of the writer's object and of the reader's
    """
    objects = list(objects)
    return tuple(
        name
        for name, layer in BY_NAME.items()
        if name in _NAMES and any(layer.in_force(*one) for one in objects)
    )


def examined(
    names: Sequence[str], launches: Sequence[RoundTripLaunch], row_bytes: int
) -> dict[str, tuple[int, int]]:
    """Layer -> (launches, amount) that it examined of one round trip, of those named.

    row_bytes  of destinations that were compared
    """
    made = [step for one in launches for step in one.steps]
    whole = [one for one in launches if all(step.status is Status.OK for step in one.steps)]
    compared = sum(len(one.steps) for one in whole) if row_bytes else 0
    found = {
        _ROWS: (compared, row_bytes),
        _DIFF: (len(made), sum(one.memory.examined_bytes for one in launches)),
        _LIMITS: (len(made), len(made)),
        _DEATHS: (len(made), len(made)),
    }
    for name in _AROUND:
        amount = BY_NAME[name].amount
        assert amount is not None
        looked = [one for one in launches if ran(one.memory.status) and amount(one.memory)]
        found[name] = (sum(len(o.steps) for o in looked), sum(amount(o.memory) for o in looked))
    records = [step.record for step in made if step.record is not None and ran(step.status)]
    found |= {name: _of_records(name, records) for name in _RECORDED}
    return {name: found[name] for name in names}


def _of_records(name: str, records: Sequence[CheckRecord]) -> tuple[int, int]:
    of: Mapping[str, list[int]] = {
        "checked build": [record.accessed_bytes for record in records],
        "checked index type": [record.operations for record in records],
        "UBSan": [1] * len(records),
    }
    return sum(amount > 0 for amount in of[name]), sum(of[name])

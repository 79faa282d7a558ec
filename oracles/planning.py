"""Laying the buffers of a case out, whatever its operation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagefuzz.oracles.case import Case, CaseError, Placement
from pagefuzz.oracles.layout import (
    MOST_ALIGNMENT_BYTES,
    BufferRole,
    Dtype,
    Image,
    Plan,
    PlannedBuffer,
    Role,
)

#: Memory of one case above this is not laid out.
MAX_MEMORY_BYTES = 2**42

#: Payload above this is not compared: it would have to be held in memory.
MAX_PAYLOAD_BYTES = 2**32

#: Memory of a buffer whose sizes cannot be laid out: only a refused case has one.
CLAMPED_BYTES = 2**20

#: Each source's payload begins this far into the case's stream after that of the one before, so
#: that no two sources hold the same bytes at the same place.
PAYLOAD_STEP_BYTES = MAX_MEMORY_BYTES


def planned_buffers(
    case: Case,
    roles: tuple[BufferRole, ...],
    required: Mapping[str, int],
    types: Mapping[str, tuple[int, int]],
    *,
    sound: bool,
    alignments: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, PlannedBuffer]:
    """Every buffer, without its image.

    required  bytes by buffer, optional ones as if present
    types     (dtype, rank) by buffer
    sound     whether `required` follows from the sizes as they are; otherwise memory is kept small
    alignments  of bases, in bytes, where the operation asks for more than that of an element
    An optional buffer is absent if the case holds no values for it.
    """
    overrides = case.overrides
    too_large = sum(required.values()) > MAX_MEMORY_BYTES
    buffers: dict[str, PlannedBuffer] = {}
    sources = [role.name for role in roles if role.role.holds_payload]
    lying_over: dict[str, list[str]] = {}
    for name, place in case.placements.items():
        if place.over is not None and name in types:
            lying_over.setdefault(place.over[0], []).append(name)

    def needs(name: str) -> int:
        return max(Dtype(types[name][0]).size_bytes, alignments.get(name, 1))

    for role in roles:
        name = role.name
        absent = role.optional and name not in case.values
        needed = 0 if absent else required[name]
        placement = Placement() if absent else case.placement(name)
        told = min(needed + placement.slack_bytes, 2**63 - 1)
        told = overrides.get(f"{name}.extent_bytes", told)
        data = overrides.get(f"{name}.data")
        if data not in (None, 0):
            raise CaseError(f"overrides.{name}.data={data} must be 0, a null pointer")
        dtype, rank = types[name]
        buffers[name] = PlannedBuffer(
            name=name,
            role=role.role,
            required_bytes=needed if sound and not too_large else min(needed, CLAMPED_BYTES),
            extent_bytes=told,
            dtype=overrides.get(f"{name}.dtype", int(dtype)),
            rank=overrides.get(f"{name}.rank", rank),
            placement=placement,
            is_null=absent or data is not None,
            image=Image.empty(),
            payload_origin_bytes=(
                sources.index(name) * PAYLOAD_STEP_BYTES if name in sources else 0
            ),
            host=role.host,
            # What is wrong with a case that must be refused is never where its memory lies.
            alignment_bytes=(
                MOST_ALIGNMENT_BYTES
                if not sound
                else max(needs(one) for one in (name, *lying_over.get(name, ())))
            ),
        )
    for name, buffer in buffers.items():
        if buffer.placement.over is not None:
            _check_over(buffers, name)
    return buffers


def check_memory(plan: Plan, total_bytes: int) -> None:
    """What the launcher is told of a case that it must accept has to be true. Raises `CaseError`.

    total_bytes  of all buffers
    """
    if total_bytes > MAX_MEMORY_BYTES:
        raise CaseError(
            f"the case needs {total_bytes} bytes of memory; at most {MAX_MEMORY_BYTES} are laid out"
        )
    for name, buffer in plan.buffers.items():
        memory_bytes = buffer.memory_bytes
        if buffer.placement.over is not None:
            root, begin = buffer.placement.over
            memory_bytes = plan.buffers[root].memory_bytes - begin
            if {buffer.role, plan.buffers[root].role} != {Role.DESTINATION}:
                raise CaseError(
                    f"placements.{name}.over: only a case that must be refused may place a buffer "
                    "over another, two destinations excepted"
                )
        if buffer.extent_bytes > memory_bytes:
            raise CaseError(
                f"{name} is said to have {buffer.extent_bytes} bytes, it has {memory_bytes}, and "
                "nothing else makes the case refused"
            )


def _check_over(buffers: Mapping[str, PlannedBuffer], name: str) -> None:
    placement = buffers[name].placement
    assert placement.over is not None
    root, offset_bytes = placement.over
    what = f"placements.{name}.over"
    if root not in buffers or root == name:
        raise CaseError(f"{what} names {root!r}, it must name another buffer of the operation")
    if buffers[root].placement.over is not None or buffers[root].memory_bytes == 0:
        raise CaseError(f"{what} names {root!r}, which has no memory of its own")
    if not 0 <= offset_bytes <= buffers[root].memory_bytes:
        raise CaseError(f"{what} offset {offset_bytes} must lie in {root}'s memory")
    if placement.offset_bytes or placement.before_bytes or placement.after_bytes:
        raise CaseError(f"{what}: such a buffer has no offset, no workspace of its own")

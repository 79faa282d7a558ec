"""Which subjects a command is about."""

from __future__ import annotations

import pytest

from pagefuzz.harness.commands.selection import selected_subjects
from pagefuzz.harness.errors import CannotCheckError


def test_a_name_that_several_operations_have():
    """Without --op it is a subject of each of them; with it, of that one."""
    everywhere = {s.operation for s in selected_subjects(None, ["bundled:page-as-merged"])}
    assert {"cp_gather_cache", "gather_and_maybe_dequant_cache"} <= everywhere
    (one,) = selected_subjects(["cp_gather_cache"], ["bundled:page-as-merged"])
    assert one.operation == "cp_gather_cache"


def test_a_name_that_no_operation_has():
    """One sentence, with the names there are."""
    with pytest.raises(CannotCheckError, match=r"unknown subject 'bundled:nope'; there is .*page"):
        selected_subjects(None, ["bundled:page", "bundled:nope"])

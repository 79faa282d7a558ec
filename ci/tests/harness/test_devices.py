"""What a machine can check on is found out without touching CUDA here."""

from __future__ import annotations

import sys

import pytest

from pagefuzz.harness import devices
from pagefuzz.harness.errors import CannotCheckError


def test_the_host_is_always_there() -> None:
    """`host` needs no probe; `auto` is one of the two."""
    assert devices.resolve_device("host") == "host"
    assert devices.resolve_device("auto") in ("host", "cuda")


def test_an_unknown_device_lists_what_there_is() -> None:
    """A misspelt device is no silent host run."""
    with pytest.raises(CannotCheckError, match="unknown device 'gpu'; there is auto, host, cuda"):
        devices.resolve_device("gpu")


def test_cuda_without_a_gpu_cannot_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name, a missing GPU is an error with its reason; `auto` falls back."""
    missing = devices.Machine(None, "there is no GPU to check on: no driver", ())
    monkeypatch.setattr(devices, "machine", lambda: missing)
    with pytest.raises(CannotCheckError, match="there is no GPU to check on"):
        devices.resolve_device("cuda")
    assert devices.resolve_device("auto") == "host"


def test_the_probe_says_which() -> None:
    """The machine has a GPU, or one sentence that says why not."""
    here = devices.machine()
    assert (here.gpu is None) == bool(here.no_gpu)
    if here.gpu is None:
        assert "GPU" in here.no_gpu
    else:
        assert here.gpu.architecture.startswith("sm_")


def test_compilers_carry_their_version() -> None:
    """Each compiler that is found is there with its path and a version line."""
    for compiler in devices.machine().compilers:
        assert compiler.version
        assert compiler.path.endswith(compiler.name)


def test_a_probe_that_dies_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes its process down does not take the answer with it."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    gpu, why = devices._probe_gpu()
    assert gpu is None
    assert "the probe for a GPU failed: exit status 1" in why

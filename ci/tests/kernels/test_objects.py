"""What every object says of itself, and what the sources promise: flags, CUDA builds, tidiness."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ci.tests.kernels.conftest import CP_GATHER_CACHE, OK, REFUSED, fragment, load

from pagefuzz.harness.build import KERNELS, BuildSpec, asan_runtime, build, commands, compiler

OPERATIONS = sorted((KERNELS / "operations").glob("*.cu"))
SOURCES = sorted(path for path in KERNELS.rglob("*") if path.suffix in (".cu", ".h"))
FLAGS = {"checked": 2, "ubsan": 4, "asan": 8, "coverage": 16}


@pytest.mark.parametrize("flags", ["release", "checked", "ubsan", "checked,coverage"])
def test_an_object_names_its_flags(flags):
    """pf_build_flags and the ABI version."""
    loaded = load(CP_GATHER_CACHE, flags)
    assert loaded.lib.pf_abi_version() == 1
    assert loaded.lib.pf_build_flags() == sum(FLAGS.get(flag, 0) for flag in flags.split(","))


def test_what_a_build_does_not_have_is_refused():
    """A release build has no record, a host build no scan, others no coverage."""
    loaded = load(CP_GATHER_CACHE, "release")
    assert loaded.lib.pf_check_begin(loaded.ffi.NULL, 0) == REFUSED
    assert loaded.lib.pf_check_end(loaded.ffi.new("pf_check_record *")) == REFUSED
    null = loaded.ffi.NULL
    assert loaded.lib.pf_scan(null, 0, 16, 0, null, null) == REFUSED
    assert loaded.lib.pf_coverage_dump() == REFUSED


def test_an_object_exports_the_abi_and_nothing_else():
    """So two objects in one process share no state."""
    command = ["nm", "-D", "--defined-only", str(build(CP_GATHER_CACHE, BuildSpec("host")))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert "pf_cp_gather_cache_page" in names
    assert [name for name in names if not name.startswith("pf_")] == []


def test_coverage_counts_can_be_flushed_by_a_worker(tmp_path):
    """The .gcda file appears on pf_coverage_dump, before the process ends."""
    path = build(CP_GATHER_CACHE, BuildSpec.parse("host", "coverage"))
    assert path.with_suffix(".gcno").exists()
    counts = path.with_suffix(".gcda")
    counts.unlink(missing_ok=True)
    loaded = load(CP_GATHER_CACHE, "coverage")
    for _ in range(2):
        assert loaded.lib.pf_coverage_dump() == OK
        assert counts.exists()
        counts.unlink()


def test_an_asan_object_runs_in_a_process_that_preloads_its_runtime():
    """Builds, loads with LD_PRELOAD, runs fibers, and sees a stray write of a kernel."""
    path = build(CP_GATHER_CACHE, BuildSpec.parse("host", "asan"))
    script = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kit", sys.argv[1])
kit = importlib.util.module_from_spec(spec)
sys.modules["kit"] = kit
spec.loader.exec_module(kit)
loaded = kit.load(kit.CP_GATHER_CACHE, "asan")
case = kit.Case(
    starts=[0, 5], table=[[1, 0]], num_tokens=5, page_size_tokens=3, num_pages=2, entry_bytes=40
)
for schedule in ("page", "token", "page-as-merged"):
    for order in range(4):
        loaded.lib.pf_set_order(order, 1)
        launch = kit.Launch(loaded, case)
        want = kit.wanted(launch)
        assert launch.run(schedule) == kit.OK
        assert (launch.dst == want.dst).all()
print("clean", flush=True)
loaded.ffi.cdef("void *malloc(size_t);")
table = loaded.ffi.dlopen(None).malloc(4)
loaded.ffi.cast("int32_t *", table)[0] = 0
case = kit.Case(
    starts=[0, 1], table=[[0]], num_tokens=1, page_size_tokens=1, num_pages=1, entry_bytes=1,
    seq_starts=[1],
)
launch = kit.Launch(loaded, case)
launch.args.block_table.data = table
launch.run("page-as-merged")
print("not seen", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(Path(__file__).parent / "conftest.py")],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_PRELOAD": str(asan_runtime()), "ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.stdout == "clean\n", done.stderr
    assert "heap-buffer-overflow" in done.stderr
    assert "cp_gather_cache" in done.stderr
    assert path.exists()


@pytest.mark.parametrize("source", OPERATIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize("flags", ["release", "checked", "ubsan", "coverage"])
def test_sources_compile_without_a_warning(source, flags, tmp_path):
    """g++ with -Wall -Wextra -Werror, every flavour."""
    (command, _) = commands(source, BuildSpec.parse("host", flags), tmp_path / "object.so")
    command = [word for word in command if word not in ("-O2",)]
    subprocess.run([*command, "-O0", "-Werror", "-fsyntax-only"], check=True)


@pytest.mark.parametrize("source", OPERATIONS, ids=lambda path: path.stem)
def test_sources_compile_with_nvcc(source, monkeypatch, tmp_path):
    """Release, sm_90, and not one warning: one pass of nvcc a source."""
    monkeypatch.setenv("PAGEFUZZ_CUDA_ARCH", "90")
    (command,) = commands(source, BuildSpec.parse("cuda", "release"), tmp_path / "object.so")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("source", OPERATIONS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    ("flags", "arch"), [("checked", "90"), ("release", "80"), ("checked", "80")]
)
def test_sources_compile_with_nvcc_in_every_form(source, flags, arch, monkeypatch, tmp_path):
    """The checked build and the oldest architecture."""
    monkeypatch.setenv("PAGEFUZZ_CUDA_ARCH", arch)
    (command,) = commands(source, BuildSpec.parse("cuda", flags), tmp_path / "object.so")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "warning" not in done.stdout + done.stderr


@pytest.mark.slow
def test_nvcc_keeps_the_reported_product_in_32_bits(monkeypatch, tmp_path):
    """Signed overflow is undefined: a compiler that widened the product would hide the fault."""
    monkeypatch.setenv("PAGEFUZZ_CUDA_ARCH", "90")
    words = [
        *compiler("cuda"),
        "-std=c++20",
        "-O3",
        "-arch=sm_90",
        f"-I{KERNELS}",
        "-ptx",
        "-lineinfo",
    ]
    ptx = tmp_path / "kernel.ptx"
    subprocess.run([*words, str(CP_GATHER_CACHE), "-o", str(ptx)], check=True)
    lines = CP_GATHER_CACHE.read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if "to = task.row_begin * pf::narrow" in text)
    at_line = re.findall(rf"\.loc\s+\d+ {line} .*\n((?:(?!\s*\.loc).*\n)*)", ptx.read_text())
    products = re.findall(r"mul\.\S+", "".join(at_line))
    assert products
    assert set(products) == {"mul.lo.s32"}


def without_comments(text):
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("source", OPERATIONS, ids=lambda path: path.stem)
def test_kernels_reach_memory_through_views_only(source):
    """No subscripts, no dereferences, no pointers and no raw atomics in an operation's code."""
    text = source.read_text()
    code = without_comments(text.replace(fragment(text), ""))
    for what, pattern in {
        "a subscript": r"[\w)\]]\s*\[(?!\[)",
        "a dereference": r"(?:^|[=(,;{&|!?:]|return)\s*\*+\s*[\w(]",
        "a pointer": r"\b(?:u?int\d+(?:_t)?|u?int4|char|void|float|auto|Vector|Element)\s*\*",
        "a reinterpretation": r"reinterpret_cast\s*<[^>]*\*",
        "an atomic": r"\batomic\w+\(",
        "a copy": r"\bmem(?:cpy|set|move)\b",
        "a kernel launched past pf::launch": r"<<<|cudaLaunch",
        "an allocation or a wait": r"cuda(?:Malloc|Free|\w*Synchronize|Memcpy)|\bnew\b|malloc",
    }.items():
        found = [
            line.strip()
            for line in code.splitlines()
            if re.search(pattern, line) and not re.search(_ALLOWED, line)
        ]
        assert found == [], what


# Launchers take their args by pointer and hand the message on.
_ALLOWED = r"^PF_EXPORT|pf_message\* message|\*args\b"


def test_the_tidiness_test_can_fail():
    """The patterns above find what they look for."""
    text = CP_GATHER_CACHE.read_text()
    for wrong in (
        "  const int32_t id = table[q];",
        "  x = *pointer;",
        "  atomicAdd(counts, 1);",
        "  int32_t* p = base;",
    ):
        broken = text.replace("  const index64 stride = gridDim.x;", wrong, 1)
        assert broken != text
        fake = type("Source", (), {"read_text": lambda _self, broken=broken: broken})()
        with pytest.raises(AssertionError):
            test_kernels_reach_memory_through_views_only(fake)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_sources_are_tidy(path):
    """Lines of at most 120 characters, no tabs, no file over 500 lines."""
    lines = path.read_text().splitlines()
    assert len(lines) <= 500
    for number, line in enumerate(lines, 1):
        assert len(line) <= 120, f"{path.name}:{number}"
        assert "\t" not in line
        assert line == line.rstrip()

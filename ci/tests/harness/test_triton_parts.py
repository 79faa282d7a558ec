"""Parts of the Triton harness: compilation keys, compilation without a GPU, versions, watching."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from pagefuzz.harness import subjects
from pagefuzz.harness.campaign.plan import Unit
from pagefuzz.harness.commands import fuzz
from pagefuzz.harness.errors import CannotCheckError, MissingPackageError
from pagefuzz.harness.triton import private
from pagefuzz.harness.triton.watching import FootprintWatcher
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import shapes_for

OPERATION = "cp_gather_indexer_k_quant_cache_hinted"
SOURCE = subjects.KERNELS / "triton" / f"{OPERATION}.py"

#: A process of its own: this one must not import triton. argv: sources; prints, for each, group ->
#: how many keys there are in it and how many distinct ones.
COUNTED = f"""
import json, sys
from pathlib import Path
from pagefuzz.harness.triton import keys, private
from pagefuzz.harness.triton.loading import load_launcher
from pagefuzz.oracles.registry import operation
from pagefuzz.strategies.registry import shapes_for
OPERATION = {OPERATION!r}
said = []
for source in sys.argv[1:]:
    launcher = load_launcher(Path(source), f"pf_{{OPERATION}}_triton", interpreted=False)
    private.use_offline_target(90)
    groups = {{}}
    for one in keys.compilations(launcher, operation(OPERATION), shapes_for(OPERATION)):
        groups.setdefault(one.varies, []).append(json.dumps(one.key))
    said.append({{name: [len(all_), len(set(all_))] for name, all_ in groups.items()}})
print(json.dumps(said))
"""

#: Compiles both kernels for sm_90, in both layouts. argv: the source.
COMPILED = f"""
import sys
from pathlib import Path
from pagefuzz.harness.triton import private
from pagefuzz.harness.triton.loading import load_launcher
private.set_mode(interpreted=False)
launcher = load_launcher(Path(sys.argv[1]), "pf_{OPERATION}_triton", interpreted=False)
module = sys.modules[launcher.__module__]
import triton
from triton.backends.compiler import GPUTarget
for kernel in (module.gather_rows, module.gather_rows_compile_time):
    for layout in (0, 1):
        told = dict(page_size_tokens=64, head_dim=128, groups=4, page_layout=layout,
                    key_tile=128, scale_tile=4, num_requests=3, num_tokens=7, num_pages=5,
                    table_width=2)
        types = dict(src="*u8", src_words="*u32", dst_k="*u8", dst_scale="*u32", counts="*i64")
        signature, constants = {{}}, {{}}
        for index, parameter in enumerate(kernel.params):
            name = parameter.name
            if parameter.is_constexpr:
                signature[name], constants[index,] = "constexpr", told[name]
            else:
                pointer = types.get(name, "*i32" if not parameter.annotation else None)
                signature[name] = pointer or "i64"
        source = triton.compiler.ASTSource(kernel, signature, constants, {{}})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={{"num_warps": 1}})
        print(layout, len(made.asm["cubin"]) > 0, made.asm["ptx"].count("atom"))
"""


def run(program: str, *arguments: str, cache: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TWINS = {
    # Specialised by 1 and by divisibility, a count and a stride.
    "table_width": ('"num_pages", "table_width", ', '"num_pages", '),
    "table_row_stride": ('"table_width", "table_row_stride"),', '"table_width"),'),
    "the alignment of src": ('*("src", "src_words",', '*("src_words",'),
    # As wide as its value: only 2^31 tells.
    "page_stride_bytes": ("    page_stride_bytes: tl.int64,", "    page_stride_bytes,"),
    # Nothing but a shape tells: the launcher has it compiled in, under another name.
    "shape": (
        '        triton.next_power_of_2(a["head_dim"]),',
        '        triton.next_power_of_2(max(a["head_dim"], 16 * a["num_tokens"])),',
    ),
}


def test_keys_depend_on_nothing_that_follows_the_batch(tmp_path: Path) -> None:
    """One key in every group of the run-time form; two or more where a twin lets a value in."""
    text = SOURCE.read_text()
    paths = [SOURCE]
    for index, (find, other) in enumerate(TWINS.values()):
        assert text.count(find) == 1, find
        paths.append(tmp_path / f"twin{index}.py")
        paths[-1].write_text(text.replace(find, other))
    right, *wrong = json.loads(run(COUNTED, *map(str, paths), cache=tmp_path))
    assert all(distinct == 1 for _, distinct in right.values())
    assert right["shape"] == [20, 1]
    for name in set(operation(OPERATION).run_time) - {"dst_k_rows", "dst_scale_rows"}:
        assert right[name][0] == (7 if "stride" in name else 6), name
    assert sum(name.startswith("the alignment of") for name in right) == 9
    for expected, groups in zip(TWINS, wrong, strict=True):
        named = {name for name, (_, distinct) in groups.items() if distinct > 1}
        assert named - {"shape"} == {expected} - {"shape"}
        assert expected in named


def test_kernels_compile_for_a_gpu_that_is_not_here(tmp_path: Path) -> None:
    """Both forms and both layouts down to sm_90 code, counters by atomics."""
    lines = run(COMPILED, str(SOURCE), cache=tmp_path).split("\n")[:-1]
    assert [line.split()[:2] for line in lines] == [["0", "True"], ["1", "True"]] * 2
    assert all(int(line.split()[2]) >= 2 for line in lines)


def test_shapes_are_legal_and_differ(tmp_path: Path) -> None:
    """Twenty, in contract, with the same compile-time sizes; each size takes several values."""
    of, shapes = operation(OPERATION), shapes_for(OPERATION)
    assert len(shapes) == 20
    for case in shapes:
        assert of.expect(of.plan(case)).case_class == "in contract"
    for name in of.sizes:
        values = {case.sizes[name] for case in shapes}
        if name in of.run_time:
            assert len(values) >= 4, name
        elif name != "has_terminal":
            assert len(values) == 1, name
    assert shapes_for("cp_gather_cache") == ()


# ---- without Triton, or with another one ---------------------------------------------------------


def _version(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def told(name: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(private.metadata, "version", told)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private parts are as they were in one release: another one is no pass, but exit 2."""
    assert private.require_triton("x").startswith("3.6.")
    _version(monkeypatch, "3.7.0")
    with pytest.raises(MissingPackageError, match=r"needs Triton 3\.6, .* 3\.7\.0 is installed"):
        private.require_triton("x.py")
    _version(monkeypatch, None)
    with pytest.raises(MissingPackageError, match=r"not installed; pip install 'pagefuzz\[tri"):
        private.require_triton("x.py")


def test_a_unit_without_its_package_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be built is; alone, the missing package is the whole answer."""
    _version(monkeypatch, None)
    hinted = Unit(OPERATION, "bundled:triton", hostile=True)
    plain = Unit("cp_gather_cache", "bundled:page", hostile=True)
    build, flags = fuzz._build_all([hinted, plain], "host", "checked", isolate=True)
    assert (build, flags) == ("checked", {plain.name: frozenset({"checked"})})
    with pytest.raises(MissingPackageError):
        fuzz._build_all([hinted], "host", "checked", isolate=True)


def test_a_campaign_without_triton_is_no_pass(cli, tmp_path: Path) -> None:
    """The other unit runs, the sentence is there, and the exit code is 2."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "theirs = metadata.version\n"
        "def version(name):\n"
        "    if name == 'triton':\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return theirs(name)\n"
        "metadata.version = version\n"
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = cli(
        *("fuzz", "--op", "cp_gather_cache", "--op", OPERATION, "--cases", "3", "--jobs", "1"),
        env={"PYTHONPATH": path},
    )
    assert done.returncode == 2, (done.stdout, done.stderr)
    said = " ".join((done.stdout + done.stderr).split())
    assert "is written in Triton, which is not installed; pip install 'pagefuzz[triton]'" in said
    assert re.search(r"bundled:page +[1-9]", done.stdout)


def test_a_worker_is_of_one_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads its mode when it is imported: asking for the other one later is an error."""
    monkeypatch.setitem(sys.modules, "triton", sys)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(CannotCheckError, match="imported in another mode"):
        private.set_mode(interpreted=True)
    private.set_mode(interpreted=False)


# ---- the watcher ---------------------------------------------------------------------------------


@pytest.fixture
def watcher() -> FootprintWatcher:
    """Of the third shape; every buffer at a multiple of 2^40."""
    of = operation(OPERATION)
    plan = of.plan(shapes_for(OPERATION)[2])
    addresses = {
        name: 2**40 * index
        for index, (name, buffer) in enumerate(plan.buffers.items(), 1)
        if not buffer.is_null
    }
    for name in plan.buffers:
        addresses.setdefault(name, 0)
    expectation = of.expect(plan)
    return FootprintWatcher(plan, expectation, addresses, SOURCE, "x.py", lambda: (4, 0, 0))


def _at(*addresses: int) -> np.ndarray:
    return np.array(addresses, dtype=np.uint64)


def test_each_lane_is_tested_at_one_byte(watcher: FootprintWatcher) -> None:
    """Hints are the fifth buffer: 18 of 4 bytes; a word past them, before them, across the end."""
    base = 5 * 2**40
    lanes = _at(base, base + 68, base + 72, base - 4, base + 70, 2**64 - 8, 0)
    good = watcher.see("read", "token_to_seq", lanes, 4)
    assert good.tolist() == [True, True, False, False, False, False, False]
    record = watcher.record()
    assert (record.accesses, record.accessed_bytes, record.access_fault_count) == (7, 28, 5)
    (fault,) = record.access_faults  # of one line, the first
    assert (fault.buffer, fault.offset_bytes, fault.size_bytes) == ("token_to_seq", 72, 4)
    assert (fault.kind, fault.site.file, fault.site.block) == ("read", "x.py", (4, 0, 0))


def test_reading_is_not_writing(watcher: FootprintWatcher) -> None:
    """Hints may be read, never written; a destination is written, never read."""
    hints, dst_k = 5 * 2**40, 2 * 2**40
    assert not watcher.see("write", "token_to_seq", _at(hints), 4).any()
    assert watcher.see("write", "dst_k", _at(dst_k), 1).all()
    assert not watcher.see("read", "dst_k", _at(dst_k), 1).any()
    assert [fault.kind for fault in watcher.record().access_faults] == ["write", "read"]


def test_an_address_of_no_known_buffer_is_of_the_nearest(watcher: FootprintWatcher) -> None:
    """A pointer made of an integer still has a name in the report."""
    watcher.see("write", None, _at(2 * 2**40 - 16), 8)
    (fault,) = watcher.record().access_faults
    assert (fault.buffer, fault.offset_bytes) == ("dst_k", -16)

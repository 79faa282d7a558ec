"""Exit codes of the installed command, and the one sentence that goes with each 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pagefuzz.oracles.registry import operations

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def _sentence(done: subprocess.CompletedProcess[str]) -> str:
    """Of a command that could not check: exit 2, one sentence on stderr, no traceback."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert lines
    assert lines[0].startswith("pagefuzz: ")
    return lines[0]


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment without a compiler and without built objects."""
    return {"PATH": str(tmp_path), "PAGEFUZZ_CACHE": str(tmp_path / "cache"), "CXX": ""}


def test_version(cli):
    """--version prints it and exits 0."""
    import pagefuzz

    done = cli("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"pagefuzz {pagefuzz.__version__}")


@pytest.mark.parametrize("arguments", [[], ["fuzz"], ["replay"], ["doctor"], ["list"]])
def test_help(cli, arguments):
    """Every command has help; the long ones have examples and the exit codes."""
    done = cli(*arguments, "--help")
    assert done.returncode == 0
    assert "usage: pagefuzz" in done.stdout
    if arguments in ([], ["fuzz"]):
        assert "exit codes: 0 clean, 1 findings, 2 could not check" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "required: COMMAND"),
        (["fuzz", "--time", "soon"], "'soon' must be a time such as 90s, 10m or 2h"),
        (["fuzz", "--time", "0s"], "'0s' must be a time such as"),
        (["fuzz", "--hang-after", "0.5s"], "'0.5s' must be a time from 1s to 24h"),
        (["replay", "x.json", "--hang-after", "25h"], "'25h' must be a time from 1s to 24h"),
        (["fuzz", "--cases", "0"], "'0' must be a whole number, 1 or more"),
        (["fuzz", "--jobs", "-1"], "'-1' must be a whole number, 1 or more"),
        (["fuzz", "--jobs", "100000000000"], "'100000000000' must be at most 4,096"),
        (["matrix", "--jobs", "4097"], "'4097' must be at most 4,096"),
        (["fuzz", "--seed", "x"], "'x' must be a whole number in 0..2^64-1"),
        (["fuzz", "--seed", str(2**64)], "must be a whole number in 0..2^64-1"),
        (["fuzz", "--cases", "9" * 5000], "999 must be a whole number, 1 or more"),
        (["fuzz", "--time", f"{'9' * 400}h"], "must be a time such as 90s, 10m or 2h"),
        (["fuzz", "--gpu-memory", f"{'9' * 400}TiB"], "must be a size such as 8GiB"),
        (["fuzz", "--gpu-memory", "0.5"], "'0.5' must be a size such as 8GiB"),
        (["fuzz", "--report", ""], "--report: must not be empty"),
        (["fuzz", "--build", ""], "--build: must not be empty"),
        (["replay", ""], "CASE.json: must not be empty"),
        (["replay", "x.json", "--subject", ""], "--subject: must not be empty"),
        (["roundtrip", "--mover", ""], "--mover: must not be empty"),
        (["fuzz", "--time", "1m", "--cases", "3"], "not allowed with argument"),
        (["fuzz", "--profile", "huge"], "invalid choice: 'huge'"),
        (["fuzz", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["replay"], "required: CASE.json"),
    ],
)
def test_wrong_usage(cli, arguments, said):
    """What cannot be understood is exit 2, with what would be right."""
    done = cli(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_unknown_operation(cli):
    """An operation that does not exist: its name and those there are."""
    sentence = _sentence(cli("fuzz", "--op", "nope"))
    assert sentence == f"pagefuzz: unknown operation 'nope'; there is {', '.join(operations())}"


@pytest.mark.parametrize("name", ["bundled:nope", "twin:nope", "nope", "twin:nope.toml"])
@pytest.mark.parametrize("operation", [[], ["--op", "cp_gather_cache"]])
def test_unknown_subject(cli, name, operation):
    """A subject that does not exist is named."""
    assert "nope" in _sentence(cli("fuzz", *operation, "--subject", name))


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["fuzz", "--op", "cp_gather_cach"], "cp_gather_cache"),
        (["fuzz", "--op", "CP_GATHER_CACHE"], "cp_gather_cache"),
        (["fuzz", "--subject", "bundled:tokn"], "bundled:token"),
        (["fuzz", "--subject", "page"], "bundled:page"),
        (["fuzz", "--op", "copy_blocks", "--build", "Checked"], "checked"),
        (["matrix", "--kind", "read Past"], "read past"),
        (["roundtrip", "--pair", "concat_and_cache_mla/cp_gather_cach"],
         "concat_and_cache_mla/cp_gather_cache"),
    ],
)  # fmt: skip
def test_misspelt_names(cli, arguments, meant):
    """The name that was probably meant stands before those there are, each of them once."""
    sentence = _sentence(cli(*arguments, env=NO_GPU))
    assert f"; did you mean {meant!r}? There is " in sentence
    names = sentence.split("There is ")[1].split(" of ")[0].split(", and ")[0].split(", ")
    assert len(names) == len(set(names)) > 1


def test_unknown_build(cli):
    """A build flag that does not exist: its name and those there are."""
    assert "'fast'" in _sentence(cli("fuzz", "--device", "host", "--build", "fast"))


def test_absent_gpu(cli):
    """--device cuda without a GPU says so; it does not fall back to the host."""
    assert "GPU" in _sentence(cli("fuzz", "--device", "cuda", env=NO_GPU))


def test_missing_compiler(cli, no_compiler):
    """Without a compiler: what was looked for, and how to name one."""
    sentence = _sentence(cli("fuzz", "--device", "host", env=no_compiler))
    assert "no C++ compiler" in sentence


def test_compiler_that_is_none(cli, no_compiler):
    """PAGEFUZZ_CXX must name a program."""
    env = {**no_compiler, "PAGEFUZZ_CXX": "no-such-compiler"}
    assert "PAGEFUZZ_CXX names 'no-such-compiler'" in _sentence(
        cli("fuzz", "--device", "host", env=env)
    )


def test_compiler_that_fails(cli, no_compiler, tmp_path):
    """A failing compiler: its name, its exit status, and the end of what it printed."""
    compiler = tmp_path / "broken-g++"
    compiler.write_text('#!/bin/sh\necho broken as designed >&2\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    env = {**no_compiler, "PATH": os.environ["PATH"], "PAGEFUZZ_CXX": str(compiler)}
    done = cli("fuzz", "--op", "cp_gather_cache", "--device", "host", env=env)
    assert "broken-g++ failed on cp_gather_cache.cu (exit status 1)" in _sentence(done)
    assert "broken as designed" in done.stderr


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("kill -9 $$", "(ended by signal 9); it printed nothing"),
        ("exit 0", "(exit status 0, but there is no cp_gather_cache.o); it printed nothing"),
    ],
)
def test_compiler_that_makes_nothing(cli, no_compiler, tmp_path, does, said):
    """A compiler that is killed, or that lies: what happened, and no tail of nothing."""
    compiler = tmp_path / "g++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || {does}\n')
    compiler.chmod(0o755)
    env = {**no_compiler, "PATH": os.environ["PATH"], "PAGEFUZZ_CXX": str(compiler)}
    done = cli("fuzz", "--op", "cp_gather_cache", "--device", "host", env=env)
    assert _sentence(done).endswith(said)


def test_terminated_while_compiling(no_compiler, tmp_path):
    """SIGTERM is exit 2 and a sentence, and leaves no compiler behind."""
    compiler = tmp_path / "g++"
    pid_file = tmp_path / "pid"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit\necho $$ > {pid_file}\nexec sleep 100\n'
    )
    compiler.chmod(0o755)
    env = {**os.environ, **no_compiler, "PATH": os.environ["PATH"], "PAGEFUZZ_CXX": str(compiler)}
    with subprocess.Popen(
        [sys.executable, "-m", "pagefuzz", "fuzz", "--device", "host"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        while not (pid_file.exists() and pid_file.read_text().strip()):
            assert running.poll() is None
            time.sleep(0.05)
        running.terminate()
        _, said = running.communicate(timeout=60)
    assert (running.returncode, said) == (2, "pagefuzz: interrupted before anything was checked\n")
    stat = Path("/proc", pid_file.read_text().strip(), "stat")
    assert not stat.exists() or stat.read_text().rsplit(")")[1].split()[0] == "Z"


def test_streams_do_not_decide(tmp_path, root):
    """A finding is exit 1 in an ASCII locale and without standard output, too."""
    (case,) = root.glob("ci/tests/twins/table-over-read.json")
    (tmp_path / "case.json").write_text(json.dumps(json.loads(case.read_text())["case"]))
    subject = "--subject bundled:page-as-merged --device host"
    command = f"{sys.executable} -m pagefuzz replay case.json {subject}"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for redirected, env in (("", ascii_only), (" >&-", {})):
        done = subprocess.run(
            command + redirected,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("redirected", ["2>/dev/full", "2>&1 | true", "2>&-"])
def test_a_sentence_that_cannot_be_printed(tmp_path, redirected):
    """Exit 2 all the same: Python's own 1, of an exception that got out, would mean findings."""
    command = f"(sleep 0.2; {sys.executable} -m pagefuzz fuzz --op nope; echo $? >code) "
    subprocess.run(command + redirected, shell=True, cwd=tmp_path, check=False, timeout=60)
    assert (tmp_path / "code").read_text() == "2\n"


@pytest.mark.parametrize("command", ["list", "doctor", "fuzz --op copy_blocks --cases 1"])
def test_output_onto_a_full_disk(tmp_path, command):
    """Exit 2 and a sentence; nothing that asks to be reported."""
    done = subprocess.run(
        f"{sys.executable} -m pagefuzz {command} >/dev/full",
        shell=True,
        cwd=tmp_path,
        env={**os.environ, **NO_GPU},
        capture_output=True,
        text=True,
        check=False,
    )
    assert _sentence(done) == "pagefuzz: cannot write the output: No space left on device"


@pytest.mark.slow
def test_damaged_object(cli, tmp_path):
    """What is in the way is named, and what to do about it."""
    env = {"PAGEFUZZ_CACHE": str(tmp_path / "cache")}
    fuzz = ["fuzz", "--op", "cp_gather_cache", "--device", "host"]
    fuzz += ["--subject", "bundled:page", "--cases", "1"]
    assert cli(*fuzz, env=env).returncode == 0
    (made,) = (tmp_path / "cache").rglob("*.so")
    made.write_bytes(b"junk")
    sentence = _sentence(cli(*fuzz, env=env))
    assert str(made) in sentence
    assert sentence.endswith("if it is damaged, remove it, and it is built again")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read the case file"),
        ("not JSON", "not a JSON case file"),
        ("[]", "must be an object"),
        ("{}", "pagefuzz_case"),
        ('{"pagefuzz_case": 99}', "99"),
        ('{"pagefuzz_case": 1, "operation": "cp_gather_cache", "sizes": {"x": 1.5}}', "x"),
        ('{"pagefuzz_case": 1, "operation": "cp_gather_cache", "sizes": {}}', "num_requests"),
        ('{"pagefuzz_case": 1, "operation": "nope", "sizes": {}}', "unknown operation 'nope'"),
        ('{"pagefuzz_finding": 1}', "a case must be an object"),
        ("[" * 100_000, "not a JSON case file"),
        ('{"pagefuzz_round_trip": 1}', "is a round trip; try: pagefuzz roundtrip case.json"),
        ('{"pagefuzz_round_trip_finding": 1}', "try: pagefuzz roundtrip case.json"),
    ],
)
def test_malformed_case_files(cli, tmp_path, text, said):
    """A file that is no case: exit 2, with what is wrong with it."""
    if text is not None:
        (tmp_path / "case.json").write_text(text)
    sentence = _sentence(cli("replay", "case.json", "--device", "host"))
    assert said in sentence
    assert sentence.startswith("pagefuzz: case.json")


@pytest.mark.parametrize("command", ["fuzz", "roundtrip"])
def test_report_folder_that_cannot_be_written(cli, tmp_path, command):
    """A report that cannot be written is no clean run."""
    (tmp_path / "report").write_text("a file is in the way")
    done = cli(command, "--device", "host", "--cases", "5", "--report", "report")
    assert "report" in _sentence(done)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["roundtrip", "case.json"], "case.json is a case of one launch; try: pagefuzz replay"),
        (["roundtrip", "x.json", "--seed", "1"], "x.json is one round trip: leave --seed out"),
        (["matrix", "--skip", "2", "--tries", "2"], "--skip 2 leaves none of 2 cases"),
    ],
)
def test_what_does_not_go_together(cli, tmp_path, arguments, said):
    """An option that would not be heeded, and a file that is for another command."""
    (tmp_path / "case.json").write_text('{"pagefuzz_case": 1}')
    assert said in _sentence(cli(*arguments, env=NO_GPU))


def test_doctor(cli):
    """Fits 80 columns; says what is missing and what is used."""
    done = cli("doctor", env=NO_GPU)
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("python", "host compiler", "GPU", "checked build", "--device auto runs on host"):
        assert word in done.stdout


def test_doctor_where_nothing_can_be_checked(cli, no_compiler):
    """Neither a compiler nor a GPU: exit 2."""
    done = cli("doctor", env={**no_compiler, **NO_GPU})
    assert done.returncode == 2
    assert "nothing can be checked on this machine" in done.stdout


def test_list(cli):
    """Operations, subjects with promises and faults, judgements; at 80 columns."""
    done = cli("list")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    for word in ("cp_gather_cache", "bundled:page-as-merged", "promises containment", "untouched"):
        assert word in done.stdout


def test_list_on_a_narrow_terminal(cli):
    """Below its name, where a text has no room beside it."""
    done = cli("list", env={"COLUMNS": "40"})
    assert done.returncode == 0
    assert "  concat_and_cache_ds_mla\n    writes latent" in done.stdout
    assert len(done.stdout.splitlines()) < 400


def test_case_files_of_other_schemas_name_the_schema(cli, tmp_path):
    """A case of a future version is refused with the version that is understood."""
    (tmp_path / "case.json").write_text(json.dumps({"pagefuzz_case": 2}))
    assert '"pagefuzz_case": 1' in _sentence(cli("replay", "case.json"))


@pytest.mark.parametrize("arguments", [("list",), ("fuzz", "--subject", "bundled:nobody")])
@pytest.mark.parametrize("full", ["stdout", "stderr", "both"])
def test_a_full_disk_for_what_is_printed_is_no_finding(arguments, full) -> None:
    """An exception that cannot even be printed would end the process with 1."""
    with open("/dev/full", "w", encoding="utf-8") as disk:
        streams = {
            name: disk if full in (name, "both") else subprocess.DEVNULL
            for name in ("stdout", "stderr")
        }
        command = [sys.executable, "-P", "-m", "pagefuzz", *arguments]
        done = subprocess.run(command, check=False, env={**os.environ, **NO_GPU}, **streams)
    assert done.returncode == (0 if full == "stderr" and arguments == ("list",) else 2)

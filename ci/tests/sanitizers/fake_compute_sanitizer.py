"""A stand-in for compute-sanitizer: runs the program and prints reports in its form.

What it reports follows from FAKE_SANITIZER, JSON: `faulty`, text that the JSON of a faulty case
holds; `way`, how it behaves.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

REPORT = """\
========= Invalid __global__ read of size 4 bytes
=========     at load(const int *)+0x1d0 in views.h:71
=========     by thread (32,0,0) in block (1,0,0)
=========     Address {address:#x} is out of bounds
=========         Device Frame: gather(args)+0x90 in cp_gather_cache.cu:88
=========
"""

#: Ways in which it does without the program.
CUT_SHORT = ("no summary", "dies", "miscounts")


def main() -> int:
    asked: dict[str, Any] = json.loads(os.environ["FAKE_SANITIZER"])
    way = asked.get("way", "")
    program = sys.argv[sys.argv.index("-m") - 1 :]
    if way == "does not start":
        print("========= Error: Target application terminated before first instrumented API call")
        return 1
    if way in CUT_SHORT:
        is_faulty = asked["faulty"] in json.dumps(json.loads(Path(program[-1]).read_text()))
        report = REPORT.format(address=0) if is_faulty else ""
        print("[pagefuzz begin 0]", report, "[pagefuzz end 0]", sep="\n")
        sys.stdout.flush()
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "miscounts":
            print("========= ERROR SUMMARY: 0 errors")
        return 0
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    job = json.loads(Path(program[-1]).read_text(encoding="utf-8"))
    faulty = [n for n, case in job["cases"].items() if asked["faulty"] in json.dumps(case)]
    if way == "only together" and len(job["cases"]) == 1:
        faulty = []
    print("========= COMPUTE-SANITIZER")
    late = []
    for line in done.stdout.splitlines():
        print(line)
        begun = re.fullmatch(r"\[pagefuzz begin (\d+)\]", line)
        if begun and begun[1] in faulty:
            report = REPORT.format(address=address_of(job["results"], int(begun[1])))
            if way.startswith("late"):
                late.append(report)
            else:
                print(report, end="")
    print(done.stderr, *late, sep="", end="", flush=True)
    _, waits, flag = way.partition("waits, ")
    if waits:  # until somebody ends it
        Path(flag).touch()
        signal.pause()
    print(f"========= ERROR SUMMARY: {len(faulty)} error{'s' * (len(faulty) != 1)}")
    return done.returncode or (86 if faulty else 0)


def address_of(results: str, case: int) -> int:
    """Just behind the table of that case."""
    for line in Path(results).read_text(encoding="utf-8").splitlines():
        launched = json.loads(line)
        if launched["case"] == case:
            base, size_bytes = launched["buffers"]["block_table"]
            return int(base + size_bytes)
    return 0


if __name__ == "__main__":
    sys.exit(main())

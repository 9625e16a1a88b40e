"""Runs `make test` for pairs of torch and Python, each in a copy of the tree, and keeps what came out in
docs/limitations.md.

python tools/matrix.py [--pairs "2.15.0:3.13 2.11.0:3.11"] [--keep]
python tools/matrix.py --newest

A pair is a release of torch and a Python, by its version or by the path of its interpreter. --newest runs a
part of the tests with the newest torch that is known to work and the Python that runs this, and publishes
nothing; where that torch cannot be had, it says so and succeeds. It uses the environment of `make cuda-check`
where that has this torch already.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from trees import ROOT, copy_tree, interpreter

PAGE = ROOT / "docs" / "limitations.md"
BEGIN, END = "<!-- Begin of what tools/matrix.py writes -->", "<!-- End of what tools/matrix.py writes -->"
NEWEST = "2.15.0"
PAIRS = f"2.11.0:3.11 2.12.1:3.12 2.13.0:3.11 2.13.0:3.13 2.14.1:3.12 {NEWEST}:3.13"
# What a new torch breaks first: all without ranks, and with ranks what stands on its classes.
PART = ["-m", "not slow", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "tests/python"] + [
    f"tests/multiproc/test_{name}.py"
    for name in (
        "calls",
        "autograd",
        "compile",
        "backend_p2p",
        "broadcast",
        "reconfigure",
        "state",
        "torch_programs",
        "pipeline",
    )
]
CUDA_VENV = ROOT / ".venv-cuda"
NEEDS_GIB = 14  # of disk, for torch with CUDA's libraries and the build


def counts(log: str, status: int) -> tuple[str, str]:
    """Of C++ and pytest: "passed", "failed" with what could not run in words."""
    cases = re.search(
        r"^C\+\+ tests: .*?(\d+) test cases|^C\+\+ tests: .*\| +(\d+) passed", log, re.MULTILINE
    )
    ended = re.findall(r"^=+ (.*(?:passed|failed|error).*) in .*=+$", log, re.MULTILINE)
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", ended[-1])} if ended else {}
    passed = numbers.get("passed", 0) + int(next(filter(None, cases.groups()), 0) if cases else 0)
    failed = str(numbers.get("failed", 0) + numbers.get("errors", 0) + numbers.get("error", 0))
    if not ended:
        failed = "did not come to its tests"
    elif status != 0 and failed == "0":
        failed = "C++ tests"
    return str(passed), failed


def borrow(tree: Path) -> list[list[str]]:
    """Gives tree the environment of `make cuda-check`; what brings its module up to date and copies it."""
    (tree / ".venv").symlink_to(CUDA_VENV)
    built = ROOT / "build" / "on_gpu" / "tree" / "python" / "meshcast"
    copy = f"cp {built}/_C.*.so {built}/_build_info.py {tree}/python/meshcast/"
    build = [str(CUDA_VENV / "bin" / "python"), str(ROOT / "tools" / "on_gpu.py"), "--dry", "--only", "build"]
    return [build, ["sh", "-c", copy]]


def newest() -> int:
    """Runs PART; the exit status."""
    free = shutil.disk_usage(ROOT).free >> 30
    if free < NEEDS_GIB and not (CUDA_VENV / f".stamp-torch=={NEWEST}").exists():
        print(f"test-newest: NOT RUN: {free} GiB of disk are free, torch {NEWEST} needs {NEEDS_GIB}")
        return 0
    row = run_pair(f"{NEWEST}:{sys.executable}", keep=True, arguments=PART)
    log = ROOT / "build" / "matrix" / f"torch-{NEWEST}-python-{row[1]}" / "test.log"
    text = log.read_text()
    if "No matching distribution" in text or "Could not find a version" in text:
        print(f"test-newest: NOT RUN: pip has no torch {NEWEST} for Python {row[1]} here")
        return 0
    if row[5] != "0":
        print(text[-20000:])
    print(f"test-newest: torch {NEWEST}, Python {row[1]}: {row[4]} passed, {row[5]} failed")
    return int(row[5] != "0")


def run_pair(pair: str, keep: bool, arguments: Sequence[str] = ()) -> list[str]:
    """arguments: for pytest, which then runs alone; all tests where there are none."""
    torch, _, name = pair.partition(":")
    python = interpreter(name)
    version = subprocess.run(
        [python, "--version"], check=True, capture_output=True, text=True
    ).stdout.split()[1]
    tree = ROOT / "build" / "matrix" / f"torch-{torch}-python-{version}"
    shutil.rmtree(tree, ignore_errors=True)
    copy_tree(tree)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    print(f"torch {torch}, Python {version}: {tree}/test.log", flush=True)
    # A constraint that a machine sets for its users is not meant here: this release is asked for by name.
    environment["PIP_CONSTRAINT"] = os.devnull
    # -v: the log names a test as soon as it has failed.
    given = [f"TORCH_SPEC=torch=={torch}", f"PYTHON={python}", "PYTEST_ARGS=-v"]
    commands = [["make", "test", *given]]
    if arguments:
        given += ["MESHCAST_CUDA=OFF"]  # twice as quick to build
        commands = [["make", "build", ".venv/.stamp-dev", *given]]
        if (CUDA_VENV / f".stamp-torch=={torch}").exists():
            commands = borrow(tree)
        commands += [[str(tree / ".venv" / "bin" / "python"), "-m", "pytest", *arguments]]
    with (tree / "test.log").open("w") as log:
        for command in commands:
            status = subprocess.run(
                command, cwd=tree, env=environment, stdout=log, stderr=log, check=False
            ).returncode
            if status != 0:
                break
    passed, failed = counts((tree / "test.log").read_text(), status)
    if not keep:
        shutil.rmtree(tree / ".venv", ignore_errors=True)
        shutil.rmtree(tree / "build", ignore_errors=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    return [torch, version, datetime.date.today().isoformat(), commit, passed, failed]


def publish(row: list[str]) -> None:
    """Puts a row in place of what the page has for its pair."""
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()[2:]]
    minor = row[1].rpartition(".")[0]
    rows = [old for old in rows if (old[0], old[1].rpartition(".")[0]) != (row[0], minor)] + [row]
    rows.sort(key=lambda cells: [[int(part) for part in re.findall(r"\d+", cell)] for cell in cells[:2]])
    lines = ["| torch | Python | date | commit | passed | failed |", "|---|---|---|---|---:|---:|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    PAGE.write_text(before + BEGIN + "\n\n" + "\n".join(lines) + "\n\n" + END + after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", default=PAIRS, help=f'default "{PAIRS}"')
    parser.add_argument(
        "--keep", action="store_true", help="leave environments and builds, 2 to 6 GB for each pair"
    )
    parser.add_argument("--newest", action="store_true", help="a part of the tests with the newest torch")
    options = parser.parse_args()
    if options.newest:
        return newest()
    bad = False
    for pair in options.pairs.split():
        row = run_pair(pair, options.keep)
        print("passed {4}, failed {5}".format(*row), flush=True)
        publish(row)
        bad |= row[5] != "0"
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())

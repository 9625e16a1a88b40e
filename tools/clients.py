"""Runs the tests of packages that use meshcast, each in an environment of its own with pinned versions.

python tools/clients.py [--clients "torchft megatron"] [pytest arguments]

A folder of tests/clients is a client. Its requirements.txt pins the package, and without_dependencies.txt,
where there is one, what comes without its own. Its tests run against them. The environments are in
build/clients, and are made again where a requirement has changed. They have the torch of TORCH_SPEC and
import the meshcast of this tree, so they need the Python and the torch that this runs with. needs_torch.txt,
where there is one, is the oldest minor release of torch that the package runs with. A client that cannot be
installed is printed as NOT RUN, with the reason, and counts as a failure. One for a newer torch is printed so
too, and counts only where --clients names it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS, BUILD = ROOT / "tests" / "clients", ROOT / "build" / "clients"
NEEDS_GIB = 8  # of disk, for the environment of one client: 6 with torch's CUDA libraries
LIMIT = 1800  # seconds for the tests of one client


def environment() -> dict[str, str]:
    # A constraint that a machine sets for its users is not meant here: every version is asked for by name.
    return {**os.environ, "PIP_CONSTRAINT": os.devnull, "PYTHONNOUSERSITE": "1"}


def too_old(client: str, torch: str) -> str:
    """Why this torch is none for the client, or nothing."""
    needs = TESTS / client / "needs_torch.txt"
    if not needs.exists():
        return ""
    oldest = needs.read_text().strip()
    here = [int(part) for part in re.findall(r"\d+", torch)[:2]]
    if here >= [int(part) for part in oldest.split(".")]:
        return ""
    return f"it needs torch {oldest} or newer, this is {torch}: TORCH_SPEC names another"


def python_of(client: str) -> Path:
    return BUILD / client / "bin" / "python"


def installed(client: str, torch: str) -> str:
    """Makes the environment. Why it cannot be made, or nothing."""
    requirements = TESTS / client / "requirements.txt"
    bare = [path for path in [TESTS / client / "without_dependencies.txt"] if path.exists()]
    wanted = "\n".join([torch, *(path.read_text() for path in (requirements, *bare))])
    stamp = BUILD / client / "requirements.done"
    if stamp.exists() and stamp.read_text() == wanted:
        return ""
    free = shutil.disk_usage(ROOT).free >> 30
    if free < NEEDS_GIB:
        return f"{free} GiB of disk are free, its environment needs {NEEDS_GIB}"
    shutil.rmtree(BUILD / client, ignore_errors=True)
    venv.create(BUILD / client, with_pip=True)
    index = os.environ.get("TORCH_INDEX_URL")
    pip = [str(python_of(client)), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    commands = [
        [*pip, *(["--index-url", index] if index else []), torch],
        [*pip, torch, "-r", str(ROOT / "requirements-build.txt"), "-r", str(requirements)],
        *([*pip, "--no-deps", "-r", str(path)] for path in bare),
    ]
    log = BUILD / client / "install.log"
    with log.open("w") as output:
        for command in commands:
            done = subprocess.run(command, env=environment(), stdout=output, stderr=output, check=False)
            if done.returncode != 0:
                errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
                return f"pip: {errors[-1] if errors else 'failed'} ({log})"
    stamp.write_text(wanted)
    return ""


def tested(client: str, arguments: list[str]) -> int:
    """Exit status of its tests."""
    python = python_of(client)
    print(f"--- {client}: {python} -m pytest tests/clients/{client}", flush=True)
    command = [str(python), "-m", "pytest", "-o", "faulthandler_timeout=0", f"tests/clients/{client}"]
    command += arguments
    try:
        return subprocess.run(command, cwd=ROOT, env=environment(), timeout=LIMIT, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{client}: not complete after {LIMIT} s")
        return 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = sorted(path.parent.name for path in TESTS.glob("*/requirements.txt"))
    parser.add_argument("--clients", help=f'default "{" ".join(every)}"')
    parser.add_argument("--install", action="store_true", help="make the environments and run nothing")
    options, arguments = parser.parse_known_args()
    torch = os.environ.get("TORCH_SPEC", "torch==2.13.0")
    said, left = [], []
    for client in (options.clients or " ".join(every)).split():
        if client not in every:
            sys.exit(f"no client {client}: there are {', '.join(every)}")
        why = too_old(client, torch)
        if why and not options.clients:
            left.append(f"{client}: NOT RUN: {why}")
            continue
        why = why or installed(client, torch)
        if why:
            said.append((client, f"NOT RUN: {why}"))
        elif options.install:
            said.append((client, "installed"))
        else:
            said.append((client, "passed" if tested(client, arguments) == 0 else "FAILED"))
    print("\n".join([*(f"{client}: {word}" for client, word in said), *left]))
    good = sum(word in ("passed", "installed") for _, word in said)
    print(f"clients: {good} passed, {len(said) - good} failed or not run")
    return int(good < len(said))


if __name__ == "__main__":
    sys.exit(main())

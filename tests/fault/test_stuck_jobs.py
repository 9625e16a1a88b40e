"""Jobs in which something is wrong with one rank, and what `python -m meshcast explain` says of them.

docs/observing.md shows the same output; figures that differ from run to run are left out of the comparison.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from multiproc.fork_server import Forked, environment, run
from multiproc.harness import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

JOB = Path(__file__).with_name("stuck_job.py")
PAGE = (ROOT / "docs" / "observing.md").read_text()
FAULTS = ("absent", "order", "arguments", "killed", "frozen", "exception", "ended", "unready")
STUCK = ("absent", "frozen", "unready")  # in which nobody raises
LIMIT = 300.0  # seconds for a job to come to step 2 and write its records
# Torch is imported once, which is what a job's start costs most of; each rank is a process that runs the job.
START = """
import os, runpy, sys
import torch.distributed.tensor, torch.testing
job, *faults = sys.argv[1:]
for fault in faults:
    name, folder, port = fault.split("=")
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            os.environ.update(RANK=str(rank), MASTER_PORT=port, MESHCAST_FLIGHT_RECORD=f"{folder}/job")
            output = os.open(f"{folder}/output{rank}", os.O_WRONLY | os.O_CREAT, 0o644)
            os.dup2(output, 1), os.dup2(output, 2)
            sys.argv = [job, name]
            runpy.run_path(job, run_name="__main__")
            sys.exit()
        print(name, pid, flush=True)
sys.stdin.read()  # until then, the numbers of processes that have ended are still theirs
for _ in range(3 * len(faults)):
    os.wait()
"""


@contextlib.contextmanager
def running(folder: Path) -> Iterator[dict[str, list[int]]]:
    """The jobs of all faults: the processes of each. What is left of them is killed at the end of the
    block."""
    stores = {name: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for name in FAULTS}
    for name in FAULTS:
        (folder / name).mkdir()
    variables = environment() | {
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # as torchrun does
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "3",
    }
    faults = [f"{name}={folder / name}={store.port}" for name, store in stores.items()]
    start = Forked(
        [sys.executable, "-c", START, str(JOB), *faults],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    processes: dict[str, list[int]] = {name: [] for name in FAULTS}
    try:
        assert start.stdout is not None
        for _ in range(3 * len(FAULTS)):
            name, pid = start.stdout.readline().split()
            processes[name].append(int(pid))
        yield processes
    finally:
        for pid in (pid for pids in processes.values() for pid in pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        start.communicate(timeout=60)


def record(name: str, folder: Path, pids: list[int]) -> Path:
    """A copy of the job's records once they are written: by the ranks, or since this asks for them."""
    end = time.monotonic() + LIMIT
    while not recorded(name, folder, pids):
        outputs = "\n".join(path.read_text() for path in sorted(folder.glob("output*")))
        assert time.monotonic() < end, f"{name}: no records:\n{outputs}"
        time.sleep(0.3)
    copy = folder / "records"
    copy.mkdir()
    for path in folder.glob("job.rank?"):
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def recorded(name: str, folder: Path, pids: list[int]) -> bool:
    texts = [path.read_text() for path in sorted(folder.glob("job.rank?"))]
    if name == "ended" and sum('"ended": true' in text for text in texts) != 1:
        return False
    if name not in STUCK:
        return sum('"exception": {' in text for text in texts) == (2 if name in ("killed", "ended") else 3)
    unfinished = sum('"unfinished"' in text for text in texts)
    done = unfinished == 2 and (name == "frozen" or len(texts) == 3)
    if not done and all("step 2" in path.read_text() for path in folder.glob("output?")):
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)  # a frozen rank does not hear it
        time.sleep(0.5)
    return done


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder with those of each of the jobs."""
    folder = tmp_path_factory.mktemp("jobs")
    with running(folder) as processes:
        return {name: record(name, folder / name, processes[name]) for name in FAULTS}


def explain(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run where the job's program is, so that its lines are short."""
    return run([sys.executable, "-m", "meshcast", "explain", str(folder)], env=environment(), cwd=JOB.parent)


def comparable(text: str) -> list[str]:
    """Lines without times, addresses and what is only one rank's view of an error."""
    lines = [re.sub(r"\d+\.\d+ s", "T s", line) for line in text.splitlines()]
    return [line for line in lines if not re.match(r"  \w+Error", line)]


@pytest.mark.parametrize("fault", FAULTS)
def test_as_the_page_says(records: dict[str, Path], fault: str) -> None:
    shown = re.search(rf"stuck_job\.py {fault}`.*?<!-- output -->\n```\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    done = explain(records[fault])
    assert (done.returncode, done.stderr) == (0, "")
    assert comparable(done.stdout) == comparable(shown[1])


def test_records_of_two_jobs_are_told_apart(records: dict[str, Path], tmp_path: Path) -> None:
    """Also where one followed the other at the same address, within a few seconds."""
    for rank, name in enumerate(("absent", "order", "order")):
        found = json.loads((records[name] / f"job.rank{rank}").read_text())
        assert len(found["jobs"]) == 1
        (tmp_path / f"job.rank{rank}").write_text(json.dumps(found | {"job": ""}))
    done = explain(tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert "job.rank0 and job.rank1, job.rank2 are of different jobs" in done.stderr

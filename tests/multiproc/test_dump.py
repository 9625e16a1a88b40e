"""A job of torchrun with a stuck rank: what its ranks say by themselves, and `python -m meshcast dump`."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from multiproc.fork_server import children, run
from multiproc.training_runs import ENVIRONMENT, ROOT, command, start

JOB = ROOT / "tests" / "fault" / "stuck_job.py"
LIMIT = 200  # seconds; it takes about 10 on an idle machine
NOTICE = re.compile(
    r"\[meshcast\] rank ([01]) has waited for [\d.]+ s in reshard call 4 of 0,1,2 "
    r"\(0 of \d+ bytes received\): rank 2 on \S+ did not call, or is busy, frozen, dead, or done with its "
    r"part\. Look at its output\. `python -m meshcast dump`, on each host, writes what all ranks are doing"
)

pytestmark = pytest.mark.timeout(LIMIT + 60)


def meshcast(*arguments: str) -> str:
    done = run([sys.executable, "-m", "meshcast", *arguments], env=ENVIRONMENT, limit=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_a_stuck_job(tmp_path: Path) -> None:
    # Longer than ranks wait for each other to start: a line for that would hold back the next for as long.
    environment = {**ENVIRONMENT, "MESHCAST_WAIT_NOTICE": "8", "TMPDIR": str(tmp_path)}
    environment.pop("MESHCAST_FLIGHT_RECORD", None)
    job = start(command(JOB, "absent", ranks=3), environment)
    try:
        assert job.stdout is not None
        said, lines = set(), []
        while len(said) < 2:  # until the time limit of the test
            lines.append(job.stdout.readline())
            assert lines[-1], "".join(lines)
            if found := NOTICE.fullmatch(lines[-1].strip()):
                said.add(found[1])
        processes = [str(rank) for rank in children(job.pid)]
        assert len(processes) == 3
        # Of this job alone: others may be under way on this host.
        *written, last = meshcast("dump", "--pid", *processes).splitlines()
        records = [Path(line.rpartition(": ")[2]) for line in written]
        assert [record.name for record in records] == ["job.rank0", "job.rank1", "job.rank2"]
        assert all(record.exists() for record in records)
        (folder,) = {str(record.parent) for record in records}
        assert last.endswith(f"python -m meshcast explain {folder}")
        explained = meshcast("explain", folder)
        assert "3 records of 3 ranks" in explained
        assert re.search(r"first cause: rank 2 has not made reshard call 4 .* in load$", explained.strip())
        for process in processes:  # by hand, a rank survives it as well
            os.kill(int(process), signal.SIGUSR1)
        meshcast("dump", "--pid", *processes)
        assert job.poll() is None
        rest = "".join(lines)
        assert "SIGUSR1" not in rest and "Traceback" not in rest
    finally:
        job.terminate()
        rest = job.communicate(timeout=LIMIT)[0]
    assert len(NOTICE.findall("".join(lines) + rest)) == 2  # one of each rank that waits

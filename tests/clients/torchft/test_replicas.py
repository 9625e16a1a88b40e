"""The way of torchft in the benchmark of jobs with kills: a replica is killed, the others go on, and all
steps have the losses of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from multiproc.harness import ROOT

sys.path += [str(ROOT), str(ROOT / "examples")]

from elastic import alone, train

from benchmarks.elastic.kills import Lines, children

pytestmark = pytest.mark.timeout(500)

LAUNCHER = ROOT / "benchmarks/elastic/torchft_job.py"
STEPS = 30


def test_replicas_go_on_without_one_that_is_killed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    options = ["--steps", str(STEPS), "--metrics", str(tmp_path / "metrics")]
    command = [sys.executable, str(LAUNCHER), "3", "1", *options]
    lines = Lines(tmp_path / "metrics")
    with (tmp_path / "log").open("w") as log:
        job = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + 230
            while not any(step.ranks == 3 and step.step >= 3 for step in lines.whole):
                assert job.poll() is None, (tmp_path / "log").read_text()[-8000:]
                assert time.monotonic() < until
                time.sleep(0.02)
                lines.read()
            victim = children(job.pid)[1]
            os.kill(victim, signal.SIGKILL)
            status = job.wait(timeout=230)
        finally:
            job.terminate()
            job.wait()
    assert status == 0, (tmp_path / "log").read_text()[-8000:]
    lines.read()
    assert lines.of[victim][-1]["step"] < STEPS - 1
    told = list(lines.all())
    assert {line["step"] for line in told} == set(range(STEPS))
    assert {2, 3} <= {line["ranks"] for line in told}
    expected = alone.losses(train.task_of(train.parser().parse_args(options)), STEPS)
    for line in told:
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-5), line

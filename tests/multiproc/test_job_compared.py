"""The benchmark of jobs with kills, with real jobs, but for torchft, which has an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from multiproc.harness import ROOT

LIMIT = 400.0  # seconds; it takes about 40 on an idle machine


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 60)
def test_two_ways_through_the_same_training(tmp_path: Path) -> None:
    """A rank is killed after step 12; the last checkpoint is that of step 10."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "job_compared",
        "--ways",
        "meshcast",
        "torchrun",
        "--no-publish",
    ]
    command += ["--ranks", "4", "--steps", "30", "--every", "5", "--kill-at", "12", "--victims", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT)])}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "job_compared.json").read_text())
    ours, theirs = (results["ways"][name] for name in ("meshcast", "torchrun"))
    assert ours["steps"]["step"] == list(range(30))
    assert (ours["repeated"], min(ours["steps"]["ranks"])) == (0, 3)
    assert set(theirs["steps"]["step"]) == set(range(30))
    (again,) = [event for event in theirs["events"] if event["what"] == "restart"]
    assert again["step"] % 5 == 0
    assert 10 <= again["step"] <= 15
    assert set(theirs["steps"]["ranks"]) == {4}
    for way in (ours, theirs):
        assert [event["rank"] for event in way["events"] if event["what"] == "kill"] == [1]
        assert way["apart"] < 1e-5
    assert (tmp_path / "job_compared.png").read_bytes().startswith(b"\x89PNG")

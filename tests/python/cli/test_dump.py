"""`python -m meshcast dump` signals the processes that keep a flight record, and no others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import meshcast
import pytest
from meshcast.cli import main

PACKAGE = Path(meshcast.__file__).parent.parent
PROGRAM = (
    "import meshcast, sys; meshcast.reshard; print('ready', flush=True); sys.stdin.read(); print('lives')"
)


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """One with a record, in a folder that is not there yet, and one without."""
    started = []
    for record in (str(tmp_path / "records" / "job"), ""):
        environment = {
            **os.environ,
            "PYTHONPATH": str(PACKAGE),
            "MESHCAST_FLIGHT_RECORD": record,
            "RANK": "3",
        }
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield started
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_only_processes_with_a_record_are_asked(
    processes: list[subprocess.Popen[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_record, without = processes
    written = tmp_path / "records" / "job.rank3"
    assert main(["dump", str(with_record.pid)]) == 0
    assert capsys.readouterr().out == f"asked process {with_record.pid} to write {written}\n"
    end = time.monotonic() + 60
    while not written.exists() and time.monotonic() < end:
        os.sched_yield()
    assert json.loads(written.read_text())["process"] == with_record.pid
    assert main(["dump", str(without.pid)]) == 2
    assert f"process {without.pid} does not listen" in capsys.readouterr().err
    assert main(["dump", "x"]) == 2
    assert "'x': expected the number of a process" in capsys.readouterr().err
    assert main(["dump"]) == 0  # all of this host: the other one is left alone
    out = capsys.readouterr().out
    assert f"process {with_record.pid} " in out and f"process {without.pid} " not in out
    for process in processes:
        assert process.communicate("", timeout=60)[0] == "lives\n"
        assert process.returncode == 0

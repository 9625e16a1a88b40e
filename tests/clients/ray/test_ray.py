"""The programs with actors of Ray as a user runs them.

examples/ray_weights: trainers and rollouts on two nodes that are two hosts to meshcast. Values, a rollout
that is killed, and that no process is left. examples/launching/ray_actors.py: a reshard on one node.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "examples/ray_weights/run.py"
ACTORS = ROOT / "examples/launching/ray_actors.py"
LOST_IN_PUSH = Path(__file__).with_name("lost_in_push.py")
LIMIT = 300.0  # seconds for a program; it takes about 20 on an idle machine
ROW = re.compile(r" +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)  (\w+)")
HEARD = re.compile(r"rank (\d+): (\w+) after ([\d.]+) s: (.*)")


class Program:
    def __init__(self, script: Path, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
            cwd=ROOT,
            start_new_session=True,  # by which its processes are found: Ray writes over environments
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def output(self) -> str:
        """Once it has ended."""
        try:
            return self.process.communicate(timeout=LIMIT)[0]
        except BaseException:
            self.process.terminate()
            raise

    def check_nothing_left(self, seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < end, left
            time.sleep(0.2)

    def processes(self) -> list[str]:
        """Command lines of those that it has started, and itself."""
        return [line.replace("\0", " ")[:200] for line, _ in self._found()]

    def folder(self) -> Path:
        """Of Ray: what its processes have in common."""
        (name,) = {each["RAY_TMPDIR"] for _, each in self._found() if "RAY_TMPDIR" in each}
        return Path(name)

    def _found(self) -> Iterator[tuple[str, dict[str, str]]]:
        """Command line and environment of each. One that has ended and nobody has waited for has no line."""
        for process in Path("/proc").glob("[0-9]*"):
            try:
                session = int((process / "stat").read_text().rpartition(")")[2].split()[3])
                text = (process / "environ").read_text(errors="replace")
                line = (process / "cmdline").read_text()
            except OSError:  # it has ended
                continue
            if line and session == self.process.pid:
                yield line, dict(each.split("=", 1) for each in text.split("\0") if "=" in each)


def ended(script: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output; nothing is left."""
    program = Program(script, *arguments)
    text = program.output()
    print(text)
    program.check_nothing_left()
    return program.process.returncode, text


def test_versions_arrive() -> None:
    status, text = ended(RUN, "--model", "nano", "--versions", "3", "--every", "4", "--trainers", "3")
    assert status == 0, text
    places = re.findall(r"rank (\d): (\w+) on (.*)", text)
    assert places == [(str(r), "trains", "host 0") for r in range(3)] + [
        (str(r), "serves", "host 1") for r in (3, 4)
    ]
    rows = ROW.findall(text)
    assert [row[0] for row in rows] == ["1", "2", "3"], text
    assert all(row[6] == "yes" for row in rows), text
    assert all(float(row[1]) > 0 for row in rows), text
    held_out = [float(row[5]) for row in rows]
    assert held_out[2] < held_out[1] < held_out[0], text


def test_a_rollout_is_killed_between_pushes() -> None:
    """The trainers train, and have not begun to push."""
    status, text = ended(RUN, "--model", "nano", "--versions", "2", "--kill", "2", "--limit", "60")
    assert status == 0, text
    assert [row[0] for row in ROW.findall(text)] == ["1"], text
    check_heard(text)
    assert "rank 2 has version 1\n" in text, text


def test_a_rollout_is_killed_in_a_push() -> None:
    status, text = ended(LOST_IN_PUSH)
    assert status == 0, text
    check_heard(text)
    assert "rank 2 has torn weights\n" in text, text


def check_heard(text: str) -> None:
    """All survivors, of the right one, and long before the limit."""
    assert "rank 3 was killed\n" in text, text
    heard = HEARD.findall(text)
    assert [rank for rank, *_ in heard] == ["0", "1", "2"], text
    for _, kind, seconds, message in heard:
        assert kind == "PeerLostError", text
        assert float(seconds) < 30, text
        assert "lost rank 3" in message, text
    assert re.search(r"the trainers trained on: loss \d", text), text


def test_a_reshard_between_actors() -> None:
    status, text = ended(ACTORS, "--nic", "lo", "--limit", "90")
    assert status == 0, text
    whole = torch.arange(24).view(4, 6)
    rows = [*whole.chunk(2), *[whole[:0, :0]] * 3]
    columns = [*[whole[:0, :0]] * 2, *whole.chunk(3, dim=1)]
    lines = [f"rank {rank}: x {rows[rank].tolist()}  y {columns[rank].tolist()}" for rank in range(5)]
    assert re.findall(r"^rank \d.*$", text, re.MULTILINE) == lines


def test_actors_are_told_of_an_interface_that_is_not_there() -> None:
    status, text = ended(ACTORS, "--nic", "no-such0", "--limit", "90")
    assert status == 1, text
    assert "no-such0" in text, text
    assert "rank 0: x" not in text, text


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_ended_from_outside(how: signal.Signals) -> None:
    """Once versions arrive, with hundreds to come."""
    program = Program(RUN, "--model", "nano", "--versions", "500")
    assert program.process.stdout is not None
    seen = ""
    for line in program.process.stdout:
        seen += line
        if ROW.match(line):
            break
    assert len(program.processes()) > 6, (seen, program.processes())  # four actors, and Ray's own
    folder = program.folder()
    program.process.send_signal(how)
    seen += program.output()
    assert program.process.returncode != 0, seen
    program.check_nothing_left(180.0)  # Ray's agents first try for a minute to tell its dead server
    shutil.rmtree(folder)  # it stays, with what the actors printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rollouts", "3"), "--rollouts 3: 4 heads cannot be shared evenly; use 2"),
        (("--trainers", "5"), "--batch 24: 5 trainers cannot share it; use --batch 20"),
        (("--trainers", "0"), "--trainers 0: must be at least 1"),
        (("--kill", "1"), "--kill 1: use a version from 2 to --versions 4"),
        (("--versions", "0"), "--versions 0 --every 10: both must be at least 1"),
        (("--limit", "0"), "--limit 0.0: seconds, above 0"),
        (("--rollout-s", "2"), "--rollout-s: no such option; use --rollouts, or see --help"),
    ],
)
def test_what_cannot_run_is_refused(arguments: tuple[str, ...], message: str) -> None:
    status, text = ended(RUN, *arguments)
    assert (status, text.strip()) == (2, f"run.py: error: {message}")

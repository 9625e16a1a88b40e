"""`python -m meshcast dump` asks the processes that listen, and sends nobody a signal; SIGUSR1 by hand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from meshcast.cli import main
from multiproc.fork_server import Forked, environment

READY = "print('ready', flush=True); print(sys.stdin.readline().strip(), flush=True)"
PROGRAM = f"import sys, os, signal; import meshcast; {READY}"
# With handlers of its own, before meshcast has one and after.
HANDLER = "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'handled\\n'))"
BEFORE = f"import sys, os, signal; {HANDLER}; import meshcast; {READY}"
AFTER = f"import sys, os, signal; import meshcast; {HANDLER}; {READY}"
IGNORES = f"import sys, os, signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN); import meshcast; {READY}"
# Its child has what listens in the parent, until it has closed that. Python 3.12 warns where a process with
# threads forks, which would be the first line.
FORKS = f"""
import os, sys, warnings, meshcast
warnings.simplefilter("ignore", DeprecationWarning)
if os.fork() == 0:
    {READY}
    os._exit(0)
"""
RANK_3 = {"RANK": "3", "WORLD_SIZE": "5"}

Started = subprocess.Popen[str]
Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts programs that write their records below `tmp_path`. first: what their first line has. process:
    their class."""
    started = []
    usual = {name: value for name, value in environment().items() if not name.startswith("MESHCAST_")}

    def start_one(
        program: str = PROGRAM,
        first: str = "ready",
        process: type[Started] = Forked,
        **variables: str,
    ) -> Started:
        found = process(
            [sys.executable, "-c", program],
            env={**usual, "TMPDIR": str(tmp_path), **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(found)
        assert found.stdout is not None and first in found.stdout.readline()
        return found

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def end(process: Started) -> list[str]:
    """Returns what it has written since it was ready, if it then ends as it should."""
    lines = process.communicate("lives\n", timeout=60)[0].splitlines()
    assert (process.returncode, lines[-1:]) == (0, ["lives"])
    return lines[:-1]


def process_of(record: Path) -> int:
    return int(json.loads(record.read_text())["process"])


def test_a_record_is_there_when_the_command_ends(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the set path, in a folder that was not there; at one of the rank's own; where the command says."""
    path = tmp_path / "records" / "deep" / "job"
    rank = start(MESHCAST_FLIGHT_RECORD=str(path), **RANK_3)
    assert path.parent.is_dir()  # from the import on
    other = start(RANK="4", WORLD_SIZE="5")
    written = Path(f"{path}.rank3")
    assert main(["dump", str(rank.pid)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"rank 3, process {rank.pid}: {written}",
        f"what they say together: python -m meshcast explain {path.parent}",
    ]
    assert process_of(written) == rank.pid
    assert main(["dump", "--pid", str(other.pid), str(rank.pid), "--rank", "4"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    own = Path(line.removeprefix(f"rank 4, process {other.pid}: "))
    assert own.name == "job.rank4" and process_of(own) == other.pid
    root = own.parent.parent
    assert root.parent == tmp_path and root.stat().st_mode & 0o777 == 0o700
    assert main(["dump", "--pid", str(other.pid), str(rank.pid), "--to", str(tmp_path / "to")]) == 0
    assert sorted(path.name for path in (tmp_path / "to").iterdir()) == ["job.rank3", "job.rank4"]
    same = start(**RANK_3)
    assert main(["dump", "--pid", str(same.pid), str(rank.pid), "--to", str(tmp_path / "to")]) == 2
    assert "are both of rank 3, so of different jobs" in capsys.readouterr().err
    assert end(rank) == end(other) == []


def test_who_does_not_listen_is_left_alone(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """A process that is no rank yet; one that is no program of meshcast; what is no number."""
    alone = start()
    for process in (alone.pid, 1):
        assert main(["dump", "--pid", str(process)]) == 2
        assert f"process {process} does not listen" in capsys.readouterr().err
    assert main(["dump", "x"]) == 2
    assert "'x': expected the number of a process" in capsys.readouterr().err
    assert main(["dump", "--rank", "123456"]) == 2
    assert "no process of rank 123456 listens" in capsys.readouterr().err
    assert end(alone) == []


def test_a_frozen_process_is_named(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    """By the variables that it was started with, as /proc has them: those of a fork are its server's."""
    rank = start(process=subprocess.Popen, **RANK_3)
    os.kill(rank.pid, signal.SIGSTOP)
    assert os.WIFSTOPPED(os.waitpid(rank.pid, os.WUNTRACED)[1])  # all of its threads have stopped
    assert main(["dump", str(rank.pid), "--limit", "0.2"]) == 1
    said = capsys.readouterr()
    assert f"rank 3, process {rank.pid}: no record: it does not answer" in said.out
    assert "no record was written" in said.err
    os.kill(rank.pid, signal.SIGCONT)
    assert end(rank) == []


def test_a_record_that_cannot_be_written_is_told(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = start(**RANK_3)
    (tmp_path / "file").touch()
    assert main(["dump", str(rank.pid), "--to", str(tmp_path / "file")]) == 1
    assert f"rank 3, process {rank.pid}: no record: [Errno" in capsys.readouterr().out
    assert end(rank) == []


def test_a_folder_that_cannot_be_is_told_at_the_import(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    given = str(tmp_path / "file" / "job")
    start(
        first=f"{given}: no flight record can be written there: [Errno",
        MESHCAST_FLIGHT_RECORD=given,
        **RANK_3,
    )


@pytest.mark.parametrize(
    ("program", "variables", "said"),
    [
        (PROGRAM, {}, []),
        (PROGRAM, RANK_3, []),
        (BEFORE, RANK_3, ["handled"]),
        (AFTER, RANK_3, ["handled"]),
        (IGNORES, RANK_3, []),
    ],
)
def test_nobody_dies_of_the_signal(
    start: Start, program: str, variables: dict[str, str], said: list[str]
) -> None:
    """Sent by hand. A handler of the program's own runs as without meshcast."""
    process = start(program, **variables)
    os.kill(process.pid, signal.SIGUSR1)
    assert end(process) == said


@pytest.mark.parametrize("program", [PROGRAM, BEFORE])
def test_the_signal_writes_the_record(start: Start, tmp_path: Path, program: str) -> None:
    """Also of a program with a handler of its own: ours calls that."""
    rank = start(program, MESHCAST_FLIGHT_RECORD=str(tmp_path / "job"), **RANK_3)
    written = tmp_path / "job.rank3"
    assert not written.exists()
    os.kill(rank.pid, signal.SIGUSR1)
    while not written.exists():  # until the time limit of the test
        os.sched_yield()
    assert process_of(written) == rank.pid


def test_a_forked_child_does_not_keep_its_parent_listening(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = start(FORKS, **RANK_3)  # the child is ready; the parent ends
    assert parent.wait(60) == 0
    assert main(["dump", str(parent.pid)]) == 2
    assert f"process {parent.pid} does not listen" in capsys.readouterr().err
    assert parent.stdin is not None and parent.stdout is not None
    parent.stdin.write("lives\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "lives\n"

"""Agents of meshcast.elastic.run on several hosts, whose workers are shells."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from meshcast.elastic import rendezvous as meet
from multiproc.fork_server import Forked, environment

pytestmark = pytest.mark.timeout(180)

SLEEP = "echo $$ >> {folder}/pids; exec sleep 1000"


class Agents:
    """Agents of this machine, each as if on a host of its own; the first leads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        script: str,
        *options: str,
        hosts: str = "2",
        ranks: str = "2",
        conf: str = "",
        process: type[subprocess.Popen[str]] = Forked,
    ) -> int:
        """Its number. Output is read by over()."""
        conf = ",".join(filter(None, [f"is_host={int(not self.started)},keep_alive=3", conf]))
        command = [sys.executable, "-m", "meshcast.elastic.run", "--monitor-interval", "0.05"]
        command += ["--nnodes", hosts, "--nproc-per-node", ranks, "--rdzv-endpoint", f"127.0.0.1:{self.port}"]
        command += ["--rdzv-conf", conf, *options, "--no-python", "sh", "-c"]
        command.append(script.format(folder=self.folder))
        pipe = subprocess.PIPE
        self.started.append(process(command, env=environment(), stdout=pipe, stderr=pipe, text=True))
        return len(self.started) - 1

    def lead_nowhere(self) -> None:
        """The first of them is none: the others follow."""
        pipe = subprocess.PIPE
        self.started.append(subprocess.Popen(["true"], stdout=pipe, stderr=pipe, text=True))

    def start_looking(self) -> int:
        """A follower, once it has found a store, beside the client of the process with the store."""
        number = self.start(SLEEP, conf="join_timeout=60,keep_alive=60")
        until(lambda: connections(self.port) == 2, "a follower")
        return number

    def over(self, number: int, limit: float = 60.0) -> tuple[int, str]:
        """Exit status and stderr, once it has ended by itself."""
        process = self.started[number]
        try:
            _, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"agent {number} goes on: {process.communicate()}") from None
        return process.returncode, errors

    def pids(self, count: int) -> list[int]:
        """Of the shells, once so many have started."""
        path = self.folder / "pids"
        limit = time.monotonic() + 60
        while not path.exists() or len(path.read_text().split()) < count:
            if time.monotonic() > limit:
                ended = [each.communicate() for each in self.started if each.poll() is not None]
                there = path.read_text().split() if path.exists() else []
                raise AssertionError(f"{len(there)} workers, not {count}; what ended agents said: {ended}")
            time.sleep(0.02)
        return [int(pid) for pid in path.read_text().split()]


@pytest.fixture
def agents(tmp_path: Path):
    found = Agents(tmp_path)
    yield found
    for process in found.started:
        if process.poll() is None:
            process.terminate()
            process.communicate(timeout=60)


def until(done: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 60
    while not done():
        assert time.monotonic() < limit, what
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def connections(port: int) -> int:
    """To that port of this machine."""
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line for table in tables for line in table]
    return sum(line.split()[2].endswith(f":{port:04X}") and line.split()[3] == "01" for line in lines)


def test_a_program_without_a_job_runs_as_under_torchrun(agents: Agents) -> None:
    says = 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $GROUP_RANK $MASTER_PORT" >> {folder}/said; '
    waits = "while [ $(wc -l < {folder}/said) != 4 ]; do sleep 0.05; done"
    for _ in range(2):
        agents.start(says + waits, process=subprocess.Popen)
    assert [agents.over(number)[0] for number in range(2)] == [0, 0]
    said = sorted((agents.folder / "said").read_text().splitlines())
    expected = ["0 4 0 0", "1 4 1 0", "2 4 0 1", "3 4 1 1"]
    assert said == [f"{each} {agents.port}" for each in expected]


def test_workers_are_replaced_where_they_were_and_failures_are_told_everywhere(agents: Agents) -> None:
    """The job needs four workers. One restart is allowed, and the other host's first worker fails twice."""
    script = 'echo "$GROUP_RANK $LOCAL_RANK $TORCHELASTIC_RESTART_COUNT" >> {folder}/said; '
    script += '[ "$GROUP_RANK $LOCAL_RANK" = "1 0" ] && sleep 1 && exit 7; ' + SLEEP
    for _ in range(2):
        agents.start(script, "--max-restarts", "1")
    status, errors = agents.over(0)
    assert status == 1
    assert re.search(r"exitcode *: 7", errors), errors
    assert agents.over(1)[0] == 1
    assert sorted((agents.folder / "said").read_text().splitlines()) == [
        "0 0 0",
        "0 1 0",
        "1 0 0",
        "1 0 1",
        "1 1 0",
    ]
    assert not any(map(lives, agents.pids(3)))


def test_a_job_that_loses_too_many_hosts_waits_for_others_and_ends(agents: Agents) -> None:
    for _ in range(2):
        agents.start(SLEEP, conf="join_timeout=3")
    pids = agents.pids(4)
    begin = time.monotonic()
    os.kill(agents.started[1].pid, signal.SIGTERM)
    assert agents.over(1)[0] == 128 + signal.SIGTERM
    status, errors = agents.over(0)
    assert status == 1
    assert time.monotonic() - begin > 3
    assert "is lost, with worker 0.0@1" in errors
    assert not any(map(lives, pids))


def test_too_few_hosts_come(agents: Agents) -> None:
    for _ in range(2):
        agents.start(SLEEP, hosts="3", conf="join_timeout=5")
    status, errors = agents.over(0)
    assert status == 1
    assert "4 workers on 2 hosts are fewer than the 6 that the job needs" in errors
    assert agents.over(1)[0] == 1
    assert not any(map(lives, agents.pids(4)))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_followers_end_with_the_one_that_leads(agents: Agents, how: signal.Signals) -> None:
    for _ in range(3):
        agents.start(SLEEP, hosts="3", ranks="1")
    pids = agents.pids(3)
    leader = agents.started[0]
    os.kill(leader.pid, how)
    try:
        for number in (1, 2):
            status, errors = agents.over(number)
            assert status == 1
            assert "the job's agent" in errors
        assert sum(map(lives, pids)) <= 1
    finally:
        leader.kill()
        for pid in filter(lives, pids):  # the leader's
            os.kill(pid, signal.SIGKILL)


def test_a_signal_to_the_one_that_leads_ends_all(agents: Agents) -> None:
    for _ in range(2):
        agents.start(SLEEP)
    pids = agents.pids(4)
    os.kill(agents.started[0].pid, signal.SIGINT)
    assert [agents.over(number)[0] for number in range(2)] == [128 + signal.SIGINT] * 2
    assert not any(map(lives, pids))


def test_a_host_too_many_and_one_of_another_job_are_refused(agents: Agents) -> None:
    agents.start(SLEEP, hosts="1", ranks="1")
    agents.pids(1)
    status, errors = agents.over(agents.start(SLEEP, hosts="1", ranks="1"))
    assert status == 1
    assert "does not take this host: the job has its 1 hosts" in errors
    status, errors = agents.over(agents.start(SLEEP, "--rdzv-id", "another", hosts="1", ranks="1"))
    assert status == 1
    assert "has the id 'none', not 'another'" in errors
    assert len(agents.pids(1)) == 1


def test_what_is_no_agent_is_not_followed(agents: Agents) -> None:
    store = dist.TCPStore("127.0.0.1", agents.port, is_master=True, wait_for_workers=False)
    agents.lead_nowhere()
    status, errors = agents.over(agents.start(SLEEP))
    assert status == 1
    assert "is no agent of meshcast.elastic.run" in errors
    assert store.check(["elastic/hosts"]) is False


def test_an_agent_that_listens_already_is_waited_for(agents: Agents) -> None:
    """Between the two the agent does little, but another process may run there."""
    store = dist.TCPStore("127.0.0.1", agents.port, is_master=True, wait_for_workers=False)
    agents.lead_nowhere()
    late = agents.start_looking()
    time.sleep(0.5)  # ten looks for the mark
    store.set("elastic/hosts", "1")
    store.set("elastic/agent", "none")
    until(lambda: meet.is_there(store, meet.Hello, 1), "its first word")
    meet.post(store, meet.Welcome("not today"), 1)
    status, errors = agents.over(late)
    assert status == 1
    assert "does not take this host: not today" in errors


def test_a_host_that_dies_before_its_first_word_keeps_no_other_out(agents: Agents) -> None:
    agents.start(SLEEP, hosts="1:2", ranks="1")
    agents.pids(1)
    store = dist.TCPStore("127.0.0.1", agents.port, is_master=False)
    assert store.add("elastic/hosts", 1) == 2
    del store
    agents.start(SLEEP, hosts="1:2", ranks="1")
    assert len(agents.pids(2)) == 2


def test_nobody_leads(agents: Agents) -> None:
    agents.lead_nowhere()
    status, errors = agents.over(agents.start(SLEEP, conf="join_timeout=1"))
    assert status == 1
    assert f"no agent of meshcast.elastic.run at 127.0.0.1:{agents.port}" in errors


def test_a_follower_that_is_interrupted_before_it_has_joined(agents: Agents) -> None:
    store = dist.TCPStore("127.0.0.1", agents.port, is_master=True, wait_for_workers=False)
    agents.lead_nowhere()
    late = agents.start_looking()
    os.kill(agents.started[late].pid, signal.SIGINT)
    status, errors = agents.over(late)
    assert status == 128 + signal.SIGINT
    assert "interrupted before it had workers" in errors
    assert "Traceback" not in errors
    del store


def test_the_endpoint_of_another_program(agents: Agents) -> None:
    """The host that was told to lead cannot; one that was not told follows, and finds no agent."""
    store = dist.TCPStore("127.0.0.1", agents.port, is_master=True, wait_for_workers=False)
    status, errors = agents.over(agents.start(SLEEP))
    assert status == 1
    assert f"127.0.0.1:{agents.port}" in errors
    assert "in use" in errors
    assert dist.TCPStore("127.0.0.1", agents.port, is_master=False, timeout=timedelta(seconds=5))
    del store

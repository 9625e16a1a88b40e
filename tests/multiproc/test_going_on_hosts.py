"""Jobs of meshcast.elastic.run with several agents: hosts come, die and come again, and the rest go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from multiproc.conftest import buildable  # noqa: F401
from multiproc.fork_server import children
from multiproc.test_going_on import ENVIRONMENT, LIMIT, PROGRAM, Notes, Started, ended

from benchmarks.cluster import Cluster

pytestmark = [pytest.mark.timeout(LIMIT + 60)]

CONF = "keep_alive=2,last_call_timeout=1"


class Hosts:
    """Agents of one job, each as if on a host of its own, or on one of a cluster."""

    def __init__(
        self,
        folder: Path,
        ranks: str,
        hosts: str,
        *options: str,
        program: list[str],
        cluster: Cluster | None = None,
    ) -> None:
        self.folder, self._cluster = folder, cluster
        self._program = program
        self._options = ["--nnodes", hosts, "--nproc-per-node", ranks, *options]
        endpoint = f"127.0.0.1:{_free_port()}"
        if cluster is not None:
            endpoint = f"{cluster.address(0)}:{cluster.port()}"
        self._options += ["--rdzv-endpoint", endpoint]
        self.agents: list[Started] = []

    def start(self, conf: str = "") -> Started:
        leads = int(not self.agents)
        conf = ",".join([CONF, f"is_host={leads}", *filter(None, [conf])])
        before, more = [], {"MESHCAST_HOST_ID": f"host {len(self.agents)}"}
        if self._cluster is not None:
            before = self._cluster.enter(len(self.agents))
            more |= {"GLOO_SOCKET_IFNAME": self._cluster.interfaces()[0], "RES_OPTIONS": "attempts:0"}
        agent = Started(
            *self._options,
            *("--rdzv-conf", conf, *self._program),
            before=before,
            environment={**ENVIRONMENT, **more},
        )
        self.agents.append(agent)
        return agent

    def until(self, done: Callable[[], bool], what: str) -> None:
        limit = time.monotonic() + LIMIT
        while not done():
            dead = [agent for agent in self.agents if agent.poll() not in (None, -signal.SIGKILL)]
            assert not dead, f"an agent ended before {what}: {dead[0].output()[-4000:]}"
            assert time.monotonic() < limit, what
            time.sleep(0.05)


@contextmanager
def several(
    folder: Path, ranks: str, hosts: str, *options: str, program: list[str], cluster: Cluster | None = None
) -> Iterator[Hosts]:
    found = Hosts(folder, ranks, hosts, *options, program=program, cluster=cluster)
    try:
        yield found
    finally:
        for agent in found.agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in found.agents:
            print(agent.output()[-4000:])


def kill_host(agent: Started) -> None:
    """All of its processes at once."""
    pids = children(agent.pid)
    os.kill(agent.pid, signal.SIGKILL)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    agent.wait()


@pytest.mark.slow
def test_hosts_die_and_come(tmp_path: Path) -> None:
    """Of three hosts of two ranks one dies, another one comes in its place, and a rank there is replaced. The
    program compares each step with one process."""
    program = [str(PROGRAM), str(tmp_path), "1000000", "[]", "0.05"]
    with several(tmp_path, "2", "1:3", "--max-restarts", "1", program=program) as job:

        def steps_on(ranks: int) -> Callable[[], bool]:
            begin = time.time()

            def found() -> bool:
                newest = Notes(tmp_path).newest()
                return bool(newest["ranks"] == ranks and newest["time"] > begin + 0.2)

            return found

        for _ in range(3):
            job.start()
        job.until(steps_on(6), "all are together")
        kill_host(job.agents[1])
        job.until(steps_on(4), "the others go on")
        job.start()
        job.until(steps_on(6), "another host joins")
        os.kill(children(job.agents[3].pid)[0], signal.SIGKILL)
        job.until(steps_on(5), "five go on")
        job.until(steps_on(6), "a worker joins in its place")
        (tmp_path / "stop").touch()
        output = [ended(agent) for agent in job.agents]
        assert [agent.returncode for agent in job.agents] == [0, -signal.SIGKILL, 0, 0], output
        notes = Notes(tmp_path)
        assert len(notes.with_key("end")) == 6
        assert len(set(notes.with_key("end").values())) == 1
        restarted = [name for name in notes.with_key("end") if name.split("@")[0].endswith(".1")]
        assert restarted in (["0.1@3"], ["1.1@3"])
        assert {name.partition("@")[2] for name in notes.with_key("end")} == {"", "2", "3"} or {
            name.partition("@")[2] for name in notes.with_key("end")
        } == {"", "1", "3"}


@pytest.mark.slow
def test_a_host_dies_whose_shards_live_nowhere_else(tmp_path: Path) -> None:
    """FSDP2 over the ranks of three hosts: ranks of the one that dies have their copies on other hosts."""
    program = [str(PROGRAM), str(tmp_path), "1000000", "[]", "0.05", "3"]
    with several(tmp_path, "2", "1:3", program=program) as job:
        for _ in range(3):
            job.start()
        job.until(lambda: Notes(tmp_path).newest()["step"] >= 5, "copies are there")
        assert Notes(tmp_path).newest()["ranks"] == 6
        kill_host(job.agents[2])
        job.until(lambda: Notes(tmp_path).newest()["ranks"] == 4, "the others go on")
        (tmp_path / "stop").touch()
        for agent in job.agents[:2]:
            output = ended(agent)
            assert agent.returncode == 0, output[-8000:]
        notes = Notes(tmp_path)
        assert len(notes.with_key("end")) == 4
        fewer = [step for step, ranks in notes.steps("0.0") if ranks == 4]
        more = [step for step, ranks in notes.steps("0.0") if ranks == 6]
        assert 0 <= max(more) - min(fewer) + 1 <= 4, "at most the steps since the last copy are done again"


@pytest.mark.slow
def test_a_host_that_is_frozen_is_given_up_and_ends_its_workers(tmp_path: Path) -> None:
    program = [str(PROGRAM), str(tmp_path), "1000000", "[]", "0.05"]
    with several(tmp_path, "2", "1:2", program=program) as job:
        job.start()
        job.start()
        job.until(lambda: Notes(tmp_path).newest()["ranks"] == 4, "all are together")
        frozen = [job.agents[1].pid, *children(job.agents[1].pid)]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        try:
            job.until(lambda: Notes(tmp_path).newest()["ranks"] == 2, "the other goes on")
        finally:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
        output = ended(job.agents[1])
        assert job.agents[1].returncode == 1
        assert "the job continues without this host" in output or "has been silent for" in output
        assert not any(map(_lives, frozen))
        (tmp_path / "stop").touch()
        ended(job.agents[0])
        assert job.agents[0].returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("buildable")
def test_a_host_whose_link_goes_down_is_given_up_and_ends_its_workers(tmp_path: Path) -> None:
    """Hosts are network namespaces, with addresses of their own. Nobody closes a connection."""
    program = [str(PROGRAM), str(tmp_path), "1000000", "[]", "0.05"]
    with Cluster(3, 800) as cluster, several(tmp_path, "2", "2:3", program=program, cluster=cluster) as job:
        for _ in range(3):
            job.start()
        job.until(lambda: Notes(tmp_path).newest()["ranks"] == 6, "all are together")
        cut = children(job.agents[1].pid)
        command = ["ip", "-n", cluster.switch, "link", "set", "port1x0", "down"]
        subprocess.run(command, check=True)
        output = ended(job.agents[1])
        assert job.agents[1].returncode == 1
        assert "has been silent for" in output
        assert not any(map(_lives, cut))
        del job.agents[1]
        job.until(lambda: Notes(tmp_path).newest()["ranks"] == 4, "the others go on")
        (tmp_path / "stop").touch()
        for agent in job.agents:
            ended(agent)
            assert agent.returncode == 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()

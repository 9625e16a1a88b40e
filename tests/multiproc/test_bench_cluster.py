"""The emulated cluster: what it builds, what it leaves behind, and what it says where it cannot be built."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import cluster as network  # noqa: E402
from benchmarks.cluster import Cluster, ClusterError, Loopback, is_stale, owner_name, remove_stale, run_ranks  # noqa: E402

pytestmark = pytest.mark.timeout(240)


def namespaces() -> set[str]:
    return set(network._namespaces())


def wait_for(what: str, condition, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.usefixtures("buildable")
def test_hosts_reach_each_other_and_nothing_stays() -> None:
    with Cluster(3, [100, 200, 100], nics=2) as cluster:
        names = {cluster.switch, *(cluster.namespace(host) for host in range(3))}
        assert names <= namespaces()
        for nic in (0, 1):
            network._run(
                *cluster.enter(0), "bash", "-c", f"exec 3<>/dev/udp/{cluster.address(2, nic)}/9; echo >&3"
            )
        rates = network._run("tc", "-n", cluster.namespace(1), "qdisc", "show", "dev", "eth1")
        assert "rate 200Mbit" in rates
        for key, value in (
            ("tcp_limit_output_bytes", network._SOCKET_QUEUE),
            ("tcp_congestion_control", "reno"),
        ):
            found = network._run(*cluster.enter(2), "cat", f"/proc/sys/net/ipv4/{key}")
            assert found.strip() == str(value)
        folder = cluster.folder
        assert folder.is_dir()
    assert not names & namespaces()
    assert not folder.exists()


@pytest.mark.usefixtures("buildable")
def test_ranks_get_what_torchrun_gives_them() -> None:
    script = (
        "import os; e = os.environ; print(e['RANK'], e['WORLD_SIZE'], e['LOCAL_RANK'], e['GROUP_RANK'], "
        "e['MASTER_ADDR'], e['GLOO_SOCKET_IFNAME'], e['MESHCAST_IFNAMES'])"
    )
    with Cluster(2, 100, nics=2) as cluster:
        out = run_ranks(cluster, 2, [sys.executable, "-c", script], limit=100)
        assert out.split() == ["0", "4", "0", "0", cluster.address(0), "eth0", "eth0,eth1"]
        with pytest.raises(ClusterError, match=r"(?s)status 3.*broken"):
            run_ranks(cluster, 1, [sys.executable, "-c", "print('broken'); raise SystemExit(3)"], limit=100)
        begin = time.monotonic()
        with pytest.raises(ClusterError, match="not complete after 1 s"):
            run_ranks(cluster, 1, ["sleep", "1000"], limit=1)
        assert time.monotonic() - begin < 100
        assert not cluster.processes()


@pytest.mark.usefixtures("buildable")
def test_what_a_killed_owner_left_is_removed() -> None:
    program = (
        "import sys; from benchmarks.cluster import Cluster, run_ranks\n"
        "with Cluster(2, 100) as cluster:\n"
        "    print(cluster.owner, cluster.folder, flush=True)\n"
        "    run_ranks(cluster, 1, ['sleep', '1000'], limit=1000)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        name, folder = process.stdout.readline().split()
        hosts = [f"{name}h{host}" for host in (0, 1)]
        wait_for("the ranks did not start", lambda: all(network._processes(host) for host in hosts))
        ranks = set().union(*map(network._processes, hosts))
        assert not [left for left in remove_stale() if name in left], "its owner is alive"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert Path(folder).is_dir()
    removed = remove_stale()
    assert {*hosts, f"{name}b", folder} <= set(removed)
    assert not any(left.startswith(name) for left in namespaces())
    assert not Path(folder).exists()
    assert not [pid for pid in ranks if os.path.exists(f"/proc/{pid}/ns/net")]


@pytest.mark.usefixtures("buildable")
def test_the_command_line_cleans_up_when_it_is_ended() -> None:
    command = [sys.executable, "-m", "benchmarks", "cluster", "run", "--hosts", "2", "--", "sleep", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        name = owner_name(process.pid)
        hosts = {f"{name}h{host}" for host in (0, 1)}
        wait_for("no hosts", lambda: hosts <= namespaces())
        wait_for("the ranks did not start", lambda: all(network._processes(host) for host in hosts))
        process.terminate()
        assert process.wait(100) != 0
    assert not any(left.startswith(name) for left in namespaces())


@pytest.mark.usefixtures("buildable")
def test_two_may_remove_the_same() -> None:
    with Cluster(1, 100) as cluster:
        network._remove(cluster.namespace(0))
        network._remove(cluster.namespace(0))


def test_an_owner_is_a_process_and_its_start() -> None:
    mine = owner_name()
    assert mine.startswith(f"mc{os.getpid()}-")
    assert not is_stale(f"{mine}h0")
    pid, start = mine.removeprefix("mc").split("-")[:2]
    assert is_stale(f"mc{pid}-{int(start) + 1}-h0"), "another process had this id"
    assert not is_stale("mcfoo"), "not one of ours"
    assert not is_stale(f"xmc{pid}-0-h0")
    with subprocess.Popen(["sleep", "1000"]) as process:
        child = owner_name(process.pid)
        process.kill()
        wait_for("a process that has ended has no name", lambda: is_stale(child))
    assert is_stale(child)
    with pytest.raises(ProcessLookupError):
        owner_name(process.pid)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((0, 100), "0 hosts"), ((2, [100]), "2 hosts"), ((1, -5), "positive"), ((1, 100, 5), "5 NICs")],
)
def test_impossible_clusters_are_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        Cluster(*arguments)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root" in network.missing()
    with pytest.raises(ClusterError, match="root"), Cluster(1, 100):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "/nowhere")
    assert "apt-get install iproute2" in network.missing()


def test_loopback_tells_ranks_their_host() -> None:
    script = "import os; e = os.environ; print(e['RANK'], e['MESHCAST_HOST_ID'], e['GLOO_SOCKET_IFNAME'])"
    with Loopback(2, 100) as loopback:
        out = run_ranks(loopback, 1, [sys.executable, "-c", script], limit=100)
        assert out.split() == ["0", "emulated", "host", "0", "lo"]
        folder = loopback.folder
    assert not folder.exists()

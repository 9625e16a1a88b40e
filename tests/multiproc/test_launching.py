"""The recipes of docs/environment.md, run where this machine allows it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from multiproc import pods

ROOT = Path(__file__).resolve().parents[2]
LAUNCHING = ROOT / "examples" / "launching"
ENVIRONMENT = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": f"{ROOT}:{ROOT / 'python'}"}

pytestmark = pytest.mark.timeout(400)


def run(command: list[str], limit: float = 350.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=limit, check=False
    )


def quickstart(rank: int) -> str:
    """What examples/quickstart.py prints on a rank: rows on 0 and 1, columns on 2 to 4."""
    whole = torch.arange(24).view(4, 6)
    x = whole.chunk(2)[rank].tolist() if rank < 2 else []
    y = whole.chunk(3, dim=1)[rank - 2].tolist() if 2 <= rank < 5 else []
    return f"rank {rank}: x {x}  y {y}"


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.slow
@pytest.mark.usefixtures("buildable")
def test_torchrun_on_three_hosts() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    (line,) = re.findall(r"^python -m benchmarks cluster run .*$", page, re.MULTILINE)
    done = run([sys.executable, *shlex.split(line)[1:]])
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"^rank \d.*$", done.stdout, re.MULTILINE)
    ranks = [int(each[5]) for each in lines]
    assert len(set(ranks)) == 2, done.stdout  # of the first host, wherever torchrun has put it
    assert lines == [quickstart(rank) for rank in ranks]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("3 0 10.0.0.1", "six arguments or more are needed"),
        ("three 0 10.0.0.1 10.0.0.1 2 train.py", "numbers, not 'three'"),
        ("3 3 10.0.0.1 10.0.0.1 2 train.py", "INDEX 3: of 3 hosts"),
        ("3 0 10.0.0.1 10.0.0.1 0 train.py", "RANKS is at least 1"),
        ("3 0 10.0.0.1 10.0.0.1 2 no_such.py", "there is no program no_such.py"),
    ],
)
def test_what_torchrun_is_not_started_with(arguments: str, said: str) -> None:
    done = run([str(LAUNCHING / "torchrun_host.sh"), *arguments.split()], 60)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("index", "said"),
    [(0, "RendezvousTimeoutError"), (1, "RendezvousConnectionError")],
    ids=["first", "other"],
)
def test_a_host_waits_no_longer_than_join(
    index: int, said: str, unused_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the other host, which never comes. torch's own limits are minutes."""
    monkeypatch.setitem(ENVIRONMENT, "JOIN", "2")
    monkeypatch.setitem(ENVIRONMENT, "PORT", str(unused_port))
    arguments = f"2 {index} 127.0.0.1 127.0.0.1 1 examples/quickstart.py"
    done = run([str(LAUNCHING / "torchrun_host.sh"), *arguments.split()], 100)
    assert done.returncode == 1
    assert said in done.stderr, done.stderr


@pytest.mark.slow
def test_slurm_on_three_nodes() -> None:
    path = f"{os.environ['PATH']}:/usr/sbin"
    missing = [
        tool for tool in ("munged", "slurmctld", "slurmd", "srun") if not shutil.which(tool, path=path)
    ]
    if missing:
        pytest.skip(f"no Slurm here: not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("no Slurm here: its daemons need root")
    page = (ROOT / "docs" / "environment.md").read_text()
    (line,) = re.findall(r"^examples/launching/slurm_here\.sh .*$", page, re.MULTILINE)
    done = run(shlex.split(line))
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"^rank \d.*$", done.stdout, re.MULTILINE)) == [quickstart(n) for n in range(6)]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("slurm_here.sh 3", "three arguments or more are needed"),
        ("slurm_here.sh 0 2 srun", "from 1 to 99, not '0'"),
        ("slurm_rank.sh", "a program is needed"),
        ("slurm_rank.sh train.py", "start this by srun"),
    ],
)
def test_what_slurm_is_not_started_with(command: str, said: str) -> None:
    name, *arguments = command.split()
    done = run([str(LAUNCHING / name), *arguments], 60)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("buildable")
def test_what_pods_of_kubernetes_run() -> None:
    """On network namespaces in place of pods. Kubernetes is not run; its schemas are in tests/clients."""
    from benchmarks.cluster import Cluster

    service, job = pods.manifest()
    with Cluster(job["spec"]["parallelism"], 200) as cluster:
        ended = pods.run_pods(cluster, service, job, 200)
    text = "".join(output for _, output in ended)
    assert [status for status, _ in ended] == [0, 0, 0], text
    assert sorted(re.findall(r"^rank \d.*$", text, re.MULTILINE)) == [quickstart(n) for n in range(6)]


def test_pods_of_kubernetes_agree() -> None:
    """What no schema knows: numbers and names by which pods find each other and end together."""
    service, job = pods.manifest()
    spec, only = job["spec"], pods.container(job)
    hosts, _, first, *_ = only["args"]
    assert spec["completionMode"] == "Indexed"
    assert int(hosts) == spec["completions"] == spec["parallelism"]
    assert spec["backoffLimit"] == 0
    addresses = [f"10.0.0.{index + 1}" for index in range(spec["parallelism"])]
    assert f"10.0.0.1 {first}\n" in pods.names(service, job, addresses)
    (port,) = only["ports"]
    assert service["spec"]["ports"] == [{"name": port["name"], "port": port["containerPort"]}]
    script = (ROOT / only["command"][0]).read_text()
    assert f"${{PORT:-{port['containerPort']}}}" in script
    (volume,) = spec["template"]["spec"]["volumes"]
    assert only["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    assert volume["emptyDir"]["medium"] == "Memory"
    # A variable is of the script, in the list of all that matter, or in the command.
    known = script + (ROOT / "docs" / "environment.md").read_text()
    for each in only["env"]:
        name = each["name"]
        assert f"$({name})" in only["args"] or re.search(rf"\b{name}\b", known), name

"""Options of meshcast.elastic.run: torchrun's, but for some that are refused."""

from __future__ import annotations

import sys

import pytest
from meshcast.elastic import Job
from meshcast.elastic.run import read
from meshcast.errors import MeshcastError


def test_options_are_torchruns() -> None:
    config = read(["--standalone", "--nproc-per-node=4", "--max-restarts=2", "train.py", "--x", "1"])
    assert (config.least, config.most, config.max_restarts) == (4, 4, 2)
    assert (config.command, config.arguments) == (sys.executable, ("-u", "train.py", "--x", "1"))
    config = read(
        ["--nproc_per_node", "2:5", "--rdzv-conf", "join_timeout=7,last_call_timeout=0", "-m", "pack"]
    )
    assert (config.least, config.most) == (2, 5)
    assert (config.join_timeout, config.last_call) == (7, 0)
    assert config.arguments == ("-u", "-m", "pack")
    assert read(["--no-python", "sh", "-c", "true"]).command == "sh"


def test_several_hosts() -> None:
    config = read(["--nnodes=2:4", "--nproc-per-node=3:8", "--rdzv-endpoint=node0", "train.py"])
    assert (config.least, config.most, config.hosts) == (6, 8, (2, 4))
    assert (config.endpoint, config.leads) == (("node0", 29400), None)
    conf = "--rdzv-conf=is_host=true,keep_alive=3,join_timeout=9"
    config = read(["--nnodes=2", "--rdzv-endpoint=[::1]:400", conf, "train.py"])
    assert (config.hosts, config.least) == ((2, 2), 2)
    assert config.endpoint == ("::1", 400)
    assert (config.leads, config.keep_alive, config.join_timeout) == (True, 3, 9)
    one = read(["train.py"])
    assert (one.hosts, one.endpoint) == ((1, 1), None)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--nnodes", "2"], "give --rdzv-endpoint HOST:PORT as well"),
        (["--nnodes", "0:2", "--rdzv-endpoint", "a:1"], "1 <= MIN <= MAX"),
        (["--nnodes", "many", "--rdzv-endpoint", "a:1"], "1 <= MIN <= MAX"),
        (["--rdzv-endpoint", "a:70000"], "--rdzv-endpoint"),
        (["--rdzv-endpoint", "a:0"], "a port that all hosts know"),
        (["--node-rank", "1"], "--node-rank: give --rdzv-endpoint in its place"),
        (["--rdzv-conf", "is_host=perhaps"], "is_host=perhaps"),
        (["--rdzv-conf", "keep_alive=0"], "keep_alive=SECONDS"),
        (["--rdzv-backend", "etcd"], "a store of its own"),
        (["--run-path"], "only torchrun has it"),
        (["--nproc-per-node", "3:2"], "1 <= MIN <= MAX"),
        (["--nproc-per-node", "0"], "1 <= MIN <= MAX"),
        (["--nproc-per-node", "some"], "some"),
        (["--max-restarts", "-1"], "expected 0 or more"),
        (["--monitor-interval", "0"], "above 0"),
        (["--rdzv-conf", "patience=3"], "join_timeout=SECONDS"),
        (["--no-python", "--module"], "one or the other"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_refused(options: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        read([*options, "train.py"])
    assert raised.value.code == 2
    assert text in capsys.readouterr().err


def test_a_job_says_what_starts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MeshcastError, match=r"python -m meshcast\.elastic\.run"):
        Job(object)

"""Hosts with several NICs: the bytes arrive, of random layouts too, and every interface carries its share."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import Cluster, run_ranks  # noqa: E402

pytestmark = pytest.mark.timeout(240)

PROGRAM = str(Path(__file__).with_name("rails_program.py"))
NBYTES = 8 * 64 * 1024 * 4  # of the program's tensor, which it moves three times


def run(nics: int, ranks_per_host: int, *arguments: str) -> str:
    paths = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with Cluster(2, 400, nics) as cluster:
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        return run_ranks(cluster, ranks_per_host, [sys.executable, PROGRAM, *arguments], limit=200, env=env)


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize(
    ("nics", "ranks_per_host"),
    [(2, 1), (2, 2), *(pytest.param(n, r, marks=pytest.mark.slow) for n, r in [(3, 1), (4, 4)])],
)
def test_every_interface_carries_its_share(nics: int, ranks_per_host: int) -> None:
    sent = json.loads(run(nics, ranks_per_host).splitlines()[-1])
    assert len(sent) == nics
    for count in sent:  # of the host that holds the tensor; headers and the other traffic come on top
        assert count >= 3 * NBYTES / nics, sent


@pytest.mark.usefixtures("buildable")
@pytest.mark.parametrize(
    "wrong", ["eth0,eth9", *(pytest.param(w, marks=pytest.mark.slow) for w in ("eth0", "eth1,eth1"))]
)
def test_ranks_that_name_other_interfaces_are_refused_everywhere(wrong: str) -> None:
    run(2, 2, wrong)

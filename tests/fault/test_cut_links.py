"""The link of a host goes down: every rank raises within the limit, and groups of others go on. Hosts are
network namespaces, which need root and iproute2."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from multiproc.conftest import buildable  # noqa: F401
from multiproc.libraries import LIBRARIES, need_system

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import Cluster, run_ranks  # noqa: E402

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, pytest.mark.usefixtures("buildable")]

PROGRAM = str(Path(__file__).with_name("cut_link_program.py"))
NEW_PLANS = str(Path(__file__).with_name("cut_plans_program.py"))


def _run(program: str, *arguments: str, library: str = "wheel") -> str:
    paths = [str(ROOT / "python"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    with Cluster(3, 800, 2) as cluster:
        env = {"PYTHONPATH": os.pathsep.join(paths), "MESHCAST_UCX": library, "SWITCH": cluster.switch}
        env["MESHCAST_TRANSPORT"] = "ucx"
        return run_ranks(cluster, 1, [sys.executable, program, *arguments], limit=200, env=env)


def test_control() -> None:
    """While the link is up the same calls succeed."""
    _run(PROGRAM, "transfer", "keeps", "wheel")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("moment", ["transfer", "idle"])
def test_cut(moment: str, library: str) -> None:
    if library == "system":
        need_system()
    print(_run(PROGRAM, moment, "cuts", library, library=library))


@pytest.mark.parametrize(
    ("call", "ports"), [("local", "port1x0"), ("state", "port1x1"), ("state", "port1x0,port1x1")]
)
def test_cut_while_plans_are_new(call: str, ports: str) -> None:
    """port1x0 is the link of the store, port1x1 that of the data."""
    print(_run(NEW_PLANS, call, ports))

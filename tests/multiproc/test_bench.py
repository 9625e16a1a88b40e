"""The benchmarks' methods and cases: cases_bench.py, run in one set of five processes."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import meshcast
import pytest
from meshcast.bench.methods import METHODS
from multiproc.fork_server import environment, run
from multiproc.harness import WorldResult, run_world

pytestmark = [pytest.mark.timeout(420)]

MODULE = Path(__file__).with_name("cases_bench.py")


def cases_of(name: str) -> list[str]:
    """Names of the cases in a list of the module."""
    spec = importlib.util.spec_from_file_location("cases_bench", MODULE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [case.__name__ for case in getattr(module, name)]


@pytest.fixture(scope="module")
def world() -> WorldResult:
    return run_world(MODULE, 5, limit=360.0)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases_of("CASES"))
def test_bench(world: WorldResult, case: str) -> None:
    world.check(case)


@pytest.mark.slow
def test_every_method_can_do_something(world: WorldResult) -> None:
    done = {method for case in cases_of("LAYOUT_CASES") for method in world.value(case, 0)}
    assert done == set(METHODS)


@pytest.mark.slow
def test_processes_end_cleanly(world: WorldResult) -> None:
    world.check_ends()


def test_the_command_prints_what_it_measured_as_json() -> None:
    """Once, from rank 0, and nothing else on stdout."""
    names = ["two ranks to the other two", "one rank to three"]
    options = ["--json", "--repeats", "2", "--seconds", "0.01", "--methods", "auto,DTensor parent mesh"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = run([*launch, "-m", "meshcast", "bench", *names, *options], env=environment())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    topology = meshcast.Topology.from_json(json.dumps(found["topology"]))
    assert [host.ranks for host in topology.hosts] == [(0, 1, 2, 3)]
    two, three = found["cases"]
    assert [two["name"], three["name"]] == names
    for case in (two, three):
        assert case["group"] == "in-host"
        assert case["nbytes"] == 4 * case["shape"][0] * case["shape"][1] > 0
        assert len(case["seconds"]["auto"]) == len(case["busy"]["auto"]) == 2
        assert min(case["seconds"]["auto"]) > 0 < case["lower_bound"] <= case["predicted"]
        assert set(case["wrong_bytes"].values()) == {0}
        assert "failed" not in case
    assert set(two["seconds"]) == {"auto", "DTensor parent mesh"}
    assert set(three["seconds"]) == {"auto"}
    assert three["not_run"] == {"DTensor parent mesh": "needs meshes of one shape"}

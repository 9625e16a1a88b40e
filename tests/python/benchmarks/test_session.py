"""A benchmark run goes on past what fails: the ranks and the peers are played by functions of this file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from meshcast import Topology
from meshcast.bench.cases import CASES, Case, find

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import Cluster, ClusterError, Loopback  # noqa: E402
from benchmarks.reshard import session  # noqa: E402

CALIBRATION = {"hosts": 4, "efficiency": 0.95, "slowest_all_at_once": 0.99}
NAMES = ["n-to-m 1", "n-to-m 2", "n-to-m 3"]


class Unshaped(Loopback, Cluster):
    """A Cluster in type, so that peers run, whose hosts are this machine."""

    own_cores: ClassVar[list[bool]] = []  # of all clusters since the list was emptied

    def __init__(self, hosts: int, rates: list[float], nics: int, own_cores: bool) -> None:
        Unshaped.own_cores.append(own_cores)
        Loopback.__init__(self, hosts, rates, nics)


class Ranks:
    """Plays the ranks: reports what they would. breaks: (case, method) at which they fail."""

    def __init__(self, calibration: dict[str, Any], breaks: set[tuple[str, str]] = frozenset()) -> None:
        self.calibration, self.breaks = calibration, breaks
        self.jobs: list[dict[str, Any]] = []

    def __call__(self, cluster, ranks_per_host, program, job, *, limit, heard, look):
        del limit
        assert program == "reshard.session:rank"
        self.jobs.append(job)
        topology = Topology.uniform(ranks_per_host, 0.25).to_json()
        heard("calibration", self.calibration | {"topology": topology})
        look()
        for name in job["cases"]:
            methods = [method for method in job["methods"] if method not in job["failed"].get(name, [])]
            for method in methods:
                heard("begin", [name, method])
                look()
                if (name, method) in self.breaks:
                    raise ClusterError(f"rank 3 ended with status 1:\nValueError: {method} is broken")
            heard("case", measured(name, methods))
            look()
            assert Path(job["folder"], f"go {name}").exists()
        assert cluster.folder == Path(job["folder"])
        return ""


def measured(name: str, methods: list[str]) -> dict[str, Any]:
    return {
        "name": name,
        "lower_bound": 0.01 if name == "n-to-m 3" else 0.1,
        "seconds": {method: [0.11, 0.1, 0.12] for method in methods},
        "busy": {method: [0.5] * 3 for method in methods},
        "wrong_bytes": dict.fromkeys(methods, 0),
        "not_run": {},
    }


class FakePeer:
    name, what = "a peer", "for tests"

    def __init__(self, missing: str = "", error: Exception | None = None) -> None:
        self._missing, self._error = missing, error
        self.calls: list[tuple[str, int, float]] = []

    def missing(self) -> str:
        return self._missing

    def why_not(self, case: Case) -> str:
        return "does not like it" if case.name == "n-to-m 2" else ""

    def run(self, cluster, case: Case, topology: Topology, repeats: int, slow: float) -> dict[str, Any]:
        del cluster, topology
        self.calls.append((case.name, repeats, slow))
        if self._error is not None:
            raise self._error
        return {"seconds": [0.2], "busy": [0.1], "wrong_bytes": 0}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch):
    def play(
        ranks: Ranks, peers: list[FakePeer], names: list[str] = NAMES, loopback: str = ""
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"cases": [], "calibrations": [], "left_out": {}}
        monkeypatch.setattr(session, "run_job", ranks)
        monkeypatch.setattr(session, "Cluster", Unshaped)
        options = session.Options(
            ["auto", "send_recv", "a peer"], peers, 250.0, 0.3, 5, loopback, found["cases"].append,
            found["calibrations"].append,
            lambda cases, why: found["left_out"].update(dict.fromkeys(cases, why)),
        )  # fmt: skip
        session.run(find(names), options)
        return found

    return play


def test_cases_inside_one_host_have_all_cores(run) -> None:
    Unshaped.own_cores.clear()
    run(Ranks(CALIBRATION), [], ["n-to-m 1", "rows to columns"])
    assert Unshaped.own_cores == [True, False]


def test_all_goes_well(run) -> None:
    ranks, peer = Ranks(CALIBRATION), FakePeer()
    found = run(ranks, [peer])
    assert [case["name"] for case in found["cases"]] == NAMES
    assert len(ranks.jobs) == 1
    assert ranks.jobs[0]["methods"] == ["auto", "send_recv"]
    assert ranks.jobs[0]["mbit"] == [250.0] * 4
    assert [name for name, _, _ in peer.calls] == ["n-to-m 1", "n-to-m 3"]
    assert {repeats for _, repeats, _ in peer.calls} == {3}
    assert [slow for _, _, slow in peer.calls] == [pytest.approx(0.3), 0.25], "short ones are never slow"
    first, second, _ = found["cases"]
    assert first["seconds"]["a peer"] == [0.2]
    assert second["not_run"] == {"a peer": "does not like it"}
    assert found["left_out"] == {}


def test_a_broken_method_is_noted_and_left_out(run) -> None:
    ranks = Ranks(CALIBRATION, {("n-to-m 2", "send_recv")})
    found = run(ranks, [FakePeer()])
    assert [case["name"] for case in found["cases"]] == NAMES
    assert [job["cases"] for job in ranks.jobs] == [NAMES, NAMES[1:]]
    assert ranks.jobs[1]["failed"] == {"n-to-m 2": ["send_recv"]}
    assert found["cases"][1]["failed"] == {"send_recv": "ValueError: send_recv is broken"}
    assert "send_recv" not in found["cases"][1]["seconds"]
    assert "send_recv" in found["cases"][2]["seconds"]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("it says no"),
        OSError("no memory"),
        subprocess.TimeoutExpired("mpirun", 90),
        ValueError("json"),
    ],
)
def test_a_broken_peer_is_noted(run, error: Exception) -> None:
    found = run(Ranks(CALIBRATION), [FakePeer(error=error)])
    assert [case["name"] for case in found["cases"]] == NAMES
    assert found["cases"][0]["failed"] == {"a peer": str(error)}
    assert "a peer" not in found["cases"][0]["seconds"]


def test_a_missing_peer_is_named(run) -> None:
    peer = FakePeer(missing="not installed: apt-get install it")
    found = run(Ranks(CALIBRATION), [peer])
    assert all(case["not_run"] == {"a peer": "not installed: apt-get install it"} for case in found["cases"])
    assert peer.calls == []


def test_ranks_that_never_get_anywhere_end_it(run) -> None:
    every = {(name, method) for name in NAMES for method in ("auto", "send_recv")}
    ranks = Ranks(CALIBRATION, every)
    found = run(ranks, [])
    assert [case["seconds"] for case in found["cases"]] == [{}, {}, {}]
    assert all(set(case["failed"]) == {"auto", "send_recv"} for case in found["cases"])
    assert len(ranks.jobs) == 7


@pytest.mark.parametrize(
    ("part", "said"),
    [({"efficiency": 0.5}, "does not carry"), ({"slowest_all_at_once": 0.7}, "cores are the limit")],
)
def test_a_rate_beyond_the_machine_is_refused(run, part: dict[str, float], said: str) -> None:
    ranks = Ranks(CALIBRATION | part)
    with pytest.raises(session.OverloadedError, match=said):
        run(ranks, [])
    assert len(ranks.jobs) == 1
    # On loopback no link has a rate; what is measured there is never reported.
    assert len(run(Ranks(CALIBRATION | part), [FakePeer()], loopback="no root")["cases"]) == 3


def test_peers_do_not_run_on_loopback(run) -> None:
    peer = FakePeer()
    found = run(Ranks(CALIBRATION), [peer], loopback="no root")
    assert found["cases"][0]["not_run"] == {"a peer": "not run on loopback"}
    assert peer.calls == []


def test_ranks_that_stand_still_are_found(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_STILL", 0.05)
    still = iter([True])

    class Standing(Ranks):
        def __call__(self, cluster, ranks_per_host, program, job, *, limit, heard, look):
            if not next(still, False):
                return super().__call__(
                    cluster, ranks_per_host, program, job, limit=limit, heard=heard, look=look
                )
            topology = Topology.uniform(ranks_per_host, 0.25).to_json()
            heard("calibration", CALIBRATION | {"topology": topology})
            heard("begin", ["n-to-m 1", "auto"])
            while True:  # ends by what look raises
                look()

    found = run(Standing(CALIBRATION), [])
    assert "nothing was heard" in found["cases"][0]["failed"]["auto"]
    assert [case["name"] for case in found["cases"]] == NAMES


def test_each_setting_has_a_cluster_of_its_own(run) -> None:
    names = ["n-to-m 1", "one source at half the rate", "shards, 4 NICs"]
    ranks = Ranks(CALIBRATION)
    found = run(ranks, [], names)
    assert [case["name"] for case in found["cases"]] == names
    assert [job["mbit"] for job in ranks.jobs] == [[250.0] * 4, [250.0, 125.0, 250.0, 250.0], [62.5] * 4]
    assert [job["nics"] for job in ranks.jobs] == [1, 1, 4]


def test_settings_cover_all_cases_once() -> None:
    listed = [case for _, cases in session.settings(CASES) for case in cases]
    assert sorted(case.name for case in listed) == sorted(case.name for case in CASES)
    assert len({case.name for case in CASES}) == len(CASES)

"""`python -m meshcast doctor` reports and never guesses."""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import meshcast
import pytest
import torch
from meshcast.base import settings
from meshcast.base.settings import network_links
from meshcast.cli import doctor

PACKAGE = Path(meshcast.__file__).parent


def fake_link(sysfs: Path, name: str, speed: str, state: str = "up") -> None:
    (sysfs / name).mkdir(parents=True)
    (sysfs / name / "speed").write_text(f"{speed}\n")
    (sysfs / name / "operstate").write_text(f"{state}\n")


def test_links_have_the_speed_of_the_system_or_none(tmp_path: Path) -> None:
    fake_link(tmp_path, "eth0", "25000")
    fake_link(tmp_path, "veth1", "-1")
    fake_link(tmp_path, "eth2", "10000", state="down")
    fake_link(tmp_path, "lo", "0", state="unknown")
    problems: list[str] = []
    assert doctor._links(problems, tmp_path) == {
        "eth0": "25 Gbit/s",
        "veth1": "speed unknown to the operating system",
    }
    (problem,) = problems
    assert "eth0: 25 Gbit/s, veth1: speed unknown" in problem


def test_a_link_of_the_planned_speed_is_no_problem(tmp_path: Path) -> None:
    fake_link(tmp_path, "eth0", "10000")
    problems: list[str] = []
    assert doctor._links(problems, tmp_path) == {"eth0": "10 Gbit/s"}
    assert problems == []


def test_report_of_this_build() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "meshcast", "doctor", "--json"],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["meshcast"] == meshcast.__version__
    assert report["versions"]["torch"].startswith(torch.__version__)
    assert report["backends"]["gloo"] == "available, opens its listening socket"
    assert not [problem for problem in report["problems"] if problem.startswith("import meshcast")]
    assert report["verdict"].startswith("meshcast works here")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MESHCAST_TRANSPORT", "tcp", "MESHCAST_TRANSPORT is 'tcp'; expected auto, ucx or gloo"),
        ("MESHCAST_SHM", "yes", "MESHCAST_SHM is 'yes'; expected 0"),
        ("MESHCAST_SHM_MB", "-5", "MESHCAST_SHM_MB is '-5'; expected a number of MiB"),
        ("MESHCAST_IFNAMES", "eth9999", "MESHCAST_IFNAMES is 'eth9999'; expected different interfaces"),
        ("MESHCAST_IFNAMES", "lo,lo", "MESHCAST_IFNAMES is 'lo,lo'; expected different interfaces"),
    ],
)
def test_what_is_wrong_with_a_variable(
    name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    ((setting, problem),) = settings.problems()
    assert setting is not None
    assert setting.name == name
    assert problem.startswith(expected)


# Values that calls pass over or refuse.
NONSENSE = {
    "MESHCAST_BROADCAST_BYTES": "many",
    "MESHCAST_CUDA_STAGING_MB": "plenty",
    "MESHCAST_CUDA_TRANSPORT": "carrier pigeon",
    "MESHCAST_FLIGHT_RECORD": "/dev/null/no folder/job",
    "MESHCAST_GPU_FIGURES": "/dev/null/no folder",
    "MESHCAST_HOST_ID": "\u2603 \n",
    "MESHCAST_HUGE_PAGES": "2",
    "MESHCAST_IFNAMES": "lo,,lo",
    "MESHCAST_LOG": "loud",
    "MESHCAST_SHM": "maybe",
    "MESHCAST_SHM_MB": "1e3",
    "MESHCAST_TRANSPORT": "gloo,ucx",
    "MESHCAST_UCX": __file__,
    "MESHCAST_WAIT_NOTICE": "soon",
}
HARMLESS = {"MESHCAST_FLIGHT_RECORD", "MESHCAST_LOG", "MESHCAST_WAIT_NOTICE"}


def examined(**variables: str) -> dict[str, Any]:
    """The report of doctor with these, in a process of its own, which reads them at the import as well."""
    done = subprocess.run(
        [sys.executable, "-m", "meshcast", "doctor", "--json"],
        env={"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin", **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if works(report) else 1), done.stderr
    return report


def works(report: dict[str, Any]) -> bool:
    told: bool = report["verdict"].startswith("meshcast works here")
    assert told == (set(report["calls of two ranks"].values()) == {"works"}), report
    return told


@pytest.mark.parametrize("name", [each.name for each in settings.ALL])
def test_nonsense_is_refused_or_harmless(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the table of variables has; a new one needs its nonsense."""
    if name == "MESHCAST_UCX":  # read once in a process
        report = examined(**{name: NONSENSE[name]})
    else:
        monkeypatch.setenv(name, NONSENSE[name])
        status = doctor.run_doctor(argparse.Namespace(json=True))
        report = json.loads(capsys.readouterr().out)
        assert status == (0 if works(report) else 1)
    told = [each for each in report["problems"] if name in each]
    if name in HARMLESS:
        assert [each.partition(":")[0] for each in told] == ["what a variable asks for"]
        assert report["verdict"] == "meshcast works here, apart from what is listed above"
    elif name in ("MESHCAST_HOST_ID", "MESHCAST_GPU_FIGURES"):  # any text will do, any folder
        assert told == []
        assert works(report)
    elif name == "MESHCAST_UCX":
        assert NONSENSE[name] in "".join(report["problems"])
        assert report["between hosts"] == {"ucx": "cannot be used"}
        assert works(report)  # over gloo
    else:
        assert [each.partition(" is ")[0] for each in told] == [f"every call: {name}"]
        assert report["verdict"] == "meshcast plans here, but an environment variable makes its calls fail"
    assert report["environment"][name] == NONSENSE[name]


def test_what_ucx_refuses_is_named_with_its_variables() -> None:
    report = examined(UCX_NET_DEVICES="eth9")
    assert report["environment"]["UCX_NET_DEVICES"] == "eth9"
    (problem,) = (each for each in report["problems"] if each.startswith("messages over UCX"))
    assert problem.endswith("; correct or unset UCX_NET_DEVICES=eth9; they travel over gloo")
    assert works(report)
    report = examined(UCX_TLS="foo", MESHCAST_TRANSPORT="ucx")
    assert report["verdict"] == "meshcast plans here, but its calls fail"


def test_a_call_that_fails_between_hosts_alone(tmp_path: Path) -> None:
    """Shared memory of UCX reaches nobody on another host: only a call finds out. Its record is not kept,
    since it would take the place of that of a job."""
    report = examined(UCX_TLS="sm", MESHCAST_FLIGHT_RECORD=str(tmp_path / "job"))
    assert report["calls of two ranks"] == {"on one host": "works", "between hosts": "fails"}
    assert report["verdict"] == "meshcast works inside this host, but its calls between hosts fail"
    (problem,) = (each for each in report["problems"] if each.startswith("calls between hosts"))
    assert problem.endswith("; correct or unset UCX_TLS=sm")
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor._Trial, "_PROGRAM", "print(); import signal; signal.raise_signal(14)")
    problems: list[str] = []
    trial = doctor._Trial()
    assert trial.import_error() == ""
    assert doctor._calls(problems, trial) == {"on one host": "fails", "between hosts": "fails"}
    assert problems == ["every call: a call of two ranks did not end in 60 s"]
    assert doctor.verdict(problems) == "meshcast plans here, but its calls fail"


def test_the_first_cause_is_told_of_several_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["on one host", "PeerLostError", "rank 1 is lost"], ["on one host", "LayoutError", "no way"]]
    monkeypatch.setattr(
        doctor._Trial, "_PROGRAM", f"print(); [print(each) for each in {[*map(json.dumps, rows)]}]"
    )
    problems: list[str] = []
    trial = doctor._Trial()
    assert trial.import_error() == ""
    doctor._calls(problems, trial)
    assert problems == ["every call: no way"]


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([["on one GPU"], ["on one GPU"]], "works"),
        ([["on one GPU"], ["on one GPU", "MeshcastError", "CUDA says no"]], "fails"),
        ([], "fails"),
    ],
)
def test_gpu_memory_that_ranks_cannot_open_is_told(
    rows: list[list[str]], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a GPU. CPU calls work all the same."""
    rows = [[call] for call in ("on one host", "between hosts")] * 2 + rows
    program = f"print(); [print(each) for each in {[*map(json.dumps, rows)]}]"
    monkeypatch.setattr(doctor._Trial, "_PROGRAM", program)
    for gpus in (1, 0):
        monkeypatch.setattr(doctor, "_has_gpu_code", lambda: True)
        monkeypatch.setattr(doctor, "_gpus", lambda gpus=gpus: gpus)
        problems: list[str] = []
        trial = doctor._Trial()
        assert trial.import_error() == ""
        facts = doctor._calls(problems, trial)
        assert facts.pop("on one GPU", "none") == (found if gpus else "none")
        assert set(facts.values()) == {"works"}
        assert bool(problems) is (found == "fails" and gpus > 0)
        assert doctor.verdict(problems).startswith("meshcast works here")
        if problems:
            reason = "CUDA says no" if rows[-1][0] == "on one GPU" else "did not end in 60 s"
            assert problems[0].startswith("CUDA IPC between ranks of this host: ") and reason in problems[0]


def test_two_ranks_open_each_others_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = itertools.count()

    class Proof:
        def __init__(self, device: int) -> None:
            self.card = f"card {next(numbers)} on {device}".encode()

        def check(self, card: bytes, limit: float) -> str:
            assert limit > 0 and card != self.card
            return "CUDA says no" if card == b"card 0 on 0" else ""

    monkeypatch.setattr("meshcast._C.IpcProof", Proof, raising=False)
    limit = timedelta(seconds=20)
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, limit)
    others = torch.distributed.TCPStore("127.0.0.1", store.port, None, False, limit)
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(doctor._open, rank, each) for rank, each in enumerate((store, others))]
        errors = [each.exception(30) for each in tries]
    assert sorted(str(error) for error in errors) == ["CUDA says no", "None"]


def test_an_interface_that_is_down_or_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    unfit = {"lo": "", "off": "is down", "bare": "has no address"}
    monkeypatch.setattr(settings, "unfit_for_messages", unfit.__getitem__)
    monkeypatch.setattr("socket.if_nameindex", lambda: list(enumerate(unfit)))
    monkeypatch.setenv("MESHCAST_IFNAMES", "off,bare,lo")
    assert settings.IFNAMES.problem() == (
        "MESHCAST_IFNAMES is 'off,bare,lo'; expected different interfaces of this host, separated by commas, "
        "at most 16 out of lo (off is down) (bare has no address)"
    )
    monkeypatch.setenv("MESHCAST_IFNAMES", "lo")
    assert settings.IFNAMES.problem() == ""


def test_loopback_can_send() -> None:
    assert settings.unfit_for_messages("lo") == ""


def test_ucx_that_is_asked_for_and_not_there_makes_calls_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked, messages travel over gloo."""
    monkeypatch.setenv("MESHCAST_UCX", "/nowhere/libucp.so.0")
    for transport, start in (("ucx", "every call"), ("auto", "messages over UCX"), ("gloo", "")):
        monkeypatch.setenv("MESHCAST_TRANSPORT", transport)
        problems: list[str] = []
        assert doctor._between_hosts(problems) == {"ucx": "cannot be used"}
        assert [problem.partition(":")[0] for problem in problems] == [start] * bool(start)
        assert all("/nowhere/libucp.so.0" in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("MESHCAST_CUDA_TRANSPROT", "is MESHCAST_CUDA_TRANSPORT meant?"),
        ("MESHCAST_IFNAME", "is MESHCAST_IFNAMES meant?"),
        ("meshcast_shm", "is MESHCAST_SHM meant?"),
        ("MESHCAST_COLOUR", "docs/environment.md lists all of them"),
    ],
)
def test_strangers_are_named_with_the_nearest_name(
    name: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    assert (None, f"{name} is no variable of meshcast: {meant}") in settings.problems()


def test_variables_of_builds_and_tests_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MESHCAST_CUDA", "MESHCAST_FAULT", "MESHCAST_TEST_SEED"):
        monkeypatch.setenv(name, "1")
    assert settings.problems() == []


def test_a_misspelt_variable_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MESHCAST_TRANSPROT", "gloo")
    assert doctor.run_doctor(argparse.Namespace(json=False)) == 0
    text = capsys.readouterr().out
    assert "MESHCAST_TRANSPROT is no variable of meshcast: is MESHCAST_TRANSPORT meant?" in text
    assert text.endswith("verdict: meshcast works here, apart from what is listed above\n")


def test_the_script_reports_a_package_that_cannot_be_imported(tmp_path: Path) -> None:
    shutil.copytree(
        PACKAGE, tmp_path / "meshcast", ignore=shutil.ignore_patterns("__pycache__", "_build_info.py")
    )
    (tmp_path / "meshcast" / "_build_info.py").write_text(
        "torch_version = '2.9.1'\nwith_cuda = False\ncompiler = 'GNU 12'\nflags = '-O3'\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "meshcast" / "cli" / "doctor.py")],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stderr
    assert "- import meshcast: ImportError: meshcast was built for torch 2.9.1" in done.stdout
    assert done.stdout.endswith("verdict: meshcast cannot be imported here\n")


def test_devices_carry_a_jobs_traffic_unless_a_variable_names_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    fake_link(tmp_path, "docker0", "10000")
    assert network_links(tmp_path) == {"docker0": 10.0}  # no device at all: whatever is up
    for name, speed in (("eth0", "25000"), ("eth1", "-1")):
        fake_link(tmp_path, name, speed)
        (tmp_path / name / "device").mkdir()
    assert network_links(tmp_path) == {"eth0": 25.0, "eth1": None}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1,docker0")
    assert network_links(tmp_path) == {"eth1": None, "docker0": 10.0}

"""Measured figures of GPUs: what NVML is asked, the file that keeps them, and when a group takes them."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from meshcast import topology
from meshcast.base import settings
from meshcast.base.wire import pack, unpack
from meshcast.cli import doctor
from meshcast.topology import GpuFigures, MachineFigures, agreed_figures, keep_figures, stored_figures

MACHINE = settings.GpuMachine("580.1", (("GPU-0", "H200"), ("GPU-1", "H200")), frozenset(), {})
FIGURES = GpuFigures(
    local_rate=370 * 10**9,
    out_rate=45 * 10**9,
    in_rate=44 * 10**9,
    round_ns=9_500,
    ranks=2,
    measured=1_700_000_000,
    domains=(("GPU-0", "GPU-1"),),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHCAST_GPU_FIGURES", str(tmp_path / "kept"))
    monkeypatch.setattr("meshcast._C.nccl_version", lambda: "2.28.9", raising=False)
    monkeypatch.setattr(settings, "gpu_machine", lambda: MACHINE)
    monkeypatch.setattr(doctor, "_base", lambda _: settings)
    topology.forget_figures()
    topology._noted.clear()
    yield tmp_path / "kept"
    topology.forget_figures()


def known_slots() -> dict[str, GpuFigures]:
    known = topology.known_figures()
    assert known is not None and known.visible == ("GPU-0", "GPU-1"), "counted all the same"
    return known.slots


def test_the_folder_is_that_of_the_user_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    for variables, expected in (
        ({}, "/home/someone/.cache/meshcast"),
        ({"XDG_CACHE_HOME": "/var/cache/of me"}, "/var/cache/of me/meshcast"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/meshcast"),
        ({"XDG_CACHE_HOME": "/var", "MESHCAST_GPU_FIGURES": "~/figures"}, "/home/someone/figures"),
        ({"MESHCAST_GPU_FIGURES": "none"}, None),
    ):
        for name in ("XDG_CACHE_HOME", "MESHCAST_GPU_FIGURES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert settings.figures_folder() == (None if expected is None else Path(expected))
    with mock.patch.object(os.path, "expanduser", side_effect=lambda path: path):  # nobody has this number
        monkeypatch.delenv("MESHCAST_GPU_FIGURES")
        assert settings.figures_folder() is None


def test_what_is_kept_is_found_again_beside_other_slots(folder: Path) -> None:
    assert stored_figures(MACHINE) == ({}, "")
    assert keep_figures(MACHINE, "nccl", FIGURES) == ""
    other = replace(FIGURES, local_rate=10**12, domains=(("GPU-0",),))
    assert keep_figures(MACHINE, "cuda_ipc, shared GPUs", other) == ""
    assert stored_figures(MACHINE) == ({"nccl": FIGURES, "cuda_ipc, shared GPUs": other}, "")
    assert len(list(folder.iterdir())) == 1, "nothing is left beside the file"
    known = topology.known_figures()
    assert known is not None and (known.visible, known.wants) == (("GPU-0", "GPU-1"), "auto")
    assert known.slots["nccl"] == replace(FIGURES, domains=())
    # A machine with other GPUs has a file of its own.
    more = replace(MACHINE, gpus=(*MACHINE.gpus, ("GPU-2", "H200")))
    assert stored_figures(more) == ({}, "")
    assert keep_figures(more, "nccl", FIGURES) == ""
    assert len(list(folder.iterdir())) == 2


def test_the_file_is_whole_at_any_time(folder: Path) -> None:
    """Whoever reads while another writes, or after a writer has died, finds the figures of before."""
    assert keep_figures(MACHINE, "nccl", FIGURES) == ""
    with mock.patch("os.replace", side_effect=OSError(28, "No space left on device")):
        said = keep_figures(MACHINE, "nccl", replace(FIGURES, local_rate=1))
    assert said.endswith(": No space left on device")
    assert stored_figures(MACHINE)[0] == {"nccl": FIGURES}
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"driver": "570.2"}, 'driver "570.2", here it is "580.1"'),
        ({"nccl": "2.20.5"}, 'nccl "2.20.5", here it is "2.28.9"'),
        ({"meshcast": "0.0.1"}, 'meshcast "0.0.1"'),
        ({"gpus": [["GPU-7", "A100"]]}, "gpus "),
    ],
)
def test_figures_of_other_surroundings_are_ignored_with_one_line(
    folder: Path, change: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert keep_figures(MACHINE, "nccl", FIGURES) == ""
    (path,) = folder.iterdir()
    content = json.loads(path.read_text())
    content["machine"] |= change
    path.write_text(json.dumps(content))
    slots, why = stored_figures(MACHINE)
    assert slots == {} and said.replace('"', "'") in why.replace('"', "'"), why
    with caplog.at_level(logging.WARNING, "meshcast"):
        for _ in range(3):
            topology.forget_figures()
            assert not known_slots()
    assert len(caplog.messages) == 1 and str(path) in caplog.messages[0]
    # A new measurement takes its place.
    assert keep_figures(MACHINE, "cuda_ipc", FIGURES) == ""
    assert stored_figures(MACHINE) == ({"cuda_ipc": FIGURES}, "")


def spoilt() -> list[str]:
    good = {
        "format": "meshcast.gpu_figures/1",
        "machine": {
            "meshcast": settings.version(),
            "driver": "580.1",
            "nccl": "2.28.9",
            "gpus": [["GPU-0", "H200"], ["GPU-1", "H200"]],
        },
        "figures": {
            "nccl": {
                "local_rate": 1, "out_rate": 0, "in_rate": 0, "round_ns": 0, "ranks": 2, "measured": 5,
                "domains": [],
            }
        },
    }  # fmt: skip

    def changed(**changes: object) -> str:
        return json.dumps({**good, "figures": {"nccl": {**good["figures"]["nccl"], **changes}}})

    text = json.dumps(good)
    return [
        "", "{", "[]", "null", text[:-20], text + "}", "\0" * 100,
        json.dumps({**good, "format": "meshcast.topology/1"}),
        json.dumps({**good, "machine": []}),
        json.dumps({**good, "figures": [1]}),
        json.dumps({**good, "figures": {"nccl": 3}}),
        json.dumps({**good, "more": 1}),
        changed(local_rate=-1), changed(local_rate=1.5), changed(local_rate="1"), changed(local_rate=1 << 60),
        changed(local_rate=0), changed(out_rate=5), changed(round_ns=-3), changed(round_ns=10**10),
        changed(ranks=0), changed(measured=-1), changed(domains=[[1]]), changed(domains={}), changed(more=1),
        changed(local_rate=True),
    ]  # fmt: skip


@pytest.mark.parametrize("text", spoilt(), ids=range(len(spoilt())))
def test_a_damaged_file_is_ignored_with_one_line(
    folder: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert keep_figures(MACHINE, "nccl", FIGURES) == ""
    (path,) = folder.iterdir()
    path.write_text(text)
    slots, why = stored_figures(MACHINE)
    assert slots == {} and why.startswith(f"{path} cannot be read: ") and why.endswith("; delete it")
    with caplog.at_level(logging.WARNING, "meshcast"):
        assert not known_slots()
        assert not known_slots()
    assert len(caplog.messages) == 1
    assert keep_figures(MACHINE, "nccl", FIGURES) == ""
    assert stored_figures(MACHINE) == ({"nccl": FIGURES}, "")


def test_what_cannot_be_read_or_written_is_no_error(folder: Path) -> None:
    folder.mkdir()
    path = topology.figures_file(MACHINE)
    assert path is not None
    path.mkdir()
    slots, why = stored_figures(MACHINE)
    assert slots == {} and "Is a directory" in why
    assert keep_figures(MACHINE, "nccl", FIGURES).startswith(f"{path}: ")
    path.rmdir()
    assert keep_figures(None, "nccl", FIGURES) == "NVML, by which machines are distinguished, is missing"


@pytest.mark.usefixtures("folder")
def test_a_folder_that_cannot_be_entered_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """As the home folder of root is for others; root itself has no such folder, but for names like this."""
    place = tmp_path / ("long" * 100)
    monkeypatch.setenv("MESHCAST_GPU_FIGURES", str(place))
    slots, why = stored_figures(MACHINE)
    assert slots == {} and "File name too long; let MESHCAST_GPU_FIGURES name another folder, or none" in why
    with caplog.at_level(logging.WARNING, "meshcast"):
        assert not known_slots()
        topology.forget_figures()
        assert not known_slots()
    assert len(caplog.messages) == 1 and str(place) in caplog.messages[0]
    assert keep_figures(MACHINE, "nccl", FIGURES).endswith(": File name too long")


def test_figures_that_were_read_before_a_measurement_are_not_taken_after_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group meets in a thread of its own while another measures."""
    keep_figures(MACHINE, "nccl", FIGURES)
    offered = topology._offered_figures

    def meanwhile_measured() -> MachineFigures | None:
        found = offered()
        keep_figures(MACHINE, "nccl", replace(FIGURES, local_rate=7))
        topology.forget_figures()
        return found

    monkeypatch.setattr(topology, "_offered_figures", meanwhile_measured)
    before = topology.known_figures()
    assert before is not None and before.slots["nccl"].local_rate == FIGURES.local_rate
    monkeypatch.setattr(topology, "_offered_figures", offered)
    after = topology.known_figures()
    assert after is not None and after.slots["nccl"].local_rate == 7
    assert folder.is_dir()


@pytest.mark.usefixtures("folder")
def test_nobody_asks_nvml_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = mock.Mock(return_value=MACHINE)
    monkeypatch.setattr(settings, "gpu_machine", asked)
    assert topology.known_figures() is None
    assert not asked.called
    keep_figures(MACHINE, "nccl", FIGURES)
    topology.forget_figures()
    for _ in range(3):
        assert topology.known_figures() is not None
    assert asked.call_count == 1
    monkeypatch.setattr(settings, "gpu_machine", lambda: None)
    topology.forget_figures()
    assert topology.known_figures() is None


@pytest.mark.parametrize(
    ("named", "found"),
    [
        (None, ("GPU-0", "GPU-1")),
        ("1", ("GPU-1",)),
        ("7", ("7",)),
        ("1,GPU-1", ("GPU-1", "GPU-1")),
        ("MIG-3", ("MIG-3",)),
        (" GPU-1, GPU-0", ("GPU-1", "GPU-0")),
        ("0,-1,1", ("GPU-0",)),
        ("", ()),
    ],
)
def test_gpus_that_a_process_sees(
    named: str | None, found: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert settings.visible_gpus(MACHINE) == found


def test_the_age_is_said() -> None:
    hour = 3600
    assert FIGURES.text(FIGURES.measured + 5 * hour) == (
        "370 GB/s inside the host, 45 out and 44 GB/s in, 9.5 us a round; by 2 ranks, 5 hours ago "
        "(2023-11-14 22:13 UTC)"
    )
    old = replace(FIGURES, out_rate=0, in_rate=0, round_ns=0).text(FIGURES.measured + 75 * hour)
    assert old.startswith("370 GB/s inside the host, a round not measured; by 2 ranks, 3 days ago")


def test_doctor_shows_them_with_their_age(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    assert doctor._figures(2, problems) == {
        "measured figures": 'none: rates are guessed; meshcast.measure_topology(device="cuda") measures them'
    }
    keep_figures(MACHINE, "nccl", FIGURES)
    found = doctor._figures(2, problems)
    assert found["measured figures"] == str(next(folder.iterdir()))
    assert found["over nccl"].startswith("370 GB/s inside the host, ") and "days ago" in found["over nccl"]
    assert not problems
    next(folder.iterdir()).write_text("{")
    assert doctor._figures(2, problems)["measured figures"].startswith("ignored: rates are guessed")
    assert (
        len(problems) == 1
        and "cannot be read" in problems[0]
        and doctor.verdict(problems).startswith("meshcast works here")
    )
    monkeypatch.setenv("MESHCAST_GPU_FIGURES", "none")
    assert "MESHCAST_GPU_FIGURES is none" in doctor._figures(2, problems)["measured figures"]
    monkeypatch.setattr(settings, "gpu_machine", lambda: None)
    assert "NVML is missing" in doctor._figures(2, problems)["measured figures"]
    assert doctor._figures(0, problems) == {}


# What a group takes.


def machine(**changes: Any) -> MachineFigures:
    slots = {"nccl": FIGURES, "cuda_ipc, shared GPUs": replace(FIGURES, local_rate=10**12, round_ns=4000)}
    return replace(MachineFigures(("0", "1", "2", "3"), "auto", slots), **changes)


def test_an_offer_survives_the_store() -> None:
    for each in (machine(), None):
        assert unpack(MachineFigures | None, pack(each, MachineFigures | None)) == each  # type: ignore[arg-type]


def test_a_group_on_one_host_takes_its_figures() -> None:
    found = agreed_figures({3: "a", 5: "a", 9: "a"}, {3: None, 5: machine(), 9: machine(visible=())})
    assert found is not None
    assert (found.slot, found.local_rate, found.round_ns) == ("nccl", 370 * 10**9, 9500)
    # Of rank 9: each rank sees its own GPU, and those of other GPUs have no file.
    own = {rank: machine(visible=(f"GPU-{rank}",), slots={}) for rank in (3, 5)}
    same = agreed_figures({3: "a", 5: "a", 9: "a"}, {**own, 9: machine(visible=("GPU-9",))})
    assert same == found
    assert agreed_figures({3: "a", 5: "a"}, own) is None
    (host,) = found.topology.hosts
    assert host.ranks == (3, 5, 9) and host.local_rate == 370 * 10**9
    assert found.topology.latency == 9.5e-6


def test_ranks_that_share_a_gpu_have_figures_of_their_own() -> None:
    ranks = dict.fromkeys(range(5), "a")
    found = agreed_figures(ranks, {rank: machine() for rank in ranks})
    assert found is not None and found.slot == "cuda_ipc, shared GPUs"
    assert (found.local_rate, found.round_ns) == (10**12, 4000)
    # Each rank may see its own alone.
    alone = agreed_figures(ranks, {rank: machine(visible=(f"GPU-{rank}",)) for rank in ranks})
    assert alone is not None and alone.slot == "nccl"
    one = agreed_figures({0: "a", 1: "a"}, dict.fromkeys((0, 1), machine(visible=("3",))))
    assert one is not None and one.slot == "cuda_ipc, shared GPUs"
    # Over NCCL, which was not measured.
    assert agreed_figures(ranks, {rank: machine(wants="nccl") for rank in ranks}) is None
    apart = {rank: "ab"[rank == 4] for rank in range(6)}
    assert agreed_figures(apart, {rank: machine() for rank in apart}) is None


def test_several_hosts_have_their_own_rates_and_the_slowest_round() -> None:
    hosts = {0: "a", 1: "b", 2: "a", 3: "c"}
    fast = replace(FIGURES, local_rate=0, out_rate=90 * 10**9, round_ns=20_000)
    offers = {0: machine(), 1: machine(slots={"nccl": fast}), 2: machine(), 3: machine()}
    found = agreed_figures(hosts, offers)
    assert found is not None
    assert [host.ranks for host in found.topology.hosts] == [(0, 2), (1,), (3,)]
    assert [host.nics[0].out_rate for host in found.topology.hosts] == [45 * 10**9, 90 * 10**9, 45 * 10**9]
    assert found.round_ns == 20_000
    unknown = {**offers, 3: machine(slots={"nccl": replace(FIGURES, round_ns=0)})}
    found = agreed_figures(hosts, unknown)
    assert found is not None and found.round_ns == 0 and found.topology.latency == 20e-6
    for lacking in (None, machine(slots={}), machine(slots={"nccl": replace(FIGURES, out_rate=0)})):
        assert agreed_figures(hosts, {**offers, 1: lacking}) is None
    # Two ranks of a host on which a single one was measured.
    assert agreed_figures({0: "a", 1: "a"}, dict.fromkeys((0, 1), machine(slots={"nccl": fast}))) is None


def test_all_ranks_come_to_one_verdict() -> None:
    """A function of what all have heard: the order of the ranks in it does not count."""
    rng = random.Random(5)
    taken = 0
    for _ in range(300):
        ranks = rng.sample(range(20), rng.choice([1, 2, 3, 5, 7]))
        hosts = {rank: rng.choice("aab") for rank in ranks}
        offers = {
            rank: rng.choice(
                [
                    machine(),
                    machine(visible=("0", "1")),
                    machine(wants="cuda_ipc"),
                    machine(slots={"nccl": FIGURES}),
                    None,
                ]
            )
            for rank in ranks
        }
        found = []
        for _ in range(3):
            rng.shuffle(ranks)
            found.append(agreed_figures({r: hosts[r] for r in ranks}, {r: offers[r] for r in ranks}))
        assert found[0] == found[1] == found[2]
        taken += found[0] is not None
    assert 30 < taken < 270


# NVML.


_ANSWERS = {
    "nvmlInit_v2": "_init",
    "nvmlShutdown": "_shutdown",
    "nvmlDeviceGetCount_v2": "_count",
    "nvmlDeviceGetHandleByIndex_v2": "_handle",
    "nvmlSystemGetDriverVersion": "_driver",
    "nvmlDeviceGetUUID": "_uuid",
    "nvmlDeviceGetName": "_name",
    "nvmlDeviceGetP2PStatus": "_p2p",
    "nvmlDeviceGetGpuFabricInfo": "_fabric",
}


class Nvml:
    """Two GPUs with NVLinks between them, and a third. failing: a function that fails; lacking: one that the
    library does not have."""

    def __init__(self, failing: str = "", lacking: str = "", cluster: bytes = b"", state: int = 3) -> None:
        self.failing, self.lacking, self.open = failing, lacking, 0
        self.cluster, self.state = cluster, state

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.lacking:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.failing:
                return 999
            return getattr(self, _ANSWERS[name])(*arguments) or 0

        return call

    def _init(self) -> None:
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _count(self, count: Any) -> None:
        count._obj.value = 3

    def _handle(self, index: int, handle: Any) -> None:
        handle._obj.value = 1000 + index

    def _driver(self, text: Any, size: int) -> None:
        assert ctypes.sizeof(text) == size
        text.value = b"580.1"

    def _uuid(self, handle: Any, text: Any, _: int) -> None:
        text.value = f"GPU-{handle.value - 1000}".encode()

    def _name(self, _: Any, text: Any, __: int) -> None:
        text.value = b"H200"

    def _p2p(self, one: Any, other: Any, index: int, state: Any) -> None:
        assert index == 2  # NVML_P2P_CAPS_INDEX_NVLINK
        state._obj.value = 0 if {one.value, other.value} <= {1000, 1002} else 5

    def _fabric(self, _: Any, info: Any) -> None:
        info._obj.state, info._obj.clique = self.state, 4
        info._obj.cluster[: len(self.cluster)] = self.cluster


def asked(monkeypatch: pytest.MonkeyPatch, library: Nvml) -> settings.GpuMachine | None:
    monkeypatch.setattr(settings.ctypes, "CDLL", lambda _: library)
    found = settings.gpu_machine()
    assert library.open == 0
    return found


def test_nvml_says_what_a_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    found = asked(monkeypatch, Nvml())
    assert found is not None
    assert found.driver == "580.1"
    assert found.gpus == (("GPU-0", "H200"), ("GPU-1", "H200"), ("GPU-2", "H200"))
    assert found.linked("GPU-0") == ("GPU-2",) and found.linked("GPU-2") == ("GPU-0",)
    assert found.linked("GPU-1") == () and found.fabrics == {}


def test_gpus_of_an_nvlink_network_name_their_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = bytes([7] * 16)
    found = asked(monkeypatch, Nvml(cluster=cluster))
    assert found is not None and found.fabrics == {f"GPU-{i}": f"{'07' * 16}/4" for i in range(3)}
    for without in (
        Nvml(cluster=bytes(16)),  # a machine that is one by itself
        Nvml(cluster=cluster, state=2),  # still being connected
        Nvml("nvmlDeviceGetGpuFabricInfo", cluster=cluster),
        Nvml(lacking="nvmlDeviceGetGpuFabricInfo", cluster=cluster),
    ):
        found = asked(monkeypatch, without)
        assert found is not None and found.fabrics == {}


@pytest.mark.parametrize(
    "library",
    [
        Nvml("nvmlDeviceGetUUID"),
        Nvml("nvmlDeviceGetCount_v2"),
        Nvml("nvmlSystemGetDriverVersion"),
        Nvml(lacking="nvmlDeviceGetP2PStatus"),
        Nvml("nvmlDeviceGetHandleByIndex_v2"),
    ],
)
def test_an_nvml_that_fails_says_nothing(library: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asked(monkeypatch, library) is None


def test_without_nvml_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings.ctypes, "CDLL", mock.Mock(side_effect=OSError("not found")))
    assert settings.gpu_machine() is None
    failing = Nvml("nvmlInit_v2")
    assert asked(monkeypatch, failing) is None

"""What ranks say of their GPUs and what speaks against connecting them: rules, judged without any GPU."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from meshcast.base.wire import pack, unpack
from meshcast.errors import LayoutError, MeshcastError
from meshcast.transfers import gpu
from meshcast.transfers.gpu import (
    CUDA_IPC,
    NCCL,
    GpuOffer,
    blocks_of,
    choose_transport,
    own_offer,
    staging_of,
)
from meshcast.transfers.medium import device_types_of, gpu_obstacle, require_gpu


def offer(number: int, **changes: object) -> GpuOffer:
    fields = {"host": f"host{number // 2}", "device": number % 2, "uuid": f"GPU-{number}", "gpu": "H200"}
    return GpuOffer(**(fields | {"nccl": "2.28.9"} | changes))  # type: ignore[arg-type]


def offers(count: int = 5, **of_rank: GpuOffer) -> dict[int, GpuOffer]:
    """Of ranks 10, 11, ...; of_rank: r12=... in place of a good one."""
    return {10 + i: of_rank.get(f"r{10 + i}", offer(i)) for i in range(count)}


def test_a_gpu_for_each_rank_is_fine() -> None:
    for rank in offers():
        assert choose_transport(offers(), rank) == NCCL


def test_equal_indices_and_equal_uuids_of_unlike_hosts_are_fine() -> None:
    choose_transport(offers(r11=offer(1, host="elsewhere", uuid="GPU-0", device=0)), 10)


@pytest.mark.parametrize("rank", [10, 12, 14])
def test_two_ranks_on_one_gpu_are_refused_alike(rank: int) -> None:
    with pytest.raises(LayoutError) as found:
        choose_transport(offers(r13=offer(3, uuid="GPU-2", device=0)), rank)
    text = str(found.value)
    assert text.startswith(
        f"connect on rank {rank}: ranks 12 and 13 both use GPU GPU-2 (H200; cuda:0 and cuda:0)"
    )
    assert "torch.cuda.set_device" in text
    assert "2.30.3" in text and "NCCL_MULTI_RANK_GPU_ENABLE=1" in text and "2.28.9" in text
    assert text.endswith("cuda_ipc cannot: ranks 10 and 12 are on two hosts: use NCCL between hosts")
    assert (found.value.rank, found.value.peer, found.value.phase) == (rank, 13, "connect")


@pytest.mark.parametrize(
    ("version", "both", "fine"),
    [("2.30.3", True, True), ("2.31.0", True, True), ("2.30.2", True, False), ("2.30.3", False, False)],
)
def test_sharing_needs_a_new_nccl_and_leave_on_every_rank(version: str, both: bool, fine: bool) -> None:
    pair = {
        1: offer(0, nccl=version, may_share=True, wants=NCCL),
        4: offer(0, nccl=version, may_share=both, wants=NCCL),
    }
    if fine:
        assert choose_transport(pair, 1) == NCCL
    else:
        with pytest.raises(LayoutError, match="ranks 1 and 4 both use GPU") as found:
            choose_transport(pair, 4)
        assert "so does cuda_ipc, which MESHCAST_CUDA_TRANSPORT=nccl forbids" in str(found.value)


def test_a_rank_that_cannot_names_itself_to_all() -> None:
    for rank in offers():
        with pytest.raises(MeshcastError, match="rank 12 cannot use its GPU: no NCCL was found") as found:
            choose_transport(offers(r12=GpuOffer(obstacle="no NCCL was found")), rank)
        assert (found.value.rank, found.value.peer) == (rank, 12)
        assert not isinstance(found.value, LayoutError)


def test_releases_of_nccl_do_not_mix() -> None:
    choose_transport(offers(r11=offer(1, nccl="2.28.3")), 10)  # patches do
    with pytest.raises(MeshcastError, match=r"rank 10 has NCCL 2\.28\.9, rank 11 has NCCL 2\.27\.9"):
        choose_transport(offers(r11=offer(1, nccl="2.27.9")), 13)


def test_an_offer_survives_the_store() -> None:
    for each in (
        offer(3, may_share=True, reaches=("GPU-4", "GPU-5"), wants=CUDA_IPC),
        GpuOffer(obstacle='a "quoted"\nreason'),
    ):
        assert unpack(GpuOffer, pack(each)) == each


GIB = 1 << 30


@pytest.mark.parametrize(
    ("free", "asked", "goal", "limit"),
    [
        (128 * GIB, 0, 256 << 20, 8 * GIB),  # four ranks share a quarter
        (8 * GIB, 0, 64 << 20, GIB // 2),  # each has what a rank needs at least
        (128 * GIB, 1 << 30, 128 << 20, GIB),
        (128 * GIB, 16 << 20, 8 << 20, 16 << 20),
    ],
)
def test_staging_is_bounded_for_all_lanes_of_a_process(free: int, asked: int, goal: int, limit: int) -> None:
    ranks = {i: offer(0, free=free, staging=asked) for i in range(4)}
    assert staging_of(ranks) == (goal, dict.fromkeys(range(4), limit))


def test_plans_are_cut_for_the_rank_with_the_least_staging() -> None:
    ranks = {0: offer(0, free=80 * GIB), 1: offer(1, free=80 * GIB, staging=512 << 20)}
    assert staging_of(ranks) == (64 << 20, {0: 20 * GIB, 1: 512 << 20})


@pytest.mark.parametrize("multiprocessors", [132, 108, 16, 20, 2])
def test_kernels_of_all_communicators_fit_on_the_gpu_at_once(
    multiprocessors: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the order in which they are made, of one group or of several."""
    left, made = multiprocessors, []
    while left > 0:
        ranks = {0: offer(0, blocks=left), 1: offer(1, blocks=multiprocessors)}
        found = blocks_of(ranks, 1)
        made += found
        left -= found[0]
    assert sum(made) == multiprocessors
    assert all(each in (1, 2, 4, 8, 16) for each in made)
    assert made == sorted(made, reverse=True)
    assert blocks_of({0: offer(0, blocks=multiprocessors)}, len(made)) == made
    assert not caplog.messages
    assert blocks_of({0: offer(0, blocks=0)}, 1) == [1]
    assert "more communicators of NCCL than fit" in caplog.text


class Nvml:
    """NVML of a GPU with two active links and two that are off. missing: a function that fails; lacking: one
    that the library does not have."""

    def __init__(self, missing: str = "", lacking: str = "") -> None:
        self.missing, self.lacking, self.open = missing, lacking, 0

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name == self.lacking:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self.missing:
                return 999
            self.open += {"nvmlInit_v2": 1, "nvmlShutdown": -1}.get(name, 0)
            if name == "nvmlDeviceGetHandleByUUID":
                assert arguments[0] == b"GPU-1234"
            if name == "nvmlDeviceGetNvLinkState":
                arguments[2]._obj.value = int(arguments[1] in (0, 3))
                return 0 if arguments[1] < 4 else 2
            return 0

        return call


@pytest.mark.parametrize(
    ("major", "library", "rate"),
    [
        (6, Nvml(), 40e9),
        (9, Nvml(), 50e9),
        (10, Nvml(), 100e9),
        (9, Nvml("nvmlInit_v2"), 0),
        (9, Nvml("nvmlDeviceGetHandleByUUID"), 0),
        (9, Nvml(lacking="nvmlDeviceGetNvLinkState"), 0),
    ],
)
def test_the_rate_of_nvlinks_is_that_of_the_active_ones(
    major: int, library: Nvml, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda _: library)
    assert gpu._nvlink_rate("1234", major) == gpu._nvlink_rate("GPU-1234", major) == rate
    assert library.open == 0


def test_without_nvml_no_rate_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.ctypes, "CDLL", mock.Mock(side_effect=OSError("not found")))
    assert gpu._nvlink_rate("1234", 9) == 0


def one_host(count: int = 4, **changes: object) -> dict[int, GpuOffer]:
    """Ranks 0, 1, ... of one host, each with a GPU that can read all the others."""
    everybody = tuple(f"GPU-{i}" for i in range(count))
    return {
        i: offer(i, **({"host": "here", "device": i, "reaches": everybody} | changes)) for i in range(count)
    }


def test_cuda_ipc_is_taken_on_request_and_where_ranks_share_a_gpu() -> None:
    assert choose_transport(one_host(), 2) == NCCL
    assert choose_transport(one_host(wants=CUDA_IPC), 2) == CUDA_IPC
    shared = one_host(uuid="GPU-0", reaches=())
    assert choose_transport(shared, 1) == CUDA_IPC
    assert (
        choose_transport(one_host() | {3: offer(3, host="here", uuid="GPU-1", reaches=("GPU-0", "GPU-2"))}, 0)
        == CUDA_IPC
    )
    # Also where NCCL could, and where it is missing.
    assert choose_transport(one_host(uuid="GPU-0", nccl="2.31.0", may_share=True), 1) == CUDA_IPC
    assert choose_transport(one_host(uuid="GPU-0", nccl="", no_nccl="no NCCL was found"), 1) == CUDA_IPC
    with pytest.raises(LayoutError, match="MESHCAST_CUDA_TRANSPORT=nccl forbids"):
        choose_transport(one_host(uuid="GPU-0", wants=NCCL), 1)


@pytest.mark.parametrize(
    ("rank", "changes", "text"),
    [
        (2, {"host": "there"}, "ranks 0 and 2 are on two hosts: use NCCL between hosts"),
        (1, {"no_ipc": "the driver shares no events"}, "on rank 1, the driver shares no events"),
        (
            3,
            {"reaches": ("GPU-0", "GPU-1")},
            "the GPU of rank 3, GPU-3, cannot read the memory of rank 2's, GPU-2",
        ),
    ],
)
def test_cuda_ipc_that_cannot_serve_is_refused_alike_or_left_to_nccl(
    rank: int, changes: dict, text: str
) -> None:
    asked = one_host(wants=CUDA_IPC)
    asked[rank] = offer(rank, **({"host": "here", "reaches": asked[0].reaches, "wants": CUDA_IPC} | changes))
    for each in asked:
        with pytest.raises(LayoutError) as found:
            choose_transport(asked, each)
        assert str(found.value).startswith(
            f"connect on rank {each}: MESHCAST_CUDA_TRANSPORT=cuda_ipc cannot serve"
        )
        assert text in str(found.value)
        assert "set it to auto" in str(found.value)
    auto = one_host() | {rank: offer(rank, **({"host": "here", "reaches": asked[0].reaches} | changes))}
    assert choose_transport(auto, 0) == NCCL
    auto[1] = replace(auto[1], uuid="GPU-0")  # as rank 0
    with pytest.raises(LayoutError, match=r"ranks 0 and 1 both use GPU GPU-0 .* cuda_ipc cannot: ") as found:
        choose_transport(auto, 0)
    assert text in str(found.value)


def test_ranks_that_ask_for_unlike_transports_are_refused() -> None:
    for rank in range(4):
        with pytest.raises(MeshcastError) as found:
            choose_transport(one_host() | {2: offer(2, host="here", wants=CUDA_IPC)}, rank)
        assert "rank 0 has MESHCAST_CUDA_TRANSPORT=auto, rank 2 has MESHCAST_CUDA_TRANSPORT=cuda_ipc" in str(
            found.value
        )
        assert not isinstance(found.value, LayoutError)


def test_a_rank_without_nccl_is_named_where_nccl_is_needed() -> None:
    with pytest.raises(MeshcastError, match="rank 1 cannot use its GPU: no NCCL was found"):
        choose_transport(one_host() | {1: offer(1, nccl="", no_nccl="no NCCL was found")}, 3)


def test_all_ranks_come_to_one_verdict() -> None:
    """Random offers: the same transport or the same error, but for the name of who raises."""
    rng = random.Random(7)
    seen = set()
    for _ in range(400):
        ranks = range(rng.choice([1, 2, 3, 5, 7]))
        uuids = [f"GPU-{i}" for i in range(3)]
        wants = rng.choice(["auto", NCCL, CUDA_IPC])
        drawn = {
            rank: offer(
                rank,
                host=rng.choice(["a", "a", "a", "a", "b"]),
                uuid=rng.choice(uuids),
                nccl=rng.choice(["2.28.9"] * 9 + ["2.30.4"]),
                may_share=rng.random() < 0.2,
                reaches=tuple(uuids) if rng.random() < 0.9 else (),
                wants=wants if rng.random() < 0.97 else "auto",
                no_ipc="" if rng.random() < 0.95 else "no",
            )
            for rank in ranks
        }
        verdicts = set()
        for rank in ranks:
            try:
                verdicts.add(choose_transport(drawn, rank))
            except MeshcastError as error:
                verdicts.add((type(error), str(error).partition(": ")[2], error.peer))
        assert len(verdicts) == 1, drawn
        (verdict,) = verdicts
        seen.add(verdict if isinstance(verdict, str) else verdict[0])
        if verdict == CUDA_IPC:
            assert len({each.host for each in drawn.values()}) == 1
    assert seen == {NCCL, CUDA_IPC, LayoutError, MeshcastError}


def gpu_named(_: object) -> SimpleNamespace:
    return SimpleNamespace(uuid="U", name="N", major=9)


def test_a_wish_that_does_not_exist_becomes_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="U", name="N", major=9)
    )
    monkeypatch.setattr("meshcast._C.nccl_version", lambda: "2.28.9", raising=False)
    for value in ("NCCL", "ipc"):
        monkeypatch.setenv("MESHCAST_CUDA_TRANSPORT", value)
        assert f"is {value!r}; expected auto, nccl or cuda_ipc" in own_offer(0).obstacle


@pytest.mark.parametrize(("wish", "looks"), [("nccl", 0), ("auto", 1), ("cuda_ipc", 1)])
def test_cuda_ipc_is_not_tried_where_nccl_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, wish: str, looks: int
) -> None:
    """The look takes memory of the GPU."""
    asked: list[int] = []
    monkeypatch.setenv("MESHCAST_CUDA_TRANSPORT", wish)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="U", name="N", major=9)
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3 << 30, 4 << 30))
    monkeypatch.setattr("meshcast._C.nccl_blocks_left", lambda _: 100, raising=False)
    monkeypatch.setenv("MESHCAST_CUDA_STAGING_MB", "96")
    monkeypatch.setattr("meshcast._C.nccl_version", lambda: "2.28.9", raising=False)
    monkeypatch.setattr("meshcast._C.cuda_ipc_obstacle", lambda i: asked.append(i) or "no", raising=False)
    found = own_offer(0)
    assert (found.obstacle, found.wants, found.no_ipc) == ("", wish, "no" if looks else "")
    assert asked == [0] * looks
    assert (found.blocks, found.free, found.staging) == (100, 3 << 30, 96 << 20)


def test_a_gpu_that_does_not_exist_becomes_an_obstacle() -> None:
    assert own_offer(4711).obstacle


def test_sides_of_a_call() -> None:
    for source, destination in itertools.product(("cpu", "cuda"), repeat=2):
        assert device_types_of(source, destination) == (source, destination)
    for sides in (("xpu", "cpu"), ("cuda", "xpu")):
        with pytest.raises(LayoutError, match="the meshes are on xpu"):
            device_types_of(*sides)


def test_copies_need_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build without CUDA code under a CUDA torch with a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr("meshcast._C.GpuGroupCore", raising=False)
    require_gpu(copies_only=True)
    with pytest.raises(LayoutError, match="on cuda, but this build of meshcast has no CUDA code"):
        require_gpu()


def test_what_a_process_lacks_is_said_with_what_to_do() -> None:
    assert gpu_obstacle(True, "13.0", True) == ""
    assert "CPU build: install a CUDA build of torch" in gpu_obstacle(False, None, False)
    assert "no CUDA code: build it again" in gpu_obstacle(False, "13.0", True)
    assert "CUDA_VISIBLE_DEVICES" in gpu_obstacle(True, "13.0", False)

"""What ranks say of their GPUs and what speaks against connecting them: rules, judged without any GPU."""

from __future__ import annotations

import itertools

import pytest
from meshcast.errors import LayoutError, MeshcastError
from meshcast.gpu_offer import GpuOffer, gpu_obstacle, own_offer, refuse_unfit, shared_device_type


def offer(number: int, **changes: object) -> GpuOffer:
    fields = {"host": f"host{number // 2}", "device": number % 2, "uuid": f"GPU-{number}", "gpu": "H200"}
    return GpuOffer(**(fields | {"nccl": "2.28.9"} | changes))  # type: ignore[arg-type]


def offers(count: int = 5, **of_rank: GpuOffer) -> dict[int, GpuOffer]:
    """Of ranks 10, 11, ...; of_rank: r12=... in place of a good one."""
    return {10 + i: of_rank.get(f"r{10 + i}", offer(i)) for i in range(count)}


def test_a_gpu_for_each_rank_is_fine() -> None:
    for rank in offers():
        refuse_unfit(offers(), rank)


def test_equal_indices_and_equal_uuids_of_unlike_hosts_are_fine() -> None:
    refuse_unfit(offers(r11=offer(1, host="elsewhere", uuid="GPU-0", device=0)), 10)


@pytest.mark.parametrize("rank", [10, 12, 14])
def test_two_ranks_on_one_gpu_are_refused_alike(rank: int) -> None:
    with pytest.raises(LayoutError) as found:
        refuse_unfit(offers(r13=offer(3, uuid="GPU-2", device=0)), rank)
    text = str(found.value)
    assert text.startswith(f"rank {rank}: ranks 12 and 13 both use GPU GPU-2 (H200; cuda:0 and cuda:0)")
    assert "torch.cuda.set_device" in text
    assert "2.30.3" in text and "NCCL_MULTI_RANK_GPU_ENABLE=1" in text and "2.28.9" in text
    assert (found.value.rank, found.value.peer, found.value.phase) == (rank, 13, "connect")


@pytest.mark.parametrize(
    ("version", "both", "fine"),
    [("2.30.3", True, True), ("2.31.0", True, True), ("2.30.2", True, False), ("2.30.3", False, False)],
)
def test_sharing_needs_a_new_nccl_and_leave_on_every_rank(version: str, both: bool, fine: bool) -> None:
    pair = {1: offer(0, nccl=version, may_share=True), 4: offer(0, nccl=version, may_share=both)}
    if fine:
        refuse_unfit(pair, 1)
    else:
        with pytest.raises(LayoutError, match="ranks 1 and 4 both use GPU"):
            refuse_unfit(pair, 4)


def test_a_rank_that_cannot_names_itself_to_all() -> None:
    for rank in offers():
        with pytest.raises(MeshcastError, match="rank 12 cannot use its GPU: no NCCL was found") as found:
            refuse_unfit(offers(r12=GpuOffer(obstacle="no NCCL was found")), rank)
        assert (found.value.rank, found.value.peer) == (rank, 12)
        assert not isinstance(found.value, LayoutError)


def test_releases_of_nccl_do_not_mix() -> None:
    refuse_unfit(offers(r11=offer(1, nccl="2.28.3")), 10)  # patches do
    with pytest.raises(MeshcastError, match=r"rank 10 has NCCL 2\.28\.9, rank 11 has NCCL 2\.27\.9"):
        refuse_unfit(offers(r11=offer(1, nccl="2.27.9")), 13)


def test_an_offer_survives_the_store() -> None:
    for each in (offer(3, may_share=True), GpuOffer(obstacle='a "quoted"\nreason')):
        assert GpuOffer.from_text(each.as_text()) == each


def test_a_gpu_that_does_not_exist_becomes_an_obstacle() -> None:
    assert own_offer(4711).obstacle


def test_device_types_of_a_call() -> None:
    assert shared_device_type(["cpu", "cpu"], "reshard") == "cpu"
    assert shared_device_type(["cuda"], "reshard") == "cuda"
    assert shared_device_type([], "reshard") == "cpu"
    for types in itertools.permutations(("cpu", "cuda")):
        with pytest.raises(LayoutError, match=r"reshard: the meshes are on cpu and cuda; .* x\.cuda\(\)"):
            shared_device_type(types, "reshard")
    with pytest.raises(LayoutError, match="the meshes are on xpu"):
        shared_device_type(["xpu", "xpu"], "reshard")


def test_what_a_process_lacks_is_said_with_what_to_do() -> None:
    assert gpu_obstacle(True, "13.0", True) == ""
    assert "CPU build: install a CUDA build of torch" in gpu_obstacle(False, None, False)
    assert "no CUDA code: build it again" in gpu_obstacle(False, "13.0", True)
    assert "CUDA_VISIBLE_DEVICES" in gpu_obstacle(True, "13.0", False)

"""What a call between CPUs and GPUs does with pinned memory and its GPU, part by part, in one process: a
fake GPU (fake_gpu.py), and a transfer between ranks that is over when the test says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from meshcast.errors import AbortedError, DeadlineExceededError, LayoutError, MeshcastError
from meshcast.transfers.pinned import HostStaging, PinnedPool
from multiproc.fake_gpu import FakeGpu

pytestmark = pytest.mark.timeout(60)
TO_HOST, TO_GPU = (True, False), (False, True)


class Work:
    """The transfer between ranks. Who waits for it too early would block the host."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over, self.error = False, error

    def is_completed(self) -> bool:
        return self.over

    def wait(self) -> None:
        assert self.over, "somebody waited for a transfer that is not over"
        if self.error is not None:
            raise self.error


class Call:
    """One that the test starts, or lets fail."""

    op = "reshard"

    def __init__(self, timeout: float) -> None:
        self.timeout, self.deadline = timeout, time.monotonic() + timeout
        self.work: Any = None
        self.error: Exception | None = None

    def is_completed(self) -> bool:
        return self.error is not None or (self.work is not None and self.work.is_completed())


def new_call(timeout: float = 30.0) -> Any:
    return Call(timeout)


def staging(
    gpu: FakeGpu, tensor: torch.Tensor, way: tuple[bool, bool], call: Any = None, pool: Any = None
) -> HostStaging:
    sides = ([tensor], [None]) if way == TO_HOST else ([None], [tensor])
    return HostStaging(gpu, pool or PinnedPool(gpu.pinned), call or new_call(), 3, *sides, way)


def arriving(gpu: FakeGpu, tensor: torch.Tensor, work: Work) -> tuple[torch.Tensor, Any]:
    """A call whose result goes to `tensor`: where the transfer writes, and the work of the call."""
    made = staging(gpu, tensor, TO_GPU)
    (host,) = made.dst
    assert host is not None
    return host, made.landing(work)


def until(done: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not done():
        assert time.monotonic() < limit, "it never came"
        time.sleep(0.0005)


def blocks_of(tensors: list[torch.Tensor]) -> list[int]:
    return sorted(tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 8192, 8193, 100_000])
def test_a_block_holds_what_was_asked_for_and_less_than_twice_that(size: int) -> None:
    (block,) = PinnedPool(FakeGpu(0).pinned).lend([size])
    assert size <= block.numel() < max(2 * size, 4097)


def test_blocks_are_lent_to_one_call_at_a_time_and_nobody_waits_for_them() -> None:
    gpu, call, work = FakeGpu(0), new_call(), Work()
    pool = PinnedPool(gpu.pinned)
    lent = pool.lend([5000, 8192, 100])
    pool.watch(call, lent)
    assert len({*blocks_of(lent)}) == 3
    kept = [lent]
    for call.work in (None, work):  # queued; under way
        kept.append(pool.lend([8192, 100]))
        assert not {*blocks_of(kept[-1])} & {*blocks_of(lent)}, "a block of a call in flight was lent"
    work.over = True
    allocated = len(gpu.pinned_bytes)
    again = pool.lend([100, 6000, 7000])  # of different shapes, but the same sizes
    assert blocks_of(again) == blocks_of(lent) and len(gpu.pinned_bytes) == allocated
    more = pool.lend([8192, 100])
    assert not {*blocks_of(more)} & {*blocks_of(again)}, "a block was lent twice"


@pytest.mark.parametrize("started", [True, False])
def test_blocks_of_a_call_that_failed_are_given_up(started: bool) -> None:
    """Nobody knows what still writes to them."""
    gpu, call = FakeGpu(0), new_call()
    pool = PinnedPool(gpu.pinned)
    lent = pool.lend([9000])
    pool.watch(call, lent)
    if started:
        work = Work(MeshcastError("a rank is gone"))
        call.work = work
        work.over = True
    else:
        call.error = MeshcastError("the group has failed before")
    for _ in range(2):
        assert blocks_of(pool.lend([9000])) != blocks_of(lent)


def test_the_memory_of_a_call_is_its_own_until_it_has_landed() -> None:
    gpu, call, work = FakeGpu(2), new_call(), Work()
    pool = PinnedPool(gpu.pinned)
    made = staging(gpu, torch.zeros(2000), TO_GPU, call, pool)
    (host,) = made.dst
    assert host is not None
    call.work = made.landing(work)
    others = pool.lend([8000])
    work.over = True
    until(call.is_completed)
    assert blocks_of(others) != [host.data_ptr()]
    assert blocks_of(pool.lend([8000])) == [host.data_ptr()]


def test_a_source_leaves_behind_the_stream_and_its_limit_is_kept() -> None:
    gpu, x = FakeGpu(3), torch.zeros(5, 3)
    gpu.stalled = True
    gpu.enqueue(lambda: x.fill_(7))
    made = staging(gpu, x, TO_HOST)
    assert not made.has_left()
    short = staging(gpu, x, TO_HOST, new_call(0.05))
    with pytest.raises(DeadlineExceededError, match=r"reshard on rank 3: the GPU had not .* within 0.05 s"):
        short.leave(lambda: None)
    with pytest.raises(AbortedError, match="while the GPU copied the source to the host: the job is over"):
        made.leave(lambda: "the job is over")
    gpu.stalled = False
    made.leave(lambda: None)
    assert made.has_left()
    (host,) = made.src
    assert host is not None and torch.equal(host, torch.full((5, 3), 7.0))


def test_a_copy_to_the_host_that_cuda_gives_up_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By leave(); has_left(), which others ask under their locks, only says no."""
    gpu = FakeGpu(4)
    made = staging(gpu, torch.ones(4), TO_HOST)

    def drive(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal address")

    monkeypatch.setattr(gpu, "drive", drive)
    assert made.has_left() is False
    with pytest.raises(MeshcastError, match=r"copying the source to the host failed: CUDA error: an ill"):
        made.leave(lambda: None)


def test_a_result_is_completed_when_the_gpu_has_it() -> None:
    gpu, x, work = FakeGpu(5), torch.zeros(300), Work()
    host, call = arriving(gpu, x, work)
    assert not call.is_completed() and not gpu.ways, "it cannot land before it has come"
    host.fill_(2)
    work.over = True
    until(call.is_completed)
    assert torch.equal(x, torch.full((300,), 2.0))
    assert call.wait() and call.is_completed()
    assert gpu.ways == ["in"], "it landed more than once"


@pytest.mark.parametrize("how", ["wait", "future"])
def test_who_has_waited_sees_the_result(how: str) -> None:
    gpu, x, work = FakeGpu(6), torch.zeros(300), Work()
    host, call = arriving(gpu, x, work)
    host.fill_(2)
    work.over = True
    call.wait() if how == "wait" else call.get_future().wait()
    assert torch.equal(x, torch.full((300,), 2.0))


def test_a_result_lands_behind_what_used_its_memory_but_nothing_later() -> None:
    """What the caller's stream got after the call may itself wait for this one, through another rank."""
    gpu, x, work = FakeGpu(7), torch.ones(300), Work()
    read: list[torch.Tensor] = []
    gpu.enqueue(lambda: read.append(x.clone()))
    host, call = arriving(gpu, x, work)
    gpu.read(torch.zeros(1))  # the stream comes so far
    gpu.stalled = True
    gpu.enqueue(lambda: None)
    host.fill_(2)
    work.over = True
    until(call.is_completed)
    assert torch.equal(read[0], torch.ones(300)) and torch.equal(x, torch.full((300,), 2.0))


def test_a_transfer_that_failed_never_lands() -> None:
    gpu, x, error = FakeGpu(8), torch.ones(4), MeshcastError("a rank is gone")
    work = Work(error)
    _, call = arriving(gpu, x, work)
    work.over = True
    assert call.is_completed()
    for run in (call.wait, call.get_future().wait):
        with pytest.raises(MeshcastError, match="a rank is gone"):
            run()
    assert not gpu.ways and torch.equal(x, torch.ones(4))


def test_a_landing_that_fails_is_raised_by_all_that_ask() -> None:
    gpu, work = FakeGpu(9), Work()
    _, call = arriving(gpu, torch.ones(4), work)
    work.over = True
    gpu.failure = "CUDA error: unspecified launch failure"
    assert call.is_completed()
    text = "reshard on rank 3: copying what arrived onto the GPU failed: CUDA error: unspecified"
    for run in (call.wait, call.wait, call.get_future().wait):
        with pytest.raises(MeshcastError, match=text):
            run()


def test_a_stream_that_cannot_follow_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, work = FakeGpu(10), Work()
    _, call = arriving(gpu, torch.ones(4), work)
    work.over = True

    def follow(_: int, __: object) -> None:
        raise RuntimeError("CUDA error: the stream is gone")

    monkeypatch.setattr(gpu, "follow", follow)
    with pytest.raises(MeshcastError, match="onto the GPU failed: CUDA error: the stream is gone"):
        call.wait()


def test_tensors_on_two_gpus_and_captures_are_refused_before_anything_is_enqueued() -> None:
    gpu = FakeGpu(11)
    pool = PinnedPool(gpu.pinned)
    sides: Any = [[mock.Mock(**{"device.index": index, "numel.return_value": 2})] for index in (1, 0)]
    with pytest.raises(LayoutError, match=r"on several GPUs of this rank, \[0, 1\]"):
        HostStaging(gpu, pool, new_call(), 3, *sides, (True, True))
    gpu.captures = True
    with pytest.raises(LayoutError, match="is being captured into a CUDA graph"):
        staging(gpu, torch.ones(2), TO_HOST, pool=pool)
    assert not gpu.pinned_bytes and not gpu.ways

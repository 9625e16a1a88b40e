"""Which inner backend of "meshcast" gets a call, and what becomes of the one for GPUs. Tensors on cuda are
torch's fake ones, which say so without a GPU; in NCCL's place stands torch's FakeProcessGroup."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from meshcast import _C, AbortedError, LayoutError, MeshcastError
from meshcast.backend import backend
from meshcast.backend.backend import InnerNccl, nccl_obstacle, split
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.timeout(60)

FAKE = FakeTensorMode()


class Side:
    """What InnerNccl is to the backend; remembers who asked."""

    def __init__(self, made: Any = None, possible: bool = True, rank: int = 0) -> None:
        self.made = FakeProcessGroup._create_internal(rank, 1 + rank) if made is None else made
        self.is_possible = possible
        self.ops: list[str] = []

    def make(self, op: str) -> Any:
        self.ops.append(op)
        return self.made

    def possible(self) -> bool:
        return self.is_possible


def no_multicast(*_: Any) -> None:
    raise AssertionError("one rank alone multicasts nothing")


def no_split(*_: Any) -> None:
    raise AssertionError("nobody splits this group")


def backend_with(side: Any) -> Any:
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    return _C.ProcessGroupMeshcast(gloo, 0, 1, no_multicast, 1, None, side, no_split)


def on(device: str, *shape: int) -> torch.Tensor:
    if device == "cpu":
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    with FAKE:
        return torch.empty(shape, device=device)


def is_fake(work: Any) -> bool:
    return type(work).__name__ == "FakeWork"


# By the name that errors call it: the call, given a way to make tensors. Those of one rank that only gives or
# only gets have an empty list.
CALLS: list[tuple[str, str, Callable[[Any, Callable[..., torch.Tensor]], Any]]] = [
    ("broadcast", "broadcast", lambda b, new: b.broadcast([new(4)])),
    ("all_reduce", "allreduce", lambda b, new: b.allreduce([new(4)])),
    ("all_reduce", "coalesced", lambda b, new: b.allreduce_coalesced([new(4), new(3)])),
    ("reduce", "reduce", lambda b, new: b.reduce([new(4)], dist.ReduceOptions())),
    ("all_gather", "allgather", lambda b, new: b.allgather([[new(4)]], [new(4)])),
    ("all_gather_into_tensor", "allgather_base", lambda b, new: b._allgather_base(new(4), new(4))),
    ("gather", "gather to here", lambda b, new: b.gather([[new(4)]], [new(4)], dist.GatherOptions())),
    ("scatter", "scatter from here", lambda b, new: b.scatter([new(4)], [[new(4)]], dist.ScatterOptions())),
    ("reduce_scatter", "reduce_scatter", lambda b, new: b.reduce_scatter(
        [new(4)], [[new(4)]], dist.ReduceScatterOptions())),
    ("reduce_scatter_tensor", "reduce_scatter_base", lambda b, new: b._reduce_scatter_base(new(4), new(4))),
    ("all_to_all_single", "alltoall_base", lambda b, new: b.alltoall_base(
        new(4), new(4), [], [], dist.AllToAllOptions())),
]  # fmt: skip
ONLY_ON_GPUS: list[tuple[str, str, Callable[[Any, Callable[..., torch.Tensor]], Any]]] = [
    ("gather", "gather elsewhere", lambda b, new: b.gather([], [new(4)], dist.GatherOptions())),
    ("scatter", "scatter elsewhere", lambda b, new: b.scatter([new(4)], [], dist.ScatterOptions())),
    ("all_to_all", "alltoall", lambda b, new: b.alltoall([new(4)], [new(4)], dist.AllToAllOptions())),
    ("send", "send", lambda b, new: b.send([new(4)], 0, 0)),
    ("recv", "recv", lambda b, new: b.recv([new(4)], 0, 0)),
    ("recv", "recv_anysource", lambda b, new: b.recv_anysource([new(4)], 0)),
]


@pytest.mark.parametrize(("op", "name", "call"), CALLS + ONLY_ON_GPUS)
def test_a_call_on_cuda_goes_to_the_backend_for_gpus(op: str, name: str, call: Callable[..., Any]) -> None:
    side = Side(rank=1 if "elsewhere" in name else 0)
    backend = backend_with(side)
    assert backend.inner_cuda is None
    assert is_fake(call(backend, lambda *shape: on("cuda", *shape)))
    assert side.ops == [op]
    assert backend.inner_cuda is side.made
    call(backend, lambda *shape: on("cuda", *shape))
    assert side.ops == [op], "it is made once"


@pytest.mark.parametrize("call", [call for _, _, call in CALLS], ids=[name for _, name, _ in CALLS])
def test_a_call_on_the_cpu_stays_with_gloo(call: Callable[..., Any]) -> None:
    side = Side()
    backend = backend_with(side)
    work = call(backend, lambda *shape: on("cpu", *shape))
    assert not is_fake(work)
    work.wait()
    assert backend.inner_cuda is None and side.ops == []


def test_a_group_may_go_while_gloo_lets_go_of_a_tensor() -> None:
    """Gloo's threads free tensors, for which they need the interpreter, and end with their group."""
    for _ in range(300):
        backend = backend_with(Side())
        works = [backend.allreduce([on("cpu", 4)]) for _ in range(4)]
        works.pop().wait()
        del works, backend


def test_tensors_of_both_kinds_in_one_call_are_refused() -> None:
    backend = backend_with(Side())
    for call in (
        lambda: backend.allreduce_coalesced([on("cuda", 4), on("cpu", 4)]),
        lambda: backend.allgather([[on("cpu", 4)]], [on("cuda", 4)]),
        lambda: backend._allgather_base(on("cuda", 4), on("cpu", 4)),
    ):
        with pytest.raises(LayoutError, match=r"rank 0 of the group: all_\w+: some tensors .* on cuda, some"):
            call()
    backend.allreduce([on("cpu", 4)]).wait()


def test_barriers_that_name_gpus_are_those_of_gpus() -> None:
    side = Side()
    backend = backend_with(side)
    backend.barrier().wait()
    assert side.ops == []
    options = dist.BarrierOptions()
    options.device_ids = [0]
    assert is_fake(backend.barrier(options))
    assert side.ops == ["barrier"]
    nowhere = Side(possible=False)
    backend_with(nowhere).barrier(options).wait()  # as gloo alone, which does not look at them
    assert nowhere.ops == []


def test_a_group_bound_to_a_gpu_has_its_barriers_there() -> None:
    side = Side()
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group.bound_device_id = torch.device("cuda", 0)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend_with(side))
    group.barrier().wait()
    assert side.ops == ["barrier"]


def test_batches_on_gpus_are_batches_of_their_backend() -> None:
    side = Side()
    backend = backend_with(side)
    assert backend.supports_coalescing
    backend._start_coalescing()
    assert is_fake(backend.send([on("cuda", 4)], 0, 0))
    assert is_fake(backend._end_coalescing())
    tensor = on("cpu", 4)
    backend._start_coalescing()
    backend.allreduce([tensor])
    backend.recv([on("cuda", 4)], 0, 0)
    both = backend._end_coalescing()
    assert not is_fake(both) and both.wait(timedelta(seconds=5))
    backend._start_coalescing()
    backend.allreduce([tensor])
    on_cpu = backend._end_coalescing()
    assert on_cpu.wait() and on_cpu.is_completed()
    backend._start_coalescing()
    assert backend._end_coalescing().wait(), "an empty batch is done"


def test_without_a_gpu_batches_are_as_with_gloo() -> None:
    backend = backend_with(Side(possible=False))
    assert not backend.supports_coalescing
    with pytest.raises(RuntimeError, match="gloo does not implement startCoalescing"):
        backend._start_coalescing()


class Refusing(Side):
    """Tells that a call has come this far."""

    def make(self, op: str) -> Any:
        raise LayoutError(f"{op} arrived inside")


def group_with(side: Any) -> dist.ProcessGroup:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend_with(side))
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def test_hooks_at_completion_are_those_of_the_backend_for_gpus() -> None:
    """Neither gloo nor torch's fake has them; each says so by its name."""
    side = Side()
    group = group_with(side)
    with pytest.raises(RuntimeError, match="waitForPendingWorks, but got gloo"):
        group._wait_for_pending_works()
    with pytest.raises(RuntimeError, match="onCompletion hook, but got fake"):
        group._register_on_completion_hook(print)
    assert side.ops == ["register_on_completion_hook"] and not group._has_hooks()
    with pytest.raises(RuntimeError, match="waitForPendingWorks, but got fake"):
        group._wait_for_pending_works()
    nowhere = Side(possible=False)
    with pytest.raises(RuntimeError, match="onCompletion hook, but got gloo"):
        group_with(nowhere)._register_on_completion_hook(print)
    assert nowhere.ops == []


def test_timing_of_collectives_is_that_of_both_devices() -> None:
    side = Side(possible=False)
    group_with(side)._enable_collectives_timing()
    assert side.ops == []
    side = Side()
    with pytest.raises(RuntimeError, match="fake is missing implementation of enableCollectivesTiming"):
        group_with(side)._enable_collectives_timing()
    assert side.ops == ["enable_collectives_timing"]


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "gather_single"),
    reason=f"torch {torch.__version__} has no gather_single and no extensions of limits: torch 2.14 has",
)
def test_what_torch_2_14_added_goes_to_the_backend_of_the_device() -> None:
    backend = backend_with(Refusing())
    with pytest.raises(LayoutError, match="gather_single arrived inside"):
        backend.gather_single(on("cuda", 4), on("cuda", 4), dist.GatherOptions())
    with pytest.raises(RuntimeError, match="gloo does not support gather_single"):
        backend.gather_single(on("cpu", 4), on("cpu", 4), dist.GatherOptions())
    with pytest.raises(LayoutError, match="add_ephemeral_timeout arrived inside"):
        backend._add_ephemeral_timeout(timedelta(seconds=3))
    backend_with(Side(possible=False))._add_ephemeral_timeout(timedelta(seconds=3))


def nested() -> tuple[Any, Any]:
    """A backend whose backend for GPUs is one of ours again: that shows what it was told."""
    inside = backend_with(Refusing())
    return backend_with(Side(inside)), inside


def call_inside(backend: Any) -> None:
    with pytest.raises(LayoutError, match="all_reduce arrived inside"):
        backend.allreduce([on("cuda", 4)])


def test_a_limit_reaches_the_backend_for_gpus_before_and_after_it_is_made() -> None:
    backend, inside = nested()
    backend.set_timeout(timedelta(seconds=7))
    assert (backend.timeout, inside.timeout) == (timedelta(seconds=7), timedelta(seconds=20))
    call_inside(backend)
    assert inside.timeout == timedelta(seconds=7)
    backend.set_timeout(timedelta(seconds=9))
    assert inside.timeout == timedelta(seconds=9)


def test_sequence_numbers_count_both_devices() -> None:
    backend, inside = nested()
    first = backend._get_sequence_number_for_group()
    backend.allreduce([on("cpu", 4)]).wait()
    assert backend._get_sequence_number_for_group() == first + 1
    call_inside(backend)
    before = backend._get_sequence_number_for_group()
    inside.allreduce([on("cpu", 4)]).wait()
    assert backend._get_sequence_number_for_group() == before + 1


@pytest.mark.parametrize(("end", "how"), [("abort", "aborted"), ("shutdown", "shut down")])
def test_the_end_reaches_the_backend_for_gpus(end: str, how: str) -> None:
    backend, inside = nested()
    call_inside(backend)
    getattr(backend, end)()
    for each in (backend, inside):
        with pytest.raises(AbortedError, match=f"all_reduce: the process group was {how}; make a new one"):
            each.allreduce([on("cuda", 4)])


def test_nothing_is_made_after_the_end() -> None:
    side = Side()
    backend = backend_with(side)
    backend.abort()
    with pytest.raises(AbortedError, match="broadcast: the process group was aborted"):
        backend.broadcast([on("cuda", 4)])
    assert side.ops == [] and backend.inner_cuda is None


def test_an_end_while_it_is_being_made_ends_it_too() -> None:
    inside = backend_with(Side())
    side = Side(inside)
    backend = backend_with(side)
    make = side.make

    def slow(op: str) -> Any:
        backend.abort()
        return make(op)

    side.make = slow  # type: ignore[method-assign]
    for each in (backend, inside):
        with pytest.raises(AbortedError, match="the process group was aborted"):
            each.allreduce([on("cuda", 4)])


def test_errors_of_the_making_keep_their_type_and_can_be_met_again() -> None:
    side = Side()
    backend = backend_with(side)
    make, failures = side.make, [LayoutError("first", rank=0, op="all_reduce"), ValueError("second")]

    def fails(op: str) -> Any:
        if failures:
            raise failures.pop(0)
        return make(op)

    side.make = fails  # type: ignore[method-assign]
    with pytest.raises(LayoutError, match="first") as caught:
        backend.allreduce([on("cuda", 4)])
    assert caught.value.op == "all_reduce"
    with pytest.raises(MeshcastError, match="second"):
        backend.allreduce([on("cuda", 4)])
    assert is_fake(backend.allreduce([on("cuda", 4)]))


# ---- InnerNccl -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuda", "nccl", "gpu", "expected"),
    [
        (None, False, False, "is a CPU build: install a CUDA build of torch"),
        ("13.0", False, True, "was built without NCCL: install one that has it"),
        ("13.0", True, False, "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES"),
        ("13.0", True, True, ""),
    ],
)
def test_what_is_missing_is_named(cuda: str | None, nccl: bool, gpu: bool, expected: str) -> None:
    found = nccl_obstacle(cuda, nccl, gpu)
    assert expected in found and bool(found) == bool(expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda uses it")
def test_without_a_gpu_the_call_is_refused_with_what_to_do() -> None:
    nccl = InnerNccl(dist.HashStore(), 3, 5, timedelta(seconds=20))
    assert not nccl.possible()
    with pytest.raises(
        LayoutError, match="rank 3 of the group: all_gather: the tensors are on cuda, but torch"
    ):
        nccl.make("all_gather")


def test_one_is_made_however_many_threads_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_obstacle_here", lambda: "")
    nccl = InnerNccl(dist.HashStore(), 0, 1, timedelta(seconds=20))
    made: list[object] = []

    def create() -> object:
        time.sleep(0.05)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(nccl, "_create", create)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(nccl.make("send"))) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and found == made * 5


def test_what_torch_says_against_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_obstacle_here", lambda: "")
    nccl = InnerNccl(dist.HashStore(), 2, 5, timedelta(seconds=20))

    def create() -> object:
        raise RuntimeError("ProcessGroupNCCL is only supported with GPUs, no GPUs found!")

    monkeypatch.setattr(nccl, "_create", create)
    with pytest.raises(
        MeshcastError, match=r"rank 2 of the group: send: torch could not make .* no GPUs found"
    ):
        nccl.make("send")


# ---- pg_options ------------------------------------------------------------------------------------------


def test_options_are_taken_by_device() -> None:
    gloo = dist.ProcessGroupGloo._Options()
    assert split(None) == (None, None)
    assert split(gloo) == (gloo, None)
    assert split({"cpu": gloo}) == (gloo, None)
    assert split({"cuda": None, "cpu": gloo}) == (gloo, None)
    if dist.is_nccl_available():
        nccl = dist.ProcessGroupNCCL.Options()
        assert split(nccl) == (None, nccl)
        assert split({"cpu": gloo, "cuda": nccl}) == (gloo, nccl)


@pytest.mark.parametrize("options", [7, {"xpu": None}, {"cuda": "fast"}], ids=str)
def test_other_options_are_refused(options: Any) -> None:
    with pytest.raises(LayoutError, match=r"pg_options: expected ProcessGroupGloo.Options or .*found"):
        split(options)


def test_options_of_gloo_reach_gloo() -> None:
    import meshcast  # noqa: F401

    options = dist.ProcessGroupGloo._Options()
    options._threads = 3
    assert not dist.is_initialized()
    dist.init_process_group(
        "meshcast", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=9),
        pg_options={"cpu": options},
    )  # fmt: skip
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        assert (backend.inner.options._threads, backend.timeout) == (3, timedelta(seconds=9))
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()

"""Groups of backend "meshcast" over both devices, in three processes without a GPU: what is asked of GPUs is
refused, what is asked of the CPU is as it was. Tensors on cuda are torch's fake ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import LayoutError
from meshcast.backend.backend import InnerNccl
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 60.0
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ALL = [0, 1, 2]


def backend_of(group: dist.ProcessGroup | None, device: torch.device):
    """Also below torch's debug wrapper."""
    found = (dist.group.WORLD if group is None else group)._get_backend(device)
    return getattr(found, "wrapped_pg", found)


def fake_on_cuda() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4, device="cuda")


def refused(call: Callable[[], object], expected: str) -> None:
    try:
        call()
    except LayoutError as error:
        assert re.search(expected, str(error)), error
    else:
        raise AssertionError("a tensor on cuda was accepted")


def sums(group: dist.ProcessGroup | None, ranks: list[int], rank: int) -> None:
    """The group still does on the CPU what it is for."""
    tensor = torch.tensor([rank + 1.0, 10.0 * rank])
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [sum(r + 1.0 for r in ranks), sum(10.0 * r for r in ranks)]


def one_backend_serves_both_devices(context) -> None:
    assert dist.get_backend() == "meshcast"
    assert dist.get_backend_config() == "cpu:meshcast,cuda:meshcast"
    both = backend_of(None, CPU)
    assert both.key == backend_of(None, CUDA).key
    sums(None, ALL, context.rank)
    dist.barrier()
    assert both.inner_cuda is None, "made although nothing was on a GPU"


def a_tensor_on_cuda_is_refused_and_the_group_goes_on(context) -> None:
    """On one rank alone, so that nobody can be waiting."""
    backend = backend_of(None, CUDA)
    if context.rank == 1:
        tensor = fake_on_cuda()
        expected = (
            r"rank 1 of the group: {}: the tensors are on cuda, but torch.*keep the tensors .* on the CPU"
        )
        refused(lambda: backend.allreduce([tensor]), expected.format("all_reduce"))
        refused(lambda: backend.broadcast([tensor]), expected.format("broadcast"))
        refused(lambda: backend.send([tensor], 0, 0), expected.format("send"))
    assert backend.inner_cuda is None
    sums(None, ALL, context.rank)


def groups_by_every_name(context) -> None:
    for name in ("meshcast", "cpu:meshcast,cuda:meshcast", "cpu:meshcast", "cpu:gloo,cuda:meshcast"):
        ranks = [0, 2]
        group = dist.new_group(ranks, backend=name)
        if context.rank in ranks:
            sums(group, ranks, context.rank)
            if "cuda" in dist.get_backend_config(group):
                backend = backend_of(group, CUDA)
                assert isinstance(backend, meshcast._C.ProcessGroupMeshcast)
                # Group ranks: NCCL numbers them so, too.
                refused(
                    lambda b=backend: b.allreduce([fake_on_cuda()]), f"rank {ranks.index(context.rank)} of"
                )
                sums(group, ranks, context.rank)
            dist.destroy_process_group(group)


def cuda_alone_has_nothing_for_the_cpu(context) -> None:
    group = dist.new_group(ALL, backend="cuda:meshcast")
    assert dist.get_backend_config(group) == "cuda:meshcast"
    backend = backend_of(group, CUDA)
    refused(lambda: backend.allreduce([fake_on_cuda()]), "the tensors are on cuda, but torch")
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        assert "No backend type associated with device type cpu" in str(error), error
    else:
        raise AssertionError("a group for cuda alone took a tensor on the CPU")
    # Private groups need the store and the ranks of the group alone.
    mesh = DeviceMesh("cpu", ALL, _init_backend=False, _rank=context.rank)
    full = torch.arange(12.0).view(6, 2)
    x = DTensor.from_local(full.chunk(3)[context.rank].clone(), mesh, [Shard(0)], run_check=False)
    assert torch.equal(meshcast.reshard(x, mesh, [Replicate()], group=group).to_local(), full)
    dist.destroy_process_group(group)


def _ring(context) -> tuple[list, torch.Tensor, torch.Tensor]:
    """Every rank sends to the next and receives from the one before, in one batch."""
    given = torch.full((3,), float(context.rank))
    got = torch.full((3,), -1.0)
    world = context.world
    batch = [
        dist.P2POp(dist.isend, given, (context.rank + 1) % world),
        dist.P2POp(dist.irecv, got, (context.rank - 1) % world),
    ]
    works = dist.batch_isend_irecv(batch)
    for work in works:
        work.wait()
    return works, got, torch.full((3,), float((context.rank - 1) % world))


def a_batch_on_the_cpu_has_a_work_for_each_message(context) -> None:
    assert not dist.group.WORLD._get_backend(CPU).supports_coalescing
    works, got, expected = _ring(context)
    assert len(works) == 2 and torch.equal(got, expected)


def where_gpus_may_be_used_a_batch_has_one_work(context) -> None:
    """torch asks for batches without saying for which device."""
    with mock.patch.object(InnerNccl, "possible", return_value=True):
        works, got, expected = _ring(context)
    assert len(works) == 1 and torch.equal(got, expected)
    assert works[0].is_completed() and backend_of(None, CPU).inner_cuda is None
    sums(None, ALL, context.rank)


def monitored_barriers_go_by_the_device(context) -> None:  # noqa: ARG001
    group = dist.new_group(ALL, backend="cpu:meshcast")
    dist.monitored_barrier(group, timeout=timedelta(seconds=20))
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    dist.destroy_process_group(group)
    assert backend_of(None, CPU).inner_cuda is None


def a_mesh_takes_options_for_a_dimension(context) -> None:
    options = dist.ProcessGroupGloo._Options()
    options._threads = 1
    group = dist.new_group(ALL, backend="meshcast", pg_options={"cpu": options, "cuda": None})
    assert backend_of(group, CPU).inner.options._threads == 1
    sums(group, ALL, context.rank)
    dist.destroy_process_group(group)
    try:
        dist.new_group(ALL, backend="meshcast", pg_options=3)
    except LayoutError as error:
        assert "pg_options: expected ProcessGroupGloo.Options" in str(error)
    else:
        raise AssertionError("a number was taken for options")


def a_part_of_a_group_has_one_backend_for_both_devices(context) -> None:
    """torch's splitGroup asks for the part of each device in turn."""
    members = [0, 2]
    if torch.__version__.startswith("2.11") and dist.get_debug_level() == dist.DebugLevel.DETAIL:
        with pytest.raises(RuntimeError, match="missing implementation of split"):  # of torch's own wrapper
            dist.group.WORLD.split_group(members, group_name="halves")
        return
    part = dist.group.WORLD.split_group(members, group_name="halves")
    if context.rank not in members:
        assert part is None
        return
    backend = backend_of(part, CPU)
    assert isinstance(backend, meshcast._C.ProcessGroupMeshcast)
    assert backend.key == backend_of(part, CUDA).key != backend_of(None, CPU).key
    assert (part.rank(), part.size()) == (members.index(context.rank), 2)
    tensor = torch.tensor([context.rank + 1.0])
    part.allreduce([tensor]).wait()
    assert tensor.item() == 1.0 + 3.0
    long = torch.full((100_000,), 7.0 + context.rank)
    if context.rank == 0:
        part.send([long], 1, 3).wait()
    else:
        part.recv([long], 0, 3).wait()
    assert torch.equal(long, torch.full((100_000,), 7.0))
    other = dist.group.WORLD._get_backend(CPU)
    assert other.supports_splitting


CASES = [
    one_backend_serves_both_devices,
    a_tensor_on_cuda_is_refused_and_the_group_goes_on,
    groups_by_every_name,
    cuda_alone_has_nothing_for_the_cpu,
    a_batch_on_the_cpu_has_a_work_for_each_message,
    where_gpus_may_be_used_a_batch_has_one_work,
    monitored_barriers_go_by_the_device,
    a_mesh_takes_options_for_a_dimension,
    a_part_of_a_group_has_one_backend_for_both_devices,
]

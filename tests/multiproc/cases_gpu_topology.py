"""measure_topology between GPUs that keep a clock of their own (fake_rounds.py), what is kept of it, and that
ranks of different files plan equally. Five ranks, each on a host of its choice."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import topology as topology_module
from meshcast.base import settings
from meshcast.errors import LayoutError, MeshcastError, PlanMismatchError
from meshcast.groups import private as private_module
from meshcast.groups.parent import parent_group
from meshcast.resharding import measure as measure_module
from meshcast.topology import GpuFigures
from multiproc.fake_gpu import held, mesh_on
from multiproc.fake_rounds import FakeRates, FakeRounds, fake_rounds
from multiproc.oracle import unique_fill
from torch.distributed.tensor import Replicate, Shard

ROUND_S = 11e-6
NEAR, FAR = 40e9, 5e9  # bytes/s inside a domain, and between two of them
OUT, BACK = 3e9, 2e9  # from the first host to the second, and back
SECONDS = 0.001


def gpu(number: int) -> str:
    return f"GPU-{number}"


def machine(gpus: int, links: tuple[tuple[int, int], ...] = (), fabric: str = "") -> settings.GpuMachine:
    both = {(gpu(one), gpu(other)) for pair in links for one, other in (pair, pair[::-1])}
    named = tuple((gpu(number), "H200") for number in range(gpus))
    return settings.GpuMachine("580.1", named, frozenset(both), {uuid: fabric for uuid, _ in named if fabric})


@contextlib.contextmanager
def gpus(
    context,
    hosts: str,
    cards: str,
    seen: settings.GpuMachine | None,
    *,
    folder: str = settings.NOWHERE,
    rate: Callable[[int, int], float] = lambda *_: NEAR,
    transport: str = "nccl",
) -> Iterator[FakeRounds]:
    """Rank i is on host hosts[i] and has GPU cards[i] of it. rate: inside a host, between two ranks."""
    mine = hosts[context.rank]

    def seconds(peer: int, sent: bool, nbytes: int) -> float:
        if hosts[peer] == mine:
            return nbytes / rate(context.rank, peer)
        # Each rank of a host has an equal part of its bytes.
        return nbytes * hosts.count(mine) / (OUT if sent == (mine == min(hosts)) else BACK)

    clock = FakeRates(seconds, ROUND_S)
    variables = {"MESHCAST_HOST_ID": mine, settings.GPU_FIGURES.name: folder}
    named = SimpleNamespace(uuid=gpu(int(cards[context.rank])))
    with (
        fake_rounds() as fake,
        mock.patch.dict(os.environ, variables),
        mock.patch.object(torch.cuda, "Event", clock.event),
        mock.patch.object(torch.cuda, "current_device", return_value=0),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=named),
        mock.patch.object(torch.cuda, "mem_get_info", return_value=(8 << 30, 8 << 30)),
        mock.patch.object(settings, "gpu_machine", return_value=seen),
        mock.patch.object(measure_module, "_MEMORY", "cpu"),
        mock.patch.object(private_module._C, "GpuGroupCore", object, create=True),
        mock.patch.object(topology_module, "_facts_of", facts_of),
    ):
        fake.rates, fake.transport = clock, transport
        topology_module.forget_figures()
        yield fake
    topology_module.forget_figures()


def facts_of(seen: settings.GpuMachine) -> dict:
    return {"nccl": "2.28.9", "driver": seen.driver, "gpus": [list(each) for each in seen.gpus]}


def agreed(value: object) -> None:
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    assert all(each == found[0] for each in found), found


def shared_folder(context) -> str:
    """One folder for all ranks."""
    box = [tempfile.mkdtemp() if context.rank == 0 else None]
    dist.broadcast_object_list(box, 0)
    return str(box[0])


def measured(group: dist.ProcessGroup | None = None) -> meshcast.Topology:
    before = {*parent_group(group, "test")._twins}
    found = meshcast.measure_topology(group, seconds=SECONDS, device="cuda")
    agreed(found.to_json())
    assert {*parent_group(group, "test")._twins} == before, "its communicators are gone"
    return found


def near(found: float, expected: float) -> bool:
    """The cost of rounds is in a rate as well."""
    return found == pytest.approx(expected, rel=0.05)


def rates_of_two_hosts_are_those_of_the_gpus(context) -> None:
    with gpus(context, "abbab", "00112", machine(5)):
        topology = measured()
    assert [host.ranks for host in topology.hosts] == [(0, 3), (1, 2, 4)]
    (out,), (back,) = (host.nics for host in topology.hosts)
    assert near(out.out_rate, OUT) and near(out.in_rate, BACK), out
    assert near(back.out_rate, BACK) and near(back.in_rate, OUT), back
    assert all(near(host.local_rate, NEAR) for host in topology.hosts), topology.hosts
    assert topology.latency == pytest.approx(ROUND_S, rel=1e-3), topology.latency
    # What was measured plans transfers.
    full = unique_fill((10, 7), torch.float32, 1)
    with gpus(context, "abbab", "00112", machine(5)):
        src, dst = mesh_on("cuda", [0, 3]), mesh_on("cuda", [1, 2, 4])
        y = meshcast.reshard(held(full, src, [Shard(0)], context.rank), dst, [Replicate()], topology=topology)
    if context.rank in (1, 2, 4):
        assert torch.equal(y._local_tensor, full)


def rate_by_domain(domains: Mapping[int, int]) -> Callable[[int, int], float]:
    return lambda one, other: NEAR if domains[one] == domains[other] else FAR


ISLANDS = {0: 0, 1: 1, 2: 0, 3: 1, 4: 1}  # ranks 3 and 4 share a GPU


def nvml_says_which_gpus_nvlink_joins(context) -> None:
    seen, folder = machine(4, ((0, 2), (1, 3))), shared_folder(context)
    with gpus(context, "aaaaa", "01233", seen, folder=folder, rate=rate_by_domain(ISLANDS)):
        topology = measured()
        (kept,) = topology_module.stored_figures(seen)[0].values()
    assert [host.ranks for host in topology.hosts] == [(0, 2), (1, 3, 4)]
    assert all(near(host.local_rate, NEAR) for host in topology.hosts), topology.hosts
    # Two ranks that send at FAR each to three that receive all of it at FAR.
    assert near(topology.hosts[0].nics[0].in_rate, 2 * FAR), topology.hosts
    # The file is of a whole machine: its ranks have what they reach in the other domain.
    assert kept.domains == (("GPU-0", "GPU-2"), ("GPU-1", "GPU-3"))
    assert kept.out_rate == kept.in_rate == 0 and kept.local_rate < 1.05 * FAR, kept


def without_nvml_the_rates_say_it(context) -> None:
    for seen in (None, machine(2)):  # or NVML does not know the GPU, which is a part of one
        with gpus(context, "aaaaa", "45677", seen, rate=rate_by_domain(ISLANDS)):
            topology = measured()
        assert [host.ranks for host in topology.hosts] == [(0, 2), (1, 3, 4)]
    with gpus(context, "aaaaa", "01234", None):
        assert [host.ranks for host in measured().hosts] == [(0, 1, 2, 3, 4)]


def alone(context, cards: str) -> settings.GpuMachine:
    """NVML where a batch system lets each process see its own GPU and no other."""
    return settings.GpuMachine("580.1", ((gpu(int(cards[context.rank])), "H200"),), frozenset(), {})


def where_nvml_shows_a_part_the_rates_say_it(context) -> None:
    folder = shared_folder(context)
    seen = alone(context, "01233")
    with gpus(context, "aaaaa", "01233", seen, folder=folder, rate=rate_by_domain(ISLANDS)):
        assert [host.ranks for host in measured().hosts] == [(0, 2), (1, 3, 4)]
    # Later groups count the GPUs of all ranks, by whatever number each process has for its own.
    seen = alone(context, "01234")
    with (
        gpus(context, "aaaaa", "01234", seen, folder=folder),
        mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES="0"),
    ):
        measured()
        assert (context.rank == 0) == bool(topology_module.stored_figures(seen)[0])
        later = parent_group(None, "test").twin("alone").private(range(5))
        later.connect(60.0)
        assert later.figures is not None and later.figures.slot == "nccl"
        dist.barrier()


def gpus_without_nvlink_are_one_host(context) -> None:
    with gpus(context, "aaaaa", "01234", machine(5)):
        assert [host.ranks for host in measured().hosts] == [(0, 1, 2, 3, 4)]


def machines_that_nvlink_joins_are_one_host(context) -> None:
    with gpus(context, "aabba", "01012", machine(3, ((0, 1), (1, 2)), fabric="00ff/7"), rate=lambda *_: OUT):
        topology = measured()
    assert [host.ranks for host in topology.hosts] == [(0, 1, 2, 3, 4)]


def figures_are_kept_for_later_groups(context) -> None:
    """Of each host by its first rank; a group that is made later plans with them, without a topology."""
    folder = shared_folder(context)
    # The machines differ, as their GPUs do.
    seen = machine(5) if context.rank in (0, 3) else machine(6)
    with gpus(context, "abbab", "00112", seen, folder=folder):
        before = parent_group(None, "test").twin("before").private(range(5))
        before.connect(60.0)
        assert before.figures is None
        group = dist.new_group(list(range(5)))
        topology = measured(group)
        assert len(list(Path(folder).iterdir())) == 2
        after = parent_group(group, "test").private(range(5))  # which had not met for the measurement
        after.connect(60.0)
        assert after.figures is not None
        agreed((after.figures.slot, after.figures.topology.to_json(), after.figures.round_ns))
        assert after.figures.slot == "nccl"
        assert after.figures.round_ns == round(1e9 * topology.latency)
        assert after.gpu_topology == topology and after.topology != topology
        (stored,) = topology_module.stored_figures(seen)[0].values()
        assert stored.ranks == (2 if context.rank in (0, 3) else 3)
        assert stored.text(stored.measured).count("GB/s") == 2
        dist.barrier()


def nothing_is_kept_where_that_is_forbidden_or_impossible(context) -> None:
    folder = shared_folder(context)
    for where, seen in ((settings.NOWHERE, machine(5)), (folder, None)):
        with gpus(context, "aaaaa", "01234", seen, folder=where):
            measured()
            assert topology_module.known_figures() is None
    assert not list(Path(folder).iterdir())
    dist.barrier()
    file = Path(folder) / "file"
    if context.rank == 0:
        file.write_text("")
    dist.barrier()
    with gpus(context, "aaaaa", "01234", machine(5), folder=str(file / "below")):
        measured()  # with a line in the log of the first rank


def put(folder: str, seen: settings.GpuMachine, local_rate: float, **more: int) -> None:
    fields = {"out_rate": 0, "in_rate": 0, "round_ns": 9000, "ranks": 2, "measured": 1_700_000_000} | more
    with (
        mock.patch.dict(os.environ, {settings.GPU_FIGURES.name: folder}),
        mock.patch.object(topology_module, "_facts_of", facts_of),
    ):
        figures = GpuFigures(local_rate=int(local_rate), **fields)
        assert topology_module.keep_figures(seen, "nccl", figures) == ""


def planned(context, hosts: str, folder: str, seen: settings.GpuMachine, name: str) -> tuple:
    """What this rank plans a broadcast between GPUs with, and that it arrives."""
    full = unique_fill((64, 1001), torch.bfloat16, 3)
    group = dist.new_group(list(range(5)))
    with gpus(context, hosts, "01234", seen, folder=folder) as fake:
        src, dst = mesh_on("cuda", [0]), mesh_on("cuda", [1, 2, 3, 4])
        x = held(full, src, [Replicate()], context.rank)
        y = meshcast.reshard(x, dst, [Replicate()], group=group)
        assert len(fake.starts) == 1, name
        figures = parent_group(group, "test").private(range(5)).figures
    if context.rank:
        assert torch.equal(y._local_tensor, full)
    dist.destroy_process_group(group)
    return fake.starts[0].descriptor, figures and figures.topology.to_json()


def ranks_of_different_files_plan_equally(context) -> None:
    seen = machine(5)
    folder = tempfile.mkdtemp()  # of this rank alone
    default = planned(context, "aaaaa", folder, seen, "none")
    agreed(default)
    assert default[1] is None
    put(folder, seen, 1e11 + context.rank * 1e10)
    own = planned(context, "aaaaa", folder, seen, "all")
    agreed(own)
    assert own[1] is not None and json.loads(own[1])["hosts"][0]["local_rate"] == 100_000_000_000
    assert own[0] != default[0], "another topology makes another plan"
    # The first rank of a host that has some speaks for it.
    for rank in (0, 1):
        if context.rank == rank:
            for file in Path(folder).iterdir():
                file.unlink()
        few = planned(context, "aaaaa", folder, seen, f"without {rank}")
        agreed(few)
        found = json.loads(few[1])["hosts"][0]
        assert found["local_rate"] == 100_000_000_000 + 10_000_000_000 * (rank + 1), found


def a_host_without_figures_leaves_all_with_the_guess(context) -> None:
    seen = machine(5)
    folder = tempfile.mkdtemp()
    both = {"out_rate": 4 * 10**10, "in_rate": 5 * 10**10}
    if context.rank in (0, 2):
        put(folder, seen, 2e11, **(both if context.rank == 0 else {}))
    for number in range(2):
        found = planned(context, "aabbb", folder, seen, f"{number}")
        agreed(found)
        if number == 0:  # nothing is known of the second host's network
            assert found[1] is None
            if context.rank == 2:
                put(folder, seen, 1e11, **both)
        else:
            hosts = json.loads(found[1])["hosts"]
            assert [host["local_rate"] for host in hosts] == [2 * 10**11, 10**11]
            assert hosts[0]["nics"] == [both]


def a_damaged_file_counts_as_none(context) -> None:
    seen = machine(5)
    folder = tempfile.mkdtemp()
    put(folder, seen, 1e11)
    (file,) = Path(folder).iterdir()
    if context.rank != 3:
        file.write_text(file.read_text()[: 10 * context.rank])
    found = planned(context, "aaaaa", folder, seen, "damaged")
    agreed(found)
    assert json.loads(found[1])["hosts"][0]["local_rate"] == 10**11, "that of rank 3"


def what_is_wrong_on_one_rank_is_raised_on_all(context) -> None:
    first = context.rank == 0

    def call(error: type[MeshcastError], text: str, **arguments: object) -> None:
        with pytest.raises(error, match=text):
            meshcast.measure_topology(**arguments)

    with gpus(context, "aaaaa", "01234", machine(5)):
        refused = LayoutError if first else PlanMismatchError
        call(refused, "device 'xpu': expected one of cpu, cuda", device="xpu" if first else "cuda")
        call(refused, "seconds", seconds=-1 if first else 0.01, device="cuda")
        call(refused, "seconds", seconds="long" if first else 0.01)
        differs = "rank 0 measures cpu for 0.01 s, rank 1 cuda for 0.01 s: call"
        call(PlanMismatchError, differs, seconds=0.01, device="cpu" if first else "cuda")
        lost = mock.Mock(side_effect=RuntimeError("the GPU fell off the bus"))
        with mock.patch.object(torch.cuda, "mem_get_info", lost) if first else contextlib.nullcontext():
            call(MeshcastError, "rank 0 cannot use its GPU: the GPU fell off the bus", device="cuda")
        measured()
    # Without any GPU.
    call(LayoutError, "the meshes are on cuda, but", device="cuda")


def what_goes_wrong_meanwhile_on_one_rank_is_raised_on_all(context) -> None:
    """Its memory runs out between two transfers, or its GPU fails in one."""
    full, lost = torch.OutOfMemoryError("no room: CUDA out of memory"), RuntimeError("no room: lost")
    before = {*parent_group(None, "test")._twins}
    for name, number, error in (("_shard", 7, full), ("_shard", 15, full), ("Event", 5, lost)):
        left = number

        def failing(*arguments, real, error=error, **options):
            nonlocal left
            left -= 1
            if left == 0:
                raise error
            return real(*arguments, **options)

        with gpus(context, "aabbb", "01012", machine(3)):
            where = torch.cuda if name == "Event" else measure_module
            broken = functools.partial(failing, real=getattr(where, name))
            with (
                mock.patch.object(where, name, broken) if context.rank == 1 else contextlib.nullcontext(),
                pytest.raises((MeshcastError, type(error)), match="no room: ") as raised,
            ):
                meshcast.measure_topology(seconds=SECONDS, device="cuda")
            assert raised.value is error or context.rank != 1
            assert context.rank == 1 or "rank 1" in str(raised.value)
            assert {*parent_group(None, "test")._twins} == before, "its communicators are gone"
            measured()


def a_host_with_more_ranks_than_gpus_shares_them(context) -> None:
    """Its figures are others than those of a rank for each GPU."""
    seen, folder = machine(3), shared_folder(context)
    with gpus(context, "aaaaa", "01122", seen, folder=folder, transport="cuda_ipc"):
        measured()
        slots, _ = topology_module.stored_figures(seen)
        assert list(slots) == ["cuda_ipc, shared GPUs"]
        again = parent_group(None, "test").twin("again")
        everybody = again.private(range(5))
        everybody.connect(60.0)
        assert everybody.figures is not None and everybody.figures.slot == "cuda_ipc, shared GPUs"
        # Of three ranks each may have a GPU.
        if context.rank < 3:
            few = again.private(range(3))
            few.connect(60.0)
            assert few.figures is None
        dist.barrier()


CASES = [
    rates_of_two_hosts_are_those_of_the_gpus,
    nvml_says_which_gpus_nvlink_joins,
    without_nvml_the_rates_say_it,
    where_nvml_shows_a_part_the_rates_say_it,
    gpus_without_nvlink_are_one_host,
    machines_that_nvlink_joins_are_one_host,
    figures_are_kept_for_later_groups,
    nothing_is_kept_where_that_is_forbidden_or_impossible,
    ranks_of_different_files_plan_equally,
    a_host_without_figures_leaves_all_with_the_guess,
    a_damaged_file_counts_as_none,
    what_is_wrong_on_one_rank_is_raised_on_all,
    what_goes_wrong_meanwhile_on_one_rank_is_raised_on_all,
    a_host_with_more_ranks_than_gpus_shares_them,
]

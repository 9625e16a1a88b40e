"""Calls for GPUs where none can be used, ranks that say so to one another, and how those that share a GPU
meet. Three processes, no GPU."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.errors import DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from meshcast.groups import private as private_module
from meshcast.groups.parent import parent_group
from meshcast.groups.private import PrivateGroup
from meshcast.resharding.compiled import tensor_spec
from meshcast.topology import GpuFigures, MachineFigures
from meshcast.transfers import gpu as gpu_module
from meshcast.transfers import medium as medium_module
from meshcast.transfers.gpu import GpuOffer
from multiproc.meshes import resharder_between, sharded
from multiproc.oracle import unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 60.0
_WORLD = [0, 1, 2]


class Place:
    """A call that has a GPU, or says why not."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.device = 0
        self.problem = problem


@contextlib.contextmanager
def gpus_that_say(uuid: str, **more: object) -> Iterator[None]:
    """What this rank says of its GPU, which it does not have."""
    said = {"host": "h", "uuid": uuid, "gpu": "H200", "nccl": "2.28.9", **more}
    with (
        mock.patch.object(gpu_module, "own_offer", lambda i: GpuOffer(device=i, **said)),
        mock.patch.object(gpu_module._C, "nccl_unique_id", return_value=bytes(128), create=True),
    ):
        yield


def reshard_still_works(rank: int, seed: int) -> None:
    mesh = DeviceMesh("cpu", _WORLD)
    full = unique_fill((5, 4), torch.float32, seed)
    result = meshcast.reshard(sharded(full, mesh, [Shard(0)], rank), mesh, [Replicate()])
    assert torch.equal(result.to_local(), full)


def group_of(name: str) -> PrivateGroup:
    parent = parent_group(None, "test")
    return (parent.twin(name) if name else parent).private(_WORLD)


def cause_of(name: str) -> str:
    """Why that group ended, as this rank hears it."""
    limit = time.monotonic() + GROUP_TIMEOUT / 2
    while (cause := group_of(name).cause()) is None:
        assert time.monotonic() < limit, "the group lives on"
        time.sleep(0.005)
    return cause


def connect(ordinal: int, place: Place, limit: float, name: str = "") -> Exception | None:
    """The error of connect_lanes(), once the group is up. name: of a group of its own."""
    group = group_of(name)
    group.connect(GROUP_TIMEOUT)
    try:
        deadline = time.monotonic() + limit
        gpu_module.connect_lanes(group, group.core, (0, 1), place, (0, ordinal), deadline)
    except Exception as raised:
        return raised
    return None


def a_cuda_mesh_without_gpu_is_refused(context) -> None:
    """Nobody hangs, and the ranks go on with what they can do."""
    mesh = DeviceMesh("cuda", _WORLD, _init_backend=False)
    spec = meshcast.TensorSpec((6, 4), torch.float32, mesh, [Shard(0)])
    try:
        resharder_between(spec, spec)
    except LayoutError as error:
        assert "the meshes are on cuda, but" in str(error)
    else:
        raise AssertionError("a mesh on cuda was accepted")
    reshard_still_works(context.rank, 1)


def block_scaled_types_need_kernels(context) -> None:
    """Of tensors on GPUs, where a rank has none, or the build no code for it; a type of the user's own needs
    a GPU alone. All ranks hear of it."""
    there, here = DeviceMesh("cuda", _WORLD, _init_backend=False), DeviceMesh("cpu", _WORLD)
    own = meshcast.BlockScaled(lambda part: (part, part), block=(1, 4), dtype=torch.float32, name="own")
    spec = tensor_spec(there, Layout(there, [Shard(0)]), (6, 32), torch.float32)
    state = {"w": DTensor(torch.ones(2, 32), spec, requires_grad=False)}
    on_cpu = tensor_spec(here, Layout(here, [Shard(0)]), (6, 32), torch.float32)
    half = {**state, "v": DTensor(torch.ones(2, 32), on_cpu, requires_grad=False)}
    joined = meshcast.TensorMap(["w", "v"], "x")
    for kind in ("mxfp8", "fp8_e4m3:2x2", own):
        for held, where, options, expected in (
            (state, {"w": (here, [Replicate()])}, {}, "cannot run on rank 0: torch is a CPU build"),
            (
                half,
                {"x": (here, [Replicate()])},
                {"maps": joined},
                "cannot run on rank 0: torch is a CPU build",
            ),
        ):
            try:
                meshcast.reshard_state_dict(held, where, quantize={next(iter(where)): kind}, **options)
            except LayoutError as error:
                assert expected in str(error), error
            else:
                raise AssertionError("a tensor on a GPU that is not there was quantised")
    # Torch's part is there, meshcast's kernels are not, as in a build without CUDA.
    with mock.patch.object(medium_module, "gpu_obstacle", lambda built, *_: "" if built else "no CUDA code"):
        for held, name, kind, options, expected in (
            (
                state,
                "w",
                "nvfp4",
                {},
                "'w' is on cuda, where quantize='nvfp4' cannot run on rank 0: no CUDA code",
            ),
            (half, "x", own, {"maps": joined}, "'x' is made of tensors on cpu and cuda"),
        ):
            try:
                meshcast.reshard_state_dict(
                    held, {name: (here, [Replicate()])}, quantize={name: kind}, **options
                )
            except LayoutError as error:
                assert expected in str(error), error
            else:
                raise AssertionError("a build without kernels quantised on a GPU")
    reshard_still_works(context.rank, 2)


def a_rank_without_gpu_refuses_what_is_for_it(context) -> None:
    """The others, whose tensors are on the CPU, hear of it: in a call, from a Resharder, of weights."""
    there, here = DeviceMesh("cuda", [0], _init_backend=False), DeviceMesh("cpu", _WORLD)
    full = unique_fill((6, 4), torch.float32, 2)
    x = sharded(full, here, [Shard(0)], context.rank)
    local, layouts = x.to_local(), (Layout(here, [Shard(0)]), Layout(there, [Replicate()]))
    spec = meshcast.TensorSpec((6, 4), torch.float32, there, [Replicate()])
    calls = [
        lambda: meshcast.reshard(x, there, [Replicate()]),
        lambda: meshcast.reshard(x, there, [Replicate()], async_op=True).wait(),
        lambda: meshcast.reshard_local(
            local, layouts[0], None, layouts[1], shape=(6, 4), dtype=full.dtype, device=("cpu", "cuda")
        ),
        lambda: resharder_between(x, spec).run(x),
        lambda: meshcast.reshard_state_dict({"x": x}, {"x": (there, [Replicate()])}),
    ]
    for number, call in enumerate(calls):
        begin = time.monotonic()
        try:
            call()
        except LayoutError as error:
            assert context.rank == 0 or number == 4, error
            assert "on cuda" in str(error) and "torch is a CPU build" in str(error), error
        except PlanMismatchError as error:
            assert context.rank != 0 and number != 4 and error.peer == 0, error
            assert "on cuda, but torch is a CPU build" in str(error), error
        else:
            raise AssertionError(f"call {number} was accepted")
        assert time.monotonic() - begin < GROUP_TIMEOUT / 2
    reshard_still_works(context.rank, 8)


def a_rank_alone_that_calls_for_gpus_is_named(context) -> None:
    """The ranks that called for the CPU raise as well, at once, and the group lives on."""
    device = "cuda" if context.rank == 1 else "cpu"
    mesh = DeviceMesh(device, _WORLD, _init_backend=False, _rank=context.rank)
    full = unique_fill((6, 4), torch.float32, 6)
    spec = tensor_spec(mesh, Layout(mesh, [Shard(0)]), full.shape, full.dtype)
    x = DTensor(full.chunk(3)[context.rank].clone(), spec, requires_grad=False)
    try:
        meshcast.reshard(x, mesh, [Replicate()])
    except LayoutError as error:
        assert context.rank == 1 and "the meshes are on cuda, but" in str(error), error
    except PlanMismatchError as error:
        assert context.rank != 1 and error.peer == 1, error
        assert "refused its arguments" in str(error) and "the meshes are on cuda, but" in str(error)
    else:
        raise AssertionError("ranks on cpu and cuda agreed on a call")
    reshard_still_works(context.rank, 7)


def a_rank_without_gpu_tells_all(context) -> None:
    """All raise alike, nobody runs into a limit, and the group lives on."""
    problem = LayoutError("the tensors of one call are on several GPUs") if context.rank == 1 else None
    with gpus_that_say(f"GPU-{context.rank}"):
        error = connect(7001, Place(problem), GROUP_TIMEOUT)
        assert isinstance(error, MeshcastError)
        assert "rank 1 cannot use its GPU: the tensors of one call are on several GPUs" in str(error)
    reshard_still_works(context.rank, 3)


def a_gpu_for_two_ranks_is_refused_by_all(context) -> None:
    with gpus_that_say("GPU-a" if context.rank < 2 else "GPU-b"):
        if context.rank == 1:
            time.sleep(0.3)  # the others wait for what it says
        error = connect(7002, Place(), GROUP_TIMEOUT)
        assert isinstance(error, LayoutError)
        assert f"rank {context.rank}: ranks 0 and 1 both use GPU GPU-a" in str(error)
    reshard_still_works(context.rank, 4)


def an_id_that_nccl_does_not_give_is_missed_by_all(context) -> None:
    """Only the first rank asks for one; the others must not wait for it."""
    no_id = mock.Mock(side_effect=MeshcastError("NCCL finds no network interface"))
    with gpus_that_say(f"GPU-{context.rank}"), mock.patch.object(gpu_module._C, "nccl_unique_id", no_id):
        error = connect(7007, Place(), GROUP_TIMEOUT)
        assert isinstance(error, MeshcastError), error
        assert "rank 0" in str(error) and "NCCL finds no network interface" in str(error), error
        assert no_id.called is (context.rank == 0)
    reshard_still_works(context.rank, 10)


def a_rank_that_stays_away_is_named(context) -> None:
    """It ends the group on all ranks, which is one of its own here."""
    with gpus_that_say(f"GPU-{context.rank}"):
        if context.rank == 2:
            group_of("away").connect(GROUP_TIMEOUT)
        else:
            error = connect(7003, Place(), 1.0, "away")
            assert isinstance(error, MeshcastError), error
            # Who is first tells the other, whose own limit may not be over yet.
            assert "2] did not come to connect their GPUs" in str(error), error
            assert isinstance(error, DeadlineExceededError) is ("was aborted" not in str(error))
        assert "did not come to connect their GPUs" in cause_of("away")
    reshard_still_works(context.rank, 5)


class Recorder:
    """In the place of what a build with CUDA has: notes how it is connected, and listens at no socket."""

    def __init__(self, *arguments: object) -> None:
        self.address = f"address {arguments}" if arguments else f"socket {id(self)} of {dist.get_rank()}"
        self.calls: list[tuple] = []

    def connect(self, lane: int, unique_id: bytes, *others: Any) -> None:
        *options, limit = others
        assert 0 < limit <= GROUP_TIMEOUT
        self.calls.append((lane, len(unique_id), *options))

    def connect_ipc(
        self,
        lane: int,
        meeting: Recorder,
        addresses: list[str],
        staging: int,
        link_rate: int,
        round_ns: int,
        limit: float,
    ) -> None:
        self.costs = (link_rate, round_ns)
        assert staging == 64 << 20, "an eighth of 512 MiB, since nothing is said to be free"
        assert 0 < limit <= GROUP_TIMEOUT, "what is left of the call's own limit, in seconds"
        self.calls.append((lane, meeting.address, addresses))

    def shutdown(self) -> None:
        self.calls.append(("shutdown",))


class Proof:
    """Memory that the others can open, unless it is in another container: `foreign` of them."""

    foreign: tuple[int, ...] = ()
    broken = False  # CUDA makes none
    alive: list[Proof] = []  # noqa: RUF012

    def __init__(self, device: int) -> None:
        if self.broken:
            raise MeshcastError(f"cuda:{device} has no memory left")
        self.card = f"card of {dist.get_rank()}".encode()
        self.alive.append(self)

    def check(self, card: bytes, limit: float) -> str:
        assert self in self.alive and 0 < limit <= GROUP_TIMEOUT
        owner = int(card.decode().removeprefix("card of "))
        assert owner != dist.get_rank()
        return "CUDA says no" if (owner in self.foreign) != (dist.get_rank() in self.foreign) else ""


@contextlib.contextmanager
def built_with_cuda(core: type = Recorder, proof: type = Proof) -> Iterator[None]:
    with (
        mock.patch.object(gpu_module._C, "GpuGroupCore", core, create=True),
        mock.patch.object(gpu_module._C, "IpcMeeting", core, create=True),
        mock.patch.object(gpu_module._C, "IpcProof", proof, create=True),
        mock.patch.object(gpu_module._C, "cuda_staging", return_value={"limit": 0}, create=True),
        mock.patch.object(gpu_module._C, "limit_cuda_staging", create=True) as limited,
    ):
        yield
    assert all(call.args == (0, 512 << 20) for call in limited.mock_calls), limited.mock_calls


class Foreign(Proof):
    foreign = (2,)


def transports(context, name: str) -> list:
    """How the GPUs of each rank are connected, and with what calls."""
    gpu = gpu_module.gpu_of(group_of(name))
    found: list = [None] * context.world
    dist.all_gather_object(found, gpu and (gpu.transport, gpu.core.calls))
    return found


def ranks_of_two_containers_use_nccl(context) -> None:
    """A GPU of its own each, or a NCCL that lets them share: whoever finds that it cannot open the others'
    memory, all leave CUDA IPC before they need it."""
    more = {"nccl": "2.31.0", "may_share": True, "blocks": 36, "link_rate": 300 + context.rank}
    with gpus_that_say("GPU-a", **more), built_with_cuda(proof=Foreign):
        for ordinal in (7008, 7009):
            assert connect(ordinal, Place(), GROUP_TIMEOUT, "containers") is None
        calls = [
            (0, 128, 16, 64 << 20, 300, 0),
            (1, 128, 8, 64 << 20, 300, 0),
        ]  # for the rank with the slowest link
        assert transports(context, "containers") == [("nccl", calls)] * context.world
    reshard_still_works(context.rank, 11)


def ranks_of_two_containers_are_refused_by_all(context) -> None:
    """Where NCCL cannot take their place: the error has both reasons. The group lives on."""
    for ordinal, wants in ((7010, "auto"), (7011, "cuda_ipc")):
        with gpus_that_say("GPU-a", wants=wants), built_with_cuda(proof=Foreign):
            error = connect(ordinal, Place(), GROUP_TIMEOUT)
        assert isinstance(error, LayoutError), error
        text = "on rank 0, the GPU memory of rank 2 cannot be opened: CUDA says no; containers of one host"
        assert text in str(error), error
        assert ("cuda_ipc cannot serve these ranks" in str(error)) is (wants == "cuda_ipc")
    reshard_still_works(context.rank, 12)


def a_rank_without_memory_to_show_is_named(context) -> None:
    class Broken(Proof):
        broken = context.rank == 1

    with gpus_that_say("GPU-a"), built_with_cuda(proof=Broken):
        error = connect(7012, Place(), GROUP_TIMEOUT)
    assert isinstance(error, LayoutError), error
    assert "on rank 1, cuda:0 has no memory left" in str(error), error
    reshard_still_works(context.rank, 13)


def ranks_that_share_a_gpu_are_connected_over_cuda_ipc(context) -> None:
    """Each lane with the addresses of all ranks, in their order; known lanes not again."""
    with gpus_that_say("GPU-a"), built_with_cuda():
        if context.rank == 2:
            time.sleep(0.2)
        for ordinal in (7004, 7005):
            error = connect(ordinal, Place(), GROUP_TIMEOUT, "ipc")
            assert error is None, error
        gpu = gpu_module.gpu_of(group_of("ipc"))
        assert gpu is not None
        assert gpu.transport == "cuda_ipc" and gpu.lanes == {0, 1}
        found: list = [None] * context.world
        dist.all_gather_object(found, gpu.core.calls)
        for lane in (0, 1):
            own = [calls[lane][1] for calls in found]
            assert len(set(own)) == context.world
            for calls in found:
                assert len(calls) == 2
                assert (calls[lane][0], calls[lane][2]) == (lane, own)


def measured_costs_cut_the_rounds_of_all_lanes(context) -> None:
    """Those that the ranks agreed on as they met, if they are of the transport that connects them."""
    own = GpuFigures(7 * 10**11 + context.rank, 0, 0, 8000 + context.rank, ranks=3, measured=0)
    for ordinal, name, slot, gpus, expected in (
        (7013, "fits", "cuda_ipc, shared GPUs", 1, (7 * 10**11, 8000)),
        (7014, "another", "nccl", 8, (0, 0)),  # eight GPUs, of which the ranks share one
        (7015, "none", "", 1, (0, 0)),
    ):
        offered = MachineFigures(tuple(map(str, range(gpus))), "auto", {slot: own}) if slot else None
        with (
            gpus_that_say("GPU-a"),
            built_with_cuda(),
            mock.patch.object(private_module, "known_figures", return_value=offered),
            mock.patch.object(gpu_module.log, "warning") as warned,
        ):
            assert connect(ordinal, Place(), GROUP_TIMEOUT, name) is None
        figures = group_of(name).figures
        assert (slot if figures is None else figures.slot) == slot and (figures is None) is (not slot)
        gpu = gpu_module.gpu_of(group_of(name))
        assert gpu is not None and gpu.core.costs == expected, (name, gpu.core.costs)
        assert warned.called is (name == "another"), warned.mock_calls
    more = {"nccl": "2.28.9", "link_rate": 300 + context.rank}
    offered = MachineFigures(("0", "1", "2"), "auto", {"nccl": own})
    for ordinal, name, known, expected in (
        (7016, "measured", offered, (7 * 10**11, 8000)),
        (7017, "nvml", None, (300, 0)),
    ):
        with (
            gpus_that_say(f"GPU-{context.rank}", blocks=36, **more),
            built_with_cuda(),
            mock.patch.object(private_module, "known_figures", return_value=known),
        ):
            assert connect(ordinal, Place(), GROUP_TIMEOUT, name) is None
        assert [each[-2:] for each in transports(context, name)[0][1]] == [expected] * 2


def a_rank_that_cannot_connect_ends_the_group(context) -> None:
    """For the others, which may have connected: they would wait for it in their first transfer."""

    class Lost(Recorder):
        def connect_ipc(self, lane: int, *others: Any) -> None:
            super().connect_ipc(lane, *others)
            if context.rank == 1 and lane == 1:
                raise MeshcastError("rank 1: its socket is gone")

    with gpus_that_say("GPU-a"), built_with_cuda(Lost):
        error = connect(7006, Place(), GROUP_TIMEOUT, "lost")
        if context.rank == 1:
            assert "its socket is gone" in str(error)
        assert "rank 1: its socket is gone" in cause_of("lost")
    reshard_still_works(context.rank, 9)


CASES = [
    a_cuda_mesh_without_gpu_is_refused,
    block_scaled_types_need_kernels,
    a_rank_without_gpu_refuses_what_is_for_it,
    a_rank_alone_that_calls_for_gpus_is_named,
    a_rank_without_gpu_tells_all,
    a_gpu_for_two_ranks_is_refused_by_all,
    an_id_that_nccl_does_not_give_is_missed_by_all,
    a_rank_that_stays_away_is_named,
    ranks_that_share_a_gpu_are_connected_over_cuda_ipc,
    measured_costs_cut_the_rounds_of_all_lanes,
    a_rank_that_cannot_connect_ends_the_group,
    ranks_of_two_containers_use_nccl,
    ranks_of_two_containers_are_refused_by_all,
    a_rank_without_memory_to_show_is_named,
]

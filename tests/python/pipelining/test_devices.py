"""Stages on GPUs: what is refused where there is none, and what all ranks must agree on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.errors import LayoutError
from meshcast.pipelining import Edge, PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.edge import Delivery
from meshcast.pipelining.parallel import stage_device
from meshcast.pipelining.table import agree_on_stages, describe_stages
from meshcast.pipelining.wiring import EdgeTransfers, LocalShape, Wiring, make_transfer
from meshcast.transfers.gpu import GpuMedium
from meshcast.transfers.transfer import PersistentTransfer, PlanOptions
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

pytestmark = pytest.mark.timeout(60)
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stage(index: int = 0, count: int = 1) -> PipelineStage:
    return PipelineStage(nn.Linear(2, 2), index, count, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: tests/cuda uses it")
@pytest.mark.parametrize("device", ["cuda", "cuda:3"])
def test_a_gpu_that_is_not_there_is_refused(device: str) -> None:
    expected = rf"stage 0: device is {device}, but (torch is a CPU build|this build|torch sees no GPU)"
    with pytest.raises(LayoutError, match=expected):
        PipelineStage(nn.Linear(2, 2), 0, 1, device)  # type: ignore[arg-type]


def test_the_gpu_is_the_current_one_and_must_exist() -> None:
    with (
        mock.patch("meshcast.pipelining.parallel.own_obstacle", return_value=""),
        mock.patch.object(torch.cuda, "device_count", return_value=4),
        mock.patch.object(torch.cuda, "current_device", return_value=2),
    ):
        assert stage_device("stage 1", "cuda", None) == torch.device("cuda", 2)
        assert stage_device("stage 1", "cuda:3", None) == torch.device("cuda", 3)
        with pytest.raises(LayoutError, match="stage 1: device is cuda:4, but this process sees 4 GPUs"):
            stage_device("stage 1", "cuda:4", None)
        mesh = DeviceMesh("cpu", [0])
        with pytest.raises(LayoutError, match=r"stage 1: device is cuda:2, but mesh= is on cpu: make both"):
            stage_device("stage 1", "cuda", mesh)
    there = DeviceMesh("cuda", [0], _init_backend=False)
    with pytest.raises(LayoutError, match="stage 2: device is cpu, but mesh= is on cuda"):
        PipelineStage(nn.Linear(2, 2), 2, 3, CPU, mesh=there)


def test_stages_of_one_rank_share_a_device() -> None:
    first, second = stage(0, 2), stage(1, 2)
    second.device = GPU
    with pytest.raises(LayoutError, match="stages 0 and 1 of rank 0 have different device: cpu and cuda:0"):
        ScheduleInterleaved1F1B([first, second], 2)


def test_ranks_on_unlike_devices_are_told_alike() -> None:
    board = mock.Mock(spec=PipelineBoard)
    board.ranks = [0, 1]
    here, there = stage(0, 2), stage(1, 2)
    there.device = GPU
    board.collect.return_value = {
        rank: describe_stages([each], "GPipe", 2, False) for rank, each in enumerate((here, there))
    }
    with pytest.raises(LayoutError, match="disagree on device: rank 0 has cpu, rank 1 has cuda"):
        agree_on_stages(board)


def test_transfers_are_those_of_the_device() -> None:
    """Only those on the CPU agree before their first call, which blocks the host for NCCL's connections."""
    layout = Layout([0], [Replicate()])
    problems = [((2,), torch.float32, layout, layout)]
    options = PlanOptions("broadcast")
    with mock.patch.object(PersistentTransfer, "agree_ahead") as ahead:
        there = stage()
        there.device = GPU
        made = make_transfer(there, problems, 5, "pipeline", 3.0, options)
        assert isinstance(made._medium, GpuMedium) and made._device_types == ("cuda", "cuda")
        assert (made._lane, made._op, made._options, made._backward) == (5, "pipeline", options, None)
        ahead.assert_not_called()
        made = make_transfer(stage(), problems, 7, "pipeline", 3.0)
        assert made._medium is None and made._lane == 7
        ahead.assert_called_once_with(3.0)


def test_a_step_on_the_cpu_touches_no_gpu() -> None:
    schedule = ScheduleGPipe(stage(), 2, loss_fn=nn.functional.mse_loss)
    with (
        mock.patch.object(torch.cuda, "Event", side_effect=AssertionError),
        mock.patch.object(torch.cuda, "device", side_effect=AssertionError),
    ):
        schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert schedule.summary().startswith("rank 0: step of")


def test_a_step_is_made_on_the_gpu_of_its_stage() -> None:
    """A transfer of a rank without any shard, and whatever a module makes, come to the current one."""
    entered: list[torch.device | None] = []

    @contextlib.contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        entered.append(chosen)
        yield
        entered.append(None)

    class Looking(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(entered[-1])
            return super().forward(x)

    found: list[torch.device | None] = []
    schedule = ScheduleGPipe(PipelineStage(Looking(2, 2), 0, 1, CPU), 3, loss_fn=nn.functional.mse_loss)
    schedule._device = GPU
    with mock.patch.object(torch.cuda, "device", device):
        schedule.step(torch.ones(6, 2), target=torch.ones(6, 2))
    assert found == [GPU] * 3
    assert entered == [GPU, None]


class Recording:
    """A transfer that writes down what it was started with."""

    def __init__(self) -> None:
        self.started: list[tuple[list[Any], list[Any]]] = []
        self.plan = mock.Mock()
        self.plan.bytes_sent.return_value = 77

    def start(self, src: list[Any], dst: list[Any], *, timeout: float) -> Any:
        assert timeout == 5.0
        self.started.append((src, dst))
        handle = mock.Mock()
        handle.figures.side_effect = AssertionError("it need not be over")
        return handle


def edge_transfers(transfer: Any, sources: list[LocalShape], buffers: list[LocalShape]) -> EdgeTransfers:
    """As on a GPU, but that its tensors are on the CPU."""
    layout = Layout([0], [Replicate()])
    values = [Delivery(0, layout, {1: [0]}), Delivery(1, layout, {1: [1]})]
    made = EdgeTransfers(transfer, (1,), values, sources, buffers, stage(), 4)
    assert made.warm_up(5.0) is None, "on the CPU nothing has to be connected"
    made.on_gpu = True
    return made


def test_an_edge_is_warmed_up_with_zeros_of_its_own_shapes() -> None:
    shards: list[LocalShape] = [((3, 2), torch.float32), ((0, 2), torch.int64)]
    for sources, buffers in ((shards, []), ([], shards), (shards, shards)):
        transfer = Recording()
        assert edge_transfers(transfer, sources, buffers).warm_up(5.0) is not None
        ((src, dst),) = transfer.started
        for given, tensors in ((sources, src), (buffers, dst)):
            expected = [*given] or [None, None]
            assert [None if t is None else (tuple(t.shape), t.dtype) for t in tensors] == expected
        assert all(t is None or not t.any() for t in src)
    assert edge_transfers(None, [], []).warm_up(5.0) is None, "values that are handed over need no connection"


def test_edges_receive_into_buffers_of_their_own_within_the_limit() -> None:
    """On the device of the stage; what is sent is what was given."""
    shards: list[LocalShape] = [((3, 2), torch.float32), ((0, 2), torch.int64)]
    values = [torch.ones(3, 2), torch.ones(0, 2, dtype=torch.int64)]
    there = stage()
    there.device = torch.device("meta")  # as good as any that is not the CPU
    transfer: Any = Recording()
    EdgeTransfers(transfer, (1,), [], shards, [], there, 0).send(values, 5.0)
    _, received = EdgeTransfers(transfer, (1,), [], [], shards, there, 0).receive(5.0)
    _, handed = EdgeTransfers(transfer, (1,), [], shards, shards, there, 0).hand_over(values, 5.0)
    for (src, dst), expected in zip(
        transfer.started, [(values, [None] * 2), ([None] * 2, received), (values, handed)], strict=True
    ):
        assert [*map(id, src), *map(id, dst)] == [*map(id, expected[0]), *map(id, expected[1])]
    for buffers in (received, handed):
        assert [(tuple(t.shape), t.dtype) for t in buffers] == shards
        assert all(t.device == there.device for t in buffers)
    assert EdgeTransfers(None, (1,), [], shards, shards, there, 0).hand_over(values, 5.0) == (None, values)


def test_bytes_sent_on_gpus_are_those_of_the_plan() -> None:
    transfer = Recording()
    sending = edge_transfers(transfer, [((3, 2), torch.float32)], [])
    assert sending.bytes_sent(transfer.start([], [], timeout=5.0)) == 77
    transfer.plan.bytes_sent.assert_called_once_with(0)


def test_edges_come_in_one_order() -> None:
    """That of their numbers, which all ranks share: the order of links differs from rank to rank. Stage 0
    sends to 1, to 1 and 3 together, to 2 and to 3."""
    made = [EdgeTransfers(None, (1,), [], [], [], stage(), number) for number in range(6)]
    wiring = Wiring(
        edges=(), links=[(0, 1), (0, 2), (0, 3)], values=[], inputs={}, ways={},
        forward={(0, 1): made[:2], (0, 3): [made[1], made[3]], (0, 2): [made[2]]},
        backward={(0, 2): made[5], (0, 1): made[4]}, free_lane=0,
    )  # fmt: skip
    assert wiring.edge_transfers() == made


def test_a_first_step_warms_up_every_edge() -> None:
    edges = [Edge(0, 0, 1, 0), Edge(0, 0, 2, 1), Edge(1, 0, 2, 0)]

    class Sum(nn.Module):
        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return sum(values[1:], values[0]) * 2.0

    stages = [PipelineStage(Sum(), index, 3, CPU, edges=edges) for index in range(3)]
    found: list[int] = []
    with mock.patch.object(EdgeTransfers, "warm_up", lambda each, _: found.append(each.number)):
        schedule = ScheduleInterleaved1F1B(stages, 3)
        for _ in range(2):
            schedule.eval(torch.ones(3, 2))
    assert len(found) == len(set(found)) == len(edges)

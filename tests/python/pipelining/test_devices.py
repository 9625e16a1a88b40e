"""Stages on GPUs: what is refused where there is none, and what all ranks must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshcast import cuda_transfer
from meshcast.errors import LayoutError
from meshcast.pipelining import PipelineStage, ScheduleGPipe, devices
from meshcast.pipelining.devices import make_transfer, stage_device
from meshcast.pipelining.exchange import Exchange
from meshcast.pipelining.table import agree_on_stages, describe_stages
from meshcast.transfer import Transfer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
        mock.patch.object(devices, "gpu_obstacle", return_value=""),
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
    from meshcast.pipelining import ScheduleInterleaved1F1B

    with pytest.raises(LayoutError, match="stages 0 and 1 of rank 0 have unlike device: cpu and cuda:0"):
        ScheduleInterleaved1F1B([first, second], 2)


def test_ranks_on_unlike_devices_are_told_alike() -> None:
    exchange = mock.Mock(spec=Exchange)
    exchange.ranks = [0, 1]
    here, there = stage(0, 2), stage(1, 2)
    there.device = GPU
    exchange.collect.return_value = {
        rank: describe_stages([each], "GPipe", 2, False) for rank, each in enumerate((here, there))
    }
    with pytest.raises(LayoutError, match="disagree on device: rank 0 has cpu, rank 1 has cuda"):
        agree_on_stages(exchange)


def test_transfers_are_those_of_the_device() -> None:
    """Only those on the CPU agree before their first call, which blocks the host for NCCL's connections."""
    found: list[tuple[Any, ...]] = []

    class Fake(cuda_transfer.CudaTransfer):
        def _setup(self, *arguments: Any) -> None:
            found.append(arguments)

    there = stage()
    there.device = GPU
    with mock.patch.object(cuda_transfer, "CudaTransfer", Fake):
        made = make_transfer(there, [], 5, "pipeline", 3.0, strategy="broadcast")
    assert isinstance(made, Fake)
    assert found[0][1:] == ([], None, 5, "pipeline", "broadcast", None)
    with mock.patch.object(Transfer, "__init__", return_value=None) as init:
        assert type(make_transfer(stage(), [], 7, "pipeline", 3.0)) is Transfer
    expected = {
        "group": None,
        "lane": 7,
        "op": "pipeline",
        "strategy": "auto",
        "topology": None,
        "timeout": 3.0,
    }
    init.assert_called_once_with([], **expected)


def test_a_step_on_the_cpu_touches_no_gpu() -> None:
    schedule = ScheduleGPipe(stage(), 2, loss_fn=nn.functional.mse_loss)
    with (
        mock.patch.object(torch.cuda, "Event", side_effect=AssertionError),
        mock.patch.object(torch.cuda, "device", side_effect=AssertionError),
    ):
        schedule.step(torch.ones(4, 2), target=torch.ones(4, 2))
    assert schedule.summary().startswith("rank 0: step of")

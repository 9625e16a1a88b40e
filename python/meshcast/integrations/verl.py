"""A checkpoint engine for verl: ``checkpoint_engine.backend=meshcast`` with
``checkpoint_engine.custom_backend_module=meshcast.integrations.verl``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NamedTuple

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ..base.wire import pack, unpack
from ..errors import Caller, LayoutError
from ..layout import Layout
from ..resharding.meeting import Meeting, buckets

__all__ = ["MeshcastCheckpointEngine"]

_OP = "MeshcastCheckpointEngine"


class _Bucket(NamedTuple):
    """Announces the tensors that travel next; without names: all have been sent."""

    names: list[str]


@CheckpointEngineRegistry.register("meshcast")
class MeshcastCheckpointEngine(CheckpointEngine):
    """The first actor sends every tensor to all rollout ranks as a multicast: several cost it one copy.

    Tensors are read where they are and arrive in memory of their own, in buckets: a bucket travels while
    the one before is loaded.

    Args:
        bucket_size: bytes that travel together.
        is_master: of the first actor.
        timeout: seconds for each bucket, and to wait for it.

    Raises, from send_weights and receive_weights: DeadlineExceededError and PeerLostError as
    reshard_state_dict. The engine then needs init_process_group again.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 600.0) -> None:
        self._bucket_size, self._timeout = bucket_size, timeout
        self._is_master = is_master
        self._store: dist.TCPStore | None = None
        self._meeting: Meeting | None = None
        self._walks = False  # an actor that makes the tensors with the first, and sends none

    def prepare(self) -> dict[str, Any]:
        if self._is_master and self._store is None:
            self._store = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        if self._store is None:
            return {}
        # A number for each meeting: replicas come and go, and the store stays.
        return {
            "host": ray.util.get_node_ip_address().strip("[]"),
            "port": self._store.port,
            "number": self._store.add("meetings", 1),
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        size = 1 + rollout_world_size

        def each(ranks: list[int]) -> dict[str, list[Any]]:
            count = len(ranks)
            return {"rank": ranks, "world_size": [size] * count, "master_metadata": [metadata[0]] * count}

        return each([0] + [-1] * (actor_wg_world_size - 1)), each(list(range(1, size)))

    def init_process_group(self, rank: int, world_size: int, master_metadata: dict[str, Any]) -> None:
        self._close()
        self._walks = rank < 0
        if self._walks:
            return
        store = self._store
        if store is None:
            host, port = master_metadata["host"], master_metadata["port"]
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
        name = f"{_OP} {master_metadata['number']}"
        self._meeting = Meeting(store, name, range(world_size), rank, self._timeout)

    def finalize(self) -> None:
        """Connections stay for the next step, and end with the next init_process_group."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        if self._walks:
            for _ in weights:
                pass
            return
        travelling: asyncio.Future[Any] | None = None
        for bucket in buckets(weights, _nbytes, self._bucket_size):
            if travelling is not None:
                await travelling
            travelling = self._soon(dict(bucket))
        if travelling is not None:
            await travelling
        await self._soon({})

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        bucket = await self._soon({})
        while bucket:
            travelling = self._soon({})
            for name, tensor in bucket.items():
                yield name, tensor
            bucket = await travelling

    def _soon(self, bucket: dict[str, torch.Tensor]) -> asyncio.Future[dict[str, torch.Tensor]]:
        return asyncio.get_running_loop().run_in_executor(None, self._moved, bucket)

    def _moved(self, bucket: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Moves the sender's bucket to the others, where it returns what has arrived."""
        meeting = self._meeting
        if meeting is None:
            raise Caller(_OP).error(LayoutError, "call init_process_group first")
        deadline = time.monotonic() + self._timeout
        mine = {"bucket": pack(_Bucket(list(bucket)))} if meeting.rank == 0 else {}
        announced = unpack(_Bucket, meeting.move(mine, None, deadline=deadline)["bucket"])
        if not announced.names:
            return {}
        receivers = Layout(list(range(1, meeting.size)), [Replicate()])
        place = (receivers, "cuda") if torch.cuda.is_available() else receivers
        where: dict[str, Any] = dict.fromkeys(announced.names, place)
        tensors = {name: tensor.detach() for name, tensor in bucket.items()}
        return dict(meeting.move(tensors, where, deadline=deadline))

    def _close(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


def _nbytes(weight: tuple[str, torch.Tensor]) -> int:
    return weight[1].numel() * weight[1].element_size()

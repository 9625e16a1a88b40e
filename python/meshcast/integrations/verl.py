"""A checkpoint engine for verl: ``checkpoint_engine.backend=meshcast`` with
``checkpoint_engine.custom_backend_module=meshcast.integrations.verl``."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from ..errors import LayoutError
from ..layout import Layout
from .meeting import Meeting

__all__ = ["MeshcastCheckpointEngine"]

_OP = "MeshcastCheckpointEngine"


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
    reshard_state_dict. The engine then needs init_process_group anew.
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
        self._meeting = Meeting(store, name, world_size, rank, self._timeout)

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
        for bucket, is_last in _buckets(weights, self._bucket_size):
            if travelling is not None:
                await travelling
            travelling = self._soon(bucket, is_last)
        assert travelling is not None
        await travelling

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        is_last, travelling = False, self._soon({}, False)
        while not is_last:
            is_last, bucket = await travelling
            if not is_last:
                travelling = self._soon({}, False)
            for name, tensor in bucket.items():
                yield name, tensor

    def _soon(self, bucket: dict[str, torch.Tensor], is_last: bool) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(None, self._moved, bucket, is_last)

    def _moved(self, bucket: dict[str, torch.Tensor], is_last: bool) -> tuple[bool, dict[str, torch.Tensor]]:
        """Moves the sender's bucket to the others. Returns, on the others, whether it is the last one and
        what has arrived."""
        meeting = self._meeting
        if meeting is None:
            raise LayoutError(f"{_OP}: call init_process_group first", op=_OP)
        deadline = time.monotonic() + self._timeout
        told = {"names": list(bucket), "last": is_last} if meeting.rank == 0 else {}
        said = meeting.move(told, None, deadline=deadline)
        receivers = Layout(list(range(1, meeting.size)), [Replicate()])
        on_gpu = torch.cuda.is_available()
        where: dict[str, Any] = dict.fromkeys(said["names"], (receivers, "cuda") if on_gpu else receivers)
        if not where:
            return said["last"], {}
        return said["last"], dict(meeting.move(bucket, where, deadline=deadline))

    def _close(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
            self._meeting = None


def _buckets(
    weights: Iterable[tuple[str, torch.Tensor]], size: int
) -> Iterator[tuple[dict[str, torch.Tensor], bool]]:
    """Tensors of about so many bytes together, and whether they are the last; one bucket at least."""
    bucket: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in weights:
        own = tensor.numel() * tensor.element_size()
        if bucket and filled + own > size:
            yield bucket, False
            bucket, filled = {}, 0
        bucket[name] = tensor.detach()
        filled += own
    yield bucket, True

"""A fake GPU: tensors "on" it are ordinary ones, but what is enqueued runs only when somebody asks for an
event behind it, and then after a while. It stands where staged transfers ask CUDA for copies
(transfers.pinned.Copies)."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding import state_run
from meshcast.resharding.compiled import TensorMove, tensor_spec
from meshcast.transfers import medium as medium_module
from meshcast.transfers import pinned as pinned_module
from meshcast.transfers import transfer as transfer_module
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

POISON = 0x5A
_pinned: dict[int, torch.Tensor] = {}  # by address; groups keep blocks longer than a FakeGpu lives
_LONGEST = 0.004  # seconds that an operation takes until it may run


class Event:
    def __init__(self, gpu: FakeGpu, stream: str) -> None:
        self.done = False
        self.stream = stream
        self._gpu = gpu

    def query(self) -> bool:
        self._gpu.drive(self)
        return self.done

    def synchronize(self) -> None:
        limit = time.monotonic() + 20
        while not self.query():
            assert time.monotonic() < limit, "the event never came"
            time.sleep(0.0005)


@dataclass
class _Operation:
    run: Callable[[], None]
    needs: Event | None
    ready: float  # time.monotonic() from which it may run
    memory: frozenset[int]  # pinned blocks that it uses


class FakeGpu:
    """One current stream, which the test fills by enqueue(), and the two of the copies. What torch computes
    runs at once: so follow() waits for what the current stream would wait for. pinned_bytes: of each
    allocation. faults: what no GPU would have forgiven."""

    def __init__(self, seed: int) -> None:
        self.pinned_bytes: list[int] = []
        self.ways: list[str] = []  # of each copy: "out" to the host or "in"
        self.faults: list[str] = []
        self.stalled = False  # the current stream does not go on
        self.captures = False
        self.failure = ""  # of the next copy
        self._random = random.Random(seed)
        self._streams: dict[str, deque[_Operation]] = {"current": deque(), "out": deque(), "in": deque()}
        self._lock = threading.RLock()

    # What the transfers ask for.

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes.append(nbytes)
        block = torch.full((nbytes,), POISON, dtype=torch.uint8)
        _pinned[block.data_ptr()] = block
        return block

    def capturing(self) -> bool:
        return self.captures

    def mark(self, _: int) -> Event:
        return self._record("current")

    def copy(self, _: int, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Event) -> Event:
        if self.failure:
            failure, self.failure = self.failure, ""
            raise RuntimeError(failure)
        with self._lock:
            to_host = pairs[0][0].untyped_storage().data_ptr() in _pinned
            stream = "out" if to_host else "in"
            self.ways.append(stream)
            self._add(stream, lambda: None, after)
            for to, from_ in pairs:
                assert to.shape == from_.shape and to.dtype == from_.dtype
                block = (to if to_host else from_).untyped_storage().data_ptr()
                if any(block in each.memory for queue in self._streams.values() for each in queue):
                    self.faults.append("a block was lent again before a copy of it was through")
                if to_host:
                    to.untyped_storage().fill_(POISON)  # what a transfer that starts too early sends
                self._add(stream, _copying(to, from_), None, block)
            return self._record(stream)

    def follow(self, _: int, event: Event) -> None:
        event.synchronize()

    # What tests do.

    def enqueue(self, run: Callable[[], None]) -> None:
        """A kernel in the current stream."""
        self._add("current", run, None)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a kernel behind the current stream sees it."""
        seen: list[torch.Tensor] = []
        self.enqueue(lambda: seen.append(tensor.detach().clone()))
        self._record("current").synchronize()
        return seen[0]

    def drive(self, event: Event) -> None:
        """Runs what the event is behind, as far as it may run by now."""
        with self._lock:
            queue = self._streams[event.stream]
            while not event.done and queue:
                operation = queue[0]
                if operation.needs is not None and not operation.needs.done:
                    self.drive(operation.needs)
                    if not operation.needs.done:
                        return
                stalled = self.stalled and event.stream == "current"
                if stalled or time.monotonic() < operation.ready:
                    return
                queue.popleft().run()

    def _record(self, stream: str) -> Event:
        event = Event(self, stream)

        def pass_() -> None:
            event.done = True

        self._add(stream, pass_, None)
        return event

    def _add(self, stream: str, run: Callable[[], None], needs: Event | None, block: int = 0) -> None:
        with self._lock:
            ready = time.monotonic() + self._random.choice([0.0, 0.0, self._random.random() * _LONGEST])
            self._streams[stream].append(_Operation(run, needs, ready, frozenset([block] if block else [])))


def _copying(to: torch.Tensor, from_: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        with torch.inference_mode():
            to.copy_(from_)

    return run


@contextlib.contextmanager
def fake_gpu(seed: int) -> Iterator[FakeGpu]:
    """This process has a GPU for staged transfers. New results on it hold rubbish until something is copied
    there."""
    gpu = FakeGpu(seed)
    check, allocate = transfer_module.check_shards, TensorMove.allocate

    def check_on_cpu(*arguments, **options) -> None:
        check(*arguments, **{**options, "on_cpu": True})

    def allocate_rubbish(move: TensorMove) -> DTensor:
        result = allocate(move)
        if move.device_types[1] == "cuda" and result._local_tensor.numel():
            result._local_tensor.untyped_storage().fill_(POISON)
        return result

    empty = state_run._empty

    def rubbish(shape, dtype, device_type: str) -> torch.Tensor:
        result = empty(shape, dtype, device_type)
        if device_type == "cuda" and result.numel():
            result.untyped_storage().fill_(POISON)
        return result

    with (
        mock.patch.object(state_run, "_empty", rubbish),
        mock.patch.object(pinned_module, "COPIES", gpu),
        mock.patch.object(medium_module, "gpu_obstacle", return_value=""),
        mock.patch.object(transfer_module, "check_shards", check_on_cpu),
        mock.patch.object(TensorMove, "allocate", allocate_rubbish),
    ):
        yield gpu
    assert not gpu.faults, gpu.faults


def mesh_on(device: str, ranks: object) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks), _init_backend=False, _rank=dist.get_rank())


def held(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], rank: int) -> DTensor:
    """`full` on a mesh whose device this process may not have; a shell outside of it."""
    place = coordinates(mesh.mesh).get(rank)
    local = (
        torch.empty((0,) * full.ndim, dtype=full.dtype)
        if place is None
        else cut(full, mesh.mesh.shape, place, placements).clone()
    )
    spec = tensor_spec(mesh, Layout(mesh, placements), tuple(full.shape), full.dtype)
    return DTensor(local, spec, requires_grad=False)


def check(
    gpu: FakeGpu, result: DTensor, full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """The result as a kernel sees it, or the host where the mesh is there."""
    place = coordinates(mesh.mesh).get(dist.get_rank())
    if place is None:
        return
    local = result._local_tensor
    seen = gpu.read(local) if mesh.device_type == "cuda" else local
    expected = cut(full, mesh.mesh.shape, place, placements)
    assert seen.dtype == expected.dtype and torch.equal(seen, expected), (seen, expected)

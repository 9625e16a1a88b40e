"""The ways of meshcast, see cases.py."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import meshcast
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .messages import Buffers, Messages, TorchMessages

_PLACEMENTS = [Replicate()]


class _Ours(ABC):
    """What the ways have in common: a message is a call that moves a tensor from one rank's mesh to the
    other's. A way defines `_call`, by the sender."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers, self._rank = buffers, buffers.rank
        self._meshes = [
            DeviceMesh("cpu", torch.tensor([each]), _init_backend=False, _rank=self._rank) for each in (0, 1)
        ]
        self._last: Any = None  # a result, where this rank received it
        self._results: list[Any] = []

    def prepare(self, nbytes: int, window: int) -> None:
        self._outs = self._buffers.prepare(nbytes, window)
        self._window, self._count = window, nbytes // 4
        self._ends = [self._on(mesh, self._buffers.mine) for mesh in (0, 1)]

    def _on(self, mesh: int, values: torch.Tensor) -> DTensor:
        """On the mesh of a rank: these values, or a shell on the other rank."""
        local = values if mesh == self._rank else torch.empty(0)
        shape = torch.Size([self._count])
        return DTensor.from_local(
            local, self._meshes[mesh], _PLACEMENTS, run_check=False, shape=shape, stride=(1,)
        )

    @abstractmethod
    def _call(self, sender: int) -> Any: ...

    @abstractmethod
    def batch(self) -> None: ...

    def _message(self, sender: int) -> None:
        if self._rank == sender:
            self._call(sender)
        else:
            self._last = None  # so that its memory can be taken again
            self._last = self._call(sender)

    def there(self) -> None:
        self._message(0)

    def back(self) -> None:
        self._message(1)

    def right(self) -> bool:
        return self._buffers.right(
            each.to_local() if isinstance(each, DTensor) else each
            for each in (self._last, *(self._results if self._rank else ()))
        )

    def settle(self) -> None:
        self._last, self._results = None, []


class _Started(_Ours):
    """Calls that return a handle: `_start` sends from rank 0 into the window's place `at`."""

    @abstractmethod
    def _start(self, at: int) -> Any: ...

    def batch(self) -> None:
        self._results = []
        self._results = [handle.wait() for handle in [self._start(at) for at in range(self._window)]]


class Reshard(_Started):
    def _call(self, sender: int) -> Any:
        return meshcast.reshard(self._ends[sender], self._meshes[1 - sender], _PLACEMENTS)

    def _start(self, at: int) -> Any:  # noqa: ARG002
        return meshcast.reshard(self._ends[0], self._meshes[1], _PLACEMENTS, async_op=True)


class _IntoPlace(_Started):
    """Into tensors that are there."""

    def prepare(self, nbytes: int, window: int) -> None:
        super().prepare(nbytes, window)
        here = [self._on(self._rank, out) for out in self._outs]
        self._targets = here if self._rank else [self._on(1, torch.empty(0)) for _ in range(window)]
        self._home = here[0] if self._rank == 0 else self._on(0, torch.empty(0))


class ReshardInPlace(_IntoPlace):
    def _call(self, sender: int) -> Any:
        target = self._targets[0] if sender == 0 else self._home
        return meshcast.reshard_(target, self._ends[sender])

    def _start(self, at: int) -> Any:
        return meshcast.reshard_(self._targets[at], self._ends[0], async_op=True)


class Resharder(_IntoPlace):
    def prepare(self, nbytes: int, window: int) -> None:
        super().prepare(nbytes, window)
        self._forth, self._back = (self._resharder(sender, reuse_output=True) for sender in (0, 1))
        self._starts = self._resharder(0, reuse_output=False)

    def _resharder(self, sender: int, *, reuse_output: bool) -> Any:
        source, target = self._ends[sender], self._ends[1 - sender]
        if "placements" in inspect.signature(meshcast.Resharder).parameters:
            return meshcast.Resharder(source, target.device_mesh, _PLACEMENTS, reuse_output=reuse_output)
        specs: list[Any] = [source, target]  # another tree may know this form alone
        return meshcast.Resharder(*specs, reuse_output=reuse_output)

    def _call(self, sender: int) -> Any:
        resharder = self._back if sender else self._forth
        return resharder.run(self._ends[sender] if self._rank == sender else None)

    def _start(self, at: int) -> Any:
        if self._rank == 0:
            return self._starts.start(self._ends[0])
        return self._starts.start(out=self._targets[at])


class ReshardLocal(_Started):
    _LAYOUTS = (meshcast.Layout([0], _PLACEMENTS), meshcast.Layout([1], _PLACEMENTS))

    def _local(self, sender: int, **options: Any) -> Any:
        source = self._buffers.mine if self._rank == sender else None
        there, here = self._LAYOUTS[sender], self._LAYOUTS[1 - sender]
        return meshcast.reshard_local(
            source, there, None, here, shape=(self._count,), dtype=torch.float32, **options
        )

    def _call(self, sender: int) -> Any:
        return self._local(sender)

    def _start(self, at: int) -> Any:  # noqa: ARG002
        return self._local(0, async_op=True)


class _Scaled(torch.nn.Module):
    """What a stage computes, once: its output needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class PipelineEdge(_Ours):
    """The transfers between two stages, as the runtime of a pipeline calls them: a send is waited for behind
    the receive that comes next. The stages compute nothing, so this is no step of a pipeline."""

    _LIMIT = 60.0  # seconds

    def prepare(self, nbytes: int, window: int) -> None:
        from meshcast.pipelining import PipelineStage, ScheduleGPipe

        super().prepare(nbytes, window)
        stage = PipelineStage(_Scaled(), self._rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=1, loss_fn=lambda y, _: y.sum())
        with torch.enable_grad():
            if self._rank == 0:
                schedule.step(self._buffers.mine)
            else:
                schedule.step(target=self._buffers.mine)
        wiring = schedule._wirings.last
        assert wiring is not None
        (forth,) = wiring.forward[0, 1]
        self._schedule, self._transfers = schedule, (forth, wiring.backward[0, 1])
        self._sent: Any = None

    def _call(self, sender: int) -> Any:
        transfers = self._transfers[sender]
        if self._rank == sender:
            self._wait_for_send()
            self._sent = transfers.send([self._buffers.mine], self._LIMIT)
            return None
        handle, (found,) = transfers.receive(self._LIMIT)
        handle.wait()
        self._wait_for_send()
        return found

    def _wait_for_send(self) -> None:
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.wait()

    def batch(self) -> None:
        self._results = []
        transfers = self._transfers[0]
        if self._rank == 0:
            handles = [transfers.send([self._buffers.mine], self._LIMIT) for _ in range(self._window)]
        else:
            begun = [transfers.receive(self._LIMIT) for _ in range(self._window)]
            handles = [handle for handle, _ in begun]
            self._results = [found for _, (found,) in begun]
        for handle in handles:
            handle.wait()

    def settle(self) -> None:
        self._wait_for_send()
        super().settle()


class Stays(_Ours):
    """Calls to the same layout, which move nothing between ranks: each rank gets what it has."""

    def prepare(self, nbytes: int, window: int) -> None:
        super().prepare(nbytes, window)
        self._both = DeviceMesh("cpu", torch.tensor([0, 1]), _init_backend=False, _rank=self._rank)
        self._given = DTensor.from_local(self._buffers.mine, self._both, [Shard(0)], run_check=False)

    def _call(self, sender: int) -> Any:  # noqa: ARG002
        return meshcast.reshard(self._given, self._both, [Shard(0)])

    def there(self) -> None:
        self._last = None
        self._last = self._call(self._rank)

    def back(self) -> None:
        self.there()

    def batch(self) -> None:
        """Nothing is in flight."""

    def right(self) -> bool:
        return torch.equal(self._last.detach().to_local(), self._buffers.mine)


class StaysWithGradient(Stays):
    def prepare(self, nbytes: int, window: int) -> None:
        super().prepare(nbytes, window)
        self._given = self._given.detach().requires_grad_()

    @torch.enable_grad()
    def there(self) -> None:
        super().there()

    def settle(self) -> None:
        super().settle()
        meshcast.backward()  # frees the graph


KINDS: dict[str, Callable[[Buffers], Messages]] = {
    "reshard": Reshard,
    "reshard_": ReshardInPlace,
    "Resharder": Resharder,
    "reshard_local": ReshardLocal,
    "backend": lambda buffers: TorchMessages(buffers, "meshcast"),
    "edge": PipelineEdge,
    "stays": Stays,
    "stays-gradient": StaysWithGradient,
}

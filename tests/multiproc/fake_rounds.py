"""A fake GPU side of private groups: what a build with CUDA does by GpuGroupCore.start, done over the CPU's
transfer, so that calls between meshes on GPUs run without one. It casts as GpuGroupCore is asked to, checks
what it is given as that does, and writes it down."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from meshcast.transfers import gpu as gpu_module
from meshcast.transfers import medium as medium_module
from meshcast.transfers import transfer as transfer_module
from meshcast.transfers.gpu import CudaLanes, attach_gpu, gpu_of
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes


@dataclass
class Start:
    """One start. types: as given; sources, destinations: the tensors as given."""

    types: list[tuple[torch.dtype, torch.dtype, torch.dtype]]
    sources: list[torch.Tensor | None]
    destinations: list[torch.Tensor | None]
    reverse: bool
    descriptor: str


@dataclass
class FakeRates:
    """A GPU whose transfers take no time but on its own clock. A transfer takes as long as its slowest
    direction, and `round_s` for each of its rounds.

    seconds: for so many bytes to, or from, a rank.
    """

    seconds: Callable[[int, bool, int], float]
    round_s: float
    now: float = 0.0

    def passed(self, traffic: Sequence[tuple[int, bool, int, int]], hop_by_hop: bool) -> None:
        sides = {sent: 0.0 for _, sent, _, _ in traffic}
        for peer, sent, _, nbytes in traffic:
            sides[sent] += self.seconds(peer, sent, nbytes)
        rounds = max((messages for _, _, messages, _ in traffic), default=0) if hop_by_hop else 1
        self.now += max(sides.values(), default=0.0) + self.round_s * rounds

    def event(self, *, enable_timing: bool) -> _ClockEvent:
        assert enable_timing
        return _ClockEvent(self)


class _ClockEvent:
    def __init__(self, clock: FakeRates) -> None:
        self._clock, self.at = clock, -1.0

    def record(self) -> None:
        self.at = self._clock.now

    def synchronize(self) -> None:
        assert self.at >= 0

    def elapsed_time(self, end: _ClockEvent) -> float:
        return 1e3 * (end.at - self.at)


@dataclass
class FakeRounds:
    """All starts of this process, over all groups. rates: by which the clock of the GPU goes on. transport:
    that is said to connect them."""

    starts: list[Start] = field(default_factory=list)
    rates: FakeRates | None = None
    transport: str = "fake"

    def last(self, *, reverse: bool = False) -> Start:
        return [start for start in self.starts if start.reverse is reverse][-1]


class _Work:
    def __init__(
        self,
        inner: Any,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        over: Callable[[], None],
    ) -> None:
        self.inner = inner
        self._pairs = list(pairs)
        self._over = over

    def wait(self) -> None:
        self.inner.wait()
        self._over()
        with _disable_current_modes(), torch.inference_mode():
            while self._pairs:
                to, from_ = self._pairs.pop()
                to.copy_(from_)

    def is_completed(self) -> bool:
        return self.inner.is_completed()

    def get_future(self) -> Any:
        return self.inner.get_future()


class _Core:
    def __init__(self, control: Any, fake: FakeRounds) -> None:
        self._control = control
        self._fake = fake

    def start(
        self,
        agreed: Any,
        *,
        types: Sequence[tuple[torch.dtype, torch.dtype, torch.dtype]],
        after: int,
        src: Sequence[torch.Tensor | None],
        dst: Sequence[torch.Tensor | None],
        hop_by_hop: bool,
        **others: Any,
    ) -> _Work:
        assert after == _Mark.EVENT
        given = Start(list(types), list(src), list(dst), others["reverse"], agreed.descriptor)
        self._fake.starts.append(given)
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        sources, destinations = list(src), list(dst)
        assert not types or len(types) == len(src) == len(dst)
        with _disable_current_modes():
            for index, (source, wire, destination) in enumerate(types):
                assert wire in (source, destination)
                x, y = src[index], dst[index]
                if x is not None:
                    assert x.dtype == source, (x.dtype, source)
                    sources[index] = x.to(wire)
                if y is not None:
                    assert y.dtype == destination, (y.dtype, destination)
                    if destination != wire:
                        arrived = destinations[index] = torch.empty(y.shape, dtype=wire)
                        pairs.append((y, arrived))
            work = self._control.start(agreed, src=sources, dst=destinations, **others)
        return _Work(work, pairs, self._clocked(work, hop_by_hop))

    def _clocked(self, work: Any, hop_by_hop: bool) -> Callable[[], None]:
        """What the clock of the fake GPU does once the work is over."""
        if self._fake.rates is None:
            return lambda: None
        return lambda: self._fake.rates.passed(self._control.traffic(work), hop_by_hop)

    def stats(self, work: _Work) -> dict[str, float]:
        return self._control.stats(work.inner)

    def traffic(self, work: _Work) -> list[tuple[int, bool, int, int]]:
        return self._control.traffic(work.inner)

    def abort(self, reason: str) -> None:
        self._control.abort(reason)

    def shutdown(self) -> None:
        pass


class _Mark:
    """As that of transfers.gpu: every tensor of this process is on its one GPU."""

    EVENT = 77

    class _Event:
        cuda_event = 77

    def __init__(self, _: Any) -> None:
        self.device = None
        self.problem = None
        self.event = self._Event()


@contextlib.contextmanager
def fake_rounds() -> Iterator[FakeRounds]:
    """This process has a GPU for calls between GPUs, on which tensors are ordinary ones."""
    fake = FakeRounds()
    check = transfer_module.check_shards

    def check_on_cpu(*arguments, **options) -> None:
        check(*arguments, **{**options, "on_cpu": True})

    def connect(group, control, lanes, place, call, deadline) -> None:  # noqa: ARG001
        gpu = gpu_of(group)
        if gpu is None:
            gpu = CudaLanes(_Core(control, fake), None, fake.transport, 0, 0)  # type: ignore[arg-type]
            attach_gpu(group, gpu)
        gpu.lanes.update(lanes)
        gpu.core._fake = fake

    with (
        mock.patch.object(medium_module, "gpu_obstacle", return_value=""),
        mock.patch.object(transfer_module, "check_shards", check_on_cpu),
        mock.patch.object(gpu_module, "connect_lanes", connect),
        mock.patch.object(gpu_module, "_Mark", _Mark),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
    ):
        yield fake


class Dispatched(TorchDispatchMode):
    """Which operators of torch make or convert a tensor meanwhile, but for those of the fake GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() not in ("aten::detach", "aten::view", "aten::alias"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))

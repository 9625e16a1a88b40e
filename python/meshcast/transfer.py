"""Transfer: one or many tensors from layout to layout, compiled once, started any number of times."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from .errors import DeadlineExceededError, LayoutError, MeshcastError
from .groups import Job, ParentGroup, PrivateGroup, parent_group, seconds
from .handle import Handle, Launch
from .observe import Flight, log, profiled
from .plan import Plan, plan_many

if TYPE_CHECKING:
    import torch.distributed as dist

    from . import _C
    from .layout import Layout
    from .topology import Topology

__all__ = ["CallNumber", "Problem", "Transfer", "agreed_transfer", "publish_rejection"]

Problem = tuple[Sequence[int], torch.dtype, "Layout", "Layout"]  # global shape, dtype, source, destination
Shards = Sequence[torch.Tensor | None]

REVERSE_LANE = 1  # backward of lane 0
# Transfers that a group keeps. Every rank of a group makes the same calls, so all evict the same one; below
# the 1024 slots that message tags can tell apart.
_KEPT = 256


@dataclass(frozen=True)
class CallNumber:
    """Names one call alike on all its ranks: its position in the lane, how often its transfer had run before,
    and how often its own backward: that of a graph that is kept runs again, and messages of both are in
    flight together, as senders do not wait for their receivers."""

    ordinal: int
    run: int
    repeat: int = 0


class Transfer:
    """Compiled plan, private group and agreement of all ranks on both.

    problems: [(global shape, dtype, source Layout, destination Layout)]; all ranks of both meshes construct
    it in the same order, and construction agrees on it in the background: ranks that disagree get
    PlanMismatchError from start(). lane: ordering domain, see start(). strategy, balance: as for plan().
    Raises LayoutError if a layout does not fit its shape, a rank is outside `group`, or this rank is in no
    mesh.
    """

    _error: Exception | None  # why the transfer cannot run
    kept_as: tuple[OrderedDict[Any, Transfer], Any] | None  # where agreed_transfer keeps it, and its key
    _balance = "greedy"

    def __init__(
        self,
        problems: Sequence[Problem],
        *,
        group: dist.ProcessGroup | None = None,
        lane: int = 0,
        op: str = "reshard",
        strategy: str = "auto",
        balance: str = "greedy",
        topology: Topology | None = None,
        timeout: float | timedelta | None = None,
    ) -> None:
        parent = parent_group(group, op)
        self._balance = balance
        self._setup(parent, problems, None, lane, op, strategy, topology)
        self._agree_in_background(Launch(op, seconds(timeout, parent.timeout)))

    def _agree_in_background(self, launch: Launch) -> None:

        def job_of(ordinal: int) -> Job:
            def job(core: _C.ReshardGroup | None, error: Exception | None) -> None:
                try:
                    self._agree(_running(core, error), ordinal, launch)
                except Exception as cause:
                    self._error = cause
                finally:
                    self._compiled.set()

            return job

        self._group.call(self._lane, launch.deadline, job_of, ready=lambda: False)

    def _setup(
        self,
        parent: ParentGroup,
        problems: Sequence[Problem],
        backward: Sequence[Problem] | None,
        lane: int,
        op: str,
        strategy: str,
        topology: Topology | None,
    ) -> None:
        if not problems:
            raise LayoutError(f"{op}: nothing to transfer; give at least one tensor")
        self.problems = [(tuple(shape), dtype, src, dst) for shape, dtype, src, dst in problems]
        self._backward = backward
        self._lane, self._op, self._strategy, self._topology = lane, op, strategy, topology
        # local_shapes() also checks the layout against the shape.
        self._source = [src.local_shapes(shape).get(parent.rank) for shape, _, src, _ in self.problems]
        self._destination = [dst.local_shapes(shape).get(parent.rank) for shape, _, _, dst in self.problems]
        if all(shape is None for shape in (*self._source, *self._destination)):
            raise LayoutError(f"{op}: rank {parent.rank} is in neither mesh", rank=parent.rank, op=op)
        self._parent = parent
        self._group = parent.private(ranks_of(problems), op)
        self._plan: Plan | None = None
        self._reverse_plan: Plan | None = None
        self._slot: int | None = None
        self._descriptor = ""
        self._error = None
        self._compiled = threading.Event()
        self._runs = 0
        self._reversed: OrderedDict[int, int] = OrderedDict()  # how often, by the ordinal of the forward call
        self.evicted = False
        self.kept_as = None

    @property
    def plan(self) -> Plan:
        """The plan; waits until it is compiled, which is after the first meeting of all ranks. Raises the
        error of that."""
        self._compiled.wait()
        if self._plan is None:
            raise self._error or MeshcastError(f"{self._op}: the plan was never compiled", op=self._op)
        return self._plan

    def start(
        self, src: Shards, dst: Shards, *, timeout: float | timedelta | None = None
    ) -> Handle[list[torch.Tensor | None]]:
        """Starts the transfer and returns at once. src, dst: this rank's local shards, one per problem, any
        strides; None where the rank is not in that mesh or its shard is empty. Starts of one lane arrive in
        the order in which they were made, alike on all ranks. Raises LayoutError if a shard does not have the
        shape or dtype of its layout; the other ranks then raise as well."""
        launch, _ = self.launch(src, dst, seconds(timeout, self._parent.timeout))
        return Handle(
            launch, list(dst), lambda: self.plan.lower_bound, [tensor for tensor in src if tensor is not None]
        )

    def abort(self, reason: str) -> None:
        """Ends every call of the private group, on all its ranks, with AbortedError(reason). Any thread;
        never blocks."""
        self._group.abort(reason)

    def close(self) -> None:
        """Drops the plan; transfers in flight go on. Later starts raise."""
        self._error = self._error or MeshcastError(f"{self._op}: the transfer was closed", op=self._op)

    def launch(self, src: Shards, dst: Shards, timeout: float) -> tuple[Launch, CallNumber]:
        """start() below the handle."""
        with profiled("launch", self._op):
            return self._launch(src, dst, timeout)

    def _launch(self, src: Shards, dst: Shards, timeout: float) -> tuple[Launch, CallNumber]:
        launch = Launch(self._op, timeout)
        launch.flight = Flight(launch, self._group.name, self._group.rank)
        run = self._runs
        self._runs += 1
        try:
            self._check("source", src, self._source)
            self._check("destination", dst, self._destination)
        except LayoutError as error:
            launch.flight.failed(error)
            publish_rejection(self._group, self._lane, error, timeout)
            raise

        def job_of(ordinal: int) -> Job:
            return self._start_job(launch, CallNumber(ordinal, run), src, dst, reverse=False)

        ordinal = self._group.call(self._lane, launch.deadline, job_of, ready=lambda: self._slot is not None)
        return launch, CallNumber(ordinal, run)

    def launch_reverse(self, call: CallNumber, src: Shards, dst: Shards, timeout: float) -> Launch:
        """The backward transfer of `call`: src are gradients in the destination layout, dst receives those of
        the source."""
        again = self._reversed.pop(call.ordinal, 0)  # a retained graph runs its backward more than once
        self._reversed[call.ordinal] = again + 1
        if len(self._reversed) > _KEPT:
            self._reversed.popitem(last=False)
        call = CallNumber(call.ordinal, call.run, again)
        launch = Launch(f"{self._op} backward", timeout)
        launch.flight = Flight(launch, self._group.name, self._group.rank)
        job = self._start_job(launch, call, src, dst, reverse=True)
        self._group.replay(launch.deadline, job, ready=lambda: self._slot is not None)
        return launch

    def reject_reverse(self, call: CallNumber, error: Exception, timeout: float) -> None:
        """Lets the ranks that wait in the backward transfer of `call` raise: this rank does not take part."""
        job = _rejection_job(self._group, REVERSE_LANE, call.ordinal, error)
        self._group.replay(time.monotonic() + timeout, job, ready=lambda: True)

    def _start_job(self, launch: Launch, call: CallNumber, src: Shards, dst: Shards, *, reverse: bool) -> Job:
        def job(core: _C.ReshardGroup | None, error: Exception | None) -> None:
            try:
                group = _running(core, error)
                if self._slot is None and self._error is None:
                    self._agree(group, call.ordinal, launch)
                if self._error is not None:
                    raise self._error
                plan = self._reverse_plan if reverse else self._plan
                assert plan is not None and self._slot is not None  # _agree() set both
                if launch.flight is not None:
                    lane = REVERSE_LANE if reverse else self._lane
                    launch.flight.plan, launch.flight.number = plan, (lane, call.ordinal, call.run)
                work = group.start(
                    plan._core,
                    slot=self._slot,
                    run=call.run,
                    reverse=reverse,
                    repeat=call.repeat,
                    lane=REVERSE_LANE if reverse else self._lane,
                    ordinal=call.ordinal,
                    descriptor=self._descriptor,
                    src=_filled(src),
                    dst=_filled(dst),
                    timeout=max(launch.remaining(), 1e-3),
                    op=launch.op,
                )
            except Exception as cause:
                self._error_out(cause)
                launch.failed(cause)
            else:
                launch.started(work, lambda: group.stats(work))
                self._group.watch(launch)
            finally:
                self._compiled.set()

        return job

    def _agree(self, core: _C.ReshardGroup, ordinal: int, launch: Launch) -> None:
        """First use: compile, and compare with the other ranks before any byte moves."""
        topology = self._topology or self._group.topology
        try:
            self._plan = plan_many(
                self.problems, topology=topology, strategy=self._strategy, balance=self._balance
            )
            if self._backward is not None:
                self._reverse_plan = plan_many(self._backward, topology=topology, strategy=self._strategy)
        except Exception as error:
            core.reject(self._lane, ordinal, f"rank {self._group.rank}: {error}")
            raise
        self._descriptor = self._describe()
        try:
            self._slot = core.agree(self._lane, ordinal, self._descriptor, max(launch.remaining(), 1e-3))
        except DeadlineExceededError as error:
            core.abort(str(error))  # a rank is missing: the ranks no longer count calls alike
            raise
        log.info("rank %d: agreed on %s", self._group.rank, self._descriptor)

    def _error_out(self, cause: Exception) -> None:
        # A transfer that was never agreed on is forgotten, so that the next attempt agrees anew on every
        # rank.
        if self._slot is None:
            self._error = self._error or cause
            self.evicted = True

    def _describe(self) -> str:
        tensors = "; ".join(
            f"{_tensor_text(shape, dtype)}: {src} -> {dst}" for shape, dtype, src, dst in self.problems[:3]
        )
        more = f"; {len(self.problems) - 3} more tensors" if len(self.problems) > 3 else ""
        gradient = "no gradient"
        if self._backward is not None and self._reverse_plan is not None:
            _, _, src, dst = self._backward[0]
            gradient = f"gradient {src} -> {dst}, plan {self._reverse_plan.hash}"
        assert self._plan is not None
        return f"{self._op} {tensors}{more}; {gradient}; strategy {self._strategy}; plan {self._plan.hash}"

    def _check(self, side: str, shards: Shards, expected: Sequence[tuple[int, ...] | None]) -> None:
        if len(shards) != len(expected):
            raise LayoutError(
                f"{self._op}: expected {len(expected)} {side} shards, one per tensor, found {len(shards)}"
            )
        for index, (shard, shape) in enumerate(zip(shards, expected, strict=True)):
            dtype = self.problems[index][1]
            if shard is None:
                if shape is not None and 0 not in shape:
                    raise LayoutError(
                        f"{self._op}: rank {self._group.rank} is in the {side} mesh and must give its shard "
                        f"of tensor {index}: "
                        f"expected {_tensor_text(shape, dtype)}, found None",
                        rank=self._group.rank,
                        op=self._op,
                    )
            elif shape is None:
                if shard.numel():
                    raise LayoutError(
                        f"{self._op}: rank {self._group.rank} is not in the {side} mesh and holds nothing "
                        f"of tensor {index}: "
                        f"expected None, found {_tensor_text(shard.shape, shard.dtype)}",
                        rank=self._group.rank,
                        op=self._op,
                    )
            elif tuple(shard.shape) != shape or shard.dtype != dtype or shard.device.type != "cpu":
                raise LayoutError(
                    f"{self._op}: the {side} shard of tensor {index} on rank {self._group.rank} does not "
                    "fit its layout: expected "
                    f"{_tensor_text(shape, dtype)} on cpu, found {_tensor_text(shard.shape, shard.dtype)} "
                    f"on {shard.device}",
                    rank=self._group.rank,
                    op=self._op,
                )


def agreed_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    backward: Sequence[Problem] | None,
    *,
    op: str,
    strategy: str,
    topology: Topology | None,
) -> Transfer:
    """The transfer of an ordinary call: one kept from before, or a new one that agrees within its first
    launch, so that every call takes one ordinal whether its plan was known or not."""
    group = parent.private(ranks_of(problems), op)
    if group.slots is None:
        group.slots = OrderedDict()
    kept: OrderedDict[Any, Transfer] = group.slots
    key = (op, tuple(problems), None if backward is None else tuple(backward), strategy, topology)
    transfer = kept.get(key)
    if transfer is None or transfer.evicted:
        transfer = unagreed_transfer(parent, problems, backward, op=op, strategy=strategy, topology=topology)
        transfer.kept_as = (kept, key)
        kept[key] = transfer
    return transfer


def unagreed_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    backward: Sequence[Problem] | None,
    *,
    op: str,
    strategy: str,
    topology: Topology | None,
) -> Transfer:
    """A new transfer that agrees within its first launch."""
    transfer = Transfer.__new__(Transfer)
    transfer._setup(parent, problems, backward, 0, op, strategy, topology)
    return transfer


def touch(transfer: Transfer) -> None:
    """Marks a kept transfer as used last, and drops the one that was not used for longest. Once per call, on
    every rank."""
    if transfer.kept_as is None:
        return
    kept, key = transfer.kept_as
    if kept.get(key) is transfer:
        kept.move_to_end(key)
    if len(kept) > _KEPT:
        kept.popitem(last=False)[1].evicted = True


def publish_rejection(group: PrivateGroup, lane: int, error: Exception, timeout: float) -> None:
    """Tells the other ranks, in the background, that this rank refused its arguments: they raise at once
    instead of waiting."""
    deadline = time.monotonic() + timeout
    group.call(
        lane, deadline, lambda ordinal: _rejection_job(group, lane, ordinal, error), ready=lambda: True
    )


def _rejection_job(group: PrivateGroup, lane: int, ordinal: int, error: Exception) -> Job:
    message = f"rank {group.rank}: {error}"

    def job(core: _C.ReshardGroup | None, _: Exception | None) -> None:
        if core is not None:
            core.reject(lane, ordinal, message)

    return job


def ranks_of(problems: Sequence[Problem]) -> list[int]:
    """Ranks of all meshes, ascending: the private group of these problems."""
    return sorted({rank for _, _, src, dst in problems for rank in (*src.ranks, *dst.ranks)})


def _running(core: _C.ReshardGroup | None, error: Exception | None) -> _C.ReshardGroup:
    if core is None:
        raise error or MeshcastError("the private group is not up")
    return core


def _filled(shards: Shards) -> list[torch.Tensor | None]:
    return [None if shard is None or shard.numel() == 0 else settled(shard) for shard in shards]


def settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor behind the wrapper in which functional collectives return before they have finished; the
    wrapper has no memory of its own."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _tensor_text(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"

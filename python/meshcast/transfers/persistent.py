"""Transfer: one or many tensors from layout to layout, compiled once, started any number of times."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch

from ..base.checks import dtype_name
from ..base.observe import Flight, log, profiled
from ..errors import DeadlineExceededError, LayoutError, MeshcastError
from ..groups.agreements import Agreed
from ..groups.parent import ParentGroup, parent_group, seconds
from ..groups.private import Job
from ..groups.rejection import publish_rejection, rejection_job
from ..planning.plan import Plan, plan_many
from .gpu_offer import DeviceTypes
from .handle import Handle, Launch
from .shards import Shards, check_shards, filled, resolved, tensor_text

if TYPE_CHECKING:
    import torch.distributed as dist

    from .. import _C
    from ..layout import Layout
    from ..topology import Topology
    from .casts import Casts

__all__ = ["REVERSE_LANE", "CallNumber", "Problem", "PersistentTransfer", "ranks_of"]

Problem = tuple[Sequence[int], torch.dtype, "Layout", "Layout"]  # global shape, dtype, source, destination

REVERSE_LANE = 1  # backward of lane 0


@dataclass
class CallNumber:
    """Names one call alike on all its ranks: its position in the lane and, once it has been started, the
    slot of its transfer and how often that had run before."""

    ordinal: int
    slot: int = -1
    run: int = -1


class PersistentTransfer:
    """Compiled plan, private group and agreement of all ranks on both.

    problems: [(global shape, dtype, source Layout, destination Layout)]; all ranks of both meshes construct
    it in the same order, and construction agrees on it in the background: ranks that disagree get
    PlanMismatchError from start(). lane: ordering domain, see start(). strategy, balance: as for plan().
    Raises LayoutError if a layout does not fit its shape, a rank is outside `group`, or this rank is in no
    mesh.
    """

    _error: Exception | None  # why the transfer cannot run
    _failure: Exception | None  # of the last attempt to agree
    _balance = "greedy"
    _device_types: DeviceTypes = ("cpu", "cpu")  # where source and destination are
    _by_host = True  # the host moves the bytes; between GPUs it does not: gpu_medium.py

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
            def job(core: _C.GroupCore | None, error: Exception | None) -> None:
                try:
                    self._agreed(_running(core, error), ordinal, launch)
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
        casts: Casts | None = None,
    ) -> None:
        if not problems:
            raise LayoutError(f"{op}: nothing to transfer; give at least one tensor")
        self.problems = [(tuple(shape), dtype, src, dst) for shape, dtype, src, dst in problems]
        wires = [dtype for _, dtype, _, _ in self.problems]
        # Of the shards on either side; they differ where the transfer itself casts (casts.py).
        self._source_dtypes = wires if casts is None else [ends.source for ends in casts.forth]
        self._destination_dtypes = wires if casts is None else [ends.destination for ends in casts.forth]
        self._casts = casts
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
        self._facts: dict[str, Any] | None = None
        self._reverse_facts: dict[str, Any] | None = None
        self._kind: Hashable = None  # calls of one kind share an agreement; None: this one has its own
        self._own: Agreed | None = None
        self._descriptor = ""
        self._error = self._failure = None
        self._compiled = threading.Event()

    @property
    def plan(self) -> Plan:
        """The plan; waits until it is compiled, which is after the first meeting of all ranks. Raises the
        error of that."""
        self._compiled.wait()
        if self._plan is None:
            raise self._error or self._failure or MeshcastError(f"{self._op}: no plan yet", op=self._op)
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

    def launch(
        self, src: Shards, dst: Shards, timeout: float, *, driven: bool = False
    ) -> tuple[Launch, CallNumber]:
        """start() below the handle. driven: the caller waits at once, and lends a hand in that."""
        with profiled("launch", self._op):
            return self._launch(src, dst, timeout, driven)

    def _launch(self, src: Shards, dst: Shards, timeout: float, driven: bool) -> tuple[Launch, CallNumber]:
        launch = Launch(self._op, timeout, driven)
        launch.flight = Flight(launch.op, self._group.name, self._group.rank, launch)
        try:
            self._check("source", src, self._source)
            self._check("destination", dst, self._destination)
            src, dst = self._staged(launch, resolved(src), dst, reverse=False)
        except MeshcastError as error:
            launch.flight.failed(error)
            publish_rejection(self._group, self._lane, error, timeout)
            raise

        number = CallNumber(-1)

        def job_of(ordinal: int) -> Job:
            number.ordinal = ordinal
            return self._start_job(launch, number, src, dst, reverse=False)

        self._group.call(self._lane, launch.deadline, job_of, ready=self._ready(launch, reverse=False))
        return launch, number

    def launch_reverse(
        self, call: CallNumber, src: Shards, dst: Shards, timeout: float, *, driven: bool = False
    ) -> Launch:
        """The backward transfer of `call`: src are gradients in the destination layout, dst receives those of
        the source. driven: as in launch()."""
        launch = Launch(f"{self._op} backward", timeout, driven)
        launch.flight = Flight(launch.op, self._group.name, self._group.rank, launch)
        src, dst = self._staged(launch, resolved(src), dst, reverse=True)
        job = self._start_job(launch, call, src, dst, reverse=True)
        self._group.replay(launch.deadline, job, ready=self._ready(launch, reverse=True))
        return launch

    def reject_reverse(self, call: CallNumber, error: Exception, timeout: float) -> None:
        """Lets the ranks that wait in the backward transfer of `call` raise: this rank does not take part."""
        job = rejection_job(self._group, REVERSE_LANE, call.ordinal, error)
        self._group.replay(time.monotonic() + timeout, job, ready=lambda: True)

    def _staged(
        self,
        launch: Launch,  # noqa: ARG002
        src: Shards,
        dst: Shards,
        *,
        reverse: bool,  # noqa: ARG002
    ) -> tuple[Shards, Shards]:
        """The shards where this transfer can move them, in the caller's thread, before the call is counted:
        an error is told to the others."""
        return src, dst

    def _ready(self, launch: Launch, *, reverse: bool) -> Callable[[], bool]:  # noqa: ARG002
        """Tells, while the call is being counted, whether its start would not have to wait."""
        return _always if reverse else self._has_agreed

    def _start_job(self, launch: Launch, call: CallNumber, src: Shards, dst: Shards, *, reverse: bool) -> Job:
        def job(core: _C.GroupCore | None, error: Exception | None) -> None:
            try:
                group = _running(core, error)
                if self._error is not None:
                    raise self._error
                if not reverse:
                    agreed = self._agreed(group, call.ordinal, launch)
                    call.slot, call.run = agreed.slot, agreed.runs
                    agreed.runs += 1
                elif call.slot < 0:
                    raise self._failure or MeshcastError(
                        f"{self._op}: the call itself has failed", op=launch.op
                    )
                plan = self._reverse_plan if reverse else self._plan
                assert plan is not None  # _agreed() compiled it
                if launch.flight is not None:
                    lane = REVERSE_LANE if reverse else self._lane
                    launch.flight.plan = self._reverse_facts if reverse else self._facts
                    launch.flight.number = (lane, call.ordinal, call.run)
                work = group.start(
                    plan._core,
                    slot=call.slot,
                    reverse=reverse,
                    lane=REVERSE_LANE if reverse else self._lane,
                    ordinal=call.ordinal,
                    descriptor=self._descriptor,
                    src=filled(src),
                    dst=filled(dst),
                    timeout=max(launch.remaining(), 1e-3),
                    op=launch.op,
                    driven=launch.driven,
                )
            except Exception as cause:
                self._failure = cause
                launch.failed(cause)
            else:
                launch.started(work, lambda: group.stats(work))
                self._group.watch(launch)
            finally:
                if not self._compiled.is_set():  # worth it: set() takes a lock and looks for who waits
                    self._compiled.set()

        return job

    def _has_agreed(self) -> bool:
        """Whether a start would not have to wait. Only while no job of the group is running."""
        agreed = self._own is not None if self._kind is None else self._kind in self._group.agreements
        return agreed and self._plan is not None

    def _agreed(self, core: _C.GroupCore, ordinal: int, launch: Launch) -> Agreed:
        """What the ranks agreed on. First use: compile, and compare with the other ranks before any byte
        moves."""
        kinds = self._group.agreements
        found = self._own if self._kind is None else kinds.use(self._kind)
        try:
            self._compile()
        except Exception as error:
            if found is None:
                core.reject(self._lane, ordinal, f"rank {self._group.rank}: {error}")
            raise
        if found is not None:
            return found
        try:
            slot = core.agree(self._lane, ordinal, self._descriptor, max(launch.remaining(), 1e-3))
        except DeadlineExceededError as error:
            core.abort(str(error))  # a rank is missing: the ranks no longer count calls alike
            raise
        log.info("rank %d: agreed on %s", self._group.rank, self._descriptor)
        if self._kind is None:
            self._own = Agreed(slot)
            # Free again once nobody can start this transfer any more.
            weakref.finalize(self, _release_slot, weakref.ref(core), slot).atexit = False
            return self._own
        agreed, driven_out = kinds.add(self._kind, slot)
        if driven_out is not None:
            core.release_slot(driven_out)
        return agreed

    def _compile(self) -> None:
        if self._plan is not None:
            return
        topology = self._topology or self._group.topology
        if topology is not None and self._by_host and self._group.interfaces > 1:
            topology = topology.striped()
        plan = plan_many(self.problems, topology=topology, strategy=self._strategy, balance=self._balance)
        self._facts = _facts(plan, self._group.rank)
        if self._backward is not None:
            self._reverse_plan = plan_many(self._backward, topology=topology, strategy=self._strategy)
            self._reverse_facts = _facts(self._reverse_plan, self._group.rank)
        self._plan = plan
        self._descriptor = self._describe()

    def _describe(self) -> str:
        tensors = "; ".join(
            f"{tensor_text(shape, dtype)}: {src} -> {dst}" for shape, dtype, src, dst in self.problems[:3]
        )
        more = f"; {_more_text(self.problems[3:])}" if len(self.problems) > 3 else ""
        gradient = "no gradient"
        if self._backward is not None and self._reverse_plan is not None:
            _, _, src, dst = self._backward[0]
            gradient = f"gradient {src} -> {dst}, plan {self._reverse_plan.hash}"
        assert self._plan is not None
        return f"{self._op} {tensors}{more}; {gradient}; strategy {self._strategy}; plan {self._plan.hash}"

    def _check(self, side: str, shards: Shards, expected: Sequence[tuple[int, ...] | None]) -> None:
        check_shards(
            shards,
            expected,
            self._source_dtypes if side == "source" else self._destination_dtypes,
            op=self._op,
            rank=self._group.rank,
            side=side,
            on_cpu=self._device_types[side == "destination"] == "cpu",
        )


def _more_text(problems: Sequence[Problem]) -> str:
    """For a descriptor: which dtypes, in which order. The plan's hash knows only how wide they are."""
    names = [dtype_name(dtype) for _, dtype, _, _ in problems]
    kinds = ", ".join(dict.fromkeys(names))
    return f"{len(names)} more tensors of {kinds} ({crc32(','.join(names).encode()):08x})"


def _facts(plan: Plan, rank: int) -> dict[str, Any]:
    """What the flight record says of a plan: 2,000 plans themselves might fill the memory."""
    return {
        "plan": plan.hash,
        "strategy": plan.strategy,
        "bytes_sent": plan.bytes_sent(rank),
        "bytes_received": plan.bytes_received(rank),
        "bound": plan.lower_bound,  # seconds
    }


def _always() -> bool:
    return True


def _release_slot(core: weakref.ref[_C.GroupCore], slot: int) -> None:
    group = core()
    if group is not None:
        group.release_slot(slot)


def ranks_of(problems: Sequence[Problem]) -> list[int]:
    """Ranks of all meshes, ascending: the private group of these problems."""
    return sorted({rank for _, _, src, dst in problems for rank in (*src.ranks, *dst.ranks)})


def _running(core: _C.GroupCore | None, error: Exception | None) -> _C.GroupCore:
    if core is None:
        raise error or MeshcastError("the private group is not up")
    return core

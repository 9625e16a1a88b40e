"""PersistentTransfer: tensors from layout to layout, planned and agreed on once, started often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict
from zlib import crc32

import torch

from .. import _C
from ..base.checks import dtype_name
from ..base.counters import Moved, Traffic, begun
from ..base.observe import Flight, log, profiled, profiling
from ..errors import (
    AbortedError,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PeerLostError,
    mark_told,
    typed,
)
from ..groups.parent import ParentGroup, seconds
from ..planning.plan import Plan, Problem, plan_many
from .call import Call, CallNumber
from .gpu_offer import DeviceTypes
from .handle import Handle
from .medium import HostMedium, Medium, Statistics
from .shards import Shards, check_shards, filled, resolved, tensor_text

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..groups.private import PrivateGroup
    from ..layout import Layout
    from ..topology import Topology
    from .casts import Casts

__all__ = [
    "DEFAULT_OPTIONS",
    "REVERSE_LANE",
    "CallOptions",
    "PersistentTransfer",
    "PlanOptions",
    "ranks_of",
]

REVERSE_LANE = _C.AgreedPlan.REVERSE_LANE  # of all backwards; their forwards have lane 0


class CallOptions(TypedDict, total=False):
    """What the functions that reshard take alike; documented at meshcast.reshard."""

    group: dist.ProcessGroup | None
    strategy: str
    topology: Topology | None
    timeout: float | timedelta | None


class PlanOptions(NamedTuple):
    """How the calls of a transfer are planned; the values are those of meshcast.plan."""

    strategy: str = "auto"
    topology: Topology | None = None  # None: that of the group, once its ranks have met
    balance: str = "greedy"


DEFAULT_OPTIONS = PlanOptions()


class PersistentTransfer:
    """The moves of a call: their plan, their private group, and the agreement of all ranks on both.

    problems: what moves; backward: those of the gradients.
    lane: ordering domain, see start(). medium: where the tensors are, of device_types. casts: what it casts
    itself. kind: transfers of one kind share an agreement; None: this one has its own, made in its first call
    or by agree_ahead(). All ranks of both meshes make the same calls in one order.

    Raises LayoutError if a layout does not fit its shape, a rank is outside the parent group, or this rank is
    in no mesh.
    """

    def __init__(
        self,
        parent: ParentGroup,
        problems: Sequence[Problem],
        op: str = "reshard",
        options: PlanOptions = DEFAULT_OPTIONS,
        *,
        backward: Sequence[Problem] | None = None,
        medium: Medium | None = None,
        device_types: DeviceTypes = ("cpu", "cpu"),
        casts: Casts | None = None,
        lane: int = 0,
        kind: Hashable = None,
    ) -> None:
        if not problems:
            raise LayoutError(f"{op}: nothing to transfer; give at least one tensor")
        self.problems = [Problem(tuple(shape), dtype, src, dst) for shape, dtype, src, dst in problems]
        wires = [dtype for _, dtype, _, _ in self.problems]
        # Of the shards at either end; they differ where the transfer itself casts (casts.py).
        self._source_dtypes = wires if casts is None else [ends.source for ends in casts.forth]
        self._destination_dtypes = wires if casts is None else [ends.destination for ends in casts.forth]
        self._backward = backward
        self._op, self._options, self._lane, self._kind = op, options, lane, kind
        self._medium, self._device_types = medium or HostMedium(), device_types
        known: dict[tuple[Layout, tuple[int, ...]], tuple[int, ...] | None] = {}
        for shape, _, src, dst in self.problems:
            for layout in (src, dst):
                if (layout, shape) not in known:  # local_shapes() also checks the layout against the shape
                    known[layout, shape] = layout.local_shapes(shape).get(parent.rank)
        self._source = [known[src, shape] for shape, _, src, _ in self.problems]
        self._destination = [known[dst, shape] for shape, _, _, dst in self.problems]
        if all(shape is None for shape in (*self._source, *self._destination)):
            raise LayoutError(f"{op}: rank {parent.rank} is in neither mesh", rank=parent.rank, op=op)
        self._parent = parent
        self._group = parent.private(ranks_of(problems), op)
        self._plan: Plan | None = None
        self._reverse_plan: Plan | None = None
        self._traffic: dict[bool, Traffic] = {}  # by `reverse`, once started
        self._facts: dict[str, Any] | None = None
        self._reverse_facts: dict[str, Any] | None = None
        self._own: _C.AgreedPlan | None = None
        self._own_core: _C.GroupCore | None = None  # with which its ranks have agreed on it
        self.what = self._what()  # moves, in words; the same on all ranks
        self._descriptor = ""
        self._error: Exception | None = None  # why the transfer cannot run
        self._failure: Exception | None = None  # of the last attempt to agree
        self._compiled = threading.Event()

    @property
    def plan(self) -> Plan:
        """The plan; waits until it is compiled, which is after the first meeting of all ranks. Raises the
        error of that."""
        while not self._compiled.wait(1.0):
            self._group.give_up_if_stuck()
        if self._plan is None:
            raise self._error or self._failure or MeshcastError(f"{self._op}: no plan yet", op=self._op)
        return self._plan

    def agree_ahead(self, timeout: float | timedelta | None = None) -> None:
        """Agrees in the background, before the first call: ranks that disagree get PlanMismatchError from
        that."""
        self._group.submit(_Agreement(self, Call(self._op, seconds(timeout, self._parent.timeout))))

    def start(
        self, src: Shards, dst: Shards, *, timeout: float | timedelta | None = None
    ) -> Handle[list[torch.Tensor | None]]:
        """Starts the transfer and returns at once. src, dst: this rank's local shards, one per problem, any
        strides; None where the rank is not in that mesh or its shard is empty. Starts of one lane arrive in
        the order in which they were made, alike on all ranks. Raises LayoutError if a shard does not have the
        shape or dtype of its layout; the other ranks then raise as well."""
        call = self.launch(src, dst, seconds(timeout, self._parent.timeout))
        return Handle(
            call, list(dst), lambda: self.plan.lower_bound, [tensor for tensor in src if tensor is not None]
        )

    def abort(self, reason: str) -> None:
        """Ends every call of the private group, on all its ranks, with AbortedError(reason). Any thread;
        never blocks."""
        self._group.abort(reason)

    def close(self) -> None:
        """Drops the plan; transfers in flight go on. Later starts raise."""
        self._error = self._error or MeshcastError(f"{self._op}: the transfer was closed", op=self._op)

    def launch(self, src: Shards, dst: Shards, timeout: float, *, driven: bool = False) -> Call:
        """start() below the handle. driven: the caller waits at once, and lends a hand in that."""
        if not profiling():
            return self._launch(src, dst, timeout, driven)
        with profiled("launch", self._op):
            return self._launch(src, dst, timeout, driven)

    def _launch(self, src: Shards, dst: Shards, timeout: float, driven: bool) -> Call:
        call = self._new_call(self._op, timeout, driven)
        try:
            self._check("source", src, self._source)
            self._check("destination", dst, self._destination)
            self._medium.check((*src, *dst))
            src, dst = self._medium.bring(call, resolved(src), dst, reverse=False)
        except Exception as error:
            found = typed(error, self._op, self._group.rank)
            call.failed(found)
            self._group.refuse(self._lane, found, timeout).wait()
            mark_told(found)
            raise found from error.__cause__ if found is error else error
        command = _Start(self, call, src, dst, reverse=False)
        if self._medium.by_host:
            call.begin_again = command.begin_again
        if type(self._medium) is HostMedium:  # others copy the source as the call is made
            call.retract = command.begun.retract
        self._submit(command)
        command.begun.ordinal = command.ordinal
        call.number.ordinal = command.ordinal if command.ordinal is not None else -1
        return call

    def launch_reverse(
        self, number: CallNumber, src: Shards, dst: Shards, timeout: float, *, driven: bool = False
    ) -> Call:
        """The backward transfer of the call `number`: src are gradients in the destination layout, dst
        receives those of the source. driven: as in launch()."""
        call = self._new_call(f"{self._op} backward", timeout, driven)
        call.number = number
        try:
            src, dst = self._medium.bring(call, resolved(src), dst, reverse=True)
        except MeshcastError as error:  # the others wait for this rank
            self.reject_reverse(number, error, timeout)
            raise
        self._submit(_Start(self, call, src, dst, reverse=True))
        return call

    def _submit(self, command: _Start) -> None:
        try:
            self._group.submit(command)
            command.note()  # it may wait for a long time to be begun
        except MeshcastError as error:
            mark_told(error)
            raise
        except BaseException as raised:  # of a handler of a signal: whether it was counted is not known
            self._group.interrupted(self._op, raised)
            mark_told(raised)
            raise

    def reject_reverse(self, number: CallNumber, error: Exception, timeout: float) -> None:
        """Lets the ranks that wait in the backward transfer of a call raise: this rank does not take part."""
        self._group.refuse(REVERSE_LANE, error, timeout, ordinal=number.ordinal)

    def _new_call(self, op: str, timeout: float, driven: bool) -> Call:
        call = Call(op, timeout, driven)
        call.interrupted = self._group.interrupted
        call.take_news = self._group.take_news
        call.overdue = self._group.give_up_if_stuck
        call.flight = Flight(op, self._group.members, self._group.rank, call, self.what)
        return call

    def _has_agreed(self) -> bool:
        """Whether a start would not have to wait. Only while no command of the group is running."""
        group = self._group
        agreed = self._own_core is group._core if self._kind is None else self._kind in group.agreements
        return agreed and self._plan is not None

    def _agreed(self, core: _C.GroupCore, ordinal: int, call: Call) -> _C.AgreedPlan:
        """What the ranks agreed on. First use: compile, and compare with the other ranks before any byte
        moves."""
        agreed = self._agreement(core, ordinal, call)
        self._medium.connect(core, call, ordinal)
        return agreed

    def _agreement(self, core: _C.GroupCore, ordinal: int, call: Call) -> _C.AgreedPlan:
        kinds = self._group.agreements
        own = self._own if self._own_core is core else None
        found = own if self._kind is None else kinds.use(self._kind)
        try:
            self._compile()
        except Exception as error:
            core.refuse(self._lane, ordinal, str(typed(error, self._op)), agreed=found is not None)
            raise
        if found is not None:
            return found
        assert self._plan is not None
        reverse = None if self._reverse_plan is None else self._reverse_plan._core
        try:
            agreed = core.agree(
                self._lane,
                ordinal,
                self._op,
                self._descriptor,
                self._plan._core,
                reverse,
                max(call.remaining(), 1e-3),
            )
        except (AbortedError, DeadlineExceededError, PeerLostError) as error:
            core.abort(str(error))  # a rank is missing: the ranks no longer count calls alike
            raise
        log.info("rank %d: agreed on %s", self._group.rank, self._descriptor)
        if self._kind is None:
            self._own, self._own_core = agreed, core
        else:
            kinds.add(self._kind, agreed)
        return agreed

    def _compile(self) -> None:
        if self._plan is not None:
            return
        options, group = self._options, self._group
        topology = options.topology or group.topology
        if topology is not None and self._medium.by_host and group.interfaces > 1:
            topology = topology.striped()
        plan = plan_many(self.problems, topology=topology, strategy=options.strategy, balance=options.balance)
        self._facts = _facts(plan, group.rank)
        if self._backward is not None:
            self._reverse_plan = plan_many(self._backward, topology=topology, strategy=options.strategy)
            self._reverse_facts = _facts(self._reverse_plan, group.rank)
        self._plan = plan
        self._descriptor = self._describe(plan)

    def _carried(self, op: str, statistics: Statistics, reverse: bool) -> Traffic:
        """What each call carries: the messages of its program, which is made when it is first started."""
        found = self._traffic.get(reverse)
        if found is None:
            rank, ranks = self._group.rank, self._group.ranks
            moved = [
                Moved(*((rank, ranks[peer]) if sent else (ranks[peer], rank)), messages, nbytes)
                for peer, sent, messages, nbytes in statistics.traffic()
            ]
            facts = self._reverse_facts if reverse else self._facts
            assert facts is not None  # it has been compiled
            found = self._traffic[reverse] = Traffic(op, facts["bound"], rank, moved)
        return found

    def _what(self) -> str:
        tensors = "; ".join(
            f"{tensor_text(shape, dtype)}: {src} -> {dst}" for shape, dtype, src, dst in self.problems[:3]
        )
        more = f"; {_more_text(self.problems[3:])}" if len(self.problems) > 3 else ""
        return f"{tensors}{more}"

    def _describe(self, plan: Plan) -> str:
        gradient = "no gradient"
        if self._backward is not None and self._reverse_plan is not None:
            _, _, src, dst = self._backward[0]
            gradient = f"gradient {src} -> {dst}, plan {self._reverse_plan.hash}"
        planned = f"strategy {self._options.strategy}; plan {plan.hash}"
        return f"{self._op} {self.what}; {gradient}; {planned}{self._medium.text()}"

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


class _Agreement:
    """Command of a group: the ranks agree on a transfer that nobody has started yet."""

    ordinal: int | None = None
    refusal: Exception | None = None
    meets = True

    def __init__(self, transfer: PersistentTransfer, call: Call) -> None:
        self._transfer, self._call = transfer, call
        self.lane, self.deadline = transfer._lane, call.deadline

    def ready(self) -> bool:
        return False

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        transfer = self._transfer
        assert self.ordinal is not None  # submit() has counted it
        try:
            transfer._agreed(_running(core, error), self.ordinal, self._call)
        except Exception as cause:
            if core is not None and transfer._group.left(core, self.lane, self.ordinal):
                return True
            transfer._error = cause
        transfer._compiled.set()
        return False


class _Begun:
    """The number of a call in its group, once it has begun. A handle keeps it to take the call back, so it
    holds neither tensors nor connections."""

    __slots__ = ("group", "lane", "life", "limit", "ordinal")

    def __init__(self, group: PrivateGroup, lane: int, limit: float) -> None:
        self.group, self.lane, self.limit = group, lane, limit
        self.ordinal: int | None = None
        self.life: int | None = None

    def retract(self, error: MeshcastError) -> Callable[[], None]:
        """See PrivateGroup.retract."""
        if self.ordinal is None:
            return lambda: None
        return self.group.retract(self.lane, self.ordinal, error, self.limit, lambda: self.life).wait


class _Start:
    """Command of a group: one start of a transfer, which the ranks agree on first where they have not."""

    refusal: Exception | None = None
    meets = True
    _core: _C.GroupCore | None = None  # with which it was begun

    def __init__(
        self, transfer: PersistentTransfer, call: Call, src: Shards, dst: Shards, *, reverse: bool
    ) -> None:
        self._transfer, self._call, self._src, self._dst = transfer, call, src, dst
        self._reverse = reverse
        self.lane, self.deadline = REVERSE_LANE if reverse else transfer._lane, call.deadline
        # A reverse transfer has the ordinal of its forward call, in a lane of its own.
        self.ordinal = call.number.ordinal if reverse else None
        self.begun = _Begun(transfer._group, self.lane, call.timeout)

    def ready(self) -> bool:
        transfer = self._transfer
        return transfer._medium.ready(self._call) and (self._reverse or transfer._has_agreed())

    def note(self) -> None:
        """Which call it is, for the flight record."""
        flight = self._call.flight
        if flight is not None:
            flight.lane, flight.position = self.lane, self.ordinal

    def begin_again(self) -> bool:
        """After the work of a call failed that somebody waits for: see PrivateGroup.begin_again."""
        core = self._core
        if self._reverse or core is None:
            return False
        return self._transfer._group.begin_again(self, core)

    def begin(self, core: _C.GroupCore | None, error: Exception | None) -> bool:
        transfer, call, reverse = self._transfer, self._call, self._reverse
        number = call.number
        assert self.ordinal is not None  # submit() has counted it
        starts = False
        self._core = core
        self.begun.ordinal, self.begun.life = self.ordinal, transfer._group.life
        self.note()
        try:
            running = _running(core, error)
            if transfer._error is not None:
                raise transfer._error
            agreed = number.agreed if reverse else transfer._agreed(running, self.ordinal, call)
            if agreed is None:
                raise transfer._failure or MeshcastError(
                    f"{transfer._op}: the call itself has failed", op=call.op
                )
            if reverse and number.core is not running:
                raise AbortedError(
                    f"rank {transfer._group.rank}: {call.op} call {self.ordinal} of "
                    f"{transfer._group.name}: the group has begun anew since the forward of this call, since "
                    "a rank refused another one; run the step again",
                    rank=transfer._group.rank,
                    op=call.op,
                    sequence=self.ordinal,
                    phase="start",
                )
            if not reverse:
                number.run = agreed.next_run()
                if transfer._backward is not None:
                    number.agreed, number.core = agreed, running
            if call.flight is not None:
                call.flight.plan = transfer._reverse_facts if reverse else transfer._facts
                call.flight.run = number.run
            starts = True
            work, statistics = transfer._medium.start(
                running,
                call,
                agreed,
                ordinal=self.ordinal,
                reverse=reverse,
                src=filled(self._src),
                dst=filled(self._dst),
                timeout=max(call.remaining(), 1e-3),
            )
        except Exception as cause:
            if core is not None:
                group = transfer._group
                if group.left(core, self.lane, self.ordinal) and not reverse:
                    return True
                if starts and core.error() is None:
                    cause = typed(cause, call.op, group.rank)
                    if group.runs_here():  # before this rank goes on
                        core.refuse(self.lane, self.ordinal, str(cause), agreed=True)
                        group.left(core, self.lane, self.ordinal)
                    else:
                        self.refusal = cause
                elif isinstance(cause, AbortedError):
                    cause = group.refused_error(core, self.lane, self.ordinal) or cause
            transfer._failure = cause
            call.failed(cause)
        else:
            if call.flight is not None:
                traffic = call.flight.traffic = transfer._carried(call.op, statistics, reverse)
                # What arrives is waited for; until then it would be kept as long as the count.
                if not call.driven and traffic.only_sends:
                    begun(call.flight, traffic, work, statistics)
            call.started(work, statistics)
            transfer._group.watch(call)
        if not transfer._compiled.is_set():  # worth it: set() takes a lock and looks for who waits
            transfer._compiled.set()
        return False


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


def ranks_of(problems: Sequence[Problem]) -> list[int]:
    """Ranks of all meshes, ascending: the private group of these problems."""
    return sorted({rank for _, _, src, dst in problems for rank in (*src.ranks, *dst.ranks)})


def _running(core: _C.GroupCore | None, error: Exception | None) -> _C.GroupCore:
    if core is None:
        raise error or MeshcastError("the private group is not up")
    return core

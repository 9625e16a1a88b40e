"""PersistentTransfer: tensors from layout to layout, planned and agreed on once, started often."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, TypeVar
from zlib import crc32

import torch

from .. import _C
from .._C import Call, CallNumber
from ..base import forks
from ..base.checks import dtype_name
from ..errors import Caller, LayoutError, MeshcastError, mark_reported
from ..groups.parent import ParentGroup, seconds
from ..planning.plan import Plan, Problem, plan_many
from .handle import Handle
from .medium import DeviceTypes, Medium, Shards, check_shards, filled, resolved, tensor_text, types_of

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..layout import Layout
    from ..topology import Topology
    from .medium import Casts

__all__ = [
    "Call",
    "CallNumber",
    "CallOptions",
    "DEFAULT_OPTIONS",
    "PersistentTransfer",
    "PlanOptions",
    "REVERSE_LANE",
    "kept_transfer",
    "ranks_of",
    "taken_digests",
]

T = TypeVar("T")
REVERSE_LANE = _C.AgreedPlan.REVERSE_LANE  # of all backwards; their forwards have lane 0


class CallOptions(TypedDict, total=False):
    """Options that all functions that reshard take; documented at meshcast.reshard."""

    group: dist.ProcessGroup | None
    strategy: str
    topology: Topology | None
    timeout: float | timedelta | None


class PlanOptions(NamedTuple):
    """Options of planning the calls of a transfer; the values are those of meshcast.plan."""

    strategy: str = "auto"
    topology: Topology | None = None  # None: that of the group, once its ranks have met
    balance: str = "greedy"


DEFAULT_OPTIONS = PlanOptions()


class PersistentTransfer:
    """The moves of a call: their plan, their private group, and the agreement of all ranks on both.

    problems: what moves; backward: those of the gradients. device_types: see medium.device_types_of; casts:
    what it casts itself, between GPUs alone. lane: ordering domain, see start(). kind: transfers of one kind
    share an agreement; None: this one has its own, made in its first call or by agree_ahead(). hop_by_hop:
    between GPUs, each message has a round of its own. All ranks of both meshes make the same calls in one
    order.

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
        device_types: DeviceTypes = ("cpu", "cpu"),
        casts: Casts | None = None,
        lane: int = 0,
        kind: Hashable = None,
        hop_by_hop: bool = False,
    ) -> None:
        if not problems:
            raise LayoutError(f"{op}: nothing to transfer; give at least one tensor")
        self.problems = [Problem(tuple(shape), dtype, src, dst) for shape, dtype, src, dst in problems]
        wires = [dtype for _, dtype, _, _ in self.problems]
        # Of the shards at either end; they differ where the transfer itself casts (medium.py).
        self._source_dtypes = wires if casts is None else [ends.source for ends in casts.forth]
        self._destination_dtypes = wires if casts is None else [ends.destination for ends in casts.forth]
        self._backward = backward
        self._op, self._options, self._lane, self._kind = op, options, lane, kind
        self._device_types = device_types
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
        self._group = parent.private(ranks_of(problems))
        self._medium = medium = self._new_medium(casts, hop_by_hop)
        self._plan: Plan | None = None
        self._what = self._moves_text()
        # Through C++ a cycle would never be freed.
        this = weakref.ref(self)
        self._core = _C.Transfer(
            self._group,
            lane,
            kind is not None,
            lambda: _compiled(this()),
            op,
            self._what,
            self._group.members,
            medium,
            list(zip(self._source, self._source_dtypes, strict=True)),
            list(zip(self._destination, self._destination_dtypes, strict=True)),
        )

    def _new_medium(self, casts: Casts | None, hop_by_hop: bool) -> Medium | None:
        """Returns what moves the tensors that are not all on CPUs; loaded as few calls need it."""
        if self._device_types == ("cpu", "cpu"):
            return None
        if self._device_types != ("cuda", "cuda"):
            from .pinned import PinnedMedium

            return PinnedMedium(self._group, self._device_types)
        from .gpu import GpuMedium

        # For both directions: in a backward, ranks may come by too late to make one.
        lanes = (self._lane,) if self._backward is None else (self._lane, REVERSE_LANE)
        types = _types(self.problems, self._backward, casts)
        return GpuMedium(self._group, lanes, types, hop_by_hop=hop_by_hop)

    @property
    def plan(self) -> Plan:
        """The plan; waits until it is compiled, which is after the first meeting of all ranks. Raises the
        error of that."""
        while not self._core.wait_until_tried(1.0):
            self._group.give_up_if_stuck()
        if self._plan is None:
            raise self._core.failure() or MeshcastError(f"{self._op}: no plan yet", op=self._op)
        return self._plan

    def agree_ahead(self, timeout: float | timedelta | None = None) -> None:
        """Agrees in the background, before the first call: ranks that disagree get PlanMismatchError from
        that."""
        forks.check(self._group.fork_count, self._op)
        self._core.agree_ahead(seconds(timeout, self._parent.timeout), self)

    def start(
        self, src: Shards, dst: Shards, *, timeout: float | timedelta | None = None
    ) -> Handle[list[torch.Tensor | None]]:
        """Starts the transfer and returns at once. src, dst: this rank's local shards, one per problem, any
        strides; None where the rank is not in that mesh or its shard is empty. Starts of one lane arrive in
        the order in which they were made, the same on all ranks. Raises LayoutError if a shard does not have
        the shape or dtype of its layout; the other ranks then raise as well."""
        call = self.launch(src, dst, seconds(timeout, self._parent.timeout))
        call.watch(src)
        return Handle(call, list(dst), self.bound)

    def bound(self) -> float:
        """Seconds that no plan of these moves can beat."""
        return self.plan.lower_bound

    def abort(self, reason: str) -> None:
        """Ends every call of the private group, on all its ranks, with AbortedError(reason). Any thread;
        never blocks."""
        self._group.abort(reason)

    def close(self) -> None:
        """Drops the plan; transfers in flight continue. Later starts raise."""
        self._core.close(MeshcastError(f"{self._op}: the transfer was closed", op=self._op))

    def launch(
        self,
        src: Shards,
        dst: Shards,
        timeout: float,
        *,
        driven: bool = False,
        nans: Sequence[tuple[int, int, int]] | None = None,
    ) -> Call:
        """start() below the handle. driven: the caller waits at once, and helps to move the data. nans: see
        HostCall.take_digests; other calls take none."""
        call: Call | None = None
        try:
            if self._medium is None:
                call = _C.HostCall.of_fitting(self._core, timeout, driven, src, dst)
            if call is None:
                call = self._new_call(CallNumber(), timeout, driven, reverse=False)
                self._check("source", src, self._source)
                self._check("destination", dst, self._destination)
                if self._medium is not None:
                    self._medium.check((*src, *dst))
                self._bring(call, src, dst, reverse=False)
            if nans is not None and isinstance(call, _C.HostCall):
                call.take_digests(nans)
        except Exception as error:
            found = Caller(self._op, self._group.rank).typed(error)
            (call.flight if call is not None else self._core.new_flight(reverse=False)).failed(found)
            self._group.refuse(self._lane, found, timeout).wait()
            mark_reported(found)
            raise found from error.__cause__ if found is error else error
        self._counted(call.submit)
        return call

    def launch_plain(
        self,
        xs: Sequence[object],
        results: Sequence[object],
        timeout: float,
        *,
        are_given: bool,
        driven: bool,
    ) -> Call | None:
        """launch() of DTensors that need nothing but to be moved, see _C.HostCall.started; for None, launch()
        is left to do."""
        if self._medium is not None:
            return None
        return self._counted(_C.HostCall.started, self._core, xs, results, are_given, timeout, driven)

    def launch_reverse(
        self, number: CallNumber, src: Shards, dst: Shards, timeout: float, *, driven: bool = False
    ) -> Call:
        """The backward transfer of the call `number`: src are gradients in the destination layout, dst
        receives those of the source. driven: as in launch()."""
        call = self._new_call(number, timeout, driven, reverse=True)
        try:
            with Caller(self._op, self._group.rank, "start"):
                self._bring(call, src, dst, reverse=True)
        except MeshcastError as error:  # the others wait for this rank
            self.reject_reverse(number, error, timeout)
            raise
        self._counted(call.submit)
        return call

    def _new_call(self, number: CallNumber, timeout: float, driven: bool, *, reverse: bool) -> Call:
        kind = _C.HostCall if self._medium is None else _C.MediumCall
        return kind(self._core, number, timeout, driven, reverse)

    def _bring(self, call: Call, src: Shards, dst: Shards, *, reverse: bool) -> None:
        """Gives the call its shards as the transfer can move them."""
        src = resolved(src)
        if isinstance(call, _C.MediumCall):
            assert self._medium is not None
            src, dst = self._medium.bring(call, src, dst, reverse=reverse)
        call.give(filled(src), filled(dst))

    def _counted(self, begin: Callable[..., T], *arguments: Any) -> T:
        """Calls what counts a call and begins it behind all earlier ones: at once in this thread where
        nothing has to be waited for, else on the control thread. Raises AbortedError in a forked child."""
        try:
            forks.check(self._group.fork_count, self._op)
            return begin(*arguments)
        except MeshcastError as error:
            mark_reported(error)
            raise
        except BaseException as raised:  # of a handler of a signal: whether it was counted is not known
            self._group.interrupted(self._op, raised)
            mark_reported(raised)
            raise

    def reject_reverse(self, number: CallNumber, error: Exception, timeout: float) -> None:
        """Lets the ranks that wait in the backward transfer of a call raise: this rank does not take part."""
        self._group.refuse(REVERSE_LANE, error, timeout, ordinal=number.ordinal)

    def _compile(self) -> tuple[Any, ...]:
        """Returns op, descriptor, plan and that of the backward, on which the ranks agree, and what the
        flight record shows of both plans."""
        options, group = self._options, self._group
        by_host = self._medium is None or self._medium.by_host
        topology = options.topology or (group.topology if by_host else group.gpu_topology)
        if topology is not None and by_host and group.interfaces > 1:
            topology = topology.striped()
        plan = plan_many(self.problems, topology=topology, strategy=options.strategy, balance=options.balance)
        back = None
        if self._backward is not None:
            back = plan_many(self._backward, topology=topology, strategy=options.strategy)
        self._plan = plan
        reverse, reverse_facts = (None, None) if back is None else (back._core, _facts(back, group.rank))
        described = self._describe(plan, back)
        return self._op, described, plan._core, reverse, _facts(plan, group.rank), reverse_facts

    def _moves_text(self) -> str:
        """Describes what moves, in words that are the same on all ranks."""
        tensors = "; ".join(
            f"{tensor_text(shape, dtype)}: {src} -> {dst}" for shape, dtype, src, dst in self.problems[:3]
        )
        more = f"; {_more_text(self.problems[3:])}" if len(self.problems) > 3 else ""
        return f"{tensors}{more}"

    def _describe(self, plan: Plan, back: Plan | None) -> str:
        gradient = "no gradient"
        if self._backward is not None and back is not None:
            _, _, src, dst = self._backward[0]
            gradient = f"gradient {src} -> {dst}, plan {back.hash}"
        planned = f"strategy {self._options.strategy}; plan {plan.hash}"
        place = "" if self._medium is None else self._medium.text()
        return f"{self._op} {self._what}; {gradient}; {planned}{place}"

    def _check(self, side: str, shards: Shards, expected: Sequence[tuple[int, ...] | None]) -> None:
        check_shards(
            shards,
            expected,
            self._source_dtypes if side == "source" else self._destination_dtypes,
            side=side,
            on_cpu=self._device_types[side == "destination"] == "cpu",
        )


def _compiled(transfer: PersistentTransfer | None) -> tuple[Any, ...]:
    if transfer is None:
        raise MeshcastError("the transfer was dropped before its first call")
    try:
        return transfer._compile()
    except Exception as error:
        found = Caller(transfer._op, transfer._group.rank).typed(error)
        raise found from error.__cause__ if found is error else error


def _more_text(problems: Sequence[Problem]) -> str:
    """For a descriptor: which dtypes, in which order. The plan's hash knows only how wide they are."""
    names = [dtype_name(dtype) for _, dtype, _, _ in problems]
    kinds = ", ".join(dict.fromkeys(names))
    return f"{len(names)} more tensors of {kinds} ({crc32(','.join(names).encode()):08x})"


def _facts(plan: Plan, rank: int) -> dict[str, Any]:
    """Returns what the flight record says of a plan: 2,000 plans themselves might fill the memory."""
    return {
        "plan": plan.hash,
        "strategy": plan.strategy,
        "bytes_sent": plan.bytes_sent(rank),
        "bytes_received": plan.bytes_received(rank),
        "bound": plan.lower_bound,  # seconds
    }


def taken_digests(call: Call) -> list[int | None] | None:
    """Returns what HostCall.digests does; None for other calls."""
    return call.digests() if isinstance(call, _C.HostCall) else None


def ranks_of(problems: Sequence[Problem]) -> list[int]:
    """Ranks of all meshes, ascending: the private group of these problems."""
    return sorted({rank for _, _, src, dst in problems for rank in (*src.ranks, *dst.ranks)})


def kept_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    op: str,
    options: PlanOptions = DEFAULT_OPTIONS,
    *,
    backward: Sequence[Problem] | None = None,
    device_types: DeviceTypes = ("cpu", "cpu"),
    casts: Casts | None = None,
) -> PersistentTransfer:
    """The transfer of an ordinary call: one kept from before, or a new one. It agrees within a launch, unless
    the ranks have agreed on one of its kind, so that every call takes one ordinal in either case."""
    kept = parent.private(ranks_of(problems)).transfers
    kind = (op, tuple(problems), None if backward is None else tuple(backward), options, device_types, casts)
    transfer: PersistentTransfer | None = kept.get(kind)
    if transfer is None:
        transfer = kept[kind] = PersistentTransfer(
            parent,
            problems,
            op,
            options,
            backward=backward,
            device_types=device_types,
            casts=casts,
            kind=kind,
        )
    return transfer


def _types(problems: Sequence[Problem], backward: Sequence[Problem] | None, casts: Casts | None) -> Any:
    """Returns the types of the tensors on the way there and, in the backward, back; see types_of."""
    if casts is None:
        return (), ()
    forth = [dtype for _, dtype, _, _ in problems]
    back = [dtype for _, dtype, _, _ in backward or ()]
    return types_of(forth, casts.forth), types_of(back, casts.back)

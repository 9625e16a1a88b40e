"""reshard, reshard_many and reshard_: tensors on one mesh become the same tensors on another. reshard_local
does the same for plain tensors and layouts: no DTensor, no DeviceMesh, no autograd.
enable_dtensor_redistribute lets DTensor.redistribute do what reshard does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from ..base import checks
from ..errors import LayoutError
from ..groups.parent import ParentGroup, parent_group, raise_refused, seconds
from ..layout import Layout
from ..planning.plan import Problem
from ..spec import TensorSpec
from ..transfers.handle import Handle
from ..transfers.medium import DeviceTypes, device_types_of, fresh, require_gpu
from ..transfers.transfer import (
    DEFAULT_OPTIONS,
    Call,
    CallOptions,
    PersistentTransfer,
    PlanOptions,
    kept_transfer,
)
from .autograd import differentiable_call
from .compiled import (
    Compiled,
    ReshardGoal,
    check_reducible,
    compiled_call,
    copied,
    places_called,
)
from .memory import check_storage, overlaps
from .meshes import lost_ranks

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import Placement

    from ..topology import Topology

__all__ = [
    "enable_dtensor_redistribute",
    "reshard",
    "reshard_",
    "reshard_local",
    "reshard_many",
]

Out = DTensor | TensorSpec
T = TypeVar("T")


@overload
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    lost: Iterable[int] = (),
    digest: bool = False,
    async_op: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> DTensor: ...
@overload
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    lost: Iterable[int] = (),
    digest: bool = False,
    async_op: Literal[True],
    copy: bool = False,
    **options: Unpack[CallOptions],
) -> Handle[DTensor]: ...
def reshard(
    x: DTensor | TensorSpec,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Placement] | None = None,
    lost: Iterable[int] = (),
    strategy: str = "auto",
    topology: Topology | None = None,
    digest: bool = False,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> DTensor | Handle[DTensor]:
    """Moves x to `mesh` with `placements` (one per mesh dimension, Shard or Replicate).

    Called by every rank of both meshes, in one order that is the same on all ranks and across all groups;
    other ranks may skip it. The meshes may be disjoint, overlap or be equal, and each of them on CPUs or on
    GPUs (docs/cuda.md says what waits for what).

    Args:
        x: a DTensor, also on ranks outside its mesh that have one; there a TensorSpec will do. Its local
            tensor may be strided. On a sub-mesh of an init_device_mesh it counts as one on all of that, with
            a copy in each of the sub-meshes, unless the destination lies inside it or a dimension "pp" is
            left out; ranks outside then give the spec of that. Under Partial(op) the values of all ranks are
            reduced on the way, in the dtype of x; sums and products of floats depend on the order, which is
            the plan's.
        mesh: of the result.
        placements: of the result, Shard or Replicate for each dimension of `mesh`.
        group: process group that holds both meshes; None for the default group.
        dtype: type of the result; the cast happens on the side where fewer bytes travel.
        grad_placements: layout on `mesh` in which the gradient of the result travels back; default:
            `placements`. An incoming gradient of another layout is first redistributed inside `mesh`.
        lost: global ranks of the mesh of x that are dead, or have left with what they held. They do not call,
            and need not be in `group`. Their boxes come from replicas on other ranks. Such a call records no
            gradient: make it under torch.no_grad().
        strategy, topology: see meshcast.plan. Without a topology the hosts of the ranks are found out and
            their rates assumed.
        digest: compare a digest of x at both ends and between replicas, and notify all ranks of the call how
            it ended. Then all of them raise where x was changed while it travelled, through `.data` too.
            Costs one pass over the data on every rank, two more on a holder with async_op, and two rounds of
            small messages. Records no gradient; with async_op such calls run one after the other.
        async_op: return a Handle at once; handle.wait() gives the result. x must stay as it is until then,
            see Handle.wait.
        copy: with async_op, x is copied at once, and may be changed from then on.
        timeout: seconds or timedelta for the whole call, and for its backward; None for the group's.

    Returns:
        DTensor on `mesh` of the global shape of x. Ranks outside `mesh` hold an empty local tensor that
        carries the autograd graph, so that every rank can call backward (see meshcast.backward). The gradient
        of a Partial('sum') source is Replicate.

    Raises:
        LayoutError: bad shape, placement, mesh, rank or dtype; raised before any byte moves, on all ranks
            that called. Also where lost ranks held the only copy of a box: its field `gone` lists each
            (name, box, ranks that had it).
        PlanMismatchError: the ranks called with different arguments; prints both sides.
        DeadlineExceededError, PeerLostError, AbortedError: see meshcast.errors.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.arange(8.0).reshape(4, 2), source, [Shard(0)])
        y = meshcast.reshard(x, target, [Replicate()])
        if dist.get_rank() in (2, 3):
            assert torch.equal(y.to_local(), torch.arange(8.0).reshape(4, 2))
    """
    if torch.compiler.is_compiling():
        if async_op or digest or topology is not None or grad_placements is not None or list(lost):
            raise LayoutError(
                "reshard under torch.compile: async_op, digest, topology, grad_placements and lost are not "
                "supported"
            )
        from .compile_op import traced_reshard

        return traced_reshard(x, mesh, placements, group, dtype, strategy, timeout)
    return run_call(
        "reshard",
        [x],
        [ReshardGoal(mesh, placements, dtype, grad_placements)],
        itemgetter(0),
        lost=lost,
        digest=digest,
        async_op=async_op,
        copy=copy,
        group=group,
        options=PlanOptions(strategy, topology),
        timeout=timeout,
    )


@overload
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    lost: Iterable[int] = (),
    digest: bool = False,
    async_op: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> list[DTensor]: ...
@overload
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    lost: Iterable[int] = (),
    digest: bool = False,
    async_op: Literal[True],
    copy: bool = False,
    **options: Unpack[CallOptions],
) -> Handle[list[DTensor]]: ...
def reshard_many(
    xs: Sequence[DTensor | TensorSpec],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    *,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype | None = None,
    grad_placements: Sequence[Sequence[Placement]] | None = None,
    lost: Iterable[int] = (),
    strategy: str = "auto",
    topology: Topology | None = None,
    digest: bool = False,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> list[DTensor] | Handle[list[DTensor]]:
    """Moves every tensor of xs to `mesh`, the i-th with placements[i], under one plan and one deadline.

    Called by every rank of all meshes involved, with the tensors in one order.

    Args:
        xs: sources as meshcast.reshard takes them, on one mesh or several, of any shapes and dtypes. A rank
            that is outside the mesh of one passes a shell or a TensorSpec for it.
        mesh: of all results.
        placements: a layout on `mesh` for each tensor.
        dtype: of every result; None: that of its source.
        grad_placements: a layout for each gradient; see meshcast.reshard.
        group: process group that holds all the meshes; None for the default group.
        strategy, topology: see meshcast.plan. All tensors are planned together.
        digest, copy: see meshcast.reshard.
        async_op: return a Handle at once.
        timeout: seconds or timedelta for the whole call, and for its backward; None for the group's.
        lost: ranks of any of the sources' meshes; `gone` calls the i-th tensor "xs[i]".

    Returns:
        The results in the order of xs, or with async_op a Handle whose wait() returns them. Gradients flow as
        in meshcast.reshard.

    Raises:
        LayoutError: also for lists of different lengths, and for none at all.
        Others as meshcast.reshard.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2, 3])
        weight = distribute_tensor(torch.ones(6, 4), source, [Shard(0)])
        bias = distribute_tensor(torch.ones(6), source, [Replicate()])
        weight, bias = meshcast.reshard_many([weight, bias], target, [[Shard(1)], [Shard(0)]])
        assert weight.device_mesh == bias.device_mesh == target
    """
    op = "reshard_many"
    try:
        parent_group(group, op)  # without a process group nothing else is worth telling
        xs, goals = _lists(xs, mesh, placements, dtype, grad_placements)
    except Exception as error:
        sources = xs if isinstance(xs, list | tuple) and xs else [None]
        dead: tuple[int, ...] = ()
        with suppress(LayoutError):
            dead = lost_ranks(lost)
        places = [place for x in sources for place in places_called(x, mesh, dead)]
        raise_refused(error, op, places, group, timeout, lost=dead)
    return run_call(
        op,
        xs,
        goals,
        list,
        lost=lost,
        digest=digest,
        async_op=async_op,
        copy=copy,
        group=group,
        options=PlanOptions(strategy, topology),
        timeout=timeout,
    )


@overload
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    digest: bool = False,
    async_op: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Out: ...
@overload
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    digest: bool = False,
    async_op: Literal[True],
    copy: bool = False,
    **options: Unpack[CallOptions],
) -> Handle[Out]: ...
def reshard_(
    out: Out,
    x: DTensor | TensorSpec,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    digest: bool = False,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> Out | Handle[Out]:
    """Fills `out` with the values of x; mesh, placements and dtype are those of `out`.

    Args:
        out: DTensor of the global shape of x, any strides under which each element of a local tensor has an
            address of its own. On ranks outside its mesh a shell or a TensorSpec.
        x: as for meshcast.reshard. It may share memory with `out`: this rank's shard is then copied first.
            In one storage with `out`, it is not watched for changes before wait().
        group, strategy, topology, digest, async_op, copy, timeout: as for meshcast.reshard.

    No gradient is recorded: outside torch.no_grad(), neither may require one. The version counter of `out`
    goes up, so that a graph that saved its old values raises. After an error the contents of `out` are
    undefined. Returns `out`, or with async_op a Handle whose wait() returns it.

    Raises:
        LayoutError: also where shapes differ, or several elements of `out` share an address; and where that
            takes too long to find out, as it can for strides that are no view's.
        Others as meshcast.reshard.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        out = distribute_tensor(torch.zeros(4, 2), target, [Shard(1)])
        meshcast.reshard_(out, x)
        assert bool((out.to_local() == 1).all())
    """
    op = "reshard_"
    try:
        parent_group(group, op)
        goal = _check(out, x)
    except Exception as error:
        raise_refused(error, op, places_called(x, out), group, timeout)
    with torch.no_grad():
        return run_call(
            op,
            [x],
            [goal],
            lambda _: out,
            digest=digest,
            async_op=async_op,
            copy=copy,
            out=out,
            group=group,
            timeout=timeout,
            options=PlanOptions(strategy, topology),
        )


def run_call(
    op: str,
    xs: Sequence[Any],
    goals: Sequence[ReshardGoal],
    answer: Callable[[list[DTensor]], T],
    *,
    group: dist.ProcessGroup | None,
    timeout: Any,
    options: PlanOptions = DEFAULT_OPTIONS,
    out: Out | None = None,
    lost: Any = (),
    digest: bool = False,
    async_op: bool = False,
    copy: bool = False,
) -> T | Handle[T]:
    """A call of reshard, reshard_ or reshard_many, from its arguments to what it returns.

    answer: from the results what the caller gets. out: takes the one result.
    """
    dead: tuple[int, ...] | None = () if lost == () else None  # None: not known yet
    compiled = checked = None
    try:
        parent = parent_group(group, op)
        timeout = seconds(timeout, parent.timeout)
        dead = lost_ranks(lost, parent.rank) if dead is None else dead
        if digest:
            from .digested import Digested  # with all of state dicts, which few calls need

            checked = Digested(parent, op, xs, goals, out, dead, options)
        else:
            compiled = compiled_call(parent, xs, goals, op, options, dead)
            results, call = begun(compiled, xs, timeout, out, async_op, copy)
    except Exception as error:
        raise_refused(error, op, _places(xs, goals, compiled, dead), group, timeout, lost=dead or ())
    if checked is not None:
        return checked.start(timeout, answer, copy) if async_op else answer(checked.run(timeout))
    assert compiled is not None
    if async_op:
        return Handle(call, answer(results), compiled.bound)
    if call is not None:
        call.wait()
    return answer(results)


def begun(
    compiled: Compiled, xs: Sequence[Any], timeout: float, out: Out | None, async_op: bool, copy: bool
) -> tuple[list[DTensor], Call | None]:
    """Begins a call; see Compiled.begin."""
    if copy and async_op:
        xs = [copied(x) for x in xs]
    if compiled.differentiable and torch.is_grad_enabled():
        return differentiable_call(compiled, xs, timeout, driven=not async_op)
    return compiled.begin(xs, timeout, out, driven=not async_op)


def _places(
    xs: Sequence[Any], goals: Sequence[ReshardGoal], compiled: Compiled | None, dead: Sequence[int] | None
) -> list[Any]:
    """Returns what names the ranks of a call that was refused here."""
    if compiled is not None:
        return compiled.layouts
    if dead is None:  # if the lost rank is unknown, so is which of these ranks wait
        return [None]
    return [place for x, goal in zip(xs, goals, strict=True) for place in places_called(x, goal.mesh, dead)]


def _lists(
    xs: Any, mesh: Any, placements: Any, dtype: Any, grad_placements: Any
) -> tuple[list[Any], list[ReshardGoal]]:
    """Checks the lists of reshard_many."""
    listed, layouts = _listed("xs", xs), _listed("placements", placements)
    gradients: list[Any] = [None] * len(listed)
    if grad_placements is not None:
        gradients = _listed("grad_placements", grad_placements)
    for name, given in (("placements", layouts), ("grad_placements", gradients)):
        if len(given) != len(listed):
            raise LayoutError(f"{len(given)} {name} for {len(listed)} tensors; give one for each")
    if not listed:
        raise LayoutError("nothing to transfer; give at least one tensor")
    return listed, [
        ReshardGoal(mesh, where, dtype, back) for where, back in zip(layouts, gradients, strict=True)
    ]


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | torch.Tensor) or not isinstance(value, Iterable):
        raise LayoutError(f"{name} must be a sequence, found {type(value).__name__}")
    return list(value)


def _check(out: Any, x: Any) -> ReshardGoal:
    """Checks the tensors of reshard_, and returns what fills `out`."""
    if not isinstance(out, DTensor | TensorSpec):
        raise LayoutError(f"out must be a DTensor or a meshcast.TensorSpec, found {type(out).__name__}")
    if isinstance(x, DTensor | TensorSpec):
        if tuple(out.shape) != tuple(x.shape):
            raise LayoutError(f"out has shape {tuple(out.shape)}, but x {tuple(x.shape)}")
        if torch.is_grad_enabled() and (out.requires_grad or x.requires_grad):
            raise LayoutError(
                "no gradient is recorded, but one is asked for; call it under torch.no_grad(), or use reshard"
            )
    if isinstance(out, TensorSpec):
        return ReshardGoal(out.mesh, out.placements, out.dtype)
    check_storage(out._local_tensor)
    return ReshardGoal(out.device_mesh, out.placements, out.dtype)


def enable_dtensor_redistribute(enabled: bool = True) -> None:
    """Lets x.redistribute(other_mesh, placements) reshard, where torch raises "Cross device mesh comm not
    supported yet!". Calls on the mesh of x stay torch's own.

    Opt in, for the whole process; False takes it back. Every rank of both meshes makes the call. async_op
    returns the finished tensor; forward_dtype is the dtype of the result. Group, strategy, topology and
    timeout are the defaults of meshcast.reshard.

    Raises:
        LayoutError: `enabled` is neither True nor False.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        meshcast.enable_dtensor_redistribute()
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = x.redistribute(target, [Replicate()])
        assert y.device_mesh == target
        meshcast.enable_dtensor_redistribute(False)
    """
    if not isinstance(enabled, bool):
        raise LayoutError(
            f"enable_dtensor_redistribute: enabled {checks.shown(enabled)}: expected True or False"
        )
    current: Any = DTensor.redistribute
    original = getattr(current, "_meshcast_original", None)
    if not enabled:
        if original is not None:
            DTensor.redistribute = original  # type: ignore[method-assign]
        return
    if original is not None:
        return

    @functools.wraps(current)
    def redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> DTensor:
        if device_mesh is None or placements is None or device_mesh == self.device_mesh:
            return current(self, device_mesh, placements, **options)
        unknown = {name for name, value in options.items() if value} - {"async_op", "forward_dtype"}
        if unknown:
            error = TypeError(f"redistribute to another mesh takes no {', '.join(sorted(unknown))}")
            try:
                raise_refused(error, "redistribute", [self, device_mesh])
            except LayoutError:
                raise error from None
        return reshard(self, device_mesh, placements, dtype=options.get("forward_dtype"))

    redistribute._meshcast_original = current  # type: ignore[attr-defined]
    DTensor.redistribute = redistribute  # type: ignore[method-assign]


_OP = "reshard_local"


@overload
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    async_op: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> torch.Tensor | None: ...
@overload
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    async_op: Literal[True],
    copy: bool = False,
    **options: Unpack[CallOptions],
) -> Handle[torch.Tensor | None]: ...
@torch.no_grad()
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> torch.Tensor | Handle[torch.Tensor | None] | None:
    """Fills dst, this rank's shard under dst_layout, from the src shards of all ranks under src_layout.

    Called by every rank of both layouts in one order; other ranks may skip it. Gradients do not flow. After
    an error the contents of dst are undefined.

    Args:
        src: this rank's shard, of the shape that src_layout gives it and of `dtype`, any strides; None on a
            rank outside src_layout, or whose shard is empty.
        src_layout, dst_layout: who has what before and after; Partial only before.
        dst: this rank's shard under dst_layout, any strides under which each element has an address of its
            own. It may share memory with src, which is then copied first; in one storage with dst, src is not
            watched for changes before wait(). None inside dst_layout: it is allocated.
        shape: of the global tensor.
        dtype: of both; nothing is cast.
        device: "cpu" or "cuda", where the shards of all ranks are, or (that of the source, that of the
            destination). Allocations on cuda are on the current GPU.
        group: process group that holds the ranks of both layouts; None for the default group.
        strategy, topology: see meshcast.plan.
        async_op: return a Handle at once.
        copy: with async_op, src is copied at once, and may be changed from then on.
        timeout: seconds or timedelta for the whole call; None for the group's.

    Returns:
        dst, None outside dst_layout; or with async_op a Handle whose wait() returns that.

    Raises:
        LayoutError: also for a shard of another shape or dtype than its layout says.
        Others as meshcast.reshard.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        rows = meshcast.Layout([0, 1], [Shard(0)])
        columns = meshcast.Layout([1, 2, 3], [Shard(1)])
        rank = dist.get_rank()
        mine = torch.full((2, 6), float(rank)) if rank in (0, 1) else None
        column = meshcast.reshard_local(mine, rows, None, columns, shape=(4, 6), dtype=torch.float32)
        if rank in (1, 2, 3):
            assert column[:, 0].tolist() == [0, 0, 1, 1]
    """
    try:
        parent = parent_group(group, _OP)
        limit = seconds(timeout, parent.timeout)
        for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
            if not isinstance(layout, Layout):
                raise LayoutError(f"{name} must be a meshcast.Layout, found {type(layout).__name__}")
        private = parent.private(sorted({*src_layout.ranks, *dst_layout.ranks}))
        if parent.rank not in private.ranks:
            return Handle(None, None, lambda: 0.0) if async_op else None
        transfer = _transfer(
            parent, src_layout, dst_layout, shape, dtype, device, PlanOptions(strategy, topology)
        )
        if dst is None:
            local_shape = dst_layout.local_shapes(shape).get(parent.rank)
            where = "cuda" if transfer._device_types[1] == "cuda" else None
            dst = None if local_shape is None else fresh(local_shape, dtype, where)
        else:
            check_storage(dst)
        src = copied(src) if copy and async_op else src
        given = src
        if src is not None and dst is not None and overlaps(src, dst):
            given = src.clone()  # neighbours would read what already came in from others
        call = transfer.launch([given], [dst], limit, driven=not async_op)
    except Exception as error:
        raise_refused(error, _OP, [src_layout, dst_layout], group, timeout)
    if dst is not None:
        call.wrote(dst)
    call.watch([src], dst)
    handle = Handle(call, dst, transfer.bound)
    return handle if async_op else handle.wait()


def _transfer(
    parent: ParentGroup,
    src_layout: Layout,
    dst_layout: Layout,
    shape: Any,
    dtype: Any,
    device: Any,
    options: PlanOptions,
) -> PersistentTransfer:
    if dst_layout.has_partial:
        raise LayoutError(f"dst_layout {dst_layout} holds Partial; ask for Replicate or Shard instead")
    check_reducible(src_layout, dtype)
    device_types = _device_types(device)
    holds = (parent.rank in src_layout.ranks, parent.rank in dst_layout.ranks)
    if ("cuda", True) in zip(device_types, holds, strict=True):
        require_gpu(copies_only=device_types != ("cuda", "cuda"))
    problem = Problem(tuple(shape), dtype, src_layout, dst_layout)
    return kept_transfer(parent, [problem], _OP, options, device_types=device_types)


def _device_types(device: Any) -> DeviceTypes:
    given = (device, device) if isinstance(device, str) else device
    if not isinstance(given, tuple) or len(given) != 2:
        raise LayoutError(
            f'device must be "cpu", "cuda" or a pair of them, for the source and the destination, '
            f"found {checks.shown(device)}"
        )
    source, destination = given
    return device_types_of(source, destination)

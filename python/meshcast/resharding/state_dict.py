"""reshard_state_dict: all weights of a model from one set of meshes to another, for example from a trainer to
its rollout workers, without a checkpoint.

StateResharder: calls of reshard_state_dict that differ in their values alone. Their common part is checked
and compiled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack

from ..groups.parent import parent_group, raise_refused, seconds
from ..layout import Layout
from ..transfers.block_scaled import BlockScaled
from ..transfers.handle import Handle
from .meshes import check_lost, lost_ranks
from .recorded import RecordedDestinations
from .state_arguments import Given, WeightSource
from .state_entries import OP
from .state_run import Memory, Repeated, ReshardedState, StateRun, conversation, started
from .tensor_map import TensorMap

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import Placement

    from ..topology import Topology

__all__ = ["ReshardedState", "StateOptions", "StateResharder", "reshard_state_dict"]


Where = tuple[DeviceMesh, "Sequence[Placement]"] | Layout | tuple[Layout, str] | torch.Tensor
DType = torch.dtype | Mapping[str, torch.dtype] | Callable[[str], torch.dtype | None]
BlockType = str | BlockScaled
NamedType = BlockType | tuple[BlockType, str | tuple[str, ...]]
Quantization = BlockType | Mapping[str, NamedType] | Callable[[str], NamedType | None]


class StateOptions(TypedDict, total=False):
    """Options that reshard_state_dict and StateResharder have in common; documented at reshard_state_dict."""

    layouts: Mapping[str, Layout | tuple[Layout, Sequence[int]]] | None
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None
    maps: TensorMap | Iterable[TensorMap]
    only: Iterable[str] | Callable[[str], bool] | None
    dtype: DType | None
    quantize: Quantization | None
    scales: Mapping[str, tuple[str, Sequence[int]]] | None
    max_bytes_in_flight: int | None
    digest: bool
    strict: bool
    strategy: str
    topology: Topology | None


@overload
def reshard_state_dict(
    state_dict: Mapping[str, Any] | WeightSource | None,
    destinations: Mapping[str, Where] | RecordedDestinations | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    *,
    version: int | None = None,
    lost: Iterable[int] = (),
    group: dist.ProcessGroup | None = None,
    async_op: Literal[False] = False,
    timeout: float | timedelta | None = None,
    **options: Unpack[StateOptions],
) -> ReshardedState: ...
@overload
def reshard_state_dict(
    state_dict: Mapping[str, Any] | WeightSource | None,
    destinations: Mapping[str, Where] | RecordedDestinations | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    *,
    version: int | None = None,
    lost: Iterable[int] = (),
    group: dist.ProcessGroup | None = None,
    async_op: Literal[True],
    copy: bool = False,
    timeout: float | timedelta | None = None,
    **options: Unpack[StateOptions],
) -> Handle[ReshardedState]: ...
def reshard_state_dict(
    state_dict: Mapping[str, Any] | WeightSource | None,
    destinations: Mapping[str, Where] | RecordedDestinations | None = None,
    out: Mapping[str, torch.Tensor] | None = None,
    *,
    layouts: Mapping[str, Layout | tuple[Layout, Sequence[int]]] | None = None,
    rename: Mapping[str, str | None] | Callable[[str], str | None] | None = None,
    maps: TensorMap | Iterable[TensorMap] = (),
    only: Iterable[str] | Callable[[str], bool] | None = None,
    dtype: DType | None = None,
    quantize: Quantization | None = None,
    scales: Mapping[str, tuple[str, Sequence[int]]] | None = None,
    max_bytes_in_flight: int | None = None,
    version: int | None = None,
    digest: bool = False,
    strict: bool = True,
    lost: Iterable[int] = (),
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> ReshardedState | Handle[ReshardedState]:
    """Moves every named tensor to its destination, as one batch. Records no gradient.

    A collective of all ranks of `group`. Ranks that hold nothing need not know what there is: they pass None
    or {} and learn shapes, dtypes and sources from the others at the first call of a kind.

    Args:
        state_dict: {name: entry}. A rank in the mesh of a DTensor must have it; others may have a shell or a
            TensorSpec, or nothing. A DTensor on a sub-mesh of an init_device_mesh is a copy of what the other
            sub-meshes hold under its name. A plain tensor is a copy on every rank that has the name. Tensors
            that are one (tied weights) travel once and are one again. None, bools, numbers, text, bytes, and
            lists, tuples and dicts of such come along to every rank, without a destination; ranks that
            have one have the same. Or a WeightSource, as vLLM's engines take, read once in this call: its
            owners are global ranks.
        destinations: {name: (mesh, placements)}, or a Layout for a result that is a plain local tensor on the
            CPU, or (Layout, "cuda"). Or a tensor to receive into, as the state_dict() of a model has them: a
            DTensor lies where it lies, a plain tensor takes the whole tensor on every rank that names one.
            Each rank names at least those that it is in, and learns the others. Meshes that share no rank, as
            those of several engines, may receive one name in one call. Or what record_destinations has
            returned: tensors of a checkpoint arrive in the parameters of a model.
        out: {name: tensor} to receive into, for any of the names, on ranks inside its destination;
            its dtype is then that of the result. Where `destinations` has no such name, it is the destination
            as well. A plain tensor takes a whole copy, or the local tensor of a
            Layout. Outputs may be interleaved in memory, as columns of one matrix are; two elements never
            have one address, unless two outputs are one tensor and so are their sources. Sources may share
            memory with outputs, their own and others: they are copied before anything moves, whatever
            max_bytes_in_flight says. Changes of a source that is in one storage with an output are found by
            digests alone.
        layouts: {name: Layout} of plain tensors that are no copies, by their names in
            state_dict: each rank of the Layout has its local tensor. (Layout, shape) where the layout does
            not determine the global shape, as boxes do.
        rename: from the names in state_dict to those of maps and destinations: a mapping, in which names that
            stay are left out, or a function of the name. None as a name leaves an entry out.
        maps: TensorMaps, for tensors that are joined, cut, stacked or transposed on the way; the same on
            every rank.
        only: names of destinations, or a function of the name: the others are left out of this call.
        dtype: of the results of floating-point tensors; others keep theirs. Or by the name of the
            destination: a mapping or a function, None keeping that of the source. A function may name one for
            other tensors, too, which keep theirs; a mapping may not.
        quantize: block-scaled types, made on the way: by the name of the destination, a mapping or a
            function, None keeping the values as they are; or one for all floating-point tensors of two
            dimensions or more. "fp8_e4m3:RxC" (blocks of R x C, as 128x128), "mxfp8", "nvfp4" or a
            BlockScaled, which ranks that hold the tensor give as well; or (type, name of the scales), for
            nvfp4 (type, (name, name)). The values take the place of the tensor; its
            scales are results called NAME_scale_inv (fp8 with blocks of several rows) or NAME_scale, and for
            nvfp4 also NAME_scale_2, that of the tensor. They lie where their values lie, unless they have a
            destination of their own.
        scales: {name: (name of its scales, block)} of tensors quantised by blocks, by their destinations:
            both travel as they are, and no destination may cut a block or get other scales than those of its
            blocks. The same on every rank.
        max_bytes_in_flight: at most so many bytes (of global tensors, as they travel) are moved at a time;
            a single larger tensor goes alone. None: everything at once.
        version: a number that rises from call to call. Holders all give one or none; a rank that holds
            nothing may give the one that it expects. Any that differ, or do not exceed the last that
            arrived, raise on every rank before a tensor moves.
        digest: compare a digest of every tensor at both ends and between replicas. Costs one pass over the
            data on every rank; with async_op two more on ranks that hold it, one of them before it returns,
            so that changes through `.data` are found as well.
        strict: refuse tensors that have no destination, and entries that cannot travel; False leaves them
            out.
        lost: global ranks that are dead, or have left with what they held; the same on every rank. They are
            in layouts of what is held, make no call and need not be in `group`. Their boxes come from
            replicas on other ranks.
        async_op: return a Handle at once; handle.wait() gives the result. Calls of this kind run one
            after the other, in an order that is the same on all ranks, independently of all others.
        copy: with async_op, what this rank holds is copied at once, and may be changed from then on.
        group: process group whose ranks all call; None for the default group.
        strategy, topology: see meshcast.plan.
        timeout: seconds or timedelta for the whole call; None for the group's.

    Returns:
        {name: tensor} with attribute `version`: what this rank named, in its order, then what are no tensors.
        Ranks outside a destination get shells, without elements.

    Raises:
        LayoutError: an entry that cannot travel, a missing or superfluous name, outputs that do not fit, or
            that share addresses (see reshard_); maps that do not fit, boxes that no rank holds, blocks that
            are cut. Where lost ranks held the only copy of boxes, its field `gone` lists each (name, box,
            ranks that had it).
        PlanMismatchError: ranks, maps or versions disagree.
        MeshcastError: a source was changed while it travelled, or a digest differs: the results are torn and
            no rank returns them. Outputs are then undefined.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        weights = {"w": distribute_tensor(torch.ones(4, 2), training, [Shard(0)])}
        held = weights if dist.get_rank() in (0, 1) else None
        received = meshcast.reshard_state_dict(held, {"w": (serving, [Shard(1)])}, digest=True)
        assert bool((received["w"].to_local() == 1).all())
    """
    try:
        parent = parent_group(group, OP)
        dead = lost_ranks(lost)
        check_lost(dead, parent.rank)
    except Exception as error:
        raise_refused(error, OP, (), group, timeout)
    limit, wrong = parent.timeout, None
    try:
        limit = seconds(timeout, parent.timeout)
    except Exception as error:
        wrong = error
    given = Given(
        state_dict,
        destinations,
        out,
        layouts=layouts,
        rename=rename,
        maps=maps,
        only=only,
        dtype=dtype,
        quantize=quantize,
        scales=scales,
        max_bytes_in_flight=max_bytes_in_flight,
        digest=digest,
        strict=strict,
        strategy=strategy,
        topology=topology,
        lost=tuple((each, each) for each in dead),
    )
    deadline = time.monotonic() + limit
    run = StateRun(parent.rank, given, version, wrong=wrong)
    if async_op:
        return started(parent, run, limit, lost=dead, copy=copy)
    return conversation(parent, dead).run(run, deadline)


class StateResharder:
    """reshard_state_dict for calls that differ in nothing but their values.

    Constructed by every rank of `group`, and run by all of them in one order with their other calls. The
    first run compiles; later ones look nothing up, and what was compiled lives as long as the
    StateResharder. A run with tensors of other names, shapes, dtypes or layouts is right all the same, and
    is compiled again.

    Args:
        destinations, options: as for reshard_state_dict.
        reuse_output: every run writes into the tensors of the first result.
        group, timeout: as for reshard_state_dict; the timeout is for each run.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        send = meshcast.StateResharder({"w": (serving, [Shard(1)])}, reuse_output=True)
        for step in (1, 2):
            weights = {"w": distribute_tensor(torch.full((4, 2), float(step)), training, [Shard(0)])}
            received = send.run(weights if dist.get_rank() in (0, 1) else None, version=step)
            assert bool((received["w"].to_local() == step).all())
    """

    def __init__(
        self,
        destinations: Mapping[str, Where] | RecordedDestinations | None = None,
        *,
        reuse_output: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        **options: Unpack[StateOptions],
    ) -> None:
        self._parent = parent_group(group, "StateResharder")
        self._limit = seconds(timeout, self._parent.timeout)
        self._calls = Repeated(self._parent.rank, Given(None, destinations, **options))
        self._memory = Memory() if reuse_output else None
        self._names = len(destinations or ())

    def __repr__(self) -> str:
        return f"<StateResharder of {self._names} name{'' if self._names == 1 else 's'}>"

    def run(
        self,
        state_dict: Mapping[str, Any] | WeightSource | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        version: int | None = None,
    ) -> ReshardedState:
        """One call. state_dict, out, version, the result and the errors: as for reshard_state_dict."""
        deadline = time.monotonic() + self._limit
        run = self._calls.prepared(state_dict, out, version, self._memory)
        return conversation(self._parent).run(run, deadline)

    def start(
        self,
        state_dict: Mapping[str, Any] | WeightSource | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        version: int | None = None,
        copy: bool = False,
    ) -> Handle[ReshardedState]:
        """run() that returns at once; handle.wait() gives the result. copy: of what this rank holds, which
        may be changed from then on."""
        run = self._calls.prepared(state_dict, out, version, self._memory)
        return started(self._parent, run, self._limit, copy=copy)

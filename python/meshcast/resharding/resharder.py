"""Resharder: one kind of reshard, compiled once and started often, at the least cost per call."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from typing_extensions import Unpack, deprecated

from ..errors import LayoutError
from ..groups.parent import parent_group, raise_refused, seconds
from ..spec import TensorSpec
from ..transfers.handle import Handle
from ..transfers.medium import tensor_text
from ..transfers.transfer import CallOptions, PlanOptions
from .compiled import ReshardGoal, compile_call, places_called
from .memory import check_storage
from .meshes import positive_placements
from .reshard import begun

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

    from ..planning.plan import Plan
    from ..topology import Topology

__all__ = ["Resharder"]

_OP = "Resharder"
_OLD_FORM = (
    "meshcast.Resharder(src_spec, dst_spec) is deprecated: write Resharder(src_spec, dst_spec.mesh, "
    "dst_spec.placements, dtype=dst_spec.dtype, group=group), as for meshcast.reshard"
)
_NO_SPEC = object()  # None is that of anything else than a DTensor


class Resharder:
    """A reshard of one spec to one layout, compiled once.

    Constructed by every rank of both meshes, in one order with their other calls; started in the same way. No
    call looks anything up or exchanges anything after the first one, and the plan is never dropped while the
    Resharder lives.

    Args:
        x: a DTensor or a TensorSpec; from a DTensor only its spec is taken, so any rank may give either. With
            requires_grad, calls record gradients.
        mesh, placements: of the results, as for meshcast.reshard.
        dtype: of the results; None for that of x.
        group: process group that holds both meshes; None for the default group.
        strategy, topology: see meshcast.plan.
        reuse_output: run() and start() write every result into the same DTensor, which the next call
            overwrites; no memory is allocated per call.
        timeout: of each call, in seconds or as timedelta; None for the group's.

    Raises:
        LayoutError: arguments that are wrong by themselves. Calls raise as meshcast.reshard does.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        spec = meshcast.TensorSpec((4, 2), torch.float32, source, [Shard(0)])
        there = meshcast.Resharder(spec, target, [Replicate()], reuse_output=True)
        for step in (1.0, 2.0):
            x = distribute_tensor(torch.full((4, 2), step), source, [Shard(0)])
            y = there.run(x)
            assert bool((y.to_local() == step).all())
    """

    @overload
    def __init__(
        self,
        x: TensorSpec | DTensor,
        mesh: DeviceMesh,
        placements: Sequence[Placement],
        *,
        dtype: torch.dtype | None = None,
        reuse_output: bool = False,
        **options: Unpack[CallOptions],
    ) -> None: ...
    @overload
    @deprecated("Resharder(src_spec, dst_spec): give x, mesh and placements, as for meshcast.reshard")
    def __init__(
        self,
        src_spec: TensorSpec | DTensor,
        dst_spec: TensorSpec | DTensor,
        group: dist.ProcessGroup | None = None,
        *,
        strategy: str = "auto",
        topology: Topology | None = None,
        reuse_output: bool = False,
        timeout: float | timedelta | None = None,
    ) -> None: ...
    def __init__(  # type: ignore[misc]  # the third of the old form is the group
        self,
        x: Any = None,
        mesh: Any = None,
        placements: Any = None,
        *,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        strategy: str = "auto",
        topology: Topology | None = None,
        reuse_output: bool = False,
        timeout: float | timedelta | None = None,
        src_spec: Any = None,
        dst_spec: Any = None,
    ) -> None:
        x = src_spec if x is None else x
        old = dst_spec if mesh is None else mesh
        if isinstance(old, TensorSpec | DTensor):
            warnings.warn(_OLD_FORM, DeprecationWarning, stacklevel=2)
            group = placements if group is None else group
            spec = _spec_of("dst_spec", old)
            mesh, placements, dtype = spec.mesh, spec.placements, spec.dtype
            expected: tuple[int, ...] | None = tuple(spec.shape)
        else:
            expected = None
        self._group = group
        self._options: dict[str, Any] = {
            "group": group,
            "strategy": strategy,
            "topology": topology,
            "reuse_output": reuse_output,
            "timeout": timeout,
        }
        try:
            parent = parent_group(group, _OP)
            self._limit = seconds(timeout, parent.timeout)
            self._src = _spec_of("x", x)
            shape = tuple(self._src.shape)
            if expected is not None and expected != shape:
                raise LayoutError(f"src_spec has shape {shape}, but dst_spec {expected}")
            goal = ReshardGoal(mesh, placements, dtype)
            options = PlanOptions(strategy, topology)
            self._compiled = compile_call(
                parent, [self._src], [goal], _OP, options, spec_inside=True, kept=False
            )
            self._dst = TensorSpec(
                shape, dtype or self._src.dtype, mesh, self._compiled.moves[0].spec.placements
            )
            self._kept = self._compiled.moves[0].allocate() if reuse_output else None
        except Exception as error:  # of this rank alone, where it has no GPU: the others raise as they call
            raise_refused(error, _OP, places_called(x, mesh), group, timeout)
        self._known_spec: Any = _NO_SPEC  # the spec object that the last source came with
        self._known_out: Any = _NO_SPEC  # that of the last `out`
        self._reverse: Resharder | None = None

    def __repr__(self) -> str:
        shape, dtype, src, dst = self._compiled.moves[0].problem
        return f"<Resharder of {tensor_text(shape, dtype)}, {src} to {dst}>"

    @property
    def plan(self) -> Plan:
        """The plan. It exists once the first call has begun, since it depends on who shares a host; waits for
        that. Raises LayoutError on a rank of neither mesh."""
        if self._compiled.transfer is None:
            raise LayoutError(f"{_OP}: this rank is in neither mesh and has no plan", op=_OP)
        return self._compiled.transfer.plan

    def start(
        self, x: DTensor | None = None, *, out: DTensor | None = None, copy: bool = False
    ) -> Handle[DTensor]:
        """Starts one call and returns at once. x: the source on the ranks of its mesh; others may pass None.
        out: a DTensor of the layout of the results, which is filled, as reshard_ does. copy: x is copied, and
        may be changed from then on."""
        handle: Handle[DTensor] = self._call(x, out, async_op=True, copy=copy)
        return handle

    def run(self, x: DTensor | None = None, *, out: DTensor | None = None) -> DTensor:
        """start() and wait in one; costs less than both."""
        result: DTensor = self._call(x, out, async_op=False)
        return result

    def reverse(self) -> Resharder:
        """The Resharder of the way back, made at the first call; a Partial source comes back as Replicate.
        Called by every rank of both meshes."""
        if self._reverse is None:
            back = tuple(Replicate() if isinstance(p, Partial) else p for p in self._src.placements)
            origin = TensorSpec(self._dst.shape, self._dst.dtype, self._dst.mesh, self._dst.placements)
            mesh: Any = self._src.mesh
            self._reverse = Resharder(origin, mesh, back, dtype=self._src.dtype, **self._options)
        return self._reverse

    def _call(self, x: Any, out: Any, *, async_op: bool, copy: bool = False) -> Any:
        compiled = self._compiled
        try:
            if x is not None and getattr(x, "_spec", None) is not self._known_spec:
                self._check_source(x)
            if torch.is_grad_enabled():
                self._check_gradient(x, out)
            if out is None:
                out = self._kept
            else:
                self._check_out(out)
            (result,), call = begun(compiled, (x,), self._limit, out, async_op, copy)
        except Exception as error:
            raise_refused(error, _OP, compiled.layouts, self._group, self._limit)
        if async_op:
            return Handle(call, result, compiled.bound)
        if call is not None:
            call.wait()
        return result

    def _check_source(self, x: Any) -> None:
        if not isinstance(x, DTensor):
            raise LayoutError(f"x must be a DTensor, found {type(x).__name__}")
        _expect("x", x, self._src)
        self._known_spec = x._spec

    def _check_out(self, out: Any) -> None:
        if not isinstance(out, DTensor):
            raise LayoutError(f"out must be a DTensor, found {type(out).__name__}")
        if out._spec is not self._known_out:
            _expect("out", out, self._dst)
            self._known_out = out._spec
        check_storage(out._local_tensor)

    def _check_gradient(self, x: DTensor | None, out: DTensor | None) -> None:
        if self._compiled.differentiable and (out is not None or self._kept is not None):
            raise LayoutError(
                "a result that is overwritten carries no gradient; call it under torch.no_grad(), or "
                "without out= and reuse_output"
            )
        if x is not None and x.requires_grad and not self._src.requires_grad:
            raise LayoutError(
                "the source requires a gradient, but what the Resharder was made with has "
                "requires_grad=False: make it with a source that requires one, detach the source, or call it "
                "under torch.no_grad()"
            )


def _spec_of(name: str, given: Any) -> TensorSpec:
    if isinstance(given, TensorSpec):
        return given
    if isinstance(given, DTensor):
        return TensorSpec(given.shape, given.dtype, given.device_mesh, given.placements, given.requires_grad)
    raise LayoutError(f"{name} must be a meshcast.TensorSpec or a DTensor, found {type(given).__name__}")


def _expect(name: str, tensor: DTensor, spec: TensorSpec) -> None:
    found = (
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device_mesh,
        positive_placements(tensor.placements, tensor.ndim),
    )
    wanted = (tuple(spec.shape), spec.dtype, spec.mesh, positive_placements(spec.placements, len(spec.shape)))
    if found != wanted:
        raise LayoutError(f"{name} does not fit its spec: expected {wanted}, found {found}")

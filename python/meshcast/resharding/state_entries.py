"""The entries of a state dict on one rank, and where it wants them: what each is and how it lies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base import checks
from ..errors import LayoutError
from ..layout import Layout
from ..spec import TensorSpec
from ..transfers.medium import settled
from .compiled import source_of
from .meshes import Family, family_of, ranks_then, renumbered

__all__ = ["Held", "Reading", "Wanted", "local_of", "same_memory"]

_OP = "reshard_state_dict"


class Held(NamedTuple):
    """A tensor that this rank holds or has a spec of. layout None: a plain tensor, a copy of which is on
    every rank that has the name. plain: no DTensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout | None
    device_type: str
    family: Family | None
    plain: bool


class Wanted(NamedTuple):
    """A destination as this rank gives it. dtype: of the result, None as the source; plain: the result is a
    local tensor and no DTensor, of a Layout. floats: the dtype is for floating-point tensors alone."""

    layout: Layout
    device_type: str
    family: Family | None
    dtype: str | None
    plain: bool
    floats: bool


class Reading:
    """Reads entries for one rank, each distinct layout once."""

    def __init__(
        self, rank: int, layouts: Mapping[str, Any], numbers: Mapping[int, int] | None = None
    ) -> None:
        """numbers: of ranks in what is held, by what meshes and layouts there call them; None: the same."""
        self._rank = rank
        self._layouts = layouts
        self._numbers = numbers
        self._then = next((old for old, new in (numbers or {}).items() if new == rank), None)
        self._known: dict[Any, tuple[Layout, Family | None]] = {}

    def held(self, name: str, value: torch.Tensor | TensorSpec) -> Held:
        """Raises LayoutError for a tensor that cannot be described."""
        if isinstance(value, DTensor):
            spec = value._spec
            meta = spec.tensor_meta
            assert meta is not None  # of a DTensor there is one
            key = (spec.mesh, spec.placements, getattr(spec, "shard_order", None), len(meta.shape))
            found = self._known.get(key)
            if found is None:
                source = source_of(value, self._rank, False, _OP, ranks_of=self._ranks_of)
                found = self._known[key] = self._called(name, source.layout, family_of(spec.mesh))
            return Held(tuple(meta.shape), meta.dtype, found[0], spec.mesh.device_type, found[1], False)
        if isinstance(value, TensorSpec):
            renumbers = self._numbers is not None
            source = source_of(value, self._rank, False, _OP, spec_inside=renumbers, ranks_of=self._ranks_of)
            layout, family = self._called(name, source.layout, family_of(value.mesh))
            if self._rank in layout.ranks:
                raise LayoutError(
                    f"{_OP}: rank {self._rank} holds {name!r} and must pass its DTensor, not a spec"
                )
            return Held(source.shape, source.dtype, layout, source.device_type, family, False)
        device = value.device.type
        given = self._layouts.get(name)
        if given is None:
            return Held(tuple(value.shape), value.dtype, None, device, None, True)
        layout, shape = _given_layout(name, given, value)
        layout, _ = self._called(name, layout, None)
        local = layout.local_shapes(shape).get(self._rank)
        if local != tuple(value.shape):
            raise LayoutError(
                f"{_OP}: {name!r} has the local shape {tuple(value.shape)}, but {layout} of {shape} gives "
                f"rank {self._rank} {'nothing' if local is None else local}"
            )
        return Held(shape, value.dtype, layout, device, None, True)

    def _ranks_of(self, mesh: DeviceMesh) -> Any:
        return mesh if self._numbers is None else ranks_then(mesh, self._then)

    def _called(self, name: str, layout: Layout, family: Family | None) -> tuple[Layout, Family | None]:
        """With the numbers that ranks have now."""
        if self._numbers is None:
            return layout, family
        if layout.has_partial:
            raise LayoutError(
                f"{_OP}: {name!r} under {layout} holds Partial, whose values are reduced in the group of "
                "then; reduce it there"
            )
        layout = renumbered(layout, self._numbers, f"{_OP}: {name!r}")
        if family is not None:
            names, all_names, shape, ranks = family
            family = names, all_names, shape, tuple(self._numbers.get(rank, -1 - rank) for rank in ranks)
        return layout, family

    def wanted(
        self, name: str, where: Any, dtype: str | None, floats: bool
    ) -> tuple[Wanted, DeviceMesh | None, Any]:
        """A destination, with its mesh and placements where it has some."""
        if isinstance(where, Layout):
            where = (where, "cpu")
        pair = where if isinstance(where, tuple | list) and len(where) == 2 else (None, None)
        if isinstance(pair[0], Layout) and pair[1] in ("cpu", "cuda"):
            if pair[0].has_partial:
                raise LayoutError(f"{_OP}: the destination of {name!r}, {pair[0]}, holds Partial")
            return Wanted(pair[0], pair[1], None, dtype, True, floats), None, None
        if not isinstance(pair[0], DeviceMesh):
            raise LayoutError(
                f"{_OP}: the destination of {name!r} must be (mesh, placements) or a Layout, found "
                f"{checks.shown(where)}"
            )
        mesh, placements = pair[0], checks.listed(f"{_OP}: placements of {name!r}", pair[1])
        found = self._known.get((mesh, placements))
        if found is None:
            layout = Layout(mesh, placements)
            if layout.has_partial:
                raise LayoutError(
                    f"{_OP}: destination placements {placements} of {name!r} hold Partial; ask for Replicate "
                    "or Shard instead"
                )
            found = self._known[mesh, placements] = (layout, family_of(mesh))
        return Wanted(found[0], mesh.device_type, found[1], dtype, False, floats), mesh, placements


def _given_layout(name: str, given: Any, value: torch.Tensor) -> tuple[Layout, tuple[int, ...]]:
    """A layout of `layouts=` and the global shape."""
    layout, shape = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
    if not isinstance(layout, Layout):
        raise LayoutError(
            f"{_OP}: layouts has {checks.shown(given)} for {name!r}: expected a Layout, or (Layout, shape)"
        )
    if shape is not None:
        return layout, checks.shape(shape)
    if layout.by_boxes:  # they end where the tensor does
        boxes = [box for _, pieces in layout._held for box, *_ in pieces]
        return layout, tuple(max(box[d][1] for box in boxes) for d in range(len(boxes[0])))
    if all(p.is_replicate() for p in layout.placements):
        return layout, tuple(value.shape)
    raise LayoutError(
        f"{_OP}: layouts has {layout} for {name!r}, which does not say how large the tensor is; give "
        "(Layout, shape)"
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of an entry on this rank."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return settled(local.detach() if local.requires_grad else local)


def same_memory(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """{name: an earlier name} of tensors that are one: they share all of their memory, element by element."""
    first: dict[Any, tuple[str, Any]] = {}
    ties: dict[str, str] = {}
    for name, tensor in tensors:
        local = local_of(tensor)
        if local.numel():
            spec = tensor._spec if isinstance(tensor, DTensor) else None
            key = (local.data_ptr(), local.dtype, local.shape, local.stride())
            earlier, its = first.setdefault(key, (name, spec))
            if earlier != name and its == spec:
                ties[name] = earlier
    return ties

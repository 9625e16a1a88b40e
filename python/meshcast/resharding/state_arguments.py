"""The arguments of reshard_state_dict on one rank, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..base import checks
from ..errors import LayoutError
from ..layout import Layout
from ..spec import TensorSpec
from ..transfers.gpu_offer import own_obstacle
from .arguments import source_of
from .memory import check_outs, near, storage_of
from .state_specs import encode
from .tensor_move import Destination, Source, positive_placements

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = ["StateCall", "checked_call", "floating_name"]

_OP = "reshard_state_dict"


@dataclass
class StateCall:
    """The checked arguments of this rank."""

    held: dict[str, DTensor]
    sources: dict[str, Source]
    destinations: dict[str, Destination]
    layouts: dict[str, Layout]
    outs: dict[str, DTensor]
    options: dict[str, Any]
    topology: Topology | None

    def sent(self) -> dict[str, DTensor]:
        """What is held, with copies of all that shares memory with an output: else neighbours, or a later
        batch, would read what has already come in."""
        if not self.outs:
            return self.held
        shards = {name: x._local_tensor for name, x in self.held.items()}
        copied = near(shards, [out._local_tensor for out in self.outs.values()])
        return {
            name: DTensor(shards[name].detach().clone(), x._spec, requires_grad=False)
            if name in copied
            else x
            for name, x in self.held.items()
        }

    def watched(self) -> dict[str, DTensor]:
        """What is held in other storages than those that this very call writes to."""
        if not self.outs:
            return self.held
        written = {storage_of(out._local_tensor) for out in self.outs.values()}
        return {name: x for name, x in self.held.items() if storage_of(x._local_tensor) not in written}

    def key(self) -> Any:
        return (
            tuple((name, s.shape, s.dtype, s.layout, s.device_type) for name, s in self.sources.items()),
            tuple((name, *where) for name, where in self._wanted().items()),
            tuple((name, out.shape, out.dtype) for name, out in self.outs.items()),
            tuple(self.options.items()),
            self.topology,
        )

    def text(self) -> str:
        held = {name: (s.shape, s.dtype, s.layout, s.device_type) for name, s in self.sources.items()}
        outs = {name: (tuple(out.shape), out.dtype) for name, out in self.outs.items()}
        obstacles = [own_obstacle(copies_only=copies_only) for copies_only in (False, True)]
        return encode(held, self._wanted(), outs, self.options, obstacles)

    def _wanted(self) -> dict[str, tuple[Layout, str]]:
        return {
            name: (layout, self.destinations[name].mesh.device_type) for name, layout in self.layouts.items()
        }


def checked_call(
    rank: int, state: Any, destinations: Any, outs: Any, options: dict[str, Any], topology: Any
) -> StateCall:
    for name, given in (("state_dict", state), ("destinations", destinations), ("out", outs)):
        if not isinstance(given, Mapping):
            raise LayoutError(f"{_OP}: {name} must be a mapping by name, found {type(given).__name__}")
    if not destinations:
        raise LayoutError(f"{_OP}: no destinations; give (mesh, placements) for at least one name")
    targets, layouts = {}, {}
    for name, where in destinations.items():
        if not isinstance(where, tuple | list) or len(where) != 2 or not isinstance(where[0], DeviceMesh):
            raise LayoutError(
                f"{_OP}: the destination of {name!r} must be (mesh, placements), found {checks.shown(where)}"
            )
        targets[name] = Destination(where[0], tuple(where[1]))
        layouts[name] = Layout(where[0], where[1])
    held, sources = {}, {}
    for name, value in state.items():
        if not options["strict"] and name not in destinations:
            continue
        if not isinstance(value, DTensor | TensorSpec):
            hint = "; wrap it with DTensor.from_local" if isinstance(value, torch.Tensor) else ""
            raise LayoutError(f"{_OP}: {name!r} is a {type(value).__name__}, expected a DTensor{hint}")
        source = source_of(value, rank, False, _OP)
        sources[name] = source
        if isinstance(value, DTensor) and rank in source.layout.ranks:
            held[name] = value
    for name, out in outs.items():
        _check_out(name, out, targets)
    check_outs({name: out._local_tensor for name, out in outs.items()}, _OP)
    return StateCall(held, sources, targets, layouts, dict(outs), options, topology)


def floating_name(dtype: Any) -> str:
    found = checks.dtype(dtype)
    if not found.is_floating_point:
        raise LayoutError(f"{_OP}: dtype {found}: only floating-point tensors are cast, to a floating dtype")
    return checks.dtype_name(found)


def _check_out(name: str, out: Any, targets: Mapping[str, Destination]) -> None:
    if name not in targets:
        raise LayoutError(f"{_OP}: out has {name!r}, for which no destination is given")
    if not isinstance(out, DTensor):
        raise LayoutError(f"{_OP}: the output of {name!r} is a {type(out).__name__}, expected a DTensor")
    expected = Layout(targets[name].mesh, positive_placements(targets[name].placements, out.ndim))
    found = Layout(out.device_mesh, out.placements)
    if expected != found or out.device_mesh != targets[name].mesh:
        raise LayoutError(f"{_OP}: the output of {name!r} is under {found}, its destination is {expected}")

"""What differs between releases of torch.distributed.pipelining and how its names come to the same places
here."""

from __future__ import annotations

import csv
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError

__all__ = [
    "EXTRA_KINDS",
    "actions_of",
    "fused_pairs",
    "init_stage",
    "load_order",
    "mesh_layout",
    "mesh_of",
    "names_of_torch",
    "torch_action",
    "torch_order",
]

# Actions that need none here: FSDP2 gathers and frees parameters in its own hooks, gradients are reduced when
# the step ends, and nobody waits but for the value that is needed (the WAIT actions of torch 2.15).
EXTRA_KINDS = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT")


def names_of_torch(module: str, here: dict[str, Any]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a module that has the names of torch.distributed.pipelining's module
    of that name, private ones included, but for those that it defines itself. here: its globals."""
    theirs = import_module(f"torch.distributed.pipelining.{module}")

    def get(name: str) -> Any:
        try:
            return getattr(theirs, name)
        except AttributeError:
            raise AttributeError(f"module {here['__name__']!r} has no attribute {name!r}") from None

    return get, lambda: sorted({*here, *dir(theirs)})


def init_stage(stage: Any, *args: Any, num_stages: int, mesh: DeviceMesh | None, **named: Any) -> None:
    """torch's part of a stage. torch takes one rank for each stage at most; with mesh= there may be more."""
    given = torch_stage.PipelineStage.__init__
    known = inspect.signature(given).parameters
    room = num_stages if mesh is None else max(num_stages, dist.get_world_size(named.get("group")))
    named = {name: value for name, value in named.items() if name in known}
    given(stage, *args, num_stages=room, **named)  # type: ignore[misc]
    stage.num_stages = num_stages


def mesh_layout(mesh: DeviceMesh) -> tuple[Any, ...] | None:
    """Shapes and strides, what torch tells meshes of one set of ranks apart by; None before 2.12."""
    layout: Any = getattr(mesh, "_layout", None)
    if layout is None:
        return None
    return tuple((each.shape, each.stride) for each in getattr(layout, "axes", [layout]))  # axes: since 2.13


def mesh_of(stage: Any, names: tuple[str, ...], layout: tuple[Any, ...] | None) -> DeviceMesh:
    """The mesh of a value that comes from another stage, by ``get_mesh=`` or from given examples."""
    key = None
    if layout is not None:
        from torch.distributed import _mesh_layout as module

        flat: Any = getattr(module, "_FlatLayout", None)
        parts = [tuple(map(_tuples, each)) for each in layout]
        key = (
            module._MeshLayout(*parts[0])
            if flat is None
            else module._MeshLayout([flat(*each) for each in parts])
        )
    return stage._mesh_cache.get_mesh((names, key))


def _tuples(value: Any) -> Any:
    return value if isinstance(value, int) else tuple(map(_tuples, value))


def torch_action(action: Action) -> Any:
    """As torch writes it."""
    kind = torch_schedules._ComputationType(action.kind.value)
    return torch_schedules._Action(action.stage, kind, action.microbatch)


def load_order(path: str) -> dict[int, list[Any]]:
    """A file of torch's, with transfers or without, idle steps left out. Waits of torch 2.15, which older
    releases would read as weight gradients, are left out too: nobody waits here but for what it needs."""
    with open(path, newline="") as file:
        return {
            rank: [
                torch_schedules._Action.from_str(cell) for cell in row if cell.strip() and "WAIT" not in cell
            ]
            for rank, row in enumerate(csv.reader(file))
        }


def torch_order(actions: Actions) -> dict[int, list[Any]]:
    return {rank: [torch_action(action) for action in row] for rank, row in actions.items()}


def actions_of(order: dict[int, list[Any]]) -> Actions:
    """A schedule of torch: idle steps and what needs no action here left out, fused actions one after the
    other."""
    return {rank: [each for one in row for each in _actions(one)] for rank, row in order.items()}


def _actions(action: Any) -> list[Action]:
    if action is None:
        return []
    if action.sub_actions is not None:
        return [each for part in action.sub_actions for each in _actions(part)]
    kind = action.computation_type.value
    if kind.startswith(EXTRA_KINDS):
        return []
    if kind not in ActionKind.__members__:
        raise ScheduleError(f"action {action}: {kind} is not known here")
    return [Action(action.stage_index, ActionKind[kind], action.microbatch_index)]


def fused_pairs(order: dict[int, list[Any]]) -> dict[Action, tuple[Any, list[Action]]]:
    """Of the first part of each fused action: torch's action, and all its parts."""
    found = {}
    for row in order.values():
        for each in row:
            if each is not None and each.sub_actions is not None:
                parts = _actions(each)
                found[parts[0]] = each, parts
    return found

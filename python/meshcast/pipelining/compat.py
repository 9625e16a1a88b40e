"""Differences between releases of torch.distributed.pipelining.

The FSDP2 stages that a rank has gathered at a time: the window of ``max_active_stages``, by torch's rule.

Before every action a rank looks at the next stages that it will compute. Those beyond the window are freed
(``RESHARD``), those inside it are gathered ahead (``UNSHARD``), as many as ``unshard_lookahead`` says.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

from ..base.checks import shown
from ..errors import LayoutError
from .action import Action, ActionKind, Actions, ScheduleError

__all__ = [
    "EXTRA_KINDS",
    "FSDP_DEFAULTS",
    "Gathering",
    "PipelineStageInfo",
    "WAIT_REDUCE_GRAD",
    "accepted",
    "actions_of",
    "fused_pairs",
    "init_stage",
    "load_order",
    "lowered",
    "lowers_by_itself",
    "mesh_layout",
    "mesh_of",
    "order_of_torch",
    "parts_of",
    "scales_without_loss",
    "torch_action",
    "torch_order",
    "windows",
    "with_gathering",
]


@dataclass(frozen=True, slots=True)
class Gathering:
    """Arguments of schedules in torch 2.15 about FSDP2, checked.

    max_active_stages: stages of a rank that may be gathered at once. lookahead: "full" (all of these are
    gathered ahead), "auto" (rank r gathers r + 2 ahead), or a number for each rank of the schedule.
    defer_wait: where an order is lowered, the end of a reduction is waited for before the next one begins.
    """

    max_active_stages: int = 3
    lookahead: str | tuple[int, ...] = "full"
    defer_wait: bool = False

    def __post_init__(self) -> None:
        if not _positive(self.max_active_stages):
            raise LayoutError(
                f"max_active_stages must be an integer of at least 1, found {shown(self.max_active_stages)}"
            )
        given = self.lookahead
        if isinstance(given, str):
            if given not in ("full", "auto"):
                raise LayoutError(f'unshard_lookahead is "full", "auto" or a tuple, found {given!r}')
        elif not isinstance(given, tuple) or not all(map(_positive, given)):
            raise LayoutError(
                'unshard_lookahead is "full", "auto" or a tuple of integers of at least 1, one for each rank '
                f"of the schedule, found {shown(given)}"
            )
        if not isinstance(self.defer_wait, bool):
            raise LayoutError(f"defer_reduce_grad_wait must be True or False, found {shown(self.defer_wait)}")

    def ahead(self, rank: int, ranks: int) -> int:
        """Returns how many of the next stages a rank of the schedule gathers. Raises LayoutError for a tuple
        of another length."""
        most = self.max_active_stages
        if self.lookahead == "full":
            return most
        if self.lookahead == "auto":
            return min(rank + 2, most)
        if len(self.lookahead) != ranks:
            raise LayoutError(
                f"unshard_lookahead has {len(self.lookahead)} entries, the schedule has {ranks} ranks: give "
                "one for each"
            )
        return min(int(self.lookahead[rank]), most)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


FSDP_DEFAULTS = Gathering()


def windows(computing: Sequence[Sequence[int]], active: int, ahead: int) -> list[tuple[list[int], list[int]]]:
    """Returns for each action the stages to free before it and those to gather then.

    Args:
        computing: the stages that each action of the rank computes on; none where it computes nothing.
        active, ahead: see `Gathering`. An action that computes on several stages counts them all.
    """
    active = min(active, len({stage for stages in computing for stage in stages}))
    gathered: set[int] = set()
    found: list[tuple[list[int], list[int]]] = []
    for position, stages in enumerate(computing):
        if not stages:
            found.append(([], []))
            continue
        inside = _next(computing, position, active)
        wanted = inside if ahead >= active else _next(computing, position, ahead)
        freed = sorted(gathered.difference(inside))
        fetched = [stage for stage in wanted if stage not in gathered]
        gathered = gathered.intersection(inside).union(fetched)
        found.append((freed, fetched))
    return found


def _next(computing: Sequence[Sequence[int]], begin: int, count: int) -> list[int]:
    """The next `count` stages, without repetition."""
    stages: list[int] = []
    for position in range(begin, len(computing)):
        for stage in computing[position]:
            if stage not in stages:
                stages.append(stage)
        if len(stages) >= count:
            break
    return stages


# Actions that need none here: FSDP2 gathers and frees parameters in its own hooks, gradients are reduced when
# the step ends, and a stage waits only for the value that it needs (the WAIT actions of torch 2.15).
EXTRA_KINDS = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT")
_WAITING = re.compile(r"(\d+)(WAIT(?:_[A-Z]+)*)(\d*)")


class _Waiting(str):
    """A kind of action of torch 2.15 under an older one, which cannot have it among its own."""

    __slots__ = ()

    @property
    def value(self) -> str:
        return str(self)


def _waiting(name: str) -> Any:
    try:
        return torch_schedules._ComputationType(name)
    except ValueError:
        return _Waiting(name)


WAIT_REDUCE_GRAD = _waiting("WAIT_REDUCE_GRAD")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStageInfo:
    """The stage and micro-batch of a forward, which torch 2.15 gives to a context of
    `register_forward_context`.

    Attributes:
        stage_index: number of the stage.
        microbatch_index: number of the micro-batch in its step.
        is_metadata_inference: the module runs to find the shapes of what it returns, not on data.
    """

    stage_index: int
    microbatch_index: int
    is_metadata_inference: bool = False


PipelineStageInfo = getattr(torch_stage, "PipelineStageInfo", PipelineStageInfo)  # type: ignore[misc]


def scales_without_loss(schedule: Any) -> bool:
    """Returns whether `step` of this schedule divides what is in ``grad`` also where no loss is given: from
    torch 2.15 on only with one stage a rank."""
    single = isinstance(schedule, torch_schedules.PipelineScheduleSingle)
    return single or not hasattr(torch_schedules, "WAIT_REDUCE_GRAD")


def init_stage(stage: Any, *args: Any, num_stages: int, mesh: DeviceMesh | None, **named: Any) -> None:
    """torch's part of a stage. torch takes one rank for each stage at most; with mesh= there may be more."""
    given = torch_stage.PipelineStage.__init__
    known = inspect.signature(given).parameters
    room = num_stages if mesh is None else max(num_stages, dist.get_world_size(named.get("group")))
    named = {name: value for name, value in named.items() if name in known}
    both = named.get("input_args") is not None and named.get("output_args") is not None
    if "output_grads" not in known and not both:
        # Without one of them torch 2.11 refuses the other, or runs the module. Shapes are inferred later.
        named.update(input_args=None, output_args=None)
    given(stage, *args, num_stages=room, **named)  # type: ignore[misc]
    stage.num_stages = num_stages
    states = getattr(stage, "_forward_chunk_states", None)
    if states is not None:  # its name since torch 2.15
        stage.fwd_cache = states


def mesh_layout(mesh: DeviceMesh) -> tuple[Any, ...] | None:
    """Shapes and strides, by which torch distinguishes meshes of one set of ranks; None before 2.12."""
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
    """Returns the action as one of torch's."""
    kind = torch_schedules._ComputationType(action.kind.value)
    return torch_schedules._Action(action.stage, kind, action.microbatch)


def load_order(path: str, *, waits: bool) -> dict[int, list[Any]]:
    """A file of torch's, with transfers or without, idle steps left out. Waits of torch 2.15 stay what they
    are, also under an older torch, which would read them as weight gradients: who writes the file again
    writes them again. No rank waits here except for what it needs. waits=False: they are left out too."""
    with open(path, newline="") as file:
        read = {
            rank: [_parsed(cell.strip()) for cell in row if cell.strip()]
            for rank, row in enumerate(csv.reader(file))
        }
    return {
        rank: [each for each in row if waits or not each.computation_type.value.startswith("WAIT")]
        for rank, row in read.items()
    }


def _parsed(cell: str) -> Any:
    found = _WAITING.fullmatch(cell)
    if found is None:
        return torch_schedules._Action.from_str(cell)
    stage, kind, microbatch = found.groups()
    return torch_schedules._Action(int(stage), _waiting(kind), int(microbatch) if microbatch else None)


def accepted(kind: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments that the constructor of a schedule of torch takes under this release."""
    known = inspect.signature(kind.__init__).parameters  # type: ignore[misc]
    names = set(known)
    if any(each.kind is each.VAR_KEYWORD for each in known.values()):
        # torch's runtime takes these by **kwargs: its subclasses name them.
        names |= set(inspect.signature(torch_schedules.ScheduleInterleaved1F1B.__init__).parameters)
    return {name: value for name, value in given.items() if name in names}


def lowers_by_itself() -> bool:
    """Returns whether torch lowers an order as ``max_active_stages`` and ``unshard_lookahead`` say: since
    2.15."""
    return (
        "unshard_lookahead" in inspect.signature(torch_schedules.ScheduleInterleaved1F1B.__init__).parameters
    )


def lowered(
    schedule: Any, actions: Mapping[int, Sequence[Any]], gathering: Gathering
) -> dict[int, list[Any]]:
    """torch's actions with all that torch 2.15 adds, under an older one. schedule: one of torch's runtime."""
    rows: dict[int, list[Any]] = {}
    for rank, each in actions.items():
        made = with_gathering(each, gathering, rank, len(actions))
        made = torch_schedules._add_reduce_grad(made, schedule._n_microbatches)
        rows[rank] = _with_waits(made) if gathering.defer_wait else made
    stage_to_rank = schedule.stage_index_to_group_rank.__getitem__
    rows = torch_schedules._add_send_recv(rows, stage_to_rank=stage_to_rank, num_stages=schedule._num_stages)
    if schedule._defer_pp_recv:
        rows = torch_schedules._defer_recv_ops(rows, stage_to_rank=stage_to_rank)
    return rows


def with_gathering(row: Sequence[Any], gathering: Gathering, rank: int, ranks: int) -> list[Any]:
    """torch's compute actions of one rank of the schedule, with UNSHARD and RESHARD where FSDP2 would gather
    and free stages."""
    row = [action for action in row if action is not None]
    computing = [[one.stage_index for one in action.sub_actions or (action,)] for action in row]
    made: list[Any] = []
    gathered: set[int] = set()
    active, ahead = gathering.max_active_stages, gathering.ahead(rank, ranks)
    for action, (freed, fetched) in zip(row, windows(computing, active, ahead), strict=True):
        made += [torch_schedules._Action(stage, torch_schedules.RESHARD, None) for stage in freed]
        made += [torch_schedules._Action(stage, torch_schedules.UNSHARD, None) for stage in fetched]
        made.append(action)
        gathered = gathered.difference(freed).union(fetched)
    made += [torch_schedules._Action(stage, torch_schedules.RESHARD, None) for stage in sorted(gathered)]
    return made


def _with_waits(row: Sequence[Any]) -> list[Any]:
    """One reduction of gradients is in flight at a time: the end of each is waited for before the next."""
    made: list[Any] = []
    reducing: list[int] = []
    for action in row:
        if action.computation_type == torch_schedules.REDUCE_GRAD:
            made += [torch_schedules._Action(stage, WAIT_REDUCE_GRAD, None) for stage in reducing]
            reducing = [action.stage_index]
        made.append(action)
    return [*made, *(torch_schedules._Action(stage, WAIT_REDUCE_GRAD, None) for stage in reducing)]


def torch_order(actions: Actions) -> dict[int, list[Any]]:
    return {rank: [torch_action(action) for action in row] for rank, row in actions.items()}


def actions_of(order: dict[int, list[Any]]) -> Actions:
    """A schedule of torch: idle steps and what needs no action here left out, fused actions one after the
    other."""
    return {rank: [each for one in row for each in parts_of(one)] for rank, row in order.items()}


def parts_of(action: Any) -> list[Action]:
    """Returns what one action of torch's is here: nothing, itself, or the parts of a fused one."""
    if action is None:
        return []
    if action.sub_actions is not None:
        return [each for part in action.sub_actions for each in parts_of(part)]
    kind = action.computation_type.value
    if kind.startswith(EXTRA_KINDS):
        return []
    if kind not in ActionKind.__members__:
        raise ScheduleError(f"action {action}: {kind} is not known here")
    return [Action(action.stage_index, ActionKind[kind], action.microbatch_index)]


def fused_pairs(order: dict[int, list[Any]]) -> dict[Action, tuple[Any, list[Action]]]:
    """Maps the first part of each fused action to torch's action and all its parts."""
    found = {}
    for row in order.values():
        for each in row:
            if each is not None and each.sub_actions is not None:
                parts = parts_of(each)
                found[parts[0]] = each, parts
    return found


def order_of_torch(name: str, stages: int, ranks: int, microbatches: int) -> Actions:
    """Compute actions of a schedule that torch orders, without stages that could run. Raises what torch
    raises for numbers that it cannot order."""
    base = torch_stage._PipelineStageBase
    looked: Any = type("Looked", (base,), dict.fromkeys(base.__abstractmethods__))
    style = "v" if name in ("ZBVZeroBubble", "DualPipeV") else "loop"
    mine = torch_schedules.generate_rank_to_stage_mapping(ranks, stages, style=style)[0]
    made = []
    for index in mine:
        stage = looked.__new__(looked)
        stage.submod, stage.group, stage.stage_index, stage.has_backward = None, None, index, False
        stage.num_stages, stage.group_size, stage.group_rank = stages, ranks, 0
        stage.device = None
        made.append(stage)
    schedule = getattr(torch_schedules, f"Schedule{name}")(made, microbatches)
    return actions_of(schedule.pipeline_order)

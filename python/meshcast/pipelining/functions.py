"""Functions of the user that run in place of a stage's: what torch's ``register_custom_function`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.compat import parts_of, torch_action, with_gathering
from meshcast.pipelining.gathered_stages import Gathering
from meshcast.pipelining.given import GivenOrder
from meshcast.pipelining.step import StepFeed

__all__ = ["Arriving", "Functions", "functions_for", "functions_of"]


class Arriving:
    """The values that such a function waits for first; torch has works of torch.distributed there."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.wait = settle


@dataclass(slots=True)
class Functions:
    """The functions of a step.

    fused: of the first of the actions that run as one: the function, and all of them. inside: all of those.
    forward_arriving, backward_arriving: by stage and micro-batch. gathering: by the action before which they
    are called, those for UNSHARD and RESHARD, with torch's action; under None those behind the last action.
    """

    by_kind: dict[ActionKind, Callable[[Action], None]] = field(default_factory=dict)
    fused: dict[Action, tuple[Callable[[], None], list[Action]]] = field(default_factory=dict)
    inside: frozenset[Action] = frozenset()
    forward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)
    backward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)

    gathering: dict[Action | None, list[tuple[Any, Callable[[], None]]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_kind or self.fused or self.gathering)


def functions_of(schedule: Any) -> Mapping[Any, Callable[..., None]]:
    """By torch's kind of action."""
    return getattr(schedule, "_comp_type_to_function_map", {})


def functions_for(
    schedule: Any,
    given: GivenOrder | None,
    feeds: Mapping[int, StepFeed],
    row: Sequence[Action],
    place: tuple[int, int],
    *,
    train: bool,
) -> Functions:
    """Functions of one step; the schedule gets what torch's functions look at.

    row: what this rank runs. place: number of the row, and how many there are.
    """
    found, registered = Functions(), functions_of(schedule)
    if not registered:
        return found
    first = next(iter(feeds.values()))
    targets = [feed.loss.targets for feed in feeds.values() if feed.loss.targets is not None]
    context = torch_schedules._PipelineContext(
        schedule,
        [tuple(feeds[0].arguments(number)) if 0 in feeds else () for number in range(first.count)],
        [dict(first.keywords(number)) for number in range(first.count)],
        list(targets[0]) if targets else None,
    )
    schedule.fwd_recv_ops, schedule.bwd_recv_ops = found.forward_arriving, found.backward_arriving
    schedule.backward_counter.clear()
    both = registered.get(torch_schedules.OVERLAP_F_B)
    if both is not None and given is not None and train:
        for start, (whole, parts) in given.pairs.items():
            found.fused[start] = _call(both, whole, context), parts
        found.inside = frozenset(part for _, parts in given.pairs.values() for part in parts)
    for kind, run in registered.items():
        if kind.value in ActionKind.__members__:
            found.by_kind[ActionKind[kind.value]] = _call_for(run, context)
    for before, action in _gathering(schedule._gathering, given, row, place):
        if action.computation_type in registered:
            run = _call(registered[action.computation_type], action, context)
            found.gathering.setdefault(before, []).append((action, run))
    return found


def _gathering(
    options: Gathering, given: GivenOrder | None, row: Sequence[Action], place: tuple[int, int]
) -> list[tuple[Action | None, Any]]:
    """torch's UNSHARD and RESHARD in their order, each with the action of the row that it comes before: where
    a given order with transfers has them, else where torch would put them."""
    order: list[Any] = [torch_action(each) for each in row if each.kind.is_compute]
    if given is not None:
        order = given.row_of({each.stage for each in row})
    if given is None or not given.lowered:
        order = with_gathering(order, options, *place)
    runs = frozenset(row)
    before: Action | None = None
    found: list[tuple[Action | None, Any]] = []
    for each in reversed(order):
        if each is None:
            continue
        if each.computation_type in (torch_schedules.UNSHARD, torch_schedules.RESHARD):
            found.append((before, each))
        else:
            before = next((part for part in parts_of(each) if part in runs), before)
    return found[::-1]


def _call(run: Callable[..., None], whole: Any, context: Any) -> Callable[[], None]:
    return lambda: run(whole, context)


def _call_for(run: Callable[..., None], context: Any) -> Callable[[Action], None]:
    return lambda action: run(torch_action(action), context)

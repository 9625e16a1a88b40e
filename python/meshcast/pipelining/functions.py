"""Functions of the user that run in place of a stage's: what torch's ``register_custom_function`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules

from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.compat import torch_action
from meshcast.pipelining.given import GivenOrder
from meshcast.pipelining.step import StepFeed

__all__ = ["Arriving", "Functions", "functions_for", "functions_of"]


class Arriving:
    """What such a function waits for before it computes: torch has works of torch.distributed there."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.wait = settle


@dataclass(slots=True)
class Functions:
    """Those of a step.

    fused: of the first of the actions that run as one: the function, and all of them. inside: all of those.
    forward_arriving, backward_arriving: by stage and micro-batch.
    """

    by_kind: dict[ActionKind, Callable[[Action], None]] = field(default_factory=dict)
    fused: dict[Action, tuple[Callable[[], None], list[Action]]] = field(default_factory=dict)
    inside: frozenset[Action] = frozenset()
    forward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)
    backward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_kind or self.fused)


def functions_of(schedule: Any) -> Mapping[Any, Callable[..., None]]:
    """By torch's kind of action."""
    return getattr(schedule, "_comp_type_to_function_map", {})


def functions_for(schedule: Any, given: GivenOrder | None, feeds: Mapping[int, StepFeed]) -> Functions:
    """Of one step that trains; the schedule gets what torch's functions look at."""
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
    if both is not None and given is not None:
        for start, (whole, parts) in given.pairs.items():
            found.fused[start] = _call(both, whole, context), parts
        found.inside = frozenset(part for _, parts in given.pairs.values() for part in parts)
    for kind, run in registered.items():
        if kind.value in ActionKind.__members__:
            found.by_kind[ActionKind[kind.value]] = _call_for(run, context)
    return found


def _call(run: Callable[..., None], whole: Any, context: Any) -> Callable[[], None]:
    return lambda: run(whole, context)


def _call_for(run: Callable[..., None], context: Any) -> Callable[[Action], None]:
    return lambda action: run(torch_action(action), context)

"""Lowering: from compute actions to what a rank really runs, with its sends and receives.

A *link* is an ordered pair of stages between which values travel: activations from the first to the second,
their gradients back. All values of one link and one micro-batch travel together. A chain of stages has the
links (0,1), (1,2), ...; a skip connection adds one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError

__all__ = ["AHEAD", "Link", "chain", "lower", "stage_ranks"]

Link = tuple[int, int]

# How many compute actions ahead of its use a receive is posted. Two would do for the steady state of 1F1B
# (the period of one kind of action is two); four also lets the back-to-back forwards of a warm-up find their
# receives posted. More only costs buffers.
AHEAD = 4


def chain(stages: int) -> list[Link]:
    """The links of stages that only feed their successor."""
    return [(stage, stage + 1) for stage in range(stages - 1)]


def stage_ranks(actions: Mapping[int, Sequence[Action]]) -> dict[int, int]:
    """Which rank runs each stage, read off the compute actions. Raises ScheduleError if two ranks compute one
    stage."""
    ranks: dict[int, int] = {}
    for rank, row in actions.items():
        for action in row:
            if action.kind.is_compute and ranks.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} is computed by rank {ranks[action.stage]} and by rank "
                    f"{rank} ({action})"
                )
    return ranks


def lower(
    actions: Mapping[int, Sequence[Action]], links: Sequence[Link] | None = None, ahead: int = AHEAD
) -> Actions:
    """Inserts the transfers into a compute-only schedule.

    A SEND comes right after the compute action that makes its value. A RECV comes ``ahead`` compute actions
    per stage that its link spans before the one that uses it (or first): a link that skips stages joins ranks
    that are further apart in time. This bounds the buffers of a link and direction by ``ahead * span + 1``.
    Both ends of a link thus see its micro-batches in the order of their compute actions; `validate` proves
    that the two orders agree.

    Args:
        actions: compute actions of each rank.
        links: pairs of stages (from, to), to > from; default: each stage feeds the next.
        ahead: at least 1; see above.

    Raises:
        ScheduleError: a link names a stage that no rank computes, or goes backwards, or the schedule holds
            transfers already.
    """
    ranks = stage_ranks(actions)
    links = chain(len(ranks)) if links is None else sorted(set(links))
    if ahead < 1:
        raise ScheduleError(
            f"receives must be posted at least 1 action ahead of their use, found ahead={ahead}"
        )
    for source, target in links:
        if source >= target:
            raise ScheduleError(f"link {source} -> {target}: values travel to a later stage")
        for stage in (source, target):
            if stage not in ranks:
                raise ScheduleError(f"link {source} -> {target}: stage {stage} is on no rank")
    return {rank: _lower_row(rank, row, links, ahead) for rank, row in actions.items()}


def _lower_row(rank: int, row: Sequence[Action], links: Sequence[Link], ahead: int) -> list[Action]:
    receives: list[list[Action]] = [[] for _ in row]
    for position, action in enumerate(row):
        if not action.kind.is_compute:
            raise ScheduleError(
                f"rank {rank}, step {position}: {action} is a transfer; only a compute-only "
                "schedule can be lowered"
            )
        for receive in _receives(action, links):
            receives[max(0, position - ahead * abs(receive.peer - receive.stage))].append(receive)
    lowered: list[Action] = []
    for posted, action in zip(receives, row, strict=True):
        lowered += [*posted, action, *_sends(action, links)]
    return lowered


def _receives(action: Action, links: Sequence[Link]) -> list[Action]:
    """What a compute action needs from other stages."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return [
            Action(stage, ActionKind.RECV_F, microbatch, source)
            for source, target in links
            if target == stage
        ]
    if action.kind in (ActionKind.B, ActionKind.I):
        return [
            Action(stage, ActionKind.RECV_B, microbatch, target)
            for source, target in links
            if source == stage
        ]
    return []


def _sends(action: Action, links: Sequence[Link]) -> list[Action]:
    """What a compute action gives to other stages: to every consumer after a forward, to every producer after
    a backward."""
    return [receive.matching() for receive in _consumers(action, links)]


def _consumers(action: Action, links: Sequence[Link]) -> list[Action]:
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.F:
        return [
            Action(target, ActionKind.RECV_F, microbatch, stage)
            for source, target in links
            if source == stage
        ]
    if action.kind in (ActionKind.B, ActionKind.I):
        return [
            Action(source, ActionKind.RECV_B, microbatch, stage)
            for source, target in links
            if target == stage
        ]
    return []

"""Lowering: from compute actions to what a rank really runs, with its sends and receives.

A *link* is an ordered pair of stages between which values travel: activations from the first to the second,
their gradients back. All values of one link and one micro-batch travel together. A chain of stages has the
links (0,1), (1,2), ...; a skip connection adds one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from meshcast.base.checks import typed_arguments
from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError

__all__ = ["AHEAD", "Link", "chain", "crossing", "lower", "stage_ranks"]

Link = tuple[int, int]

# How many compute actions ahead of its use a receive is posted, W apart, which waits for nothing. Two would
# do for the steady state of 1F1B (the period of one kind of action is two); four also lets the back-to-back
# forwards of a warm-up find their receives posted. More only costs buffers.
AHEAD = 4
_NEVER = 1 << 60


def chain(stages: int) -> list[Link]:
    """The links of stages that only feed their successor."""
    return [(stage, stage + 1) for stage in range(stages - 1)]


def crossing(links: Sequence[Link], ranks: Mapping[int, int]) -> list[Link]:
    """The links between stages of unlike ranks: those that need transfers. Inside a rank a value is handed
    over."""
    return [(source, target) for source, target in links if ranks[source] != ranks[target]]


def stage_ranks(actions: Mapping[int, Sequence[Action]]) -> dict[int, int]:
    """The rank of each stage, read from the compute actions. Raises ScheduleError if two ranks compute one
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


@typed_arguments(ScheduleError)
def lower(
    actions: Mapping[int, Sequence[Action]], links: Sequence[Link] | None = None, ahead: int = AHEAD
) -> Actions:
    """Inserts the transfers into a compute-only schedule.

    A SEND comes right after the compute action that makes its value. A RECV comes ``ahead`` compute actions
    (W not counted) per stage that its link spans before the one that uses it (or first): a link that skips
    stages joins ranks that are further apart in time. Where the value is made earlier still in a run in which
    every action takes one unit, the RECV comes before what the consumer's rank does in that unit: so senders
    that wait for their receives to be posted never wait in a circle.
    Both ends of a link thus see its micro-batches in the order of their compute actions; `validate` proves
    that the two orders agree. A link between two stages of one rank has no transfers.

    Args:
        actions: compute actions of each rank.
        links: pairs of stages (from, to), to > from; default: each stage feeds the next.
        ahead: at least 1; see above.

    Raises:
        ScheduleError: a link names a stage that no rank computes, or goes backwards, or the schedule holds
            transfers already.

    Example::

        from meshcast.pipelining import Action, lower, validate

        compute = {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}  # of each rank
        actions = lower({rank: [Action.parse(each) for each in row] for rank, row in compute.items()})
        assert "0SEND_F0" in map(str, actions[0])
        validate(actions, stages=2, microbatches=1)
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
    crossed = crossing(links, ranks)
    check_compute_only(actions)
    ends = unit_times(actions, links)
    return {rank: _lower_row(row, crossed, ahead, ends) for rank, row in actions.items()}


def _lower_row(
    row: Sequence[Action], links: Sequence[Link], ahead: int, ends: Mapping[Action, int]
) -> list[Action]:
    receives: list[list[Action]] = [[] for _ in row]
    counted: list[int] = []  # positions of the actions that `ahead` counts
    row_ends = [ends.get(action, _NEVER) for action in row]
    for position, action in enumerate(row):
        if action.kind is ActionKind.W:
            continue
        counted.append(position)
        for receive in _receives(action, links):
            early = counted[max(0, len(counted) - 1 - ahead * abs(receive.peer - receive.stage))]
            made = min(ends.get(maker, _NEVER) for maker in _makers(receive))
            receives[min(early, bisect_left(row_ends, made, 0, position))].append(receive)
    lowered: list[Action] = []
    for posted, action in zip(receives, row, strict=True):
        lowered += [*posted, action, *_sends(action, links)]
    return lowered


def check_compute_only(actions: Mapping[int, Sequence[Action]]) -> None:
    """Raises ScheduleError naming the first transfer there is."""
    for rank, row in actions.items():
        for position, action in enumerate(row):
            if not action.kind.is_compute:
                raise ScheduleError(
                    f"rank {rank}, step {position}: {action} is a transfer; only a compute-only "
                    "schedule can be lowered"
                )


def unit_times(actions: Mapping[int, Sequence[Action]], links: Sequence[Link]) -> dict[Action, int]:
    """When each compute action ends if every one takes one unit and transfers take none. An action that never
    gets to run, since what it needs is missing or behind it, is left out: `validate` says why."""
    present = {action for row in actions.values() for action in row}
    ends: dict[Action, int] = {}
    step = dict.fromkeys(actions, 0)
    moved = True
    while moved:
        moved = False
        for rank, row in actions.items():
            while step[rank] < len(row):
                action = row[step[rank]]
                makers = [m for receive in _receives(action, links) for m in _makers(receive) if m in present]
                if not all(maker in ends for maker in makers):
                    break
                before = ends[row[step[rank] - 1]] if step[rank] else 0
                ends[action] = 1 + max([before, *(ends[maker] for maker in makers)])
                step[rank] += 1
                moved = True
    return ends


def _makers(receive: Action) -> list[Action]:
    """The compute actions, one of which makes what is received."""
    kinds = (ActionKind.F,) if receive.kind is ActionKind.RECV_F else (ActionKind.B, ActionKind.I)
    return [Action(receive.peer, kind, receive.microbatch) for kind in kinds]


def _receives(action: Action, links: Sequence[Link]) -> list[Action]:
    """The receives of a compute action: what it needs from other stages."""
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
    """The sends of a compute action: to every consumer after a forward, to every producer after a
    backward."""
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

"""The shape that 1F1B and its relatives share: some forwards, then one backward and one forward in turn, then
the rest of the backwards; and how long the first part is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.errors import ScheduleError

__all__ = ["Warmup", "alternate", "check_sizes", "warmup_of_stages"]

# The forwards of each stage before its first backward: by rule, as the number of the first stage, or listed.
Warmup = Literal["1f1b", "eager"] | int | Sequence[int]


def check_sizes(stages: int, microbatches: int) -> None:
    """Raises ScheduleError unless both counts are at least one."""
    if stages < 1 or microbatches < 1:
        raise ScheduleError(
            f"a pipeline needs at least 1 stage and 1 micro-batch, found stages={stages}, "
            f"microbatches={microbatches}"
        )


def warmup_of_stages(warmup: Warmup, stages: int, microbatches: int) -> list[int]:
    """The warm-up of each stage, at most ``microbatches``.

    "1f1b": n - i for stage i. "eager": 2(n - i) - 1. An integer w >= n is the warm-up of stage 0: w - n
    forwards more than 1F1B has, given to the hops between stages in turn, the first hop first, since there
    they cost the memory of the fewest stages. A list gives every stage its own; each is at least 1 and at
    least that of the next stage, or the stage could not feed it.
    """
    if warmup == "1f1b":
        chosen = [stages - stage for stage in range(stages)]
    elif warmup == "eager":
        chosen = [2 * (stages - stage) - 1 for stage in range(stages)]
    elif isinstance(warmup, int):
        if warmup < stages:
            raise ScheduleError(
                f"a warm-up of {warmup} forwards is too short for {stages} stages: stage 0 runs at least "
                f"{stages} before its first gradient can arrive"
            )
        chosen = _spread(warmup - stages, stages)
    elif isinstance(warmup, str) or not all(isinstance(each, int) for each in warmup):
        raise ScheduleError(
            f'warm-up must be "1f1b", "eager", an integer or one integer for each stage, found {warmup!r}'
        )
    else:
        chosen = list(warmup)
        if len(chosen) != stages:
            raise ScheduleError(f"a warm-up is listed for {len(chosen)} stages, there are {stages}")
        for stage, count in enumerate(chosen):
            after = chosen[stage + 1] if stage + 1 < stages else 1
            if min(count, microbatches) < min(after, microbatches):
                raise ScheduleError(
                    f"stage {stage}: a warm-up of {count} is shorter than the {after} forwards that "
                    "must have run here before the first gradient comes back"
                )
    return [min(microbatches, count) for count in chosen]


def _spread(extra: int, stages: int) -> list[int]:
    hops = stages - 1
    each = [1 + extra // hops + (hop < extra % hops) for hop in range(hops)] if hops else []
    return [1 + sum(each[stage:]) for stage in range(stages)]


def alternate(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """``warmup`` forwards (all, if there are fewer), then B F B F ... until the forwards are used up, then
    the backwards that are left. At most ``warmup`` micro-batches are alive (forward done, backward not)."""
    warmup = min(warmup, len(forward))
    left = forward[warmup:]
    steady = [action for pair in zip(backward, left, strict=False) for action in pair]
    return [*forward[:warmup], *steady, *backward[len(left) :]]


def microbatches_of(stage: int, kind: ActionKind, microbatches: int) -> list[Action]:
    """One action of a kind for each micro-batch, in order."""
    return [Action(stage, kind, microbatch) for microbatch in range(microbatches)]

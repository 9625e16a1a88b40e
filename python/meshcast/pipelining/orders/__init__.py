"""Schedules: pure functions from (stages, micro-batches) to the compute actions of each rank."""

from __future__ import annotations

from collections.abc import Callable

from meshcast.pipelining.action import ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.orders.delay import delay_weights
from meshcast.pipelining.orders.eager_1f1b import eager_1f1b
from meshcast.pipelining.orders.gpipe import gpipe
from meshcast.pipelining.orders.interleaved import interleaved_1f1b
from meshcast.pipelining.orders.one_f_one_b import one_f_one_b
from meshcast.pipelining.orders.warmup import Warmup
from meshcast.pipelining.orders.zb_v import zb_v
from meshcast.pipelining.orders.zero_bubble import zb_h1, zb_h2

__all__ = [
    "SCHEDULES",
    "Warmup",
    "build",
    "canonical_name",
    "delay_weights",
    "eager_1f1b",
    "forward_only",
    "gpipe",
    "has_open_ranks",
    "interleaved_1f1b",
    "one_f_one_b",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

_FIXED: dict[str, Callable[[int, int], Actions]] = {
    "GPipe": gpipe,
    "ZBH1": zb_h1,
    "ZBH2": zb_h2,
    "ZBV": zb_v,
}
_WARMED: dict[str, Callable[..., Actions]] = {"1F1B": one_f_one_b, "Eager1F1B": eager_1f1b}
_INTERLEAVED = "Interleaved1F1B"

SCHEDULES = ("GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZBV", _INTERLEAVED, "ForwardOnly")


def build(
    name: str,
    stages: int,
    microbatches: int,
    *,
    ranks: int | None = None,
    warmup: Warmup | None = None,
    delay_weight_grad: bool = False,
) -> Actions:
    """Compute actions of the schedule called ``name`` (case does not matter).

    Args:
        ranks: Interleaved1F1B only, default: half the stages, two on each. All others have a fixed number.
        warmup: 1F1B and Eager1F1B, see `warmup_of_stages`; Interleaved1F1B: "1f1b" or "eager". Default: that
            of the schedule.
        delay_weight_grad: split every backward into I and W, see `delay_weights`.

    Raises:
        ScheduleError: unknown name (lists those there are), or an option that the schedule does not have.
    """
    known = canonical_name(name)
    given = {} if warmup is None else {"warmup": warmup}
    if known == _INTERLEAVED:
        if ranks is None and stages % 2:
            raise ScheduleError(
                f"{known}: {stages} stages are not two on each rank; say how many ranks there are (ranks=)"
            )
        actions = interleaved_1f1b(stages, microbatches, stages // 2 if ranks is None else ranks, **given)
    elif known in _WARMED:
        actions = _WARMED[known](stages, microbatches, **given)
    elif given:
        raise ScheduleError(f"{known} has no warm-up to choose, found {warmup!r}")
    elif known in _FIXED:
        actions = _FIXED[known](stages, microbatches)
    else:
        actions = forward_only(gpipe(stages, microbatches))
    if ranks is not None and len(actions) != ranks:
        raise ScheduleError(f"{known} with {stages} stages runs on {len(actions)} ranks, found ranks={ranks}")
    return delay_weights(actions) if delay_weight_grad else actions


def canonical_name(name: str) -> str:
    """The name as written in `SCHEDULES`. Raises ScheduleError that lists them."""
    for known in SCHEDULES:
        if known.lower() == name.lower():
            return known
    raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")


def has_open_ranks(name: str) -> bool:
    """Whether a schedule leaves the number of ranks open: `build` then takes ``ranks``."""
    return canonical_name(name) == _INTERLEAVED


def forward_only(actions: Actions) -> Actions:
    """What evaluation runs of a schedule: its forwards in their order."""
    return {rank: [action for action in row if action.kind is ActionKind.F] for rank, row in actions.items()}

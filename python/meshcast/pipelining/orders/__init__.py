"""Schedules: pure functions from (stages, micro-batches) to the compute actions of each rank."""

from __future__ import annotations

from typing import Any

from meshcast.pipelining.action import ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.orders import eager_1f1b, gpipe, interleaved, one_f_one_b, zb_v, zero_bubble
from meshcast.pipelining.orders.delay import delay_weights
from meshcast.pipelining.orders.spec import OrderSpec
from meshcast.pipelining.orders.warmup import Warmup

__all__ = ["SCHEDULES", "build", "delay_weights", "forward_only", "spec_of"]


def forward_only(actions: Actions) -> Actions:
    """What evaluation runs of a schedule: its forwards in their order."""
    return {rank: [action for action in row if action.kind is ActionKind.F] for rank, row in actions.items()}


def _forward_only(stages: int, microbatches: int) -> Actions:
    return forward_only(gpipe.gpipe(stages, microbatches))


_SPECS = {
    spec.name: spec
    for spec in (
        gpipe.SPEC,
        one_f_one_b.SPEC,
        eager_1f1b.SPEC,
        zero_bubble.SPEC_H1,
        zero_bubble.SPEC_H2,
        zb_v.SPEC,
        interleaved.SPEC,
        OrderSpec("ForwardOnly", _forward_only),
    )
}

SCHEDULES = tuple(_SPECS)


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
    spec = spec_of(name)
    options: dict[str, Any] = {}
    if warmup is not None:
        if not spec.has_warmup:
            raise ScheduleError(f"{spec.name} has no warm-up to choose, found {warmup!r}")
        options["warmup"] = warmup
    if spec.open_ranks:
        options["ranks"] = ranks
    actions = spec.order(stages, microbatches, **options)
    if ranks is not None and len(actions) != ranks:
        raise ScheduleError(
            f"{spec.name} with {stages} stages runs on {len(actions)} ranks, found ranks={ranks}"
        )
    return delay_weights(actions) if delay_weight_grad else actions


def spec_of(name: str) -> OrderSpec:
    """Of a schedule; case does not matter. Raises ScheduleError that lists those there are."""
    for known, spec in _SPECS.items():
        if known.lower() == name.lower():
            return spec
    raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")

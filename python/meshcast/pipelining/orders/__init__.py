"""Schedules: pure functions from (stages, micro-batches) to the compute actions of each rank."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from meshcast.pipelining.action import Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.orders.delay import delay_weights
from meshcast.pipelining.orders.forward_only import forward_only
from meshcast.pipelining.orders.spec import OrderSpec, check_size
from meshcast.pipelining.orders.warmup import Warmup

__all__ = ["SCHEDULES", "build", "check_size", "delay_weights", "forward_only", "spec_of"]


def _specs() -> dict[str, OrderSpec]:
    """Collects the specs of all modules here that have one: a new schedule is a new file."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    specs = [value for module in modules for value in vars(module).values() if isinstance(value, OrderSpec)]
    return {spec.name: spec for spec in sorted(specs, key=lambda spec: spec.name)}


_SPECS = _specs()
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
    check_size(stages, microbatches)
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
    """Returns the spec of a schedule; case does not matter. Raises ScheduleError, which lists them all."""
    for known, spec in _SPECS.items():
        if known.lower() == name.lower():
            return spec
    raise ScheduleError(f"there is no schedule {name!r}; choose one of {', '.join(SCHEDULES)}")

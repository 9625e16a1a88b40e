"""The counters of this process as metrics of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist
from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter

from ..base.observe import CallCounters, Counters, PairCounters, counters

__all__ = ["observe"]

# Name, unit and meaning of a metric, and its value.
_CALLS: tuple[tuple[str, str, str, Callable[[CallCounters], float]], ...] = (
    ("calls", "{call}", "Calls that ended without an error.", lambda each: each.calls),
    ("calls.failed", "{call}", "Calls that raised.", lambda each: each.failed),
    ("calls.retried", "{call}", "Calls that were begun once more.", lambda each: each.retries),
    ("calls.duration", "s", "Start to finish, of all calls together.", lambda each: each.seconds),
    ("calls.waited", "s", "What the program stood in wait().", lambda each: each.waited),
    ("calls.bound", "s", "The lower bounds of all calls together.", lambda each: each.bound),
)
_PAIRS: tuple[tuple[str, str, str, Callable[[PairCounters], float]], ...] = (
    ("pair.messages", "{message}", "Messages from rank to rank.", lambda each: each.messages),
    ("pair.io", "By", "Bytes from rank to rank.", lambda each: each.bytes),
)


def observe(meter: Meter | None = None) -> None:
    """Makes observable counters of `meshcast.counters()` on a meter, once for each process and meter.

    meshcast.calls, .calls.failed, .calls.retried, .calls.duration, .calls.waited and .calls.bound (seconds)
    have the attributes operation and rank; meshcast.calls.io (bytes) has direction, "sent" or "received",
    besides. meshcast.calls.ratio is a gauge: time over bound, of all calls so far. meshcast.pair.messages and
    meshcast.pair.io have sender and receiver, of which one is this rank: a sum over ranks counts each message
    twice, so add up those whose sender is the rank itself. Nothing is read until the SDK collects.

    Args:
        meter: None: that of the global MeterProvider by the name "meshcast", which may be set later.

    Example::

        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from meshcast.integrations import opentelemetry

        reader = InMemoryMetricReader()  # or a PeriodicExportingMetricReader with an exporter
        opentelemetry.observe(MeterProvider([reader]).get_meter("meshcast"))
    """
    on = get_meter("meshcast") if meter is None else meter
    for name, unit, meaning, value in _CALLS:
        on.create_observable_counter(f"meshcast.{name}", [_of_calls(value)], unit, meaning)
    on.create_observable_counter("meshcast.calls.io", [_io], "By", "Bytes to and from other ranks.")
    on.create_observable_gauge(
        "meshcast.calls.ratio",
        [_of_calls(lambda each: each.ratio)],
        "1",
        "Time over lower bound, of all calls.",
    )
    for name, unit, meaning, of_pair in _PAIRS:
        on.create_observable_counter(f"meshcast.{name}", [_of_pairs(of_pair)], unit, meaning)


_Callback = Callable[[CallbackOptions], Iterable[Observation]]


def _of_calls(value: Callable[[CallCounters], float]) -> _Callback:
    def observed(_: CallbackOptions) -> Iterator[Observation]:
        for op, each in counters().calls.items():
            yield Observation(value(each), {"operation": op, **_rank()})

    return observed


def _io(_: CallbackOptions) -> Iterator[Observation]:
    for op, each in counters().calls.items():
        for direction, nbytes in (("sent", each.bytes_sent), ("received", each.bytes_received)):
            yield Observation(nbytes, {"operation": op, "direction": direction, **_rank()})


def _of_pairs(value: Callable[[PairCounters], float]) -> _Callback:
    def observed(_: CallbackOptions) -> Iterator[Observation]:
        found: Counters = counters()
        for (sender, receiver), each in found.pairs.items():
            yield Observation(value(each), {"sender": sender, "receiver": receiver, **_rank()})

    return observed


def _rank() -> dict[str, int]:
    """Unknown before there is a process group, and after its end."""
    return {"rank": dist.get_rank()} if dist.is_initialized() else {}

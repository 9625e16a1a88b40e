"""meshcast.integrations.opentelemetry with the SDK of OpenTelemetry."""

from __future__ import annotations

from typing import Any

import meshcast
from meshcast._C import Traffic
from meshcast.integrations.opentelemetry import observe
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader


def points(reader: InMemoryMetricReader) -> dict[str, dict[tuple[Any, ...], Any]]:
    """By metric and values of the attributes, those of this file's operations and pairs."""
    data = reader.get_metrics_data()
    found: dict[str, dict[tuple[Any, ...], Any]] = {}
    for metric in (m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics):
        for point in metric.data.data_points:
            attributes = dict(point.attributes)
            if str(attributes.get("operation", "otel")).startswith("otel"):
                found.setdefault(metric.name, {})[tuple(attributes.values())] = point.value
    return found


def test_the_reader_gets_the_counters() -> None:
    reader = InMemoryMetricReader()
    observe(MeterProvider([reader]).get_meter("mine"))
    traffic = Traffic("otel move", 0.5, 900, [(900, 901, 3, 70), (902, 900, 1, 8)])
    traffic.ended(1.0, 0.25)
    traffic.failed()
    first = points(reader)
    assert first["meshcast.calls"] == {("otel move",): 1}
    assert first["meshcast.calls.io"] == {("otel move", "sent"): 70, ("otel move", "received"): 8}
    assert first["meshcast.calls.ratio"] == {("otel move",): 2.0}
    assert first["meshcast.pair.io"][900, 901] == 70
    traffic.ended(2.0, 0.5)
    traffic.again()
    found = points(reader)
    values = {name: each["otel move",] for name, each in found.items() if ("otel move",) in each}
    assert values == {
        "meshcast.calls": 2,
        "meshcast.calls.failed": 1,
        "meshcast.calls.retried": 1,
        "meshcast.calls.duration": 3.0,
        "meshcast.calls.waited": 0.75,
        "meshcast.calls.bound": 1.0,
        "meshcast.calls.ratio": 3.0,
    }
    assert found["meshcast.calls.io"]["otel move", "received"] == 16
    assert (found["meshcast.pair.messages"][900, 901], found["meshcast.pair.io"][902, 900]) == (6, 16)


def test_units_and_kinds() -> None:
    reader = InMemoryMetricReader()
    observe(MeterProvider([reader]).get_meter("mine"))
    Traffic("otel kinds", 0.5, 900, [(900, 901, 3, 70)]).ended(1.0, 1.0)
    data = reader.get_metrics_data()
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert {name: found[f"meshcast.{name}"].unit for name in ("calls", "calls.io", "calls.duration")} == {
        "calls": "{call}",
        "calls.io": "By",
        "calls.duration": "s",
    }
    grows = {name for name, metric in found.items() if getattr(metric.data, "is_monotonic", False)}
    assert grows == set(found) - {"meshcast.calls.ratio"}
    assert len(found) == 10


def test_the_global_provider_may_come_later() -> None:
    observe()
    reader = InMemoryMetricReader()
    metrics.set_meter_provider(MeterProvider([reader]))
    Traffic("otel later").ended(1.0, 1.0)
    assert points(reader)["meshcast.calls"]["otel later",] == 1
    assert "otel later" in meshcast.counters().calls

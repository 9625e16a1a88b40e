"""The site's gallery, which Sphinx writes into gallery/: plans of the paper's cases and of weights for many
ranks, steps of its two models by several schedules, and a step of the GPT example that was recorded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import meshcast
from meshcast import Layout, Topology
from meshcast.bench.cases import RANKS_PER_HOST, find
from meshcast.pages.page import panel_of, write_plan_page, write_timeline_page
from meshcast.pipelining import simulate
from meshcast.pipelining.trace import Timeline, read_trace

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# docs/observing.md has the command that made it.
RECORDED = ROOT / "docs" / "recordings" / "gpt-step"
# The models of the paper run in two stages. More micro-batches would look alike.
STAGES, MICROBATCHES = 2, 12
SCHEDULES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("1F1B, each send waited for", "1F1B", {"buffers": 0, "send_model": "rendezvous"}),
    ("1F1B", "1F1B", {}),
    ("Eager1F1B", "Eager1F1B", {}),
    ("Eager1F1B, delayed weight gradients", "Eager1F1B", {"delay_weight_grad": True}),
)


def write_cases(folder: Path) -> None:
    """The nine cases of arXiv 2211.05322, section 5.1.2, on hosts with 10 Gbit/s."""
    topology = Topology.uniform(RANKS_PER_HOST, 10)
    for number, case in enumerate(find(["n-to-m"]), start=1):
        write_plan_page(case.plan(topology), folder / f"case-{number}.html")


def write_weights(folder: Path) -> None:
    """A matrix of weights from 256 ranks that train to 256 that serve, whose layout is another one."""
    plan = meshcast.plan(
        (16384, 16384),
        "bfloat16",
        Layout.parse("32x8:S0S1"),
        Layout.parse("32x8@256:RS0"),
        Topology.uniform(8, 100),
    )
    write_plan_page(plan, folder / "weights-512.html")


def write_steps(folder: Path) -> None:
    """Simulated, with the times that the end-to-end benchmark takes from the paper's figures."""
    for job in json.loads((RESULTS / "e2e.json").read_text())["paper"]:
        times = {
            "forward": job["compute"] / 3,
            "backward": job["compute"] * 2 / 3,
            "transfer": job["transfer"],
        }
        reports = [
            (title, simulate(name, STAGES, MICROBATCHES, **times, **options))
            for title, name, options in SCHEDULES
        ]
        panels = [
            panel_of(Timeline.simulated(f"{title}: {report.makespan:.4g} s", report, "s"))
            for title, report in reports
        ]
        title = f"{job['name']}, {STAGES} stages, {MICROBATCHES} micro-batches"
        write_timeline_page(panels, title, folder / f"step-{job['model']}.html")


def write_recorded(folder: Path, recording: Path = RECORDED) -> None:
    """What five ranks did in a step, from what they wrote by schedule.trace(path)."""
    traces = sorted(recording.glob("rank*.json"))
    spans = [span for path in traces for span in read_trace(path)]
    panel = panel_of(Timeline.measured(f"measured, {len(traces)} traces", spans))
    title = "A recorded step of the GPT example: stages on 2 and 3 ranks, Eager1F1B, 8 micro-batches"
    write_timeline_page([panel], title, folder / "recorded-gpt.html")


def write(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_cases(folder)
    write_weights(folder)
    write_steps(folder)
    write_recorded(folder)

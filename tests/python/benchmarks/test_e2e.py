"""The end-to-end benchmark without a cluster: the paper's ratios, timed stages, tables and curves."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "examples"))

from benchmark_pages import check_tables  # noqa: E402

from benchmarks.pipeline import e2e_page, e2e_tasks  # noqa: E402
from benchmarks.pipeline.e2e_tasks import (  # noqa: E402
    AUTO,
    BASELINE,
    CHOICES,
    FREE,
    FREE_DELAYED,
    OURS,
    ROWS,
    SharedClock,
    SplitStage,
    TimedTask,
    Times,
    rows_for,
)

pytestmark = pytest.mark.timeout(60)
TIMES = Times([0.01, 0.01], [0.02, 0.02], [0.01, 0.01])


def test_transfer_over_compute_follows_from_the_sizes_of_the_papers_jobs() -> None:
    gpt, unet = e2e_tasks.gpt(), e2e_tasks.unet()
    assert gpt.nbytes == 16 * 1024 * 2560 * 2
    assert gpt.flops == pytest.approx(6 * 2.65e9 * 16 * 1024 * 4 / 3, rel=0.1)  # 6 N tokens, and recomputing
    assert unet.nbytes == 4 * 64 * (4 * 672 * 4 * 4 + 4 * 672 * 8 * 8 + 2 * 672 * 16 * 16 + 672 * 32 * 32)
    assert gpt.transfer == pytest.approx(0.0671, rel=0.01)
    assert gpt.ratio == pytest.approx(0.092, rel=0.01)
    assert unet.ratio == pytest.approx(0.190, rel=0.01)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The tensor-parallel ranks of a stage: this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_timed_stage_hands_on_what_it_gets_and_knows_a_misplaced_element(alone: dist.ProcessGroup) -> None:
    tasks = [TimedTask(TIMES, stage, 2, 2, 4096, [0.25, 0.75], alone) for stage in range(2)]
    assert tasks[0].nbytes == 4096
    (values, target), (local, _) = tasks[0].feed(False, None), tasks[0].feed(False, 1)
    assert [tuple(value.shape) for value in values] == [(4, 128), (4, 384)]
    assert torch.equal(local[1], values[1][1::2])
    for task in tasks:
        task.clock.on = False
    first, last = (task.module(False, False) for task in tasks)
    made = first(*values)
    assert all(torch.equal(a, b) for a, b in zip(made, values, strict=True))
    tasks[1].loss(last(*made), target).backward()
    for task in tasks:
        task.check("row", False, False, 0)
    for module in (first, last):
        module.zero_grad()
    swapped = [values[0].flip(1), values[1]]
    tasks[1].loss(last(*first(*swapped)), target).backward()
    for task in tasks:
        with pytest.raises(RuntimeError, match="gradient"):
            task.check("row", False, False, 0)


def test_the_time_of_a_backward_is_spent_where_its_parts_are(
    monkeypatch: pytest.MonkeyPatch, alone: dist.ProcessGroup
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(e2e_tasks, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: 100.0))
    times = Times([0.01, 0.02], [0.03, 0.05], [0.01, 0.02])
    for stage, parts in ((0, [0.01, 0.03]), (1, [0.02, 0.02, 0.03])):
        slept.clear()
        module = SplitStage(SharedClock(alone), times, stage, 2)
        values = [torch.ones(1, 3, requires_grad=stage == 1) for _ in range(2)]
        made = module(*values)
        torch.autograd.backward(made if stage else list(made), None if stage else [torch.ones(1, 3)] * 2)
        assert sorted(slept) == pytest.approx(sorted(parts))


def test_rows_with_replicas_only_where_stages_have_several_ranks() -> None:
    assert rows_for(4) == list(ROWS)
    assert [row.name for row in ROWS if row not in rows_for(1)] == ["broadcast, 1F1B"]


def results() -> dict[str, Any]:
    rows = {}
    for row in ROWS:
        seconds = {BASELINE: 3.0, OURS: 1.5, FREE: 1.4, FREE_DELAYED: 1.3}.get(row.name, 2.0)
        known = None if row.peer else 0.9 * seconds
        rows[row.name] = {
            "seconds": [seconds * 1.1, seconds, seconds * 0.9], "peak": [3, 1], "transfer": 0.05,
            "sent": 5_000_000, "simulated": known, "simulated_peak": [3, 1], "times": {},
        }  # fmt: skip
    found = {
        "model": "gpt", "compute": "timed", "mesh": [2, 2], "ranks_per_stage": 4, "nbytes": 1000,
        "mbit": 100.0, "microbatches": 12, "transfer_once": 0.02, "rows": rows,
        "times": {"forward": [0.1, 0.1], "backward": [0.1, 0.1], "weight": [0.05, 0.05]},
    }  # fmt: skip
    job = e2e_tasks.gpt()
    described = {
        "name": job.name, "samples": 16, "flops": job.flops, "peak": job.peak, "compute": job.compute,
        "nbytes": job.nbytes, "transfer": job.transfer, "ratio": job.ratio,
    }  # fmt: skip
    head = {
        "command": "c", "commit": "d", "cores": 2, "torch": "t", "microbatches": 12, "repeats": 3,
        "seconds": 9,
    }  # fmt: skip
    return {"header": head, "paper": [described], "tables": [found]}


def test_tables_hold_what_was_measured(tmp_path: Path) -> None:
    found = results()["tables"][0]
    assert e2e_page.speed_up(found) == 2.0
    assert e2e_page.ratio(found) == pytest.approx(0.1)
    assert e2e_page.reach(found) == pytest.approx(1.5 / 1.5)
    text = e2e_page.text(results())
    assert f"| {OURS} | 1.500 | 8.00 | 2.00 | 0.100 | 5.00 | 3, 1 (3, 1) | 1.350 | 0.900 |" in text
    assert "| GPT-3 2.6B | 16 | 364.7 | 125 | 0.729 | 83.9 | 0.0671 | **0.092** |" in text
    assert "Speed-up over send/recv, 1F1B: **2.00**" in text
    e2e_page.draw(results(), tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size > 5000


def test_what_auto_takes_is_compared_in_rounds_with_the_fastest_that_was_given() -> None:
    seconds = {AUTO: [2.0, 6.0, 3.0], "Eager1F1B": [2.0, 5.0, 2.0]}
    rows = {row.name: {"seconds": seconds.get(row.name, [4.0, 8.0, 5.0]), "chosen": None} for row in CHOICES}
    rows[AUTO]["chosen"] = "1F1B, delayed"
    found = results()["tables"][0] | {"rows": rows}
    assert e2e_page.best(found) == "Eager1F1B"
    assert e2e_page.against(found, "Eager1F1B") == "1.200"  # of 1.0, 1.2 and 1.5
    times = [{"model": "unet", "backward": [0.1, 0.2], "split_backward": [0.1, 0.25]}]
    text = e2e_page.choices_text({"header": results()["header"], "tables": [found, found], "times": times})
    check_tables(text)
    assert "| Eager1F1B | **2.000** | **2.000** |" in text
    assert "| auto | 3.000 | 3.000 |" in text
    assert "| chosen by auto | 1F1B, delayed | 1F1B, delayed |" in text
    assert "| auto / best | 1.200 | 1.200 |" in text
    assert "| auto / the row of what it chose | 0.600 | 0.600 |" in text
    assert "costs 25.0% in U-Transformer" in text


def test_curves_are_compared_with_one_process(tmp_path: Path) -> None:
    for model in ("gpt", "unet"):
        for layout, losses in (("1 --microbatches 1", [2.0, 1.0]), ("2,3 --schedule 1F1B", [2.0, 1.00005])):
            curve = {"model": model, "layout": layout, "losses": losses}
            (tmp_path / f"{model} {layout[:3]}.json").write_text(json.dumps(curve))
    found = e2e_page.load_curves(tmp_path)
    text = e2e_page.curves_text(found)
    assert "| GPT | one process | 2.00000 to 1.00000 |  |" in text
    assert "| U-Transformer | `--stages 2,3 --schedule 1F1B` | 2.00000 to 1.00005 | 5.0e-05 |" in text
    e2e_page.draw_curves(found, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size > 5000
    (tmp_path / "gpt 1 -.json").unlink()
    with pytest.raises(SystemExit, match="no curves of gpt"):
        e2e_page.load_curves(tmp_path)

"""Pictures of plans: written, not blank, the same every time, and bounded for large plans."""

import re
import time
from pathlib import Path

import meshcast
import pytest
from matplotlib.image import imread
from meshcast import Layout, LayoutError, Topology


def _plan(**options: object) -> meshcast.Plan:
    src, dst = Layout.parse("2x4:S0RR"), Layout.parse("3x4@8:S0RR")
    return meshcast.plan((96, 64, 64), "int32", src, dst, Topology.uniform(4, 10), **options)  # type: ignore[arg-type]


def test_png_shows_every_task(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    plan = _plan()
    plan.draw(path)
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    colours = {tuple(colour) for colour in pixels.tolist()}
    for colour in ("#4477aa", "#ee8866", "#44aa99", "#ddcc77")[: len(plan.tasks)]:
        rgb = tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert rgb in colours, f"no pixel of task colour {colour}"


def test_svg_is_text_and_reproducible(tmp_path: Path) -> None:
    plan = _plan()
    for name in ("a.svg", "b.svg"):
        plan.draw(str(tmp_path / name))
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    for part in ("host 0", "host 4", "lower bound", "makespan", "time", plan.strategy, "task 0"):
        assert part in text
    assert not re.search(r"\d{4}-\d\d-\d\d", text)  # no date


def test_plans_inside_a_host_show_ranks(tmp_path: Path) -> None:
    plan = meshcast.plan(
        (64, 64), "int8", Layout.parse("4:S0R"), Layout.parse("4:RS0"), Topology.uniform(4, 10)
    )
    plan.draw(tmp_path / "p.svg")
    assert "rank 3" in (tmp_path / "p.svg").read_text()


def test_plans_that_move_nothing_say_so(tmp_path: Path) -> None:
    plan = meshcast.plan((4,), "int8", Layout.parse("2:R"), Layout.parse("2:S0"))
    plan.draw(tmp_path / "p.svg")
    assert "nothing travels" in (tmp_path / "p.svg").read_text()


def test_large_plans_draw_in_bounded_time_and_size(tmp_path: Path) -> None:
    src, dst = Layout.parse("8:S0R"), Layout.parse("8@8:RS0")
    plan = meshcast.plan(
        (4096, 4096), "int8", src, dst, Topology.uniform(4, 10), "send_recv", chunk_bytes=512
    )
    assert len(plan) > 30_000
    start = time.perf_counter()
    plan.draw(tmp_path / "p.svg")
    assert time.perf_counter() - start < 30
    assert (tmp_path / "p.svg").stat().st_size < 5_000_000
    assert "64 tasks, one colour each" in (tmp_path / "p.svg").read_text()


@pytest.mark.parametrize("name", ["plan.gif", "plan", "plan.png.txt"])
def test_bad_suffix(tmp_path: Path, name: str) -> None:
    with pytest.raises(LayoutError, match=r"\.png, \.svg, \.pdf"):
        _plan().draw(tmp_path / name)


def test_unwritable_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        _plan().draw(tmp_path / "missing" / "plan.png")

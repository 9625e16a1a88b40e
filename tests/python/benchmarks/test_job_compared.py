"""What the benchmark of jobs with kills says and draws, from their steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic import job_compared  # noqa: E402
from benchmarks.elastic.job_compared import (  # noqa: E402
    WAYS,
    apart,
    events,
    from_start,
    parse,
    recoveries,
    repeated,
    series,
    text,
)

EXPECTED = [5.0 - 0.1 * step for step in range(12)]
KILLS = [{"time": 103.5, "process": 7, "rank": 1}]


def lines(steps: range, begin: float, group: str, ranks: int) -> list[dict[str, Any]]:
    """A step a second, that its ranks end one after the other."""
    return [
        {"step": step, "loss": EXPECTED[step], "group": group, "ranks": ranks, "rank": rank}
        | {"time": begin + number + 0.01 * rank}
        for number, step in enumerate(steps)
        for rank in range(ranks)
    ]


@pytest.fixture
def going_on() -> list[dict[str, Any]]:
    """Step 4 is on its way when a rank dies, and completed by the others; two go on, then three."""
    told = lines(range(4), 100.0, "a", 3)
    told += [line for line in lines(range(4, 5), 105.0, "a", 3) if line["rank"] != 1]
    return told + lines(range(5, 7), 107.0, "b", 2) + lines(range(7, 10), 110.0, "c", 3)


@pytest.fixture
def restarted() -> list[dict[str, Any]]:
    """From the checkpoint of step 2."""
    return lines(range(4), 100.0, "a", 3) + lines(range(2, 10), 120.0, "b", 3)


def test_a_job_that_goes_on(going_on: list[dict[str, Any]]) -> None:
    found = series(reversed(going_on))
    assert found["step"] == list(range(10))
    assert found["ranks"] == [3] * 5 + [2] * 2 + [3] * 3
    assert found["time"][0] == pytest.approx(100.02)  # of its last rank
    moved, happened = from_start(found, events(found, KILLS))
    assert happened == [
        {"what": "kill", "time": 3.48, "rank": 1},
        {"what": "join", "time": 10.0, "ranks": 3},
    ]
    assert moved["time"][:2] == [0.0, 1.0]
    assert recoveries(moved, happened) == [pytest.approx(107.01 - 103.5)]
    assert repeated(found) == 0


def test_a_job_that_starts_anew(restarted: list[dict[str, Any]]) -> None:
    found = series(restarted)
    assert found["step"] == [0, 1, 2, 3, *range(2, 10)]
    happened = events(found, KILLS)
    assert [event["what"] for event in happened] == ["kill", "restart"]
    assert happened[1]["step"] == 2
    # Steps 2 and 3 are done again, and 4 had begun.
    assert recoveries(found, happened) == [pytest.approx(123.02 - 103.5)]
    assert repeated(found) == 2


def test_a_loss_of_another_step_shows(going_on: list[dict[str, Any]]) -> None:
    found = series(going_on)
    assert apart(found, EXPECTED) == 0
    found["loss"][6] += 0.25
    assert apart(found, EXPECTED) == pytest.approx(0.25)


@pytest.fixture
def results(going_on: list[dict[str, Any]], restarted: list[dict[str, Any]]) -> dict[str, Any]:
    head = {"command": "c", "commit": "d", "cores": 2, "kernel": "k", "torch": "t"}
    head |= {"ranks": 3, "steps": 10, "kill_at": [3]}
    ways = {}
    for name, told in (("meshcast", going_on), ("torchrun", restarted)):
        found = series(told)
        moved, happened = from_start(found, events(found, KILLS))
        ways[name] = {"steps": moved, "events": happened, "recoveries": recoveries(moved, happened)}
        ways[name] |= {"repeated": repeated(found), "apart": apart(found, EXPECTED)}
    return json.loads(json.dumps({"header": head, "ways": ways, "not_run": {"torchft": "it is not there"}}))


def test_what_was_not_run_is_said(results: dict[str, Any]) -> None:
    said = text(results)
    assert "| meshcast.elastic.run | 3.5 s | 0 | 12 s | within 0e+00 |" in said
    assert "| torchrun and checkpoints | 19.5 s | 2 | 27 s | within 0e+00 |" in said
    assert "not run: it is not there" in said
    assert "![Steps per second and loss over time](images/job_compared.png)" in said


def test_rates_are_steps_of_each_second() -> None:
    assert job_compared.rates([0.2, 0.4, 1.5, 3.1, 3.2]) == ([0.5, 1.5, 2.5], [2.0, 1.0, 0.0])
    assert job_compared.rates([0.2]) == ([], [])


def test_no_line_is_drawn_over_a_gap() -> None:
    times, losses = job_compared.broken([0.0, 1.0, 9.0], [5.0, 4.0, 3.0])
    assert times == [0.0, 1.0, 9.0, 9.0]
    assert [loss for loss in losses if loss == loss] == [5.0, 4.0, 3.0]
    assert losses[2] != losses[2]


def picture(results: dict[str, Any], path: Path) -> np.ndarray:
    job_compared.draw(results, path)
    return matplotlib.image.imread(path)


def test_each_way_and_each_event_is_drawn(results: dict[str, Any], tmp_path: Path) -> None:
    whole = picture(results, tmp_path / "images" / "whole.png")
    assert np.array_equal(whole, picture(results, tmp_path / "again.png"))
    colours = {way.name: tuple(int(way.colour[at : at + 2], 16) for at in (1, 3, 5)) for way in WAYS}

    def shown(pixels: np.ndarray) -> dict[str, list[bool]]:
        """Whether its colour is there, in the upper and in the lower panel."""
        rgb = np.rint(255 * pixels[..., :3])
        half = len(rgb) // 2
        return {
            name: [bool((part == colour).all(-1).any()) for part in (rgb[:half], rgb[half:])]
            for name, colour in colours.items()
        }

    assert shown(whole) == {"meshcast": [True] * 2, "torchrun": [True] * 2, "torchft": [False] * 2}
    for name in ("meshcast", "torchrun"):
        kept = results["ways"][name]["events"]
        for event in kept:
            results["ways"][name]["events"] = [other for other in kept if other is not event]
            assert not np.array_equal(whole, picture(results, tmp_path / "fewer.png")), event
        results["ways"][name]["events"] = kept
    results["ways"]["torchft"] = results["ways"].pop("torchrun")
    assert shown(picture(results, tmp_path / "other.png"))["torchrun"] == [False] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--ranks 3", "expected 4 or more"),
        ("--victims 1", "a rank below 5 for each --kill-at"),
        ("--victims 1 5", "a rank below 5 for each --kill-at"),
        ("--kill-at 30 20", "expected rising steps"),
        ("--kill-at 30 397", "from 1 to 396"),
        ("--every 0", "expected 1 or more"),
        ("--ways ray", "invalid choice"),
    ],
)
def test_what_cannot_be_is_refused(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments.split())
    assert said in capsys.readouterr().err

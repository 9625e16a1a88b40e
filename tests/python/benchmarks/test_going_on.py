"""What the benchmark of kills says of the steps of a job that goes on, and whom it kills."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic.kills import ALLOWED, Lines, Verdict, Whole, check, may_die  # noqa: E402

EXPECTED = [5.0 - 0.1 * step for step in range(20)]
Of = dict[int, list[dict[str, Any]]]


def tell(of: Of, steps: range, processes: list[int], group: str, ranks: int | None = None) -> None:
    for step in steps:
        for rank, process in enumerate(processes):
            line = {"step": step, "loss": EXPECTED[step], "group": group, "rank": rank, "part": rank % 2}
            line |= {"ranks": ranks or len(processes), "time": 100.0 + step + 0.01 * rank}
            of.setdefault(process, []).append(line)


@pytest.fixture
def of() -> Of:
    """Process 13 of four is killed in step 5, which the others complete; 14 joins them in step 8, and 15 was
    killed before it told anything. The job was ended in step 11."""
    found: Of = {}
    tell(found, range(5), [10, 11, 12, 13], "a")
    tell(found, range(5, 6), [10, 11, 12], "a", ranks=4)
    tell(found, range(6, 8), [10, 11, 12], "b")
    tell(found, range(8, 9), [10, 11, 12, 14], "c", ranks=5)
    tell(found, range(9, 11), [10, 11, 12, 14], "d")
    tell(found, range(11, 12), [10, 11], "d", ranks=4)
    return found


def of_it(of: Of) -> Verdict:
    return check(of, {13, 15}, EXPECTED)


def test_a_job_whose_steps_are_right(of: Of) -> None:
    verdict = of_it(of)
    verdict.asked = verdict.kills = 2
    assert (verdict.steps, dict(verdict.wrong), verdict.worst, verdict.good) == (12, {}, 0.0, True)
    assert verdict.text().startswith("good: 2 of 2 kills, 0 hangs, 0 wrong steps of 12, 0 done again")


def test_fewer_kills_a_hang_or_no_step_is_not_good(of: Of) -> None:
    verdict = of_it(of)
    verdict.asked, verdict.kills = 3, 2
    assert not verdict.good
    verdict.kills, verdict.hangs = 3, 1
    assert not verdict.good
    assert verdict.text().startswith("BAD: 3 of 3 kills, 1 hangs")
    assert not Verdict().good


@pytest.mark.parametrize("process", [11, 13, 14])
@pytest.mark.parametrize("apart", [2 * ALLOWED, -1.0, float("nan")])
def test_a_wrong_loss_is_found(of: Of, process: int, apart: float) -> None:
    line = of[process][1]
    line["loss"] += apart
    verdict = of_it(of)
    assert list(verdict.wrong) == [line["step"]]
    assert f"of process {process}, expected {EXPECTED[line['step']]!r}" in verdict.text()


def test_a_wrong_loss_of_all_ranks_is_found(of: Of) -> None:
    for lines in of.values():
        for line in lines:
            line["loss"] += 2 * ALLOWED * (line["step"] == 7)
    assert list(of_it(of).wrong) == [7]


def test_what_rounding_does_is_no_wrong_step(of: Of) -> None:
    for lines in of.values():
        for line in lines:
            line["loss"] += ALLOWED / 2
    verdict = of_it(of)
    assert not verdict.wrong
    assert verdict.worst == pytest.approx(ALLOWED / 2, rel=1e-6)


def test_a_step_that_a_process_does_twice_or_leaves_out_is_found(of: Of) -> None:
    of[12].insert(8, dict(of[12][7]))
    assert list(of_it(of).wrong) == [7]
    del of[12][7:9]
    verdict = of_it(of)
    assert set(verdict.wrong) == {7, 8}
    assert "process 12 told it after step 6" in verdict.text()
    assert "step 7: 2 of 3 ranks told it, and 0 were killed in it" in verdict.text()


def test_a_step_that_nobody_tells_is_found(of: Of) -> None:
    for lines in of.values():
        lines[:] = [line for line in lines if line["step"] != 7]
    assert "step 7: nobody told it" in of_it(of).text()


def test_a_step_that_two_groups_do_is_found(of: Of) -> None:
    """Rank 11 was through with step 5 before the change, and the others did it after it."""
    for process in (10, 12):
        of[process][5] |= {"group": "b", "ranks": 3, "time": 105.5}
    of[11].insert(6, {**of[11][5], "group": "b", "ranks": 3, "time": 105.5})
    verdict = of_it(of)
    assert list(verdict.wrong) == [5]
    assert "told in 2 groups of ranks" in verdict.text()


def test_a_step_that_only_the_killed_rank_told_may_be_done_again(of: Of) -> None:
    tell(of, range(5, 6), [13], "a", ranks=4)
    of[13][-1]["rank"] = 3
    for process in (10, 11, 12):
        of[process][5] |= {"group": "b", "ranks": 3, "time": 106.0}
    verdict = of_it(of)
    assert (dict(verdict.wrong), verdict.again) == ({}, 1)
    assert list(check(of, {15}, EXPECTED).wrong) == [5]  # who lives may not have been alone


def test_a_process_that_stops_by_itself_is_found(of: Of) -> None:
    verdict = check(of, {15}, EXPECTED)
    assert "step 4: process 13 told no later one, and nobody killed it" in verdict.text()


def test_ranks_that_are_missing_and_were_not_killed_are_found(of: Of) -> None:
    assert "step 8: 4 of 5 ranks told it, and 0 were killed in it" in check(of, {13}, EXPECTED).text()


def test_two_processes_under_one_rank_are_found(of: Of) -> None:
    of[12][3]["rank"] = 1
    assert "step 3: ranks [0, 1, 1, 3] of [4] told it" in of_it(of).text()


def test_lines_are_read_as_they_come(tmp_path: Path, of: Of) -> None:
    lines = Lines(tmp_path)
    lines.read()
    assert not lines.of
    texts = {process: "".join(json.dumps(line) + "\n" for line in told) for process, told in of.items()}
    for process, text in texts.items():
        (tmp_path / f"{process}.jsonl").write_text(text[:-9])  # the end of the last line is to come
    lines.read()
    assert {process: len(told) for process, told in lines.of.items()} == {
        process: len(told) - 1 for process, told in of.items()
    }
    for process, text in texts.items():
        (tmp_path / f"{process}.jsonl").write_text(text)
    lines.read()
    lines.read()
    assert lines.of == of
    assert [step.step for step in sorted(lines.whole)] == [0, 1, 2, 3, 4, 6, 7, 9, 10]
    assert next(step for step in lines.whole if step.step == 6).parts == {10: 0, 11: 1, 12: 0}


def test_whose_part_lives_nowhere_else_is_not_killed() -> None:
    """Stages of 2 and 3 ranks; 26 starts and holds nothing yet."""
    newest = Whole(3, "a", 5, 0.0, {21: 0, 22: 0, 23: 1, 24: 1, 25: 1})
    assert may_die(newest, [21, 22, 23, 24, 25]) == [21, 22, 23, 24, 25]
    assert may_die(newest, [21, 23, 24, 25, 26]) == [23, 24, 25, 26]
    assert may_die(newest, [21, 23, 26]) == [26]

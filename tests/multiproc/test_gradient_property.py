"""Drawn pipelines, run by real processes, train as one process does: 15 of them and the named ones; the slow
test runs 200. `python -m multiproc.gradient_world --draws 2000 --first-seed S` runs more by hand."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from multiproc.gradient_drawing import corners, draw
from multiproc.gradient_world import Report, run_draws

FIRST_SEED = 100
DRAWS, SLOW_DRAWS = 15, 200


@pytest.fixture(scope="module")
def report() -> Report:
    print(f"seeds {FIRST_SEED} to {FIRST_SEED + DRAWS - 1}")
    torch.set_num_threads(1)
    drawn = {f"--corner {name!r}": each for name, each in corners().items()}
    drawn |= {f"--seed {seed}": draw(seed) for seed in range(FIRST_SEED, FIRST_SEED + DRAWS)}
    return run_draws(drawn.items(), shrink_seconds=60.0)


@pytest.mark.timeout(600)
def test_drawn_pipelines_train_as_one_process(report: Report) -> None:
    report.check()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", corners())
def test_named_draws_are_not_refused(report: Report, name: str) -> None:
    result = report.results[f"--corner {name!r}"]
    assert result.state == "passed", result.text


def test_a_seed_draws_the_same_in_every_process() -> None:
    """Whatever the hashes of strings are there."""
    program = "from multiproc.gradient_drawing import draw; print([draw(seed) for seed in range(50)])"
    printed = set()
    for hashes in ("0", "1"):
        env = {**os.environ, "PYTHONHASHSEED": hashes, "PYTHONPATH": os.pathsep.join(sys.path)}
        printed.add(
            subprocess.run([sys.executable, "-c", program], env=env, check=True, capture_output=True).stdout
        )
    assert printed == {f"{[draw(seed) for seed in range(50)]}\n".encode()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_drawn_pipelines() -> None:
    seeds = range(1000, 1000 + SLOW_DRAWS)
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    torch.set_num_threads(1)
    run_draws((f"--seed {seed}", draw(seed)) for seed in seeds).check()

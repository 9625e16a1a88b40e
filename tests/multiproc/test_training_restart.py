"""Training programs whose ranks are killed, or asked to stop: what they leave, how they go on."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from multiproc.training_runs import (
    ENVIRONMENT,
    LIMIT,
    command,
    read_records,
    step_records,
    train,
    wait,
)

RANKS = 3
STEPS, EVERY = 8, 3
SMALL = ["--model", "nano", "--batch", "12", "--microbatches", "2", "--warmup", "3", "--stages", "1,2"]
MARK = "MESHCAST_TEST_RUN"
# Without it torch 2.13 leaves ranks that were started again with the store of the ones before, gloo too.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

pytestmark = [pytest.mark.timeout(4 * LIMIT + 30), pytest.mark.slow]


def processes_of(mark: str) -> list[int]:
    """Processes that inherited the mark and still run; one that ended and waits for its parent has none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # ended meanwhile
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0"):
            found.append(int(folder.name))
    return found


def assert_none_left(mark: str) -> None:
    """Nothing that was started for the run may go on by itself; a process that is just ending may finish."""
    deadline = time.monotonic() + 30
    while left := processes_of(mark):
        assert time.monotonic() < deadline, f"processes {left} outlived the run"
        time.sleep(0.1)


def run(mark: str, arguments: list[str]) -> subprocess.Popen[str]:
    """By new processes: /proc shows the variables of a fork's server."""
    return subprocess.Popen(
        arguments,
        env=ENVIRONMENT | OWN_STORE | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """{model: its losses}"""
    found = {}
    for name in ("gpt", "unet"):
        folder = tmp_path_factory.mktemp(name)
        records = train(f"{name}/train.py", folder, *SMALL, "--steps", str(STEPS), ranks=RANKS)
        found[name] = [record["loss"] for record in records]
        assert len(found[name]) == STEPS
    return found


@pytest.mark.parametrize(
    ("name", "moment", "at", "goes_on_after"),
    [
        ("gpt", "step", 2 * EVERY + 2, 2 * EVERY),
        ("gpt", "save", 2 * EVERY, EVERY),
        ("gpt", "step", 2, 0),
        ("unet", "step", 2 * EVERY + 2, 2 * EVERY),
    ],
    ids=["gpt in a step", "gpt while it saves", "gpt before its first checkpoint", "unet in a step"],
)
def test_torchrun_goes_on_from_the_newest_checkpoint_where_a_rank_was_killed(
    uninterrupted: dict[str, list[float]], tmp_path: Path, name: str, moment: str, at: int, goes_on_after: int
) -> None:
    metrics, state, mark = tmp_path / "metrics.jsonl", tmp_path / "state", str(tmp_path)
    options = ["--steps", str(STEPS), "--checkpoint-every", str(EVERY)]
    options += ["--metrics", str(metrics), "--checkpoint", str(state)]
    program = Path(__file__).with_name("killed_training.py")
    arguments = [name, moment, str(at), *SMALL, *options]
    process = run(mark, command(program, *arguments, ranks=RANKS, restarts=1))
    assert processes_of(mark), "this test cannot tell what is left of a run"
    output = wait(process)
    assert process.returncode == 0, output[-4000:]
    assert_none_left(mark)
    records = read_records(metrics)
    starts = [index for index, record in enumerate(records) if record["event"] == "start"]
    assert len(starts) == 2, "the ranks were not started again exactly once"
    first, second = records[1 : starts[1]], records[starts[1] + 1 :]
    # In the step at which a rank dies, the rank that writes may have come so far or not.
    last = len(first)
    assert last in ((at - 1, at) if moment == "step" else (at,))
    assert [record["step"] for record in first] == list(range(1, last + 1))
    assert [record["step"] for record in second] == list(range(goes_on_after + 1, STEPS + 1))
    for record in (*first, *second):
        assert record["loss"] == pytest.approx(uninterrupted[name][record["step"] - 1], rel=1e-6)


@pytest.mark.parametrize("name", ["gpt", "unet"])
def test_sigterm_ends_the_run_with_a_checkpoint_to_go_on_from(tmp_path: Path, name: str) -> None:
    metrics, state, mark = tmp_path / "metrics.jsonl", tmp_path / "state", str(tmp_path)
    endless = ["--steps", "1000000", "--checkpoint-every", "1000000"]
    arguments = [*SMALL, *endless, "--metrics", str(metrics), "--checkpoint", str(state)]
    process = run(mark, command(f"{name}/train.py", *arguments, ranks=RANKS))
    try:
        deadline = time.monotonic() + LIMIT
        while not metrics.exists() or len(metrics.read_text().splitlines()) < 3:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert len(processes_of(mark)) > RANKS
    finally:
        process.send_signal(signal.SIGTERM)
    output = wait(process)
    assert process.returncode != 0, "whoever asked for the stop is to see that it was not the end"
    assert_none_left(mark)
    (saved,) = state.iterdir()
    done = int(saved.name.removeprefix("step-"))
    assert f"Stopped by SIGTERM after step {done}" in output
    assert step_records(metrics)[-1]["step"] == done
    one_more = ["--steps", str(done + 1), "--checkpoint", str(state), "--resume"]
    records = train(f"{name}/train.py", tmp_path, *SMALL, *one_more, ranks=RANKS)
    assert [record["step"] for record in records] == [done + 1]

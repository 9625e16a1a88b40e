"""Jobs of meshcast.elastic.run whose workers are killed: the rest go on, to the numbers of one process."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from multiproc.elastic_training import Reference
from multiproc.fork_server import Forked, children
from multiproc.harness import ROOT

sys.path += [str(ROOT), str(ROOT / "examples")]

from elastic import alone, train

from benchmarks.elastic.kills import Lines, check

LIMIT = 400.0  # seconds for one job; it takes about 10 on an idle machine
PROGRAM = Path(__file__).with_name("going_on.py")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
}

pytestmark = [pytest.mark.timeout(LIMIT + 60)]


class Started(Forked):
    """A job, or its part on a host. Its output goes to a file: workers would wait for somebody to read a full
    pipe. before: what the command begins with."""

    def __init__(
        self, *arguments: str, before: Sequence[str] = (), environment: Mapping[str, str] = ENVIRONMENT
    ) -> None:
        self.file = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        command = [*before, sys.executable, "-m", "meshcast.elastic.run", "--monitor-interval", "0.05"]
        super().__init__(
            [*command, *arguments],
            env=dict(environment),
            text=True,
            stdout=self.file,
            stderr=subprocess.STDOUT,
        )

    def output(self) -> str:
        """All of it, once the job has ended."""
        self.wait()
        self.file.seek(0)
        return self.file.read()


def ended(process: Started) -> str:
    """Its output; it is asked to end when it is too late."""
    try:
        process.wait(timeout=LIMIT)
    except BaseException:
        process.terminate()
        print(process.output()[-8000:])
        raise
    return process.output()


def whole_lines(path: Path) -> list[str]:
    """Without one that was not written to its end."""
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Notes:
    """What the workers of a job have written."""

    def __init__(self, folder: Path) -> None:
        self.of = {
            path.stem: [json.loads(line) for line in whole_lines(path)]
            for path in sorted(folder.glob("*.jsonl"))
        }

    def steps(self, name: str) -> list[tuple[int, int]]:
        """(step, ranks) that a worker has committed and lived to tell."""
        return [(note["step"], note["ranks"]) for note in self.of[name] if "step" in note]

    def newest(self) -> dict[str, Any]:
        """Of the step that was committed last."""
        steps = [note for notes in self.of.values() for note in notes if "step" in note]
        return max(steps, key=lambda note: note["step"], default={"step": -1, "ranks": 0, "time": 0.0})

    def with_key(self, key: str) -> dict[str, Any]:
        return {name: note[key] for name, notes in self.of.items() for note in notes if key in note}


def job(
    folder: Path,
    ranks: str,
    steps: int,
    faults: list[list[Any]],
    *options: str,
    every: int = 0,
    memory: int = 0,
) -> tuple[int, str, Notes]:
    """every, memory: see going_on.py."""
    more = ["0", str(every), str(memory)] if every or memory else []
    process = Started(
        "--nproc-per-node", ranks, *options, str(PROGRAM), str(folder), str(steps), json.dumps(faults), *more
    )
    output = ended(process)
    return process.returncode, output, Notes(folder)


def goes_on(
    folder: Path,
    ranks: int,
    steps: int,
    faults: list[list[Any]],
    *options: str,
    least: int = 1,
    every: int = 0,
) -> Notes:
    status, output, notes = job(folder, f"{least}:{ranks}", steps, faults, *options, every=every)
    assert status == 0, output[-8000:]
    assert len(notes.with_key("died")) == len(faults), "a worker that was to die did not"
    seen = {step for name in notes.of for step, _ in notes.steps(name)}
    assert seen == set(range(steps))
    assert set(notes.with_key("end").values()) == {steps}
    return notes


def nested_job(*victims: str, restarts: int = 4) -> tuple[int, str]:
    program = Path(__file__).with_name("nested_job.py")
    ranks = "4" if len(victims) == 4 else "1:4"  # all at once, or as many as live
    limit = ("--max-restarts", str(restarts))
    process = Started("--nproc-per-node", ranks, *limit, str(program), *victims)
    output = ended(process)
    return process.returncode, output


def test_a_nested_state_goes_on() -> None:
    status, output = nested_job("1.0")
    assert status == 0, output[-8000:]
    assert "worker 0.0 has ended well" in output
    assert "begins at step 0" not in output


@pytest.mark.slow
def test_a_job_that_lost_its_state_says_so_on_all_ranks() -> None:
    status, output = nested_job("0.0", "1.0", "2.0", "3.0")
    assert status == 0, output[-8000:]
    assert {f"rank {rank} of" for rank in range(4)} <= set(re.findall("rank . of", output)), output[-8000:]
    assert "begins at step 0: workers died" in output


@pytest.mark.slow
def test_state_that_no_other_rank_could_take_is_refused_after_the_first_step() -> None:
    status, output = nested_job("lazy")
    assert status == 1
    assert "'optim' of state_dict() holds a DTensor" in output, output[-8000:]


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("late", "'data.scale' of state_dict() has come with step 2;"),
        ("late optimizer", "'second' of state_dict() holds a DTensor"),
    ],
)
def test_state_that_comes_later_is_refused_in_the_step_that_brings_it(what: str, told: str) -> None:
    """On all ranks, and not at the first death."""
    status, output = nested_job(what, restarts=0)
    assert status == 1
    found = re.findall(rf"\[rank(.)\]: \S*LayoutError: elastic.Job: .*{re.escape(told)}", output)
    assert sorted(found) == ["0", "1", "2", "3"], output[-8000:]


def test_ranks_die_before_between_and_after_the_optimizers_of_a_step(tmp_path: Path) -> None:
    faults = [["2.0", 0, "before"], ["1.0", 1, "between"], ["3.0", 2, "after"]]
    notes = goes_on(tmp_path, 4, 4, faults)
    assert notes.with_key("deaf") == {"0.0": 1}
    assert set(notes.with_key("end")) == {"0.0"}
    assert notes.steps("0.0") == [(0, 3), (2, 2), (3, 1)]  # step 1 was completed after another rank's word


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["making", "loading", "joined"])
def test_a_rank_dies_while_the_others_recover(tmp_path: Path, moment: str) -> None:
    notes = goes_on(tmp_path, 4, 4, [["2.0", 1, "before"], ["1.0", 1, moment]])
    assert set(notes.with_key("end")) == {"0.0", "3.0"}


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_dies_while_they_save(tmp_path: Path, victim: int) -> None:
    """The others write the checkpoint when they are together again."""
    notes = goes_on(tmp_path, 4, 4, [[f"{victim}.0", 2, "saving"]])
    assert set(notes.with_key("end")) == {f"{rank}.0" for rank in range(4) if rank != victim}
    expected = Reference(2).before[2]
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "step-2", no_dist=True)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["during", "before", "between", "after"])
def test_two_ranks_die_at_once(tmp_path: Path, moment: str) -> None:
    notes = goes_on(tmp_path, 5, 4, [["1.0", 1, moment], ["3.0", 1, moment]])
    assert set(notes.with_key("end")) == {"0.0", "2.0", "4.0"}


@pytest.mark.slow
def test_workers_join_in_the_place_of_dead_ones(tmp_path: Path) -> None:
    """The least is the number of ranks: the others wait for it."""
    faults = [["0.0", 1, "before"], ["2.0", 3, "after"], ["0.1", 5, "before"]]
    notes = goes_on(tmp_path, 3, 7, faults, "--max-restarts", "3", least=3)
    assert set(notes.with_key("end")) == {"0.2", "1.0", "2.1"}
    assert {ranks for name in notes.of for _, ranks in notes.steps(name)} == {3}


@pytest.mark.slow
def test_more_dead_than_replicas_can_bear_is_one_error_on_all(tmp_path: Path) -> None:
    """Of two replicas in two shards, ranks 0 and 2 have the same shard."""
    status, output, notes = job(tmp_path, "1:4", 4, [["0.0", 2, "before"], ["2.0", 2, "before"]])
    assert status == 1
    gone = notes.with_key("gone")
    assert set(gone) == {"1.0", "3.0"}, output[-8000:]
    assert gone["1.0"] == gone["3.0"]
    assert "state.0.weight.exp_avg" in gone["1.0"]
    assert "0.weight" in output


def test_too_few_ranks_for_their_memory_is_one_error_on_all(tmp_path: Path) -> None:
    """Four ranks hold half of the state each; three would hold all of it each, beside that half. The
    checkpoint that was saved before is as it was."""
    nobody = "9.9"  # all save in the step before its death
    faults = [[nobody, 1, "saving"], ["2.0", 2, "before"]]
    status, output, notes = job(tmp_path, "1:4", 4, faults, memory=_bytes_of_a_state())
    assert status == 1
    errors = notes.with_key("error")
    assert set(errors) == {"0.0", "1.0", "3.0"}, output[-8000:]
    assert len(set(errors.values())) == 1
    assert "3 ranks are too few for the state: rank 0 needs " in errors["0.0"]
    assert not any(notes.with_key("gone").values())
    assert {step for name in errors for step, _ in notes.steps(name)} == {0, 1}
    expected = Reference(1).before[1]
    found = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(found, checkpoint_id=tmp_path / "step-1", no_dist=True)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e-5), name


def _bytes_of_a_state() -> int:
    return sum(value.nbytes for value in Reference(1).before[1].values())


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.slow), "after"])
def test_a_job_whose_state_has_no_replica_goes_back_to_its_copies(tmp_path: Path, moment: str) -> None:
    """FSDP2 alone: what the dead rank held lives nowhere else, but for the copies of steps 1 and 3."""
    notes = goes_on(tmp_path, 4, 7, [["2.0", 4, moment]], every=3)
    assert notes.steps("2.0") == [(step, 4) for step in range(4 + (moment == "after"))]
    assert set(notes.with_key("end")) == {"0.0", "1.0", "3.0"}
    for name in notes.with_key("end"):
        steps = [step for step, ranks in notes.steps(name) if ranks == 4]
        assert steps in (list(range(4)), list(range(5)))
        assert [step for step, ranks in notes.steps(name) if ranks == 3] == list(range(3, 7))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["making", "loading", "joined"])
def test_a_rank_dies_while_the_others_go_back_to_their_copies(tmp_path: Path, moment: str) -> None:
    """Where it has a copy of what the first one held, nobody has any more."""
    status, output, notes = job(tmp_path, "1:5", 7, [["2.0", 4, "before"], ["1.0", 4, moment]], every=3)
    if status:
        assert set(notes.with_key("gone")) == {"0.0", "3.0", "4.0"}, output[-8000:]
        return
    assert set(notes.with_key("end")) == {"0.0", "3.0", "4.0"}
    assert {ranks for _, ranks in notes.steps("0.0")} == {5, 3}


@pytest.mark.slow
def test_copies_survive_several_changes_of_ranks(tmp_path: Path) -> None:
    faults = [["1.0", 3, "before"], ["3.0", 5, "during"], ["0.0", 7, "before"], ["1.1", 10, "during"]]
    notes = goes_on(tmp_path, 4, 12, faults, "--max-restarts", "4", least=4, every=2)
    assert set(notes.with_key("end")) == {"0.1", "1.2", "2.0", "3.1"}
    steps = [step for step, _ in notes.steps("2.0")]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 9, 10, 11]


@pytest.mark.slow
def test_more_dead_than_copies_can_bear_is_one_error_on_all(tmp_path: Path) -> None:
    status, output, notes = job(tmp_path, "1:4", 6, [[f"{n}.0", 4, "before"] for n in (0, 1, 3)], every=2)
    assert status == 1
    assert "state.0.weight.exp_avg" in notes.with_key("gone")["2.0"], output[-8000:]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hybrid", "pipeline"])
def test_the_example_trains_on_with_another_rank_and_then_with_fewer(tmp_path: Path, kind: str) -> None:
    """Each rank of a pipeline's stages of 2 and 3 has what it has in common with another one. The first that
    is killed is replaced, the second is not."""
    lines, drawn, killed = Lines(tmp_path), random.Random(kind), set()
    program = [str(ROOT / "examples/elastic/train.py"), "--steps", "1000", "--pause", "0.2"]
    program += ["--metrics", str(tmp_path), *(["--pipeline"] if kind == "pipeline" else [])]
    process = Started("--nproc-per-node", "3:5", "--max-restarts", "1", *program)

    def until(ranks: int, since: float) -> None:
        """Three steps on so many, after that time."""
        limit = time.monotonic() + LIMIT
        while [step.ranks for step in lines.whole[-3:] if step.time > since] != [ranks] * 3:
            assert process.poll() is None, process.output()[-8000:]
            assert time.monotonic() < limit
            time.sleep(0.05)
            lines.read()

    def kill() -> float:
        killed.add(victim := drawn.choice(children(process.pid)))
        os.kill(victim, signal.SIGKILL)
        return time.time()

    try:
        until(5, 0.0)
        until(5, kill())
        until(4, kill())
    finally:
        process.terminate()
        output = process.output()
    lines.read()
    task = train.task_of(train.parser().parse_args(["--steps", "1000"]))
    verdict = check(lines.of, killed, alone.losses(task, lines.whole[-1].step + 2))
    assert not verdict.wrong, f"{verdict.text()}\n{output[-8000:]}"
    parts = {step.ranks: sorted(step.parts.values()) for step in lines.whole}
    if kind == "pipeline":
        assert (parts[5], parts[4]) == ([0, 0, 1, 1, 1], [0, 0, 1, 1])


KILLS = int(os.environ.get("MESHCAST_TEST_KILLS", "8"))


@pytest.mark.slow
@pytest.mark.timeout(120 + 60 * KILLS)
def test_any_rank_is_killed_at_any_moment(tmp_path: Path) -> None:
    """By the clock: also while ranks meet, connect or move. MESHCAST_TEST_KILLS=100 for more."""
    seed = int(os.environ.get("MESHCAST_TEST_SEED", "1"))
    drawn = random.Random(seed)
    process = Started(
        *("--nproc-per-node", "2:5", "--max-restarts", str(KILLS), "--rdzv-conf", "last_call_timeout=1"),
        *(str(PROGRAM), str(tmp_path), "1000000", "[]", "0.1"),
    )
    output, killed = "", []
    try:
        for count in range(KILLS):
            # Some while the ranks recover from the one before.
            after = Notes(tmp_path).newest()["step"] + drawn.choice([0, 1, 3])
            kill_one(process, tmp_path, drawn, after, killed)
            print(f"seed {seed}: kill {count + 1} of {KILLS}, not before step {after}")
        (tmp_path / "stop").touch()
        output = ended(process)
    finally:
        if process.poll() is None:
            process.terminate()
            output = process.output()
    assert process.returncode == 0, f"seed {seed}: {output[-8000:]}"
    notes = Notes(tmp_path)
    assert set(notes.with_key("end").values()) == {notes.newest()["step"] + 1}
    assert len(notes.with_key("end")) >= 2


def kill_one(process: Started, folder: Path, drawn: random.Random, after: int, killed: list[float]) -> None:
    """Once a step after that is through, and if enough ranks are left that one lives which has the state.
    killed: when the others were."""
    limit = time.monotonic() + LIMIT
    while True:
        time.sleep(drawn.random() * 0.3)
        last = Notes(folder).newest()
        since = sum(moment > last["time"] for moment in killed)
        if last["step"] >= max(after, 0) and last["ranks"] - since >= 2:
            os.kill(drawn.choice(children(process.pid)), signal.SIGKILL)
            killed.append(time.time())
            return
        assert process.poll() is None, f"it ended: {process.output()[-8000:]}"
        assert time.monotonic() < limit, f"nothing went on for {LIMIT} s"

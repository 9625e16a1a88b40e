"""The agent of meshcast.elastic.run, whose workers are shells: whom it starts, calls, replaces and ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from meshcast.elastic import rendezvous as meet
from meshcast.elastic.agent import Agent, Config
from torch.distributed.elastic.multiprocessing import SignalException, api
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

pytestmark = pytest.mark.timeout(120)

FAST = 0.02  # seconds between two looks


@pytest.fixture(autouse=True)
def _own_signals() -> Iterator[None]:
    """torch's handlers, which raise, are for the agent's process alone."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def shells(script: str, least: int, most: int, **options: object) -> Agent:
    return Agent(Config("sh", ("-c", script), least, most, interval=FAST, **options))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def until(done, what: str):
    """What it returns once that is true; the test fails after a minute."""
    limit = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < limit, what
        time.sleep(FAST)
    return found


def test_restarts_are_bounded(tmp_path: Path) -> None:
    name = "$LOCAL_RANK.$TORCHELASTIC_RESTART_COUNT"
    agent = shells(f'echo "{name}" >> {tmp_path}/log; exit 3', 1, 2, max_restarts=3)
    with pytest.raises(ChildFailedError) as raised:
        agent.run()
    started = lines(tmp_path / "log")
    assert len(started) == len(set(started)) == 5
    assert {"0.0", "1.0"} < set(started)
    assert {failure.exitcode for failure in raised.value.failures.values()} == {3}


def test_too_few_end_the_others() -> None:
    agent = shells('[ "$LOCAL_RANK" = 0 ] && exit 4; exec sleep 1000', 2, 2)
    with pytest.raises(ChildFailedError) as raised:
        agent.run()
    assert raised.value.failures[0].exitcode == 4
    pids = [agent._here.pid(worker) for worker in agent._here._processes]
    assert not any(map(lives, pids))


def test_a_program_without_a_job_runs_as_under_torchrun() -> None:
    shells('[ "$RANK" -lt "$WORLD_SIZE" ]', 2, 2).run()
    agent = shells('sleep "0.$LOCAL_RANK"; exit "$LOCAL_RANK"', 1, 2, max_restarts=5)
    with pytest.raises(ChildFailedError) as raised:
        agent.run()
    assert raised.value.failures[1].exitcode == 1
    assert agent.restarts == 0, "the job had ended"


def test_a_signal_ends_what_workers_started_too(tmp_path: Path) -> None:
    """They are deaf to it."""
    agent = shells(f"trap '' TERM; sleep 1000 & echo $! >> {tmp_path}/log; wait", 2, 2, shutdown_timeout=1)

    def stop() -> None:
        until(lambda: len(lines(tmp_path / "log")) == 2, "both are to start")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(SignalException):
        agent.run()
    thread.join()
    pids = [agent._here.pid(worker) for worker in agent._here._processes]
    pids += map(int, lines(tmp_path / "log"))
    until(lambda: not any(map(lives, pids)), "all are to end")


def test_a_signal_while_a_worker_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes after the process has been started and before its starter returns."""
    started: list[int] = []
    handler = api.get_subprocess_handler

    def start(*args: object, **options: object) -> api.SubprocessHandler:
        found = handler(*args, **options)
        started.append(found.proc.pid)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(api, "get_subprocess_handler", start)
    with pytest.raises(SignalException):
        shells("exec sleep 1000", 2, 2, shutdown_timeout=1).run()
    assert len(started) == 1, "the second is not started"
    assert not lives(started[0])


def worker(name: str) -> meet.Worker:
    """Such as 1.0."""
    return meet.Worker(*map(int, name.split(".")))


def workers(*names: str) -> list[meet.Worker]:
    return list(map(worker, names))


class Played:
    """An agent whose workers sleep, while the test says what they would."""

    def __init__(self, least: int, most: int, **options: object) -> None:
        self.agent = shells("exec sleep 100", least, most, **options)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.store = meet.connect(until(lambda: getattr(self.agent, "_port", 0), "port"))

    def _run(self) -> None:
        try:
            self.agent.run()
        except Exception as error:
            self.error = error

    def ready(self, *names: str) -> None:
        for name in names:
            until(lambda name=name: worker(name) in self.agent._living, f"worker {name}")
            meet.post(self.store, meet.Ready(), worker(name))

    def kill(self, *names: str) -> None:
        for name in names:
            os.kill(self.agent._here.pid(worker(name)), signal.SIGKILL)

    def call(self, number: int) -> meet.Call:
        return until(lambda: meet.found(self.store, meet.Call, number), f"call {number}")

    def come(self, number: int, **versions: tuple[int, int] | None) -> None:
        """w1_0 is worker 1.0."""
        for name, version in versions.items():
            arrival = meet.Arrival(None if version is None else meet.Version(*version))
            meet.post(self.store, arrival, number, worker(name[1:].replace("_", ".")))

    def start(self, number: int) -> meet.Start:
        return until(lambda: meet.found(self.store, meet.Start, number), f"start {number}")

    def end(self, *names: str) -> None:
        last = max(self.agent._members)
        meet.post(self.store, meet.Finished())
        assert self.call(last + 1) == meet.Call([], [])
        self.kill(*names)
        self.thread.join(60)
        assert not self.thread.is_alive()


def test_survivors_are_called_at_once_and_the_new_worker_later() -> None:
    played = Played(1, 3, max_restarts=1, last_call=0.0)
    played.ready("0.0", "2.0", "1.0")
    first = played.call(1)
    assert sorted(first.members) == workers("0.0", "1.0", "2.0")
    assert not first.lost
    played.come(1, w0_0=None, w1_0=None)
    time.sleep(10 * FAST)
    assert meet.found(played.store, meet.Start, 1) is None, "one has not come"
    played.come(1, w2_0=None)
    start = played.start(1)
    assert start.version is None
    meet.connect(start.port)
    played.kill("1.0")
    until(lambda: meet.is_there(played.store, meet.Broken, 1), "word of the death")
    second = played.call(2)
    assert second == meet.Call([each for each in first.members if str(each) != "1.0"], workers("1.0"))
    played.come(2, w0_0=(1, 4), w2_0=(1, 5))  # one knows that step 5 is committed
    start = played.start(2)
    assert (start.version, start.previous) == ((1, 5), first.members)
    played.ready("1.1")
    assert played.call(3) == meet.Call([*second.members, worker("1.1")], [])
    played.come(3, w0_0=(2, 6), w2_0=(2, 6), w1_1=None)
    start = played.start(3)
    assert (start.version, start.previous) == ((2, 6), second.members)
    played.end("0.0", "2.0", "1.1")
    assert played.agent.restarts == 1
    assert isinstance(played.error, ChildFailedError)  # they did not end by themselves


def test_a_death_while_they_meet_calls_another_rendezvous() -> None:
    played = Played(2, 3)
    played.ready("0.0", "1.0", "2.0")
    members = played.call(1).members
    played.come(1, w0_0=None, w1_0=None)
    played.kill("2.0")
    assert played.start(1).port == 0
    assert played.call(2) == meet.Call([each for each in members if str(each) != "2.0"], workers("2.0"))
    played.kill("0.0")
    played.thread.join(60)
    assert isinstance(played.error, ChildFailedError), "one is left, and two are needed"
    assert not lives(played.agent._here.pid(worker("1.0")))


def test_who_does_not_come_is_ended() -> None:
    played = Played(1, 2, join_timeout=0.5)
    played.ready("0.0", "1.0")
    played.call(1)
    played.come(1, w0_0=None)
    assert played.call(2) == meet.Call(workers("0.0"), workers("1.0"))
    played.come(2, w0_0=None)
    assert played.start(2).port
    played.end("0.0")


def test_workers_have_a_text_and_travel_as_they_are() -> None:
    here, there = meet.Worker(1, 0), meet.Worker(0, 2, host=3)
    assert (str(here), str(there), str([here])) == ("1.0", "0.2@3", "[1.0]")
    call = meet.Call([here, there], [])
    store = dist.HashStore()
    assert meet.found(store, meet.Call, 7) is None
    meet.post(store, call, 7)
    assert meet.found(store, meet.Call, 7) == call
    assert not meet.is_there(store, meet.Call, 8)
    order = meet.Order("end", there, signal.SIGTERM)
    meet.post(store, order, 3, 0)
    assert meet.found(store, meet.Order, 3, 0) == order

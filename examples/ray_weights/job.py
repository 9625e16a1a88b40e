"""The driver's side: it makes the actors, asks them for versions, and holds no weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from meshcast import MeshcastError

from ray_weights.actors import Member, RolloutActor, TrainerActor


@dataclass(frozen=True)
class Row:
    """One version. bytes: that all rollouts received. seconds: until it was whole on all of them. stopped:
    seconds that training stood still for it. equal: every rollout has the bits of every trainer."""

    version: int
    bytes: int
    seconds: float
    stopped: float
    loss: float
    held_out: float
    equal: bool


@dataclass(frozen=True)
class Calls:
    """One version, asked for on all actors: references to what their methods return."""

    version: int
    trained: Sequence[Any]
    sent: Sequence[Any]
    received: Sequence[Any]


class Job:
    """Ranks of one process group. Trainers come first, on the node with the resource `host0`; rollouts are on
    the one with `host1`. limit: seconds, of a call of the group and of a push."""

    def __init__(self, model: str, trainers: int, rollouts: int, batch: int, limit: float) -> None:
        self.limit = limit
        self.trainers = [_actor(TrainerActor, "host0") for _ in range(trainers)]
        self.rollouts = [_actor(RolloutActor, "host1") for _ in range(rollouts)]
        ranks = [*self.trainers, *self.rollouts]
        address, port = self.get(ranks[0].found.remote())
        self.hosts: list[str] = self.get(
            [actor.join.remote(address, port, rank, len(ranks), limit) for rank, actor in enumerate(ranks)]
        )
        self.get([actor.start.remote(model, trainers, batch) for actor in ranks])

    def get(self, calls: Any) -> Any:
        """What they return. Calls end by themselves: a pull has one limit to wait for a version, and one to
        move it. The third is for processes to start, or for steps of training."""
        return ray.get(calls, timeout=3 * self.limit)

    def ask(self, version: int, steps: int) -> Calls:
        """For that many steps and then a version. Waits for nothing: an actor has its calls in this order."""
        return Calls(
            version,
            [trainer.train.remote(steps) for trainer in self.trainers],
            [trainer.send.remote(version) for trainer in self.trainers],
            [rollout.receive.remote(version) for rollout in self.rollouts],
        )

    def rounds(self, versions: Iterable[int], steps: int) -> Iterator[Row]:
        """All is asked for at once. So the trainers go on while a version travels and is served."""
        for calls in [self.ask(version, steps) for version in versions]:
            losses, sent, received = (self.get(each) for each in (calls.trained, calls.sent, calls.received))
            digests = {digest for digest, _ in sent} | {each["digest"] for each in received}
            arrived = {each["version"] for each in received}
            yield Row(
                calls.version,
                sum(each["bytes"] for each in received),
                max(each["seconds"] for each in received),
                max(stopped for _, stopped in sent),
                sum(losses) / len(losses),
                received[0]["loss"],
                len(digests) == 1 and arrived == {calls.version},
            )

    def close(self) -> None:
        self.get([trainer.finish.remote() for trainer in self.trainers])
        self.get([actor.leave.remote() for actor in (*self.trainers, *self.rollouts)])


def lose(job: Job, version: int, steps: int, wait: Callable[[], None] = lambda: None) -> bool:
    """Kills the last rollout after wait(), while all are asked for `version`. Prints what the others say.
    Whether each of them raised an error of meshcast, and the trainers trained on."""
    calls = job.ask(version, steps)
    wait()
    lost = len(job.hosts) - 1
    ray.kill(job.rollouts.pop())
    begin = time.monotonic()
    print(f"rank {lost} was killed", flush=True)
    heard = 0
    waits = [*(trainer.finish.remote() for trainer in job.trainers), *calls.received[:-1]]
    for rank, call in enumerate(waits):
        try:
            job.get(call)
            print(f"rank {rank} heard of nothing", flush=True)
        except MeshcastError as error:
            heard += 1
            cause = error.cause  # what the actor raised: Ray's error is of its class, and has the traceback
            seconds = time.monotonic() - begin
            print(f"rank {rank}: {type(cause).__name__} after {seconds:.2f} s: {cause}", flush=True)
    losses = job.get([trainer.train.remote(steps) for trainer in job.trainers])
    print(f"the trainers trained on: loss {sum(losses) / len(losses):.3f}", flush=True)
    for rank, left in enumerate(job.get([each.serves.remote() for each in job.rollouts]), len(job.trainers)):
        print(f"rank {rank} has {'torn weights' if left is None else f'version {left}'}", flush=True)
    job.get([actor.leave.remote() for actor in (*job.trainers, *job.rollouts)])
    return heard == len(waits)


def _actor(kind: type[Member], host: str) -> Any:
    return ray.remote(kind).options(num_cpus=1, resources={host: 1}).remote()

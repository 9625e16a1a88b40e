"""What meshcast.elastic.Replicas costs a training step: the GPT example on two hosts, rounds with copies
and without in turns.

    PYTHONPATH=python:. torchrun --nproc-per-node 5 -m benchmarks replicas

Where others use the cores as well, the times of a step say little; CPU time still does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Topology, elastic
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from ..harness import ROOT, parser
from ..ranks import steps, total

sys.path.insert(0, str(ROOT / "examples"))

from gpt.job import GptJobType
from training.options import parse
from training.trainer import Trainer

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
HOSTS = Topology.from_hosts({0: "a", 1: "a", 2: "b", 3: "b", 4: "b"})


class Round:
    """Steps from one moment to the next: seconds of a step, and CPU seconds of all ranks in it."""

    def __init__(self, steps: int) -> None:
        dist.barrier()
        self._steps, self._wall, self._cpu = steps, time.perf_counter(), time.process_time()

    def end(self) -> tuple[float, float]:
        spent = total(time.process_time() - self._cpu)  # it is also where the last rank is waited for
        return (time.perf_counter() - self._wall) / self._steps, spent / self._steps


def main() -> None:
    given = parser("replicas", __doc__)
    for name, default in (("rounds", 8), ("steps", 20), ("every", 10)):
        given.add_argument(f"--{name}", type=int, default=default)
    given.add_argument("--model", default="tiny")
    asked = given.parse_args()
    dist.init_process_group("meshcast")
    options = parse(GptJobType(), ["--model", asked.model, "--stages", "2,3"], dist.get_world_size())
    trainer = Trainer(options, options.job.samples(0, None), torch.device("cpu"))

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(trainer.module, trainer.optimizer, options=FLAT)
        return {**weights, **moments}

    def train(first: int, replicas: elastic.Replicas | None) -> None:
        for step in range(first, first + asked.steps):
            trainer.gradients(step)
            trainer.update(step)
            if replicas is not None:
                replicas.step(step + 1)
        if replicas is not None:
            replicas.wait()

    train(0, None)  # memory, connections and plans are there afterwards
    replicas = elastic.Replicas(state, asked.every, topology=HOSTS)
    train(asked.steps, replicas)
    done = 2 * asked.steps
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in steps(range(asked.rounds), "rounds"):
        for copies in (False, True):
            one = Round(asked.steps)
            train(done, replicas if copies else None)
            found[copies].append(one.end())
            done += asked.steps
    nbytes = sum(x.numel() * x.element_size() for x in state().values() if isinstance(x, torch.Tensor))
    if dist.get_rank() == 0:
        report(asked, found, nbytes)
    replicas.close()
    dist.destroy_process_group()


def report(asked: argparse.Namespace, found: dict[bool, list[tuple[float, float]]], nbytes: int) -> None:
    print(
        f"model {asked.model}, {asked.rounds} rounds of {asked.steps} steps each, copies every {asked.every}"
    )
    print(f"rank 0 holds {nbytes / 1e6:.1f} MB; load of the machine {os.getloadavg()[0]:.1f}")
    for place, what in enumerate(("seconds of a step", "CPU seconds of a step, all ranks")):
        without, copied = (
            statistics.median(each[place] for each in found[copies]) for copies in (False, True)
        )
        more = statistics.median(b[place] / a[place] for a, b in zip(found[False], found[True], strict=True))
        print(f"{what}: {without:.4f} without, {copied:.4f} with copies; median of ratios {more:.3f}")

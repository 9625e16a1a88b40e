"""A training program for meshcast.elastic.run in which workers die by SIGKILL at chosen moments.

going_on.py FOLDER STEPS FAULTS [PAUSE [EVERY [MEMORY]]]: FAULTS is a JSON list of [worker, step, moment]; a
worker is named "LOCAL_RANK.RESTART", on other hosts "LOCAL_RANK.RESTART@HOST". Each worker writes what it has
seen to FOLDER/WORKER.jsonl. The job ends after so many steps, or in the one in which FOLDER/stop is found.
PAUSE: seconds before each step; all ranks have all then, so that any number of them may die. EVERY: no rank
has what another one has, and so many steps are between two copies on other ranks. MEMORY: bytes that the
state may take on a rank.

Moments: during - after the forward; saving - while all write a checkpoint; before - gradients are complete;
between - others have taken the step, this one has not, and one of the others does not know yet that all had
agreed; after - the step is committed; making, loading - while the ranks take the state along, the first time
after that step; joined - some ranks hold the new state already.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshcast import LayoutError
from meshcast.elastic import Job as ElasticJob
from meshcast.elastic.rendezvous import Worker
from multiproc.elastic_training import FLAT, batch, model, optimizer_of, rate
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

NAME = str(Worker.here())


class OneProcess:
    """The same training without ranks, as far as it is asked for."""

    def __init__(self) -> None:
        self.module = model()
        self.optimizer = optimizer_of(self.module)
        self.losses: list[float] = []

    def loss(self, step: int) -> float:
        while len(self.losses) <= step:
            now = len(self.losses)
            x, y = batch(now)
            self.optimizer.param_groups[0]["lr"] = rate(now)
            self.optimizer.zero_grad()
            loss = (self.module(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())
        return self.losses[step]

    def state(self, steps: int) -> dict[str, torch.Tensor]:
        """After so many steps, the last that were asked for."""
        self.loss(steps - 1)
        assert len(self.losses) == steps
        state = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                state[f"state.{name}.{key}"] = value
        return state


class Trained:
    """Two replicas of half as many shards; a copy on each rank if copies, or where their number is odd.
    Shards alone if sharded."""

    def __init__(self, last: int, copies: bool, sharded: bool) -> None:
        self.last = last  # the job ends after so many steps
        ranks = dist.get_world_size()
        shape = (2, ranks // 2) if ranks % 2 == 0 and not copies else (ranks, 1)
        shape = (1, ranks) if sharded else shape
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        self.module = model()
        fully_shard(self.module[0], mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = optimizer_of(self.module)
        get_state_dict(self.module, self.optimizer, options=FLAT)  # makes its state, by a step
        for state in self.optimizer.state.values():
            state["step"].zero_()
        # Seen by the step alone: what a step that is undone has drawn or counted must not show.
        self.seen = torch.nn.BatchNorm1d(6)

    def gradients(self, step: int, die: Callable[[str, int], None]) -> float:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        x, y = (each.tensor_split(ranks)[rank] for each in batch(step))
        self.optimizer.param_groups[0]["lr"] = rate(step)
        self.optimizer.zero_grad()
        self.seen(x)
        share = len(x) * ranks / len(batch(step)[0])
        loss = (self.module(x) - y).square().mean() * share
        die("during", step)
        loss.backward()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        return float(mean)

    def state_dict(self) -> dict[str, Any]:
        weights, moments = get_state_dict(self.module, self.optimizer, options=FLAT)
        return {**weights, **moments, "seen": self.seen.num_batches_tracked.clone(), "last": self.last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = dict(state)
        self.seen.num_batches_tracked.copy_(state.pop("seen"))
        self.last = state.pop("last")
        moments = ("state.", "param_groups.")
        set_state_dict(
            self.module,
            self.optimizer,
            model_state_dict={name: x for name, x in state.items() if not name.startswith(moments)},
            optim_state_dict={name: x for name, x in state.items() if name.startswith(moments)},
            options=FLAT,
        )

    def check(self, one: OneProcess, steps: int) -> None:
        """As in one process that nothing happened to."""
        held = self.state_dict()
        assert int(held["seen"]) == steps, f"{int(held['seen'])} batches seen in {steps} steps"
        for name, value in one.state(steps).items():
            found = held[name]
            full = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.allclose(full, value, rtol=0, atol=1e-5), name


class Worker:
    def __init__(
        self,
        folder: Path,
        steps: int,
        faults: list[list[Any]],
        pause: float = 0.0,
        every: float = 0.0,
        memory: float = 0.0,
    ) -> None:
        self.folder = folder
        self.log = (folder / f"{NAME}.jsonl").open("a")
        self.stop = folder / "stop"
        self.steps, self.pause, self.every = steps, pause, int(every) or None
        self.faults = {(moment, step) for name, step, moment in faults if name == NAME}
        self.moments = {(step, moment) for _, step, moment in faults}
        # What is deaf to the agreement of a step in which another dies between: the lowest that lives.
        self.deaf = {
            step
            for name, step, moment in faults
            if moment in ("between", "joined") and name != NAME and NAME == "0.0"
        }
        self.job = ElasticJob(
            self.make,
            backend="gloo",
            grace=120.0,
            timeout=timedelta(seconds=60),
            replicas_every=self.every,
            memory=int(memory) or None,
        )
        agree = self.job._agree

        def agree_or_die() -> bool:
            """Gloo may end with an error on a rank though it ended well on others."""
            others = agree()
            at, prepared = self.job.steps, self.job._prepared
            assert prepared is not None
            held = self.job._version
            joins = held is None or prepared.version.rendezvous != held.rendezvous
            self.die("joined" if joins and self.job._number > 1 else "between", at)
            if at in self.deaf and (not joins or self.job._number > 1):
                self.deaf.discard(at)
                self.note(deaf=at)
                raise RuntimeError("Connection closed by peer")
            return others

        self.job._agree = agree_or_die

    def note(self, **what: Any) -> None:
        print(json.dumps({"time": time.time(), **what}), file=self.log, flush=True)

    def die(self, moment: str, step: int) -> None:
        if (moment, step) in self.faults:
            self.note(died=step, moment=moment)
            os.kill(os.getpid(), signal.SIGKILL)

    def make(self) -> Trained:
        trained = Trained(self.steps, copies=self.pause > 0, sharded=self.every is not None)
        if self.job._number > 1:
            self.die("making", self.job.steps)
            load = trained.load_state_dict

            def dying(state: dict[str, Any]) -> None:
                load(state)
                self.die("loading", self.job.steps)

            trained.load_state_dict = dying
        return trained

    def run(self) -> None:
        one, ended = OneProcess(), False
        with self.job as job:
            while not ended:
                with job.attempt() as trained:
                    if job.steps >= trained.last:
                        trained.check(one, job.steps)
                        self.note(end=job.steps)
                        ended = True
                    else:
                        self.step(trained, one)

    def step(self, trained: Trained, one: OneProcess) -> None:
        job, step = self.job, self.job.steps
        time.sleep(self.pause)
        kept = list(job._generations._kept.values()) if job._generations is not None else []
        if kept and any(step == at for at, _ in self.moments):
            kept[-1].wait()  # so that the step to go back to is known
        stop = torch.tensor(int(self.stop.exists()))
        dist.broadcast(stop, 0)
        loss = trained.gradients(step, self.die)
        if (step, "saving") in self.moments:
            self.save(trained, step)
        self.die("before", step)

        def update() -> None:
            trained.optimizer.step()
            if stop:
                trained.last = step + 1

        job.commit(update)
        assert job.steps == step + 1
        self.note(step=step, loss=loss, ranks=dist.get_world_size())
        assert abs(loss - one.loss(step)) < 1e-5, (step, loss, one.loss(step))
        self.die("after", step)

    def save(self, trained: Trained, step: int) -> None:
        write = FileSystemWriter.write_data

        def dying(*arguments: Any) -> Any:
            self.die("saving", step)
            return write(*arguments)

        with mock.patch.object(FileSystemWriter, "write_data", dying):
            dcp.save(trained.state_dict(), checkpoint_id=self.folder / f"step-{step}")


def main() -> None:
    torch.set_num_threads(1)
    folder, steps, faults, *pause = sys.argv[1:]
    worker = Worker(Path(folder), int(steps), json.loads(faults), *map(float, pause))
    try:
        worker.run()
    except LayoutError as error:
        worker.note(gone=sorted({name for name, _, _ in error.gone}), error=str(error))
        raise


if __name__ == "__main__":
    main()

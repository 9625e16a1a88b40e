"""One rank of the benchmark of `partition`. Rank 0 appends one JSON object per result to a file."""

from __future__ import annotations

import argparse
import json
import math
import pickle
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import PipelineStage, get_schedule_class
from torch.distributed.device_mesh import DeviceMesh

from ..pipeline.disturbance import Watch, share_of_others
from ..pipeline.stages import Clock
from ..steps import Steps
from .choices import SAMPLES, Choice, Emulated
from .stages import LayersStage, Part, loss_fn, parts_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path, help="a pickle, see __main__.py")
    job: dict[str, Any] = pickle.loads(parser.parse_args().job.read_bytes())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    out = Path(job["folder"], "results.jsonl")
    total = job["repeats"] * sum(len(chosen) for _, chosen in job["models"].values())
    with Steps("steps", total) as counted:
        for model, (emulated, chosen) in job["models"].items():
            found = measure(emulated, chosen, job["microbatches"], job["repeats"], counted.done)
            if dist.get_rank() == 0:
                with out.open("a") as file:
                    file.write(json.dumps({model: found}) + "\n")
    dist.destroy_process_group()


def measure(
    job: Emulated,
    chosen: list[Choice],
    microbatches: int,
    repeats: int,
    done: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """The choices in turn, round after round, after a first step of each that only checks gradients. done: is
    called after each step."""
    runs = [Run(choice, job, microbatches) for choice in chosen]
    for _ in range(repeats):
        for run in runs:
            run.timed()
            done()
    for run in runs:
        run.schedule.close()
    return [{**asdict(run.choice), **run.found} for run in runs]


class Run:
    """One choice, on this rank."""

    def __init__(self, choice: Choice, job: Emulated, microbatches: int) -> None:
        self.choice = choice
        self.found: dict[str, list[float]] = {"seconds": [], "late": [], "others": []}
        parts, edges = parts_of(job.layers, choice.layers)
        starts = [sum(choice.ranks[:stage]) for stage in range(len(parts))]
        meshes = [
            DeviceMesh("cpu", list(range(start, start + count)))
            for start, count in zip(starts, choice.ranks, strict=True)
        ]
        index = max(stage for stage, start in enumerate(starts) if dist.get_rank() >= start)
        self.clock = Clock(0.0, 0.0, 0.0, scale=0.0)
        self.module = LayersStage(parts[index], SAMPLES, self.clock)
        stage = PipelineStage(
            self.module, index, len(parts), torch.device("cpu"), mesh=meshes[index], edges=edges,
            topology=job.topology,
        )  # fmt: skip
        made: Any = get_schedule_class(choice.schedule)
        self.schedule = made(stage, microbatches, loss_fn=loss_fn, **choice.options)
        numbers = torch.arange(microbatches * SAMPLES, dtype=torch.float32)
        self.batch, self.target = (numbers % 13 + 1)[:, None], numbers % 7 + 1
        self.expected = one_process(parts, edges, self.batch, self.target)[index]
        self.step()
        self.clock.scale = 1.0

    def step(self) -> None:
        """Its weight gradient needs every activation and every gradient."""
        self.module.zero_grad()
        self.schedule.step(self.batch, target=self.target, return_outputs=False)
        assert self.module.weight.grad is not None
        found = self.module.weight.grad.item()
        if not math.isclose(found, self.expected, rel_tol=1e-3):
            raise RuntimeError(
                f"{self.choice.name}, rank {dist.get_rank()}: gradient {found}, not {self.expected}"
            )

    def timed(self) -> None:
        self.clock.late = 0.0
        dist.barrier()
        begin = Watch.now()
        self.step()
        end = Watch.now()
        mine = {"begin": begin.wall, "end": end.wall, "passed": end.since(begin), "late": self.clock.late}
        gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, mine)
        # All ranks of one machine share the clock.
        seconds = max(each["end"] for each in gathered) - min(each["begin"] for each in gathered)
        self.found["seconds"].append(seconds)
        self.found["late"].append(max(each["late"] for each in gathered))
        passed = [each["passed"] for each in gathered]
        self.found["others"].append(share_of_others(passed[0], passed))


def one_process(
    parts: list[Part], edges: list[Any], batch: torch.Tensor, target: torch.Tensor
) -> list[float]:
    """The weight gradient of each stage, on the whole batch at once."""
    clock = Clock(0.0, 0.0, 0.0, scale=0.0)
    modules = [LayersStage(part, len(batch), clock) for part in parts]
    made: list[tuple[torch.Tensor, ...]] = []
    for stage, module in enumerate(modules):
        into = sorted((edge for edge in edges if edge.to_stage == stage), key=lambda edge: edge.input)
        inputs = [made[edge.from_stage][edge.output] for edge in into] if stage else [batch]
        output = module(*inputs)
        made.append(output if isinstance(output, tuple) else (output,))
    loss_fn(made[-1][0], target).backward()
    return [module.weight.grad.item() for module in modules if module.weight.grad is not None]


if __name__ == "__main__":
    main()

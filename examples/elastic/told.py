"""What each process tells of the steps that it commits."""

import json
import os
import time
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from elastic.state import Trained


class Teller:
    """Rank 0 prints a line for each step. With a folder, each process writes lines of JSON to a file there:
    whoever writes to a file of its own leaves no half line amid those of others when it is killed."""

    def __init__(self, folder: Path | None) -> None:
        self.file: TextIO | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.file = (folder / f"{os.getpid()}.jsonl").open("a")
        self.groups = 0  # that this process has been in

    def joins(self) -> None:
        """All ranks call it in a new group. Its name is another one after each change of ranks."""
        self.groups += 1
        name = torch.tensor([os.getpid(), self.groups])
        dist.broadcast(name, 0)
        self.group = ".".join(map(str, name.tolist()))

    def update(self, training: Trained, step: int, loss: float, begin: float) -> None:
        """Changes parameters, and tells it then. A step that is completed after another rank's death ends in
        here as well, so it is told like others; there may be no process group any more."""
        agreed = time.perf_counter()
        training.update()
        now, place = time.perf_counter(), self.place
        if place["rank"] == 0:
            said = f"loss {loss:.4f} on {place['ranks']} ranks, process {os.getpid()} is rank 0"
            print(f"step {step + 1}: {said}", flush=True)
        if self.file is not None:
            row = {"step": step, "loss": loss, **place, "part": training.part, "time": time.time()}
            row |= {"seconds": now - begin, "agreeing": agreed - self.ready}
            print(json.dumps(row), file=self.file, flush=True)

    def is_ready(self) -> None:
        """This rank's gradients are complete."""
        self.ready = time.perf_counter()
        self.place = {"group": self.group, "rank": dist.get_rank(), "ranks": dist.get_world_size()}

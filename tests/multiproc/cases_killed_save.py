"""A rank dies in the middle of pipelining.save, over a checkpoint that is there; another job reads it."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from meshcast.pipelining import load, save
from multiproc.pipeline_checkpoint_cases import Job, trained_alone
from torch.distributed.checkpoint import FileSystemWriter

LEAVE_UP = True  # the case ends the group itself

FOLDER, MOMENT = Path(os.environ["FOLDER"]), os.environ["MOMENT"]
VICTIM = 2 if MOMENT == "writing" else 0


def dies(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying() -> Any:
    """ "writing" its part; "between" the two renames; "replaced", before the older one is removed."""
    if MOMENT == "writing":
        return mock.patch.object(FileSystemWriter, "write_data", dies)
    if MOMENT == "replaced":
        remove = shutil.rmtree

        def once(path: Path, **options: Any) -> None:
            (dies if path.exists() else remove)(path, **options)

        return mock.patch.object(shutil, "rmtree", once)
    rename = Path.rename

    def second(path: Path, to: Path) -> None:
        (dies if path.suffix == ".partial" else rename)(path, to)

    return mock.patch.object(Path, "rename", second)


def dies_while_it_saves(context) -> None:
    job = Job([1, 3], [[0], [1, 2, 3]], seed=0, lr=0.02)
    job.train(0, 2)
    save(job.schedule, FOLDER / "a", job.optimizer, names=job.name, position=2)
    job.train(2, 1)
    with dying() if context.rank == VICTIM else nullcontext(), pytest.raises(RuntimeError):
        save(job.schedule, FOLDER / "a", job.optimizer, names=job.name, position=3)
    dist.destroy_process_group()


def another_job_reads_it_and_saves(_context) -> None:
    whole = 3 if MOMENT == "replaced" else 2
    job = Job([2, 2], [[0, 1], [2, 3]], sharded=True)
    assert load(job.schedule, FOLDER / "a", job.optimizer, names=job.name) == whole
    job.check(trained_alone(whole))
    job.train(whole, 1)
    save(job.schedule, FOLDER / "a", job.optimizer, names=job.name, position=whole + 1)
    assert sorted(path.name for path in FOLDER.iterdir()) == ["a"]
    job = Job([1, 3], [[0], [1, 2, 3]])
    assert load(job.schedule, FOLDER / "a", job.optimizer, names=job.name) == whole + 1
    job.check(trained_alone(whole + 1))
    dist.barrier()
    dist.destroy_process_group()


CASES = [{"dies": dies_while_it_saves, "reads": another_job_reads_it_and_saves}[os.environ["PART"]]]

"""A training program in which one rank dies by SIGKILL at a moment that is always the same.

killed_training.py gpt|unet step|save N, then the program's options: when the ranks are started first, the
last one dies in step N after its gradients, or while the checkpoint after step N is written.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed.checkpoint as dcp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt.job import GptJobType
from training import trainer
from training.job import JobType
from training.main import main
from unet.job import UNetJobType

JOBS: dict[str, type[JobType]] = {"gpt": GptJobType, "unet": UNetJobType}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process outlived SIGKILL")


def die_in_step(number: int) -> None:
    update = trainer.Trainer.update

    def dying(self: trainer.Trainer, step: int) -> trainer.UpdateResult:
        if step + 1 == number:
            die()
        return update(self, step)

    trainer.Trainer.update = dying


def die_while_saving(number: int) -> None:
    """The others have begun to write by then, or are about to; nobody can finish."""
    write = dcp.save

    def dying(state: Any, *, checkpoint_id: Path, **options: Any) -> Any:
        if checkpoint_id.name.startswith(f"step-{number:06d}"):
            die()
        return write(state, checkpoint_id=checkpoint_id, **options)

    dcp.save = dying


if __name__ == "__main__":
    name, moment, number, *options = sys.argv[1:]
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        {"step": die_in_step, "save": die_while_saving}[moment](int(number))
    sys.exit(main(JOBS[name](), options))

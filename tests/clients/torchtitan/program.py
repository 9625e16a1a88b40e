"""torchtitan's Trainer, its debug Llama, three steps for each schedule; run by torchrun.

    program.py FOLDER torch|meshcast SCHEDULE ...

FOLDER has the tokenizer and data that titan.py makes. Prints what torchtitan prints, and a line
"SCHEDULE name" before each. What torchtitan asks of a GPU is answered by the CPU, alike for both packages:
the device and its memory statistics, time-outs that only NCCL has, and FSDP's sum, which NCCL alone scales.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from titan import check_home, on_cpu, settings, tell_lost, undivided

on_cpu()

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.llama3.infra import parallelize  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402


def arguments(folder: Path, package: str, schedule: str) -> list[str]:
    given = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": folder,
        "job.dump_folder": folder / "out",
        "training.dataset": "c4_test",
        "training.dataset_path": folder / "data",
        **settings(schedule),
    }
    if package == "meshcast":
        given["experimental.custom_import"] = "meshcast.integrations.torchtitan"
    return [f"--{name}={value}" for name, value in given.items()]


def main() -> None:
    folder, package, *schedules = sys.argv[1:]
    init_logger()
    parallelize.disable_fsdp_gradient_division = undivided
    dist_utils.set_pg_timeouts = lambda **_: None
    for schedule in schedules:
        print(f"SCHEDULE {schedule}", flush=True)
        trainer = Trainer(ConfigManager().parse_args(arguments(Path(folder), package, schedule)))
        check_home(trainer.pp_schedule, package)
        trainer.train()
        tell_lost(trainer.model_parts)
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

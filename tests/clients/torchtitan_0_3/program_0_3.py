"""The Trainer of torchtitan 0.3, its debug Llama, three steps for each schedule; run by torchrun.

    program_0_3.py FOLDER torch|meshcast SCHEDULE ...

As torchtitan/program.py. Its attention is torch's scaled_dot_product_attention: the default, flex_attention,
has no backward on the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from titan import check_home, on_cpu, settings, tell_lost, undivided

on_cpu()

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def debug() -> Trainer.Config:
    """What --module and --config name."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def kept() -> Trainer.Config:
    """Nothing is recomputed: torch's own ZBVZeroBubble fails with selective activation checkpointing."""
    config = debug()
    config.activation_checkpoint = None
    return config


def arguments(folder: Path, package: str, schedule: str) -> list[str]:
    given = {
        "module": Path(__file__).stem,
        "config": (kept if schedule == "ZBVZeroBubble" else debug).__name__,
        "hf_assets_path": folder,
        "dump_folder": folder / "out",
        "dataloader.dataset": "c4_test",
        "dataloader.dataset_path": folder / "data",
        **settings(schedule),
    }
    if package == "meshcast":
        given["override.imports"] = "meshcast.integrations.torchtitan.pipelines"
    return [*(f"--{name}={value}" for name, value in given.items()), "--training.disable_cuda_graphs"]


def main() -> None:
    folder, package, *schedules = sys.argv[1:]
    init_logger()
    fsdp.disable_fsdp_gradient_division = undivided
    dist_utils.set_pg_timeouts = lambda **_: None
    for schedule in schedules:
        print(f"SCHEDULE {schedule}", flush=True)
        trainer = ConfigManager().parse_args(arguments(Path(folder), package, schedule)).build()
        check_home(trainer.pp_schedule, package)
        trainer.train()
        tell_lost(trainer.model_parts)
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

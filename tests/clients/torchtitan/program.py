"""torchtitan's Trainer, its debug Llama, three steps for each schedule; run by torchrun.

    program.py FOLDER torch|meshcast SCHEDULE ...

FOLDER has the tokenizer and data that --assets FOLDER makes. Prints what torchtitan prints, and a line
"SCHEDULE name" before each. What torchtitan asks of a GPU is answered by the CPU, alike for both packages:
the device and its memory statistics, time-outs that only NCCL has, and FSDP's sum, which NCCL alone scales.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import _utils

_utils._get_available_device_type = lambda: "cpu"
os.environ["LOCAL_RANK"] = "0"  # of the device: there is one CPU
for name, value in {
    "get_device_name": lambda *_: "cpu",
    "get_device_properties": lambda *_: SimpleNamespace(total_memory=1 << 34),
    "memory_stats": lambda *_: {},
    "reset_peak_memory_stats": lambda *_: None,
    "empty_cache": lambda *_: None,
}.items():
    setattr(torch.cpu, name, value)

from torchtitan.config import ConfigManager  # noqa: E402
from torchtitan.distributed import utils as dist_utils  # noqa: E402
from torchtitan.tools.logging import init_logger  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

STEPS = 3


def patch() -> None:
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.llama3.infra import parallelize

    def undivided(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    parallelize.disable_fsdp_gradient_division = undivided
    dist_utils.set_pg_timeouts = lambda **_: None


def assets(folder: Path) -> None:
    """A tokenizer of bytes and merges, and Python's sources as text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = [inspect.getsource(module) for module in (inspect, json, os)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    tokenizer.train_from_iterator(
        text,
        trainers.BpeTrainer(
            vocab_size=1000,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": special[0], "eos_token": special[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "data").mkdir(exist_ok=True)
    lines = [json.dumps({"text": part}) for whole in text for part in whole.split("\n\n\n")]
    (folder / "data" / "train.json").write_text("\n".join(lines))


def arguments(folder: Path, package: str, schedule: str) -> list[str]:
    given = {
        "model.name": "llama3",
        "model.flavor": "debugmodel",
        "model.hf_assets_path": folder,
        "job.dump_folder": folder / "out",
        "training.dataset": "c4_test",
        "training.dataset_path": folder / "data",
        "training.steps": STEPS,
        "training.local_batch_size": 8,
        "training.seq_len": 64,
        "training.mixed_precision_param": "float32",
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.data_parallel_shard_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "metrics.log_freq": 1,
        "lr_scheduler.warmup_steps": 2,
        "debug.seed": 7,
    }
    if package == "meshcast":
        given["experimental.custom_import"] = "meshcast.integrations.torchtitan"
    return [f"--{name}={value}" for name, value in given.items()]


def main() -> None:
    folder, package, *schedules = sys.argv[1:]
    init_logger()
    patch()
    for schedule in schedules:
        print(f"SCHEDULE {schedule}", flush=True)
        trainer = Trainer(ConfigManager().parse_args(arguments(Path(folder), package, schedule)))
        home = type(trainer.pp_schedule).__module__
        assert home.startswith(package), f"the schedule is of {home}"
        trainer.train()
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--assets"]:
        assets(Path(sys.argv[2]))
    else:
        main()

"""What the tests of torchtitan share: a CPU in place of its GPU, a tokenizer and texts, and its steps."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import torch

__all__ = [
    "WITHOUT", "Steps", "assets", "check_home", "on_cpu", "prepared", "settings", "tell_lost", "trained",
    "undivided",
]  # fmt: skip

STEPS = 3
_ROOT = Path(__file__).resolve().parents[2]
_STEP = re.compile(r"step: *(\d+).*?loss: *(-?[\d.]+).*?grad_norm: *([\d.]+)")
_LIMIT = 400.0  # seconds for all schedules of a package

WITHOUT = "WITHOUT GRADIENTS"
# By rank: (step, loss, gradient norm), as printed; last (WITHOUT, name, ...) if parameters got no gradient.
Steps = dict[int, list[tuple[str, ...]]]


def on_cpu() -> None:
    """Before torchtitan is imported: the device and its memory statistics."""
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


def undivided(model: torch.nn.Module) -> None:
    """Gradients summed by FSDP2 and not divided, which torchtitan asks of NCCL alone."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def check_home(schedule: object, package: str) -> None:
    home = type(schedule).__module__
    assert home.startswith(package), f"the schedule is of {home}"


def tell_lost(parts: Sequence[torch.nn.Module]) -> None:
    """Names the parameters that have no gradient behind a step."""
    lost = [name for part in parts for name, each in part.named_parameters() if each.grad is None]
    if lost:
        print(WITHOUT, *lost, flush=True)


def settings(schedule: str) -> dict[str, object]:
    """What both releases call alike: three steps, pipeline degree 2 by FSDP2 of degree 2, float32."""
    return {
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


def prepared(folder: Path) -> Path:
    """The folder with `assets`, which a process of its own makes: it imports what torchtitan needs."""
    subprocess.run([sys.executable, __file__, str(folder)], check=True, timeout=120)
    return folder


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


def trained(program: Path, folder: Path, package: str, schedules: Sequence[str]) -> dict[str, Steps]:
    """{schedule: {rank: [(step, loss, gradient norm), ...]}}, of four ranks."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_ROOT / "python"), str(_ROOT / "tests" / "clients")]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "NO_COLOR": "1",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    logs = folder / "_".join([package, *schedules])
    command += ["--redirects=3", f"--log-dir={logs}"]
    command += [str(program), str(folder), package, *schedules]
    done = subprocess.run(
        command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT, check=False
    )
    found: dict[str, Steps] = {}
    for rank in range(4):
        (output,) = logs.glob(f"**/{rank}/stdout.log")
        (errors,) = logs.glob(f"**/{rank}/stderr.log")
        text = re.sub(r"\x1b\[[0-9;]*m", "", output.read_text())
        assert done.returncode == 0, f"rank {rank}:\n{text[-6000:]}\n{errors.read_text()[-3000:]}"
        for part in text.split("SCHEDULE ")[1:]:
            lost = re.findall(rf"^{WITHOUT} (.*)$", part, re.MULTILINE)
            steps = [*_STEP.findall(part), *((WITHOUT, *names.split()) for names in lost)]
            found.setdefault(part.split()[0], {})[rank] = steps
    return found


if __name__ == "__main__":
    assets(Path(sys.argv[1]))

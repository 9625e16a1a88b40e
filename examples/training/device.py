"""Where a rank computes."""

import os

import torch

from training.layout import ConfigError


def take_device(kind: str, precision: str) -> torch.device:
    """The device of this rank, the current one from now on: the CPU, or the GPU of its local rank. Where a
    host has more ranks than GPUs they share them, if NCCL can. Raises ConfigError where there is no GPU."""
    if kind == "cpu":
        return torch.device("cpu")
    if torch.version.cuda is None:
        raise ConfigError(f"--device {kind}: torch {torch.__version__} is a CPU build; use --device cpu")
    if not torch.cuda.is_available():
        raise ConfigError(f"--device {kind}: torch sees no GPU here; use --device cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    if precision == "float32":  # convolutions would round to 10 bits
        torch.backends.cudnn.allow_tf32 = False
    return device

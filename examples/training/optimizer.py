"""AdamW as in GPT-3, but for eps; linear warm-up, then a cosine down to a tenth of the peak learning rate."""

import math

import torch
from torch import nn

EPS = 1e-6
FINAL_FRACTION = 0.1  # of the peak learning rate, reached at the last step


def make_optimizer(module: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Matrices decay, biases and norms do not (GPT-3, appendix B)."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    # Adam turns gradients of any size into steps of about lr, so the rounding of a tiny gradient can move a
    # weight as far as a true one. A larger eps damps that: runs that only differ in the order of their sums
    # stay close for longer.
    # foreach would put sharded and whole parameters into one operation, which torch refuses.
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=EPS, foreach=False)


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Of step 0, 1, ...: rises over `warmup` steps to `peak`, then falls to a tenth of it at step `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (FINAL_FRACTION + (1 - FINAL_FRACTION) * 0.5 * (1 + math.cos(math.pi * done)))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def scale_gradients(module: nn.Module, factor: float) -> None:
    if factor != 1.0:
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

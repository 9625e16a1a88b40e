"""FSDP2 modules on fake tensors: without its hooks, which would gather fakes and break the module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshcast.pipelining.wrappers import fsdp_groups, fsdp_parts

__all__ = ["can_be_faked", "fake_state", "without_fsdp"]


def can_be_faked(module: torch.nn.Module, *, exactly: bool = True) -> bool:
    """Returns whether the module runs on fake tensors as FSDP2 would run it: with one module for each group
    of parameters. exactly: with the types that FSDP2 computes in too, so without casts."""
    for part in fsdp_parts(module):
        state: Any = part._get_fsdp_state()
        if len(state._modules) > 1:
            return False
        parameters = [each for group in fsdp_groups(part) for each in group.fsdp_params]
        if exactly and any(each.mp_policy.param_dtype is not None for each in parameters):
            return False
    return True


def fake_state(
    module: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Parameters and buffers on fake tensors, under the mode that `fake` is of; those of FSDP2 gathered."""
    managed: dict[int, Any] = {
        id(each.sharded_param): each
        for part in fsdp_parts(module)
        for group in fsdp_groups(part)
        for each in group.fsdp_params
    }

    def gathered(value: torch.Tensor) -> torch.Tensor:
        found = managed[id(value)]
        whole = torch.empty(found._orig_size, dtype=value.dtype, device=value.device)
        # Tensor parallelism stays. Releases of torch differ in the name of its layout.
        spec: Any = getattr(found, "_unsharded_dtensor_spec", None) or getattr(found, "_tp_spec", None)
        if spec is not None:
            whole = DTensor.from_local(
                whole, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
        return whole.requires_grad_(value.requires_grad)

    return {
        name: gathered(value) if id(value) in managed else fake(value)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }


@contextmanager
def without_fsdp(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the module runs without the hooks that fully_shard registered."""
    before = []
    for part in fsdp_parts(module):
        for hooks in (part._forward_pre_hooks, part._forward_hooks):  # type: ignore[attr-defined]
            before.append((hooks, list(hooks.items())))
            for key in _own_hooks(part, hooks):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)


def _own_hooks(part: FSDPModule, hooks: Any) -> list[int]:
    state = part._get_fsdp_state()
    return [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]

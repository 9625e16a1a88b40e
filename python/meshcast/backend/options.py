"""pg_options of backend "meshcast": those of its inner backends, gloo on the CPU and NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ..errors import LayoutError

__all__ = ["split"]


def split(options: Any) -> tuple[Any, Any]:
    """pg_options as options for gloo and for NCCL, each None for torch's defaults. Takes those of either, or
    a dict of both by device type, {"cpu": ..., "cuda": ...}. Raises LayoutError for anything else."""
    if options is None:
        return None, None
    if isinstance(options, Mapping):
        by_device = dict(options)
    else:
        by_device = {
            next((device for device in _KINDS if isinstance(options, _class_of(device))), ""): options
        }
    for device, given in by_device.items():
        if device not in _KINDS or not (given is None or isinstance(given, _class_of(device))):
            raise LayoutError(
                f"pg_options: expected {' or '.join(_KINDS.values())}, or a dict of them by device type, "
                f'{{"cpu": ..., "cuda": ...}}; found {_described(options)}',
                op="init_process_group",
            )
    return by_device.get("cpu"), by_device.get("cuda")


_KINDS = {"cpu": "ProcessGroupGloo.Options", "cuda": "ProcessGroupNCCL.Options (where torch has NCCL)"}


def _class_of(device: str) -> type | tuple[()]:
    """The empty tuple, of which nothing is an instance, where torch was built without that backend."""
    if device == "cpu":
        return dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    return dist.ProcessGroupNCCL.Options if dist.is_nccl_available() else ()


def _described(options: Any) -> str:
    if isinstance(options, Mapping):
        entries = (f"{key!r}: {type(value).__name__}" for key, value in options.items())
        return f"{{{', '.join(entries)}}}"
    return f"{type(options).__module__}.{type(options).__qualname__}"

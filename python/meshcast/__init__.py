"""meshcast moves sharded tensors from one device mesh to another by chunk-pipelined multicast.

Importing it registers the c10d backend "meshcast" and the operator torch.ops.meshcast.reshard, and catches
SIGUSR1 in addition to the program's own handler. It changes nothing else in torch, opens no socket and starts
no thread, except for those that answer `python -m meshcast dump`, in a rank that a launcher started. Public
names are loaded when they are first used: torch.distributed.tensor alone takes the better part of a second.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ._build_check import check_torch
from ._version import __version__

check_torch(torch.__version__, torch.version.cuda)  # before anything loads _C

from .backend import register as _register_backend  # noqa: E402
from .base.observe import set_up as _set_up_observation  # noqa: E402
from .resharding.compile_op import register as _register_operator  # noqa: E402

_register_backend()
_register_operator()
_set_up_observation()

# The module of each public name; type checkers read __init__.pyi, which says the same.
_NAMES = {
    "base.observe": (
        "CallCounters",
        "Counters",
        "PairCounters",
        "counters",
        "dump_flight_record",
        "flight_record",
    ),
    "errors": (
        "AbortedError",
        "DeadlineExceededError",
        "LayoutError",
        "MeshcastError",
        "PeerLostError",
        "PlanMismatchError",
    ),
    "groups.parent": ("prepare",),
    "layout": ("Layout",),
    "planning.plan": (
        "LocalCopy",
        "Plan",
        "PlanCacheInfo",
        "Problem",
        "Task",
        "Transfer",
        "plan",
        "plan_cache_clear",
        "plan_cache_info",
        "plan_many",
    ),
    "resharding.autograd": ("backward",),
    "resharding.measure": ("measure_topology",),
    "resharding.record_destinations": ("record_destinations",),
    "resharding.recorded": ("RecordedDestinations",),
    "resharding.reshard": (
        "enable_dtensor_redistribute",
        "reshard",
        "reshard_",
        "reshard_local",
        "reshard_many",
    ),
    "resharding.resharder": ("Resharder",),
    "resharding.state_dict": ("StateResharder", "reshard_state_dict"),
    "resharding.state_run": ("ReshardedState",),
    "resharding.tensor_map": ("TensorMap",),
    "resharding.weight_reader": ("TensorManifest", "WeightManifest", "WeightReader"),
    "resharding.weight_sync": ("WeightProgress", "WeightStats", "WeightSync"),
    "spec": ("TensorSpec",),
    "topology": ("Host", "Nic", "Topology"),
    "transfers.block_scaled": ("BlockScaled",),
    "transfers.handle": ("Handle", "TransferStats"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

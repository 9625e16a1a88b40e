"""meshcast moves sharded tensors from one device mesh to another by chunk-pipelined multicast.

Importing it registers the c10d backend "meshcast" and the operator torch.ops.meshcast.reshard; it opens no
socket, starts no thread and changes nothing else in torch. Public names are loaded when they are first used:
torch.distributed.tensor alone takes the better part of a second.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from ._build_check import check_torch
from ._version import __version__

check_torch(torch.__version__, torch.version.cuda)  # before anything loads _C

from .backend.backend import register as _register_backend  # noqa: E402
from .base.observe import set_up as _set_up_observation  # noqa: E402
from .resharding.compile_op import register as _register_operator  # noqa: E402

_register_backend()
_register_operator()
_set_up_observation()

if TYPE_CHECKING:
    from .base.observe import (
        CallCounters,
        Counters,
        PairCounters,
        counters,
        dump_flight_record,
        flight_record,
    )
    from .errors import (
        AbortedError,
        DeadlineExceededError,
        LayoutError,
        MeshcastError,
        PeerLostError,
        PlanMismatchError,
    )
    from .groups.parent import prepare
    from .layout import Layout
    from .planning.plan import (
        LocalCopy,
        Plan,
        PlanCacheInfo,
        Problem,
        Task,
        Transfer,
        plan,
        plan_cache_clear,
        plan_cache_info,
        plan_many,
    )
    from .resharding.autograd import backward
    from .resharding.measure import measure_topology
    from .resharding.redistribute import enable_dtensor_redistribute
    from .resharding.reshard import reshard, reshard_, reshard_local, reshard_many
    from .resharding.resharder import Resharder
    from .resharding.state_dict import StateResharder, reshard_state_dict
    from .resharding.state_run import ReshardedState
    from .resharding.tensor_map import TensorMap
    from .resharding.weight_sync import WeightProgress, WeightStats, WeightSync
    from .spec import TensorSpec
    from .topology import Host, Nic, Topology
    from .transfers.handle import Handle, TransferStats

__all__ = [
    "AbortedError",
    "CallCounters",
    "Counters",
    "DeadlineExceededError",
    "Handle",
    "Host",
    "Layout",
    "LayoutError",
    "LocalCopy",
    "MeshcastError",
    "Nic",
    "PairCounters",
    "PeerLostError",
    "Plan",
    "PlanCacheInfo",
    "PlanMismatchError",
    "Problem",
    "ReshardedState",
    "Resharder",
    "StateResharder",
    "Task",
    "TensorMap",
    "TensorSpec",
    "Topology",
    "Transfer",
    "TransferStats",
    "WeightProgress",
    "WeightStats",
    "WeightSync",
    "__version__",
    "backward",
    "counters",
    "dump_flight_record",
    "enable_dtensor_redistribute",
    "flight_record",
    "measure_topology",
    "plan",
    "plan_cache_clear",
    "plan_cache_info",
    "plan_many",
    "prepare",
    "reshard",
    "reshard_",
    "reshard_local",
    "reshard_many",
    "reshard_state_dict",
]

_HOME = {
    "AbortedError": "errors",
    "CallCounters": "base.observe",
    "Counters": "base.observe",
    "DeadlineExceededError": "errors",
    "Handle": "transfers.handle",
    "Host": "topology",
    "Layout": "layout",
    "LayoutError": "errors",
    "LocalCopy": "planning.plan",
    "MeshcastError": "errors",
    "Nic": "topology",
    "PairCounters": "base.observe",
    "PeerLostError": "errors",
    "Plan": "planning.plan",
    "PlanCacheInfo": "planning.plan",
    "PlanMismatchError": "errors",
    "Problem": "planning.plan",
    "ReshardedState": "resharding.state_run",
    "Resharder": "resharding.resharder",
    "StateResharder": "resharding.state_dict",
    "Task": "planning.plan",
    "TensorMap": "resharding.tensor_map",
    "TensorSpec": "spec",
    "Topology": "topology",
    "Transfer": "planning.plan",
    "TransferStats": "transfers.handle",
    "WeightProgress": "resharding.weight_sync",
    "WeightStats": "resharding.weight_sync",
    "WeightSync": "resharding.weight_sync",
    "backward": "resharding.autograd",
    "counters": "base.observe",
    "dump_flight_record": "base.observe",
    "enable_dtensor_redistribute": "resharding.redistribute",
    "flight_record": "base.observe",
    "measure_topology": "resharding.measure",
    "plan": "planning.plan",
    "plan_cache_clear": "planning.plan",
    "plan_cache_info": "planning.plan",
    "plan_many": "planning.plan",
    "prepare": "groups.parent",
    "reshard": "resharding.reshard",
    "reshard_": "resharding.reshard",
    "reshard_local": "resharding.reshard",
    "reshard_many": "resharding.reshard",
    "reshard_state_dict": "resharding.state_dict",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

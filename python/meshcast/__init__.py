"""meshcast moves sharded tensors from one device mesh to another by chunk-pipelined multicast.

Importing it registers the c10d backend "meshcast" and the operator torch.ops.meshcast.reshard; it opens no
socket, starts no thread and changes nothing else in torch. Public names are loaded when they are first used:
torch.distributed.tensor alone takes the better part of a second.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ._build_check import check_torch
from ._version import __version__

check_torch(torch.__version__, torch.version.cuda)  # before anything loads _C

from . import backend, observe, ops  # noqa: E402

backend.register()
ops.register()
observe.set_up()

if TYPE_CHECKING:
    from .autograd import backward
    from .discovery import measure_topology
    from .errors import (
        AbortedError,
        DeadlineExceededError,
        LayoutError,
        MeshcastError,
        PeerLostError,
        PlanMismatchError,
    )
    from .in_place import reshard_
    from .layout import Layout
    from .local import reshard_local
    from .many import reshard_many
    from .observe import dump_flight_record, flight_record
    from .plan import Plan, plan, plan_cache_clear, plan_cache_info, plan_many
    from .prepare import prepare
    from .redistribute import enable_dtensor_redistribute
    from .reshard import reshard
    from .resharder import Resharder
    from .spec import TensorSpec
    from .state_dict import reshard_state_dict
    from .topology import Topology

__all__ = [
    "AbortedError",
    "DeadlineExceededError",
    "Layout",
    "LayoutError",
    "MeshcastError",
    "PeerLostError",
    "Plan",
    "PlanMismatchError",
    "Resharder",
    "TensorSpec",
    "Topology",
    "__version__",
    "backward",
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
    "DeadlineExceededError": "errors",
    "Layout": "layout",
    "LayoutError": "errors",
    "MeshcastError": "errors",
    "PeerLostError": "errors",
    "Plan": "plan",
    "PlanMismatchError": "errors",
    "Resharder": "resharder",
    "TensorSpec": "spec",
    "Topology": "topology",
    "backward": "autograd",
    "dump_flight_record": "observe",
    "enable_dtensor_redistribute": "redistribute",
    "flight_record": "observe",
    "measure_topology": "discovery",
    "plan": "plan",
    "plan_cache_clear": "plan",
    "plan_cache_info": "plan",
    "plan_many": "plan",
    "prepare": "prepare",
    "reshard": "reshard",
    "reshard_": "in_place",
    "reshard_local": "local",
    "reshard_many": "many",
    "reshard_state_dict": "state_dict",
}


class _Package(ModuleType):
    """Some functions share the name of the module that holds them. Importing that module binds its name in
    the package; this keeps the function there, whoever imported the module and when."""

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, ModuleType) and _HOME.get(name) == name:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'meshcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

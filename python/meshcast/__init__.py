"""meshcast moves sharded tensors from one device mesh to another by chunk-pipelined multicast.

Importing it registers the c10d backend "meshcast"; it opens no socket, starts no thread and changes nothing else in torch.
"""

from __future__ import annotations

import torch

from ._build_check import check_torch
from ._version import __version__

check_torch(torch.__version__)  # before anything loads _C

# Not lazy: importing the submodule `plan` later would put the module in the place of the function.
from .errors import (  # noqa: E402
    AbortedError,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PeerLostError,
    PlanMismatchError,
)
from .layout import Layout  # noqa: E402
from .plan import Plan, plan, plan_cache_clear, plan_cache_info, plan_many  # noqa: E402
from .topology import Topology  # noqa: E402

__all__ = [
    "AbortedError",
    "DeadlineExceededError",
    "Layout",
    "LayoutError",
    "MeshcastError",
    "PeerLostError",
    "Plan",
    "PlanMismatchError",
    "Topology",
    "__version__",
    "plan",
    "plan_cache_clear",
    "plan_cache_info",
    "plan_many",
]

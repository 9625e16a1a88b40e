"""StateResharder: one kind of reshard_state_dict, compiled once and run again and again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import Unpack

from ..groups.parent import parent_group, seconds
from ..transfers.handle import Handle
from ..transfers.transfer import Call
from .state_again import Repeated
from .state_arguments import Given
from .state_background import started
from .state_dict import StateOptions, Where
from .state_kept import Known
from .state_results import Memory, ReshardedState
from .state_run import Conversation, conversation

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["StateResharder"]


class StateResharder:
    """reshard_state_dict for calls that differ in nothing but their values.

    Constructed by every rank of `group`, and run by all of them in one order with their other calls. The
    first run compiles; later ones look nothing up, and what was compiled lives as long as the
    StateResharder. A run with tensors of other names, shapes, dtypes or layouts is right all the same, and
    is compiled anew.

    Args:
        destinations, options: as for reshard_state_dict.
        reuse_output: every run writes into the tensors of the first result.
        group, timeout: as for reshard_state_dict; the timeout is for each run.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        send = meshcast.StateResharder({"w": (serving, [Shard(1)])}, reuse_output=True)
        for step in (1, 2):
            weights = {"w": distribute_tensor(torch.full((4, 2), float(step)), training, [Shard(0)])}
            received = send.run(weights if dist.get_rank() in (0, 1) else None, version=step)
            assert bool((received["w"].to_local() == step).all())
    """

    def __init__(
        self,
        destinations: Mapping[str, Where] | None = None,
        *,
        reuse_output: bool = False,
        group: dist.ProcessGroup | None = None,
        timeout: float | timedelta | None = None,
        **options: Unpack[StateOptions],
    ) -> None:
        self._parent = parent_group(group, "StateResharder")
        self._limit = seconds(timeout, self._parent.timeout)
        self._calls = Repeated(self._parent.rank, Given(None, destinations, **options))
        self._memory = Memory() if reuse_output else None
        self._names = len(destinations or ())

    def __repr__(self) -> str:
        return f"<StateResharder of {self._names} name{'' if self._names == 1 else 's'}>"

    def run(
        self,
        state_dict: Mapping[str, Any] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        version: int | None = None,
    ) -> ReshardedState:
        """One call. state_dict, out, version, the result and the errors: as for reshard_state_dict."""
        deadline = time.monotonic() + self._limit
        prepared = self._calls.prepared(state_dict, out, version, self._memory)
        result = ReshardedState()
        self._calls.run(conversation(self._parent), prepared, deadline, result, self._memory)
        return result

    def start(
        self,
        state_dict: Mapping[str, Any] | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        version: int | None = None,
        copy: bool = False,
    ) -> Handle[ReshardedState]:
        """run() that returns at once; handle.wait() gives the result. copy: of what this rank holds, which
        may be changed from then on."""
        prepared = self._calls.prepared(state_dict, out, version, self._memory)

        def run(talk: Conversation, deadline: float, result: ReshardedState) -> tuple[Known, list[Call]]:
            return self._calls.run(talk, prepared, deadline, result, self._memory)

        return started(self._parent, prepared, self._limit, run, copy=copy)

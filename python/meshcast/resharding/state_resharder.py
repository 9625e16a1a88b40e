"""StateResharder: calls of reshard_state_dict that differ in their values alone. What they have in common is
checked and compiled once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from ..groups.parent import parent_group, seconds
from ..transfers.handle import Handle
from ..transfers.transfer import Call
from .state_arguments import Given, StateCall
from .state_batches import Batch, Known
from .state_dict import StateOptions, Where
from .state_entries import carried, is_carried, local_of, same_memory
from .state_run import Conversation, Memory, Prepared, ReshardedState, conversation, started

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Repeated", "StateResharder", "likeness"]


class Repeated:
    """The calls of one rank. One of another kind than the last is right all the same, and compiled anew."""

    def __init__(self, rank: int, given: Given) -> None:
        """given: what all calls have in common; its state and out are not read."""
        self._rank = rank
        self._given = given
        self._call: StateCall | None = None  # the last one of its kind, without its tensors
        self._key: Any = None
        self._like: dict[str, Any] = {}  # of its entries, by their names in the state_dict
        self._outs: dict[str, Any] = {}
        self._known: dict[int, Known] = {}  # by conversation: calls beside others have their own

    def prepared(
        self, state: Any, out: Any, version: Any, memory: Memory | None, wrong: Exception | None = None
    ) -> Prepared:
        """One call, checked. memory: that it will arrive in. wrong: what was found wrong before."""
        given = replace(self._given, state=state, out=out)
        if wrong is not None:
            return Prepared(self._rank, given, version, wrong=wrong)
        again = self._again(state, out)
        if again is not None:
            written = [] if memory is None else list(memory.tensors.values())
            return Prepared(self._rank, given, version, (again, self._key), written)
        prepared = Prepared(self._rank, given, version)
        if prepared.call is not None:
            self._key = prepared.key
            self._known.clear()
            if memory is not None:
                memory.forget()
            # Weights that it has sent are none of its business any more.
            self._call = replace(prepared.call, tensors={}, outs={})
            self._like = {old: likeness(x) for old, x in (state or {}).items() if not is_carried(x)}
            self._outs = {name: _place(x) for name, x in prepared.call.outs.items()}
        return prepared

    def run(
        self,
        talk: Conversation,
        prepared: Prepared,
        deadline: float,
        result: ReshardedState,
        memory: Memory | None = None,
        moving: Callable[[], None] = lambda: None,
        moves: Callable[[Sequence[Batch]], None] = lambda _: None,
    ) -> tuple[Known, list[Call]]:
        """Runs a call, as Conversation.run does."""
        same = prepared.key is self._key and prepared.key is not None
        known = self._known.get(id(talk)) if same else None
        known, made = talk.run(prepared, deadline, result, known, memory if same else None, moving, moves)
        if same:
            self._known[id(talk)] = known
        return known, made

    def _again(self, state: Any, out: Any) -> StateCall | None:
        """The last call with other tensors; None where it is of another kind."""
        call = self._call
        if call is None or not isinstance(state or {}, Mapping) or not isinstance(out or {}, Mapping):
            return None
        state, out = state or {}, out or {}
        tensors = {old: x for old, x in state.items() if not is_carried(x)}
        if {old: likeness(x) for old, x in tensors.items()} != self._like:
            return None
        if {name: _place(x) for name, x in out.items() if name in call.wanted} != self._outs:
            return None
        names = {old: name for name, old in call.keys.items()}
        sent = {names[old]: x for old, x in tensors.items() if names.get(old) in call.here}
        values = {names[old]: carried(x) for old, x in state.items() if old in names and is_carried(x)}
        if values.keys() != call.values.keys() or same_memory(sent.items()) != call.ties:
            return None
        outs = {name: x for name, x in out.items() if name in call.wanted}
        return replace(call, tensors=sent, values=values, outs=outs)


def likeness(x: Any) -> Any:
    """Equal for entries that are described alike."""
    if isinstance(x, DTensor):
        return x._spec
    if isinstance(x, torch.Tensor):
        return x.shape, x.dtype, x.device
    return x  # a spec, which is equal to itself alone, or what is refused


def _place(x: Any) -> Any:
    """Equal for outputs that are one piece of memory."""
    if not isinstance(x, torch.Tensor):
        return x
    local = local_of(x)
    return likeness(x), local.data_ptr(), local.shape, local.stride()


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

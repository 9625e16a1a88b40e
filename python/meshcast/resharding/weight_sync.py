"""WeightSync: versions of a model's weights, pushed by ranks that train and pulled by those that serve."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

from ..base import checks, forks
from ..errors import Caller, DeadlineExceededError, LayoutError, MeshcastError, PlanMismatchError
from ..groups.parent import parent_group, seconds
from ..groups.ready_barrier import Late, ReadyBarrier
from .state_arguments import Given
from .state_dict import StateOptions, Where
from .state_run import ReshardedState
from .weight_side import Buffers, Receiver, Side, State, WeightProgress, WeightStats, as_call_of

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["WeightSync"]

_OP = "WeightSync"
_JOIN = 2.5  # seconds that a version on its way gets when this rank ends
_LARGEST = (1 << 62) - 1  # version


class WeightSync:
    """Versions of a model's weights, from ranks that train to ranks that serve, while both go on.

    Constructed by every rank of `group`, each when it likes: nobody waits for another there. Ranks that give
    a state push; the others receive. A push and what it moves are beside all other calls of the process
    group: connections are its own, and no order with other calls is needed.

    **push** reads the tensors of the state where they are by then and keeps no copy. It first makes sure,
    through the rendezvous store, that every rank is ready, and only then moves anything.

    **With two buffers** a thread of each receiving rank writes a version into the buffer that is not served.
    Such a rank is always ready, unless it is stuck or frozen. A version that nobody has pulled gives way to
    the next one. **With one buffer** `pull` itself writes into the weights that are served, so a push waits
    for every such rank to be in `pull`. Each rank has as many buffers as it likes. A rank that pushes and is
    in a destination as well receives in its `push`. Onto a GPU the thread writes behind what the stream of
    the constructor's caller holds: read the weights on that stream.

    Args:
        state: {name: entry} of a rank that pushes, as the state_dict of reshard_state_dict; None elsewhere.
            Or a module, whose state_dict() each push sends, or a function that returns a mapping, which the
            constructor and each push call. Entries that share the memory of a module's parameters or buffers,
            as those of its state_dict() do, follow these into other memory: where the module is offloaded and
            loaded, converted, or assigned a checkpoint. If dtypes or shapes change by that, all ranks agree
            on it in the push.
        destinations, options: as for reshard_state_dict.
        group: whose ranks all take part.
        buffers: 1 or 2 copies of what this rank receives. They are made when they are first needed.
        timeout: seconds that a push may take, half of them until the others are ready, and that a pull waits
            for a version; by default the group's.
        out: with one buffer, {name: tensor} to receive into, as for reshard_state_dict: the weights of a
            model that serves. A module, a function, and entries that share a module's memory: as for `state`.

    Raises:
        LayoutError: a wrong argument. The other ranks then get PlanMismatchError from their next push or
            pull.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        training, serving = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
        trains = dist.get_rank() in (0, 1)
        weights = {"w": distribute_tensor(torch.zeros(4, 2), training, [Shard(0)])}
        sync = meshcast.WeightSync(weights if trains else None, {"w": (serving, [Shard(1)])})
        for version in (1, 2):
            if trains:
                weights["w"].add_(1)  # a step of the optimiser
                sync.push(version)
            else:
                newest = sync.pull(version)  # or a later one
                assert bool((sync.state["w"].to_local() == newest).all())
        sync.close()
    """

    def __init__(
        self,
        state: State | None,
        destinations: Mapping[str, Where] | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        buffers: int = 2,
        timeout: float | timedelta | None = None,
        out: State | None = None,
        **options: Unpack[StateOptions],
    ) -> None:
        self._born = forks.count
        self._parent = parent = parent_group(group, _OP)
        self._name = f"WeightSync {next(parent.extras.setdefault(_OP, itertools.count()))}"
        self._turn = threading.Lock()  # of pushes and of pulls into the only buffer
        self._closed = False
        self._receiver: Receiver | None = None
        wrong: Exception | None = None
        limit, count = parent.timeout, 1
        try:
            limit = seconds(timeout, parent.timeout)
            count = checks.integer(f"{_OP}: buffers", buffers, 1, 2)
            if out is not None and count == 2:
                raise LayoutError(f"{_OP}: out= has the only buffer; pass buffers=1 with it")
            given = Given(None, destinations, **options)
        except Exception as error:
            wrong, given = as_call_of(_OP, Caller(_OP, parent.rank).typed(error)), Given(None, None)
        twin = parent.twin(self._name)
        ranks, within = list(parent.ranks), twin.full_name
        barrier = ReadyBarrier(self._name, twin.store, ranks, parent.rank, limit, within)
        self._buffers = Buffers(count, parent.rank)
        self._limit, self._one = limit, count == 1
        self._side = Side(twin, barrier, given, state, out, self._buffers, limit)
        self._side.ask(lambda: barrier.open(state is not None), limit, "connecting with the rendezvous store")
        try:
            if wrong is not None:
                raise wrong
            on_gpu = self._side.check()
            if state is None and not self._one:
                self._receiver = Receiver(self._side, on_gpu)
                self._receiver.start()
        except MeshcastError as error:
            self._side.end(PlanMismatchError, f"rank {parent.rank} refused its arguments: {error}", error)
            raise
        receiver, side = self._receiver, self._side

        def end(why: str) -> None:
            side.leave(why)
            if receiver is not None:
                receiver.join(_JOIN)

        parent.at_end[self._name] = partial(end, "has destroyed its process group")
        weakref.finalize(self, _dropped, side, parent.at_end, self._name).atexit = False

    def push(self, version: int, state: State | None = None) -> None:
        """Sends the state as it is now to every rank that asks for it. Returns once it is whole there: the
        tensors may be changed again. They may not be while it runs. Who must have this very version over
        there pulls it by its number: what is newest may change a moment later.

        version: 0 or more, larger than that of every earlier push, and the same on all ranks that push.
        state: sent in place of the one before, by this push and later ones.

        Raises:
            DeadlineExceededError: a rank was not ready within half of the limit; the error names it. Nothing
                was moved, the older versions stay as they are, and a later push may succeed.
            PlanMismatchError, LayoutError: versions, names, tensors or destinations do not fit, on all ranks
                alike. Nothing was moved, and a later push may succeed.
            MeshcastError: the state was changed while it travelled: no rank has this version.
            PeerLostError, AbortedError, or DeadlineExceededError of a transfer: the WeightSync has failed on
                all ranks, which keep what they serve.
        """
        self._check("push")
        if not self._side.pushes:
            raise LayoutError(
                f"{_OP}.push: rank {self._parent.rank} gave no state, so it receives: call pull()",
                rank=self._parent.rank,
                op=_OP,
            )
        with self._taking_turns("push"):
            self._buffers.check_open()
            try:
                self._side.pushed(version, state)
            except Late as late:
                raise late.error from None

    def pull(self, version: int | None = None) -> int:
        """Makes the newest whole version current, and returns its number. `state` has its tensors.

        With two buffers it waits where there is no version at all, or none as new as `version`. The tensors
        of the version that was current before are then written anew by later pushes. With one buffer it takes
        part in the next push, unless what is current is as new as `version`.

        Raises:
            DeadlineExceededError: there was no such version within the limit.
            PlanMismatchError, LayoutError, MeshcastError: a push was refused or was torn on the way, told
                once. With two buffers, and where it was refused, what is current stays so.
            PeerLostError, AbortedError: the WeightSync has failed or was closed, here or on another rank.
        """
        self._check("pull")
        begin = time.monotonic()
        wanted = None if version is None else checks.integer(f"{_OP}: version", version, 0, _LARGEST)
        deadline = begin + self._limit
        if self._side.pushes or not self._one:
            return self._buffers.take(wanted, deadline, self._side.look)
        with self._taking_turns("pull"):
            current = self._buffers.version()
            while current is None or wanted is None or current < wanted:
                self._buffers.check_open()
                if self._pulled(begin, deadline):
                    current = self._buffers.take(None, deadline)
                    wanted = current if wanted is None else wanted
            return current

    @property
    def state(self) -> ReshardedState:
        """The current version: {name: tensor} as reshard_state_dict returns it, with its `version`. It is not
        written while it is current, except with one buffer.

        Raises MeshcastError where nothing was pulled yet, and with one buffer where a push has begun to write
        and did not end: the weights are torn, until a later pull has succeeded."""
        return self._buffers.state()

    @property
    def version(self) -> int | None:
        """The number of the current version; None where `state` raises."""
        return self._buffers.version()

    @property
    def stats(self) -> WeightStats | None:
        """Bytes and seconds of the last version that this rank pushed, or received whole. None before."""
        return self._buffers.stats

    @property
    def progress(self) -> WeightProgress | None:
        """Bytes of the version that is on its way, to or from this rank; None while nothing moves. For any
        thread, while another is in push or pull."""
        return self._side.progress()

    def __repr__(self) -> str:
        return f"<{self._name} of group {self._parent.name!r}{', closed' if self._closed else ''}>"

    def close(self) -> None:
        """Ends it on all ranks: pushes, and pulls that would have to wait, raise AbortedError. What is
        current can be used on. Waits a few seconds at most, for a version that is on its way."""
        forks.check(self._born, f"{_OP}.close")
        if self._closed:
            return
        self._closed = True
        self._side.leave("has closed it")
        limit = time.monotonic() + _JOIN
        if self._receiver is not None:
            self._receiver.join(_JOIN)
        self._parent.at_end.pop(self._name, None)
        self._parent.drop_twin(self._name, limit)
        if self._receiver is not None:  # a version that was on its way for longer is aborted by now
            self._receiver.join(_JOIN)

    def _check(self, what: str) -> None:
        forks.check(self._born, f"{_OP}.{what}")

    @contextmanager
    def _taking_turns(self, what: str) -> Iterator[None]:
        if not self._turn.acquire(timeout=self._limit):
            raise DeadlineExceededError(
                f"{_OP}.{what}: another thread of rank {self._parent.rank} was at it for {self._limit:g} s",
                rank=self._parent.rank,
                op=_OP,
                phase="wait",
                limit=self._limit,
            )
        try:
            yield
        finally:
            self._turn.release()

    def _pulled(self, begin: float, deadline: float) -> bool:
        """Tries to pull a version. Returns whether one has come; else there is time for another try."""
        try:
            self._side.pulled(begin, deadline)
        except Late as late:
            if time.monotonic() >= deadline:
                raise late.error from None
            return False
        return True


def _dropped(side: Side, at_end: dict[str, Any], name: str) -> None:
    """Nobody has closed it. Its connections end with the process group: this may be any thread."""
    at_end.pop(name, None)
    side.leave("has dropped it")

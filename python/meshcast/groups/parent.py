"""State that meshcast keeps for each process group of the user: the private groups made inside it, and what
they share; and the errors of a public call before it has begun, which the other ranks of the call raise as
well."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _C
from ..base import checks, forks, observe
from ..base.observe import Flight, Members, log
from ..errors import AbortedError, Caller, LayoutError, MeshcastError, mark_reported, was_reported
from ..layout import Layout
from .private import NO_LANE, Cache, PrivateGroup

__all__ = [
    "StoreConnection",
    "ParentGroup",
    "known_parents",
    "parent_group",
    "prepare",
    "raise_refused",
    "seconds",
]

_KEPT_CALLS = 1024  # kinds of call that are known without a check
_LONGEST = 365 * 86400.0  # seconds: more than the clocks of all threads can count
_DRAIN_LIMIT = 2.0  # seconds that transfers in flight get when their process group ends
_CALLBACK_LIMIT = 1.0  # seconds that callbacks get when the process ends, at least


def seconds(timeout: float | timedelta | None, default: float) -> float:
    """A user's timeout as seconds. Raises LayoutError unless it is positive."""
    if timeout is None:
        return default
    value = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not value > 0:
        raise LayoutError(f"timeout must be positive, found {timeout!r}")
    return min(value, _LONGEST)


class StoreConnection:
    """A connection of one's own, since a wait in the store blocks every other user of the same connection. It
    is made where it is first used: that may take as long as the store's limit.

    of_job: the store is one of this process's job, whose id it gets there.
    """

    def __init__(self, store: Any, prefix: str, *, of_job: bool = False) -> None:
        # Not torch's own object, which ends its process group when it is destroyed.
        self._store = dist.PrefixStore(prefix, store)
        self._of_job = of_job
        self._opened: dist.Store | None = None
        self._lock = threading.Lock()

    def __call__(self) -> dist.Store:
        """Raises ConnectionRefusedError where the process of the store has exited."""
        with self._lock:
            if self._opened is None:
                _refuse_if_gone(self._store)
                opened = self._store.clone()  # type: ignore[attr-defined]
                if self._of_job:
                    join_job(opened)
                self._opened = opened
            return self._opened


def join_job(store: Any) -> None:
    """Processes that share a store are of one job, and have an id of it in their flight records: one question
    to the store, which no other rank has to answer. Groups inside others share their store."""
    root = _root(store)
    # The agent of torchrun keeps its store when it starts all ranks again. Their records are others then.
    key = f"meshcast/job/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '')}"
    observe.join_job(root.compare_set(key, "", os.urandom(8).hex()).decode())


def _root(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _refuse_if_gone(store: Any) -> None:
    """Torch would try again and again until the store's own limit."""
    store = _root(store)
    if isinstance(store, dist.TCPStore):
        try:
            # As bytes: for a text, Python would load its tables of international names, which takes 2 ms.
            address: Any = (store.host.encode(), store.port)
            socket.create_connection(address, 1.0).close()
        except ConnectionRefusedError as error:
            raise ConnectionRefusedError(f"{store.host}:{store.port} refuses connections") from error
        except TimeoutError:
            return  # it is slow, or disconnected: the caller's limit decides


class ParentGroup:
    """A process group of the user and the private groups made inside it."""

    def __init__(
        self, ranks: Sequence[int], rank: int, timeout: float, name: str, store: Callable[[], dist.Store]
    ) -> None:
        """store: connects where that has not been done."""
        self.ranks = frozenset(ranks)
        self.rank = rank
        self.timeout = timeout
        self.name = self.full_name = name  # full_name: of a twin, with its own name
        self.closed = False
        self.place = (-1, 0)  # rank and size of the process group as it was met; `reconfigure` changes them
        self.compiled: Cache[Any, Any] = Cache(_KEPT_CALLS)  # by kind of call, of resharding/compiled.py
        self.extras: dict[str, Any] = {}  # objects that single operations keep
        self._store = store
        self._groups: dict[tuple[int, ...], PrivateGroup] = {}
        self._known = _C.KnownOffers()  # of ranks that met in one of these
        self._fork_count = forks.count
        self._groups_lock = threading.Lock()  # two threads must not make one group twice: it meets once
        self._twins: dict[str, ParentGroup] = {}
        # Calls that this rank refused, of which it is not known whose they were.
        self.refusals = _C.OpenRefusals(sorted(ranks), rank, store, self.private)
        self.at_end: dict[str, Callable[[], None]] = {}  # by name: called when it ends; never block for long

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> ParentGroup:
        store = StoreConnection(c10d._get_process_group_store(group), "meshcast", of_job=True)
        ranks, rank, timeout = dist.get_process_group_ranks(group), dist.get_rank(), _group_timeout(group)
        parent = cls(ranks, rank, timeout, group.group_name, store)
        parent.place = (ranks.index(rank) if rank in ranks else -1, len(ranks))
        return parent

    def twin(self, name: str) -> ParentGroup:
        """The same ranks with private groups of their own, whose calls need no order with those of this one.
        They end together."""
        with self._groups_lock:
            found = self._twins.get(name)
            if found is None:
                found = ParentGroup(
                    tuple(self.ranks),
                    self.rank,
                    self.timeout,
                    self.name,
                    lambda: dist.PrefixStore(name, self._store()),
                )
                found.full_name = f"{self.full_name}/{name}"
                found.closed = self.closed
                found._known = self._known
                self._twins[name] = found
            return found

    def expect(self, contacts: Mapping[int, str]) -> None:
        """Watches these ranks before they come, by what their `Contact` says of them."""
        self._known.add(dict(contacts))

    def store(self) -> dist.Store:
        """The connection of its private groups, which no one waits in."""
        return self._store()

    def drop_twin(self, name: str, limit: float) -> None:
        """Ends a twin that is not needed any longer. limit: as for close()."""
        with self._groups_lock:
            twin = self._twins.pop(name, None)
        if twin is not None:
            twin.close(limit)

    def private(self, ranks: Sequence[int]) -> PrivateGroup:
        """The private group of these global ranks, ascending and unique. Raises LayoutError for ranks outside
        the parent group."""
        key = tuple(ranks)
        group = self._groups.get(key)
        if group is None:
            outside = [rank for rank in key if rank not in self.ranks]
            if outside:
                raise LayoutError(
                    f"ranks {outside} are not in process group {self.name!r}, which has ranks "
                    f"{_brief(self.ranks)}; pass group= a group that holds both meshes"
                )
            with self._groups_lock:
                group = self._groups.get(key)
                if group is None:
                    group = self._groups[key] = PrivateGroup(
                        self._store, key, self.rank, self.timeout, self._known, self.refusals, self.full_name
                    )
        return group

    def check_place(self, group: dist.ProcessGroup, op: str) -> None:
        """Raises LayoutError for a group that was reconfigured to other ranks: torch names those of before,
        on which meshes and layouts stand."""
        place = (group.rank(), group.size())
        if place != self.place:
            raise Caller(op, self.rank).error(
                LayoutError,
                f"process group {self.name!r} was reconfigured: this process is rank {place[0]} of "
                f"{place[1]} in it, but torch.distributed.get_process_group_ranks names {self.place[1]}, "
                f"this one at {self.place[0]}; make a new group of its members and use that",
            )

    def check_process(self, op: str) -> None:
        """Raises AbortedError in a forked child, which has no part in the group."""
        forks.check(self._fork_count, op)

    def abort(self, reason: str) -> None:
        """Fails the calls of all its private groups, on all ranks. Never blocks."""
        for group in list(self._groups.values()):
            group.abort(reason)

    def close(self, limit: float | None = None) -> None:
        """limit: by time.monotonic(), until when transfers in flight may finish."""
        self.closed = True
        if self._fork_count != forks.count:
            return
        limit = time.monotonic() + _DRAIN_LIMIT if limit is None else limit
        self.refusals.close()
        groups, self._groups = list(self._groups.values()), {}
        self.compiled.clear()
        self.extras.clear()
        for group in groups:
            group.close(limit)
        for twin in self._twins.values():
            twin.close(limit)
        self._twins.clear()
        ends, self.at_end = list(self.at_end.values()), {}
        for end in ends:
            end()


_parents: weakref.WeakKeyDictionary[dist.ProcessGroup, ParentGroup] = weakref.WeakKeyDictionary()
_parents_lock = threading.Lock()
_exit_registered = False


def parent_group(group: dist.ProcessGroup | None, op: str) -> ParentGroup:
    """Returns the state of a process group; None: of the default one. A destroyed group takes its private
    groups along, and one made in its place starts again."""
    if not dist.is_available() or not dist.is_initialized():
        raise MeshcastError(f"{op}: no process group; call torch.distributed.init_process_group first", op=op)
    key = dist.group.WORLD if group is None else group
    if not isinstance(key, dist.ProcessGroup):  # new_group gives a number to ranks outside
        raise LayoutError(
            f"{op}: group {checks.shown(group)} is not a process group that this rank belongs to", op=op
        )
    known = _parents.get(key)
    if known is not None:
        known.check_process(op)
        if not known.closed:
            known.check_place(key, op)
            return known
    forks.check_group(key, op)
    with _parents_lock:
        if key not in c10d._world.pg_map:
            raise LayoutError(
                f"{op}: group {checks.shown(group)} is not a process group that this rank belongs to", op=op
            )
        parent = _parents.get(key)
        if parent is None or parent.closed:
            parent = ParentGroup.of(key)
            parent.check_place(key, op)
            _parents[key] = parent
            # torch drops its store of a group when it destroys the group, but may keep the group itself.
            weakref.finalize(c10d._get_process_group_store(key), parent.close).atexit = False
            _register_exit()
        return parent


def known_parents() -> list[ParentGroup]:
    """Returns the state of all process groups that meshcast has been used with."""
    return [parent for parent in list(_parents.values()) if not parent.closed]


def _in_child() -> None:
    """The lock may have been held by a thread that a forked child does not have."""
    global _parents_lock
    _parents_lock = threading.Lock()


os.register_at_fork(after_in_child=_in_child)


def _register_exit() -> None:
    global _exit_registered
    if not _exit_registered:
        _exit_registered = True
        atexit.register(_close_all)


def _close_all() -> None:
    limit = time.monotonic() + _DRAIN_LIMIT
    for parent in list(_parents.values()):
        parent.close(limit)
    # Callbacks need Python. One that stands for longer is left to its thread.
    _C.finish_callbacks(max(limit - time.monotonic(), _CALLBACK_LIMIT))


def _group_timeout(group: dist.ProcessGroup) -> float:
    """The group's own timeout in seconds, looked for below the debug wrapper and inside the meshcast backend;
    torch's default where a backend has none."""
    backend: Any
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # a group for GPUs alone
        backend = group._get_backend(torch.device("cuda"))
    backend = getattr(backend, "wrapped_pg", backend)
    backend = getattr(backend, "inner", backend)
    timeout = getattr(getattr(backend, "options", None), "_timeout", dist.default_pg_timeout)
    return float(timeout.total_seconds())


def _brief(ranks: frozenset[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered[-1] - ordered[0] + 1 == len(ordered):
        return f"{ordered[0]}..{ordered[-1]}"
    return str(ordered)


def raise_refused(
    error: Exception,
    op: str,
    places: Iterable[Any],
    group: Any = None,
    timeout: float | timedelta | None = None,
    *,
    prepares: bool = False,
    lost: Collection[int] = (),
) -> NoReturn:
    """Raises what a call raises here that got `error` from its arguments, and notifies the other ranks,
    unless they know.

    places: what was given for sources and destinations (tensors, specs, meshes, layouts, lists of ranks), in
    whatever state: from them the ranks of the call are known. Where one cannot be read, the ranks that wait
    for this one are looked for. group, timeout: as they were given. lost: ranks of the places
    that are in no call any longer.
    """
    found = error
    if not was_reported(error) and dist.is_available() and dist.is_initialized():
        found = Caller(op, dist.get_rank()).typed(error)
        mark_reported(found)
        Flight(op, Members(""), dist.get_rank()).failed(found)
        try:
            _tell(found, op, places, group, timeout, prepares, lost)
        except Exception as failed:  # this rank's error is worth more than the obstacle to telling it
            log.warning("%s: the other ranks could not be notified of an error: %s", op, failed)
    elif not was_reported(error):
        found = Caller(op).typed(error)
    if found is error:
        raise error
    raise found from error


def _tell(
    error: Exception,
    op: str,
    places: Iterable[Any],
    group: Any,
    timeout: Any,
    prepares: bool,
    lost: Collection[int],
) -> None:
    parents, sure = _candidates(group, op)
    if not parents:
        return
    limit = _limit(timeout, parents[0])
    known: set[int] = set()
    complete = True
    for place in places:
        # A list of numbers is ranks for prepare() alone.
        ranks = None if isinstance(place, list) and not prepares else _ranks_of(place)
        complete = complete and ranks is not None
        known.update(ranks or ())
    known.difference_update(lost)
    parent = parents[0]
    if complete and known and sure:
        if parent.rank not in known:
            return  # no rank waits for it
        if parent.ranks.issuperset(known):
            lane = NO_LANE if prepares else 0
            parent.private(sorted(known)).refuse(lane, error, limit).wait()
            return
        known = set()
    where = [each.refusals for each in parents]
    _C.OpenRefusals.refuse(str(error), sorted(known), prepares, limit, where)


def _candidates(group: Any, op: str) -> tuple[list[ParentGroup], bool]:
    """Returns the process groups in which ranks may wait for a call with this group, and whether that is
    sure. None in a forked child, which has no part in any, and for a group without this rank."""
    try:
        return [parent_group(group, op)], True
    except AbortedError:
        return [], False
    except Exception:  # whatever was given for it
        if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
            return [], False
        return [parent for parent in known_parents() if parent._fork_count == forks.count], False


def _limit(timeout: Any, parent: ParentGroup) -> float:
    try:
        return seconds(timeout, parent.timeout)
    except Exception:
        return parent.timeout


def _ranks_of(place: Any) -> set[int] | None:
    """Global ranks; None where they cannot be read."""
    try:
        if isinstance(place, Layout):
            return set(place.ranks)
        if isinstance(place, list):
            return {rank for each in place for rank in _each_rank(each)}
        mesh = place if isinstance(place, DeviceMesh) else None
        mesh = mesh or (place.device_mesh if isinstance(place, DTensor) else place.mesh)
        return {int(rank) for rank in mesh.mesh.flatten().tolist()} if isinstance(mesh, DeviceMesh) else None
    except Exception:
        return None


def _each_rank(place: Any) -> set[int]:
    if isinstance(place, int) and place >= 0:
        return {place}
    ranks = _ranks_of(place)
    if ranks is None:
        raise LayoutError("no ranks")
    return ranks


_OP = "prepare"


def prepare(
    meshes: DeviceMesh | Sequence[DeviceMesh] | Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Connects the ranks of all the meshes with each other, as the first call between these meshes would do.

    Optional, and a collective of those ranks; others may skip it. Blocks until every rank is connected.

    Args:
        meshes: those of a later call, source and destination together, or simply its global ranks.
        group: process group that holds these ranks; None for the default group.
        timeout: seconds or timedelta for the call; None for the group's.

    Raises:
        LayoutError: no ranks, or ranks outside `group`.
        DeadlineExceededError: names the ranks that did not come.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        meshcast.prepare([0, 1, 3])
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = meshcast.reshard(x, target, [Replicate()])  # finds its connections there
    """
    try:
        parent = parent_group(group, _OP)
        limit = seconds(timeout, parent.timeout)
        ranks = sorted(set(_ranks(meshes)))
        if not ranks:
            raise LayoutError("no ranks; give the meshes of a later call, or its ranks")
        private = parent.private(ranks)
    except Exception as error:
        raise_refused(error, _OP, [meshes], group, timeout, prepares=True)
    if parent.rank in ranks:
        private.connect(limit)


def _ranks(given: Any) -> Iterable[int]:
    if hasattr(given, "mesh_dim_names"):  # a DeviceMesh
        return [int(rank) for rank in given.mesh.flatten().tolist()]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LayoutError(f"expected meshes or global ranks, found {checks.shown(given)}")
    found: list[int] = []
    for item in given:
        if hasattr(item, "mesh_dim_names"):
            found.extend(_ranks(item))
        else:
            found.append(checks.integer("rank", item, 0, (1 << 31) - 1))
    return found

"""Errors of a public call on one rank before it has begun: the other ranks of the call raise as well."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _C
from ..base import checks, forks
from ..base.observe import Flight, Members, log
from ..errors import AbortedError, Caller, LayoutError, mark_told, was_told
from ..layout import Layout
from .parent import ParentGroup, known_parents, parent_group, seconds

if TYPE_CHECKING:
    from .private import PrivateGroup

__all__ = ["prepare", "raise_refused"]


def raise_refused(
    error: Exception,
    op: str,
    places: Iterable[Any],
    group: Any = None,
    timeout: float | timedelta | None = None,
    *,
    prepares: bool = False,
    private: PrivateGroup | None = None,
    lost: Collection[int] = (),
) -> NoReturn:
    """Raises what a call raises here that got `error` from its arguments, and tells the other ranks, unless
    they know.

    places: what was given for sources and destinations (tensors, specs, meshes, layouts, lists of ranks), in
    whatever state; from them, or as `private`, the ranks of the call are known. Where one cannot be read, the
    ranks that wait for this one are looked for. group, timeout: as they were given. lost: ranks of the places
    that are in no call any more.
    """
    found = error
    if not was_told(error) and dist.is_available() and dist.is_initialized():
        found = Caller(op, dist.get_rank()).typed(error)
        mark_told(found)
        Flight(op, Members("") if private is None else private.members, dist.get_rank()).failed(found)
        try:
            _tell(found, op, places, group, timeout, prepares, private, lost)
        except Exception as failed:  # this rank's error is worth more than the obstacle to telling it
            log.warning("%s: the other ranks could not be told of an error: %s", op, failed)
    elif not was_told(error):
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
    private: PrivateGroup | None,
    lost: Collection[int],
) -> None:
    parents, sure = _parents(group, op)
    if not parents:
        return
    limit = _limit(timeout, parents[0])
    if private is not None:
        private.refuse(0, error, limit).wait()
        return
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
            return  # nobody waits for it
        if parent.ranks.issuperset(known):
            parent.private(sorted(known), op).refuse_call(error, limit, prepares=prepares).wait()
            return
        known = set()
    where = [each.refusals for each in parents]
    _C.OpenRefusals.refuse(str(error), sorted(known), prepares, limit, where)


def _parents(group: Any, op: str) -> tuple[list[ParentGroup], bool]:
    """Returns the process groups in which ranks may wait for a call with this group, and whether that is
    sure. None in a forked child, which has no part in any, and for a group without this rank."""
    try:
        return [parent_group(group, op)], True
    except AbortedError:
        return [], False
    except Exception:  # whatever was given for it
        if type(group) is int and group == dist.GroupMember.NON_GROUP_MEMBER:
            return [], False
        return [parent for parent in known_parents() if parent._born == forks.count], False


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
            raise LayoutError(f"{_OP}: no ranks; give the meshes of a later call, or its ranks")
        private = parent.private(ranks, _OP)
    except Exception as error:
        raise_refused(error, _OP, [meshes], group, timeout, prepares=True)
    if parent.rank in ranks:
        private.connect(limit)


def _ranks(given: Any) -> Iterable[int]:
    if hasattr(given, "mesh_dim_names"):  # a DeviceMesh
        return [int(rank) for rank in given.mesh.flatten().tolist()]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LayoutError(f"{_OP}: expected meshes or global ranks, found {checks.shown(given)}")
    found: list[int] = []
    for item in given:
        if hasattr(item, "mesh_dim_names"):
            found.extend(_ranks(item))
        else:
            found.append(checks.integer(f"{_OP}: rank", item, 0, (1 << 31) - 1))
    return found

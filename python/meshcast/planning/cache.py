"""The plan cache: least recently used plans go first, bounded by number and by size (len(plan), its hops)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

__all__ = ["PlanCacheInfo", "plan_cache_clear", "plan_cache_info"]

MAX_PLANS = 512
MAX_HOPS = 4_000_000  # of all cached plans together; a hop takes about 36 bytes


class PlanCacheInfo(NamedTuple):
    """Counts since the start or the last `plan_cache_clear`, as `functools.lru_cache` names them, and the
    cached hops."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    hops: int


_lock = threading.Lock()
_plans: OrderedDict[Hashable, Any] = OrderedDict()
_hits = 0
_misses = 0
_hops = 0


def lookup(key: Hashable) -> Any:
    """The plan made for `key`; None if it is not cached any more."""
    global _hits, _misses
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            _misses += 1
        else:
            _hits += 1
            _plans.move_to_end(key)
        return plan


def insert(key: Hashable, plan: Any) -> Any:
    """Caches `plan`. Where two threads planned the same, both get the one that came first."""
    global _hops
    dropped: list[Any] = []  # freed after the lock is released
    with _lock:
        plan = _plans.setdefault(key, plan)
        _plans.move_to_end(key)
        _hops = sum(len(p) for p in _plans.values())
        while len(_plans) > 1 and (len(_plans) > MAX_PLANS or _hops > MAX_HOPS):
            _, oldest = _plans.popitem(last=False)
            _hops -= len(oldest)
            dropped.append(oldest)
    return plan


def plan_cache_info() -> PlanCacheInfo:
    """Hits, misses and size of the plan cache of this process.

    Example::

        meshcast.plan_cache_clear()
        rows, columns = meshcast.Layout([0, 1], [Shard(0)]), meshcast.Layout([2, 3], [Shard(1)])
        first, again = (meshcast.plan((8, 8), "float32", rows, columns) for _ in range(2))
        assert first is again and meshcast.plan_cache_info()[:2] == (1, 1)  # hits, misses
    """
    with _lock:
        return PlanCacheInfo(_hits, _misses, MAX_PLANS, len(_plans), _hops)


def plan_cache_clear() -> None:
    """Empties the plan cache and sets its counts to zero. Plans in use stay valid."""
    global _hits, _misses, _hops
    with _lock:
        _plans.clear()
        _hits = _misses = _hops = 0

"""What the ranks of a pipeline tell each other outside the data path: JSON in the store of their process
group.

Nothing here is a collective: a rank publishes without waiting, and reads with a deadline that names who is
missing. A rank that found an error publishes that instead, so that the others raise at once.
"""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from meshcast.errors import AbortedError, DeadlineExceededError, MeshcastError

__all__ = ["Exchange"]

_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Exchange:
    """One conversation of all ranks of a group. Every rank opens its conversations in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        if not dist.is_initialized():
            raise MeshcastError(
                "pipeline: no process group; call torch.distributed.init_process_group first", op="pipeline"
            )
        key: Any = dist.group.WORLD if group is None else group
        self.ranks = sorted(dist.get_process_group_ranks(key))
        self.rank = dist.get_rank()
        self.timeout = timeout
        self._published: set[str] = set()
        number = _made.get(key, 0)
        _made[key] = number + 1
        # Own connection: a wait in the store blocks every other user of the same connection.
        base: Any = c10d._get_process_group_store(key)
        store = dist.PrefixStore(f"meshcast/pipeline/{number}", base.clone())
        # A store may outlive the process group. Every life adds as many arrivals as there are ranks.
        life = (int(store.add("arrivals", 1)) - 1) // len(self.ranks)
        self._store = dist.PrefixStore(str(life), store)

    def publish(self, topic: str, value: dict[str, Any]) -> None:
        self._published.add(topic)
        self._store.set(f"{topic}/{self.rank}", json.dumps(value))

    def fail(self, topic: str, message: str) -> None:
        """Says under `topic` that this rank has only an error. What it published there before stays."""
        if topic not in self._published:
            self.publish(topic, {"error": message})

    def forget(self, topic: str) -> None:
        self._published.discard(topic)
        self._store.delete_key(f"{topic}/{self.rank}")

    def collect(self, topic: str, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """What `ranks` (all by default) published. Raises AbortedError with the message of a rank that
        failed, in rank order, and DeadlineExceededError naming the ranks that said nothing."""
        wanted = self.ranks if ranks is None else sorted(ranks)
        begin = time.monotonic()
        found: dict[int, dict[str, Any]] = {}
        for rank in wanted:
            key = f"{topic}/{rank}"
            left = max(self.timeout - (time.monotonic() - begin), 0.001)
            try:
                self._store.wait([key], timedelta(seconds=left))
            except dist.DistStoreError as cause:
                raise self._late(topic, wanted, begin) from cause
            found[rank] = json.loads(self._store.get(key))
            # Checked at once: the ranks after a failed one may be waiting for it in turn.
            if "error" in found[rank] and rank != self.rank:
                raise AbortedError(
                    found[rank]["error"], rank=self.rank, peer=rank, op="pipeline", phase="agree"
                )
        return found

    def _late(self, topic: str, wanted: list[int], begin: float) -> MeshcastError:
        missing = [rank for rank in wanted if not self._store.check([f"{topic}/{rank}"])]
        elapsed = time.monotonic() - begin
        return DeadlineExceededError(
            f"rank {self.rank}: ranks {missing} of the pipeline did not reach {topic!r} within "
            f"{self.timeout:g} s; every rank of every "
            "stage makes its stage and schedule and calls step in the same order",
            rank=self.rank,
            peer=missing[0] if missing else None,
            op="pipeline",
            phase="agree",
            elapsed=elapsed,
            limit=self.timeout,
        )

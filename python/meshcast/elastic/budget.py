"""The memory that the state of a job takes on each rank, against what the job may use."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..base import checks
from ..errors import LayoutError
from ..resharding.state_entries import local_of

_MOST = 1 << 62  # bytes

__all__ = ["budget_of", "check_budget"]


def budget_of(op: str, memory: Any) -> int | None:
    """`memory` as a number of bytes; None where there is no limit. Raises LayoutError for what is neither."""
    return None if memory is None else checks.integer(f"{op}: memory", memory, 1, _MOST)


def check_budget(op: str, memory: int | None, new: Any, old: Any, group: dist.ProcessGroup) -> None:
    """Raises LayoutError on all ranks of `group` where the state of one needs more than its `memory`.

    new: the training that was just made on this rank. old: the one whose state it takes over, or None. Both
    are there until all ranks have moved.
    """
    needed = [0, 0, 0] if memory is None else [memory, _held(new), _held(old)]
    of_all = [torch.zeros(3, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, torch.tensor(needed), group=group)
    for rank, (limit, now, then) in enumerate(each.tolist() for each in of_all):
        if now + then > limit:
            raise LayoutError(
                f"{op}: {len(of_all)} ranks are too few for the state: rank {rank} needs {now} bytes for its "
                f"share and {then} for what it held before; memory= allows {limit}. Start more workers, or "
                "allow more",
                rank=rank,
                op=op,
            )


def _held(training: Any) -> int:
    """Bytes of the state's tensors on this rank. Views of one storage count once, with all of it."""
    storages = {}
    for value in () if training is None else training.state_dict().values():
        if isinstance(value, torch.Tensor):
            storage = local_of(value).untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())

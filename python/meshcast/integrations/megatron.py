"""A copy service for megatron.core.resharding (0.16 and newer): its plan, moved as multicasts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService
from torch.distributed.tensor import Replicate

from ..errors import PlanMismatchError
from ..groups.parent import parent_group
from ..layout import Layout
from ..resharding.state_dict import reshard_state_dict

__all__ = ["MeshcastCopyService"]

_OP = "MeshcastCopyService"
_PROBE = 64  # elements: what tells most different tensors apart without reading them all


@dataclass
class _Sent:
    """A tensor that goes to some ranks, one message each in Megatron's plan. task: of one message, for the
    receiver to find it by; None where it counts."""

    tensor: torch.Tensor
    to: list[tuple[int, int | None]]


class MeshcastCopyService(CopyService):
    """For ``swap_model_weights(source, target, refit_method=MeshcastCopyService())``.

    Megatron's plan has a message for every pair of ranks. What one rank sends to several ranks, bit for bit
    the same, is one multicast here: data-parallel replicas of the target together cost one copy of their
    weights.
    All ranks of the group call ``run``.

    Args:
        group: as Megatron's own services; None for the default one. Ranks of submit_send and submit_recv
            are those in this group.
        timeout: for a run, in seconds or as timedelta; None for the group's.

    Raises, from ``run``, on all ranks: PlanMismatchError where sends and receives do not match, before
    anything moves; PeerLostError and DeadlineExceededError as reshard_state_dict.
    """

    # A run is over when all ranks have what they asked for.
    requires_process_group_barrier = False

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, timeout: float | timedelta | None = None
    ) -> None:
        self.group, self._timeout = group, timeout
        parent = parent_group(group, _OP)
        self._ranks = (
            sorted(parent.ranks) if group is None else torch.distributed.get_process_group_ranks(group)
        )
        self._me = parent.rank
        self.rank, self.world_size = self._ranks.index(self._me), len(self._ranks)
        self._sends: list[tuple[torch.Tensor, int, int | None]] = []
        self._receives: list[tuple[torch.Tensor, int, int | None]] = []

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self._sends.append((src_tensor.detach(), self._ranks[dest_rank], task_id))

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self._receives.append((dest_tensor.detach(), self._ranks[src_rank], task_id))

    def submit_send_with_id(self, task_id: int, src_tensor: torch.Tensor, dest_rank: int) -> None:
        """Submits a send in the form that Megatron 0.16 asks for."""
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: torch.Tensor, src_rank: int) -> None:
        self.submit_recv(dest_tensor, src_rank, task_id)

    @torch.no_grad()
    def run(self) -> None:
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        merged = _merged(sends)
        told = [[list(sent.tensor.shape), str(sent.tensor.dtype), sent.to] for sent in merged]
        asked = [[list(out.shape), str(out.dtype), source, task] for out, source, task in receives]
        said = reshard_state_dict(
            {f"sends {self._me}": told, f"receives {self._me}": asked},
            group=self.group,
            timeout=self._timeout,
        )
        numbers = {rank: said[f"receives {rank}"] for rank in self._ranks}
        found = {rank: _matched(said[f"sends {rank}"], rank, numbers) for rank in self._ranks}
        if not any(found.values()):
            return
        state, out, where, layouts = {}, {}, {}, {}
        source = Layout([self._me], [Replicate()])
        for index, sent in enumerate(merged):
            state[f"{self._me} {index}"], layouts[f"{self._me} {index}"] = sent.tensor, source
        for rank, rows in found.items():
            for index, targets in enumerate(rows):
                if self._me in targets:
                    name, tensor = f"{rank} {index}", receives[targets[self._me]][0]
                    layout = Layout(sorted(targets), [Replicate()])
                    out[name], where[name] = tensor, (layout, "cuda") if tensor.is_cuda else layout
        reshard_state_dict(state, where, out, layouts=layouts, group=self.group, timeout=self._timeout)

    def close(self) -> None:
        """Nothing is kept beside what the group has."""


def _merged(sends: list[tuple[torch.Tensor, int, int | None]]) -> list[_Sent]:
    """Equal tensors for different ranks as one, in the order of the first. Equal means the same bits:
    Megatron slices anew, and often into memory of its own, for each message."""
    found: list[_Sent] = []
    alike: dict[Any, list[_Sent]] = {}
    for tensor, rank, task in sends:
        flat = tensor.reshape(-1)
        probe = bytes(_bits(flat[:: max(1, flat.numel() // _PROBE)]).tolist())
        others = alike.setdefault((tensor.shape, tensor.dtype, tensor.device, probe), [])
        for other in others:
            fits = all(rank != known for known, _ in other.to) and _same(other.tensor, tensor)
            if fits:
                other.to.append((rank, task))
                break
        else:
            sent = _Sent(tensor, [(rank, task)])
            found.append(sent)
            others.append(sent)
    return found


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    one = a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
    return one or torch.equal(_bits(a.reshape(-1)), _bits(b.reshape(-1)))


def _matched(told: list[Any], source: int, asked: dict[int, list[Any]]) -> list[dict[int, int]]:
    """For each tensor that a rank sends, {rank: number of its receive}. Receives are found by task, or by
    their order where there is none."""
    waiting: dict[tuple[int, Any], list[int]] = {}
    for rank, receives in asked.items():
        for number, (_, _, sender, task) in enumerate(receives):
            if sender == source:
                waiting.setdefault((rank, task), []).append(number)
    rows = []
    for shape, dtype, to in told:
        targets = {}
        for rank, task in to:
            what = f"rank {source} sends {_text(shape, dtype, task)} to rank {rank}"
            numbers = waiting.get((rank, task))
            if not numbers:
                raise _mismatch(f"{what}, which has no receive for it")
            number = targets[rank] = numbers.pop(0)
            wanted, as_dtype, *_ = asked[rank][number]
            if (list(wanted), as_dtype) != (list(shape), dtype):
                raise _mismatch(f"{what}, which receives {_text(wanted, as_dtype, task)}")
        rows.append(targets)
    for (rank, task), numbers in waiting.items():
        for number in numbers:
            shape, dtype, *_ = asked[rank][number]
            what = _text(shape, dtype, task)
            raise _mismatch(f"rank {rank} receives {what} from rank {source}, which does not send it")
    return rows


def _text(shape: Any, dtype: str, task: int | None) -> str:
    return f"{tuple(shape)} of {dtype}" + ("" if task is None else f" (task {task})")


def _mismatch(text: str) -> PlanMismatchError:
    return PlanMismatchError(f"{_OP}: {text}: submit the same plan on all ranks", op=_OP)

"""A copy service for megatron.core.resharding (0.16 and newer): its plan, moved as multicasts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.resharding.copy_services.base import CopyService
from torch.distributed.tensor import Replicate

from ..base.wire import pack, unpack
from ..errors import Caller, PlanMismatchError
from ..groups.parent import parent_group
from ..layout import Layout
from ..resharding.state_dict import reshard_state_dict

__all__ = ["MeshcastCopyService"]

_OP = "MeshcastCopyService"
_PROBE = 64  # elements: enough to distinguish most tensors without reading all of them


class _Message(NamedTuple):
    """A message of Megatron's plan, as it was submitted. task: for the receiver to find it by; None where the
    order counts."""

    tensor: torch.Tensor
    rank: int  # the other one
    task: int | None


class _Sent(NamedTuple):
    """A tensor that goes to some ranks, one message each. to: (rank, task)."""

    tensor: torch.Tensor
    to: list[tuple[int, int | None]]


class _Send(NamedTuple):
    """A `_Sent` as the other ranks know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    to: list[tuple[int, int | None]]


class _Receive(NamedTuple):
    """A receive as the other ranks know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int
    task: int | None


class _Submitted(NamedTuple):
    """The part of a run that a rank has."""

    sends: list[_Send]
    receives: list[_Receive]


class MeshcastCopyService(CopyService):
    """For ``swap_model_weights(source, target, refit_method=MeshcastCopyService())``.

    Megatron's plan has a message for every pair of ranks. Messages of one rank to several ranks with the same
    bits are one multicast here: data-parallel replicas of the target together cost one copy of their weights.
    All ranks of the group call ``run``.

    Args:
        group: as Megatron's own services; None for the default one. Ranks of submit_send and submit_recv
            are those in this group.
        timeout: for a run, in seconds or as timedelta; None for the group's.

    Raises, from ``run``, on all ranks: PlanMismatchError where sends and receives do not match, before
    anything moves; PeerLostError and DeadlineExceededError as reshard_state_dict.
    """

    # A run is over when all ranks have what they requested.
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
        self._sends: list[_Message] = []
        self._receives: list[_Message] = []

    def submit_send(self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None) -> None:
        self._sends.append(_Message(src_tensor.detach(), self._ranks[dest_rank], task_id))

    def submit_recv(self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None) -> None:
        self._receives.append(_Message(dest_tensor.detach(), self._ranks[src_rank], task_id))

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
        mine = _Submitted(
            [_Send(tuple(sent.tensor.shape), sent.tensor.dtype, sent.to) for sent in merged],
            [_Receive(tuple(out.shape), out.dtype, source, task) for out, source, task in receives],
        )
        texts = reshard_state_dict({str(self._me): pack(mine)}, group=self.group, timeout=self._timeout)
        sides = {rank: unpack(_Submitted, texts[str(rank)]) for rank in self._ranks}
        with Caller(_OP, self._me):
            found = {rank: _matched(rank, sides) for rank in self._ranks}
        if not any(found.values()):
            return
        state, out, where, layouts = {}, {}, {}, {}
        source = Layout([self._me], [Replicate()])
        for index, sent in enumerate(merged):
            state[f"{self._me} {index}"], layouts[f"{self._me} {index}"] = sent.tensor, source
        for rank, rows in found.items():
            for index, targets in enumerate(rows):
                if self._me in targets:
                    name, tensor = f"{rank} {index}", receives[targets[self._me]].tensor
                    layout = Layout(sorted(targets), [Replicate()])
                    out[name], where[name] = tensor, (layout, "cuda") if tensor.is_cuda else layout
        reshard_state_dict(state, where, out, layouts=layouts, group=self.group, timeout=self._timeout)

    def close(self) -> None:
        """Keeps nothing in addition to what the group has."""


def _merged(sends: list[_Message]) -> list[_Sent]:
    """Equal tensors for different ranks as one, in the order of the first. Equal means the same bits:
    Megatron slices again, and often into memory of its own, for each message."""
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


def _matched(source: int, sides: Mapping[int, _Submitted]) -> list[dict[int, int]]:
    """Returns {rank: number of its receive} for each tensor that a rank sends. Receives are found by task, or
    by their order where there is none."""
    waiting: dict[tuple[int, int | None], list[int]] = {}
    for rank, side in sides.items():
        for number, receive in enumerate(side.receives):
            if receive.source == source:
                waiting.setdefault((rank, receive.task), []).append(number)
    rows = []
    for sent in sides[source].sends:
        targets = {}
        for rank, task in sent.to:
            what = f"rank {source} sends {_text(sent, task)} to rank {rank}"
            numbers = waiting.get((rank, task))
            if not numbers:
                raise _mismatch(f"{what}, which has no receive for it")
            number = targets[rank] = numbers.pop(0)
            receive = sides[rank].receives[number]
            if (receive.shape, receive.dtype) != (sent.shape, sent.dtype):
                raise _mismatch(f"{what}, which receives {_text(receive, task)}")
        rows.append(targets)
    for (rank, task), numbers in waiting.items():
        for number in numbers:
            what = _text(sides[rank].receives[number], task)
            raise _mismatch(f"rank {rank} receives {what} from rank {source}, which does not send it")
    return rows


def _text(tensor: _Send | _Receive, task: int | None) -> str:
    return f"{tensor.shape} of {tensor.dtype}" + ("" if task is None else f" (task {task})")


def _mismatch(text: str) -> PlanMismatchError:
    return PlanMismatchError(f"{text}: submit the same plan on all ranks")

"""The published plans on meshcast's transport, so that only the plan differs.

Each message of such a plan is a tensor of its own, with the sender as its only holder: the planner then has
no choice of senders or receivers left, only that of chunks, of chains through several receivers and of the
order in which a rank's messages leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

from meshcast.layout import Layout
from meshcast.planning.plan import Problem
from meshcast.transfers.transfer import PersistentTransfer, PlanOptions

from ..move import Box, CaseBatch, CaseMove, cuts, extent, intersection, turns
from .method import Method
from .ours import agreed_transfer, start


class Message(NamedTuple):
    """A box that goes from one rank to others. placed: the sender has it in its destination already."""

    move: int  # index
    box: Box
    sender: int
    receivers: list[int]
    placed: bool = False


def _boxes(move: CaseMove) -> Iterator[tuple[Box, list[int], list[int]]]:
    """Every intersection of a source tile with a destination tile: box, holders, ranks that need it."""
    for tile, holders in move.tiles.items():
        for wanted, receivers in move.wanted.items():
            box = intersection(tile, wanted)
            if box is not None:
                yield box, holders, receivers


def unicasts(index: int, move: CaseMove) -> list[list[Message]]:
    """Megatron-LM: each receiver gets its own copy, holders take turns."""
    return [
        [
            Message(index, box, turns(holders, receiver, turn), [receiver])
            for turn, (box, holders, receivers) in enumerate(_boxes(move))
            for receiver in receivers
        ]
    ]


def stripes(index: int, move: CaseMove) -> list[list[Message]]:
    """NeMo-RL: each replica gets a stripe, holders taking turns; then each passes its stripe on to the
    others."""
    first, second = [], []
    for box, holders, receivers in _boxes(move):
        for part, (stripe, receiver) in enumerate(zip(cuts(box, len(receivers)), receivers, strict=False)):
            sender = receiver if receiver in holders else holders[part % len(holders)]
            first.append(Message(index, stripe, sender, [receiver]))
            others = [rank for rank in receivers if rank != receiver]
            if others:
                second.append(Message(index, stripe, receiver, others, placed=True))
    return [first, second]


def leader_ring(index: int, move: CaseMove) -> list[list[Message]]:
    """NCCL M2N: holders take turns as the one that sends a box; the first receiver on each host passes it
    on to the next host, and to the ranks of its own. Here it travels as a chain, which the last receiver on
    each host carries on: the hosts exchange the same bytes."""
    messages = []
    for turn, (box, holders, receivers) in enumerate(_boxes(move)):
        messages += [Message(index, box, rank, [rank]) for rank in receivers if rank in holders]
        others = [rank for rank in receivers if rank not in holders]
        if others:
            messages.append(Message(index, box, holders[turn % len(holders)], others))
    return [messages]


class _Phase:
    """Messages that travel together: a transfer, and this rank's end of each of its tensors."""

    def __init__(self, batch: CaseBatch, messages: list[Message], strategy: str, balance: str) -> None:
        rank = dist.get_rank()
        self.src: list[torch.Tensor | None] = []
        self.dst: list[torch.Tensor | None] = []
        problems: list[Problem] = []
        for message in messages:
            move = batch.moves[message.move]
            src = Layout([message.sender], [Replicate()])
            dst = Layout(message.receivers, [Replicate()])
            problems.append(Problem(extent(message.box), move.dtype, src, dst))
            read = move.place if message.placed else move.cut
            self.src.append(read(message.box) if rank == message.sender else None)
            self.dst.append(move.place(message.box) if rank in message.receivers else None)
        self._transfer: PersistentTransfer | None = None
        if any(tensor is not None for tensor in (*self.src, *self.dst)):
            self._transfer = agreed_transfer(batch, problems, PlanOptions(strategy, batch.topology, balance))

    def run(self) -> None:
        if self._transfer is not None:
            start(self._transfer, self.src, self.dst)


Plan = Callable[[int, CaseMove], list[list[Message]]]


def _run(batch: CaseBatch, name: str, plan: Plan, strategy: str) -> None:
    for phase in batch.keep(name, lambda: _phases(batch, plan, strategy)):
        phase.run()


def _phases(batch: CaseBatch, plan: Plan, strategy: str) -> list[_Phase]:
    plans = [plan(index, move) for index, move in enumerate(batch.moves)]
    joined = [[message for phase in phases for message in phase] for phases in zip(*plans, strict=True)]
    return [_Phase(batch, messages, strategy, "none") for messages in joined if messages]


def _method(name: str, plan: Plan, strategy: str, what: str) -> Method:
    return Method(name, lambda batch: _run(batch, name, plan, strategy), what)


METHODS = [
    _method("Megatron plan", unicasts, "send_recv",
            "Megatron-LM's plan, one copy per receiver and holders in turn, on meshcast's transport"),
    _method("NeMo-RL plan", stripes, "broadcast",
            "NeMo-RL's plan, a stripe per replica and then all to all replicas, on meshcast's transport"),
    _method("M2N plan", leader_ring, "broadcast",
            "NCCL M2N's plan, a ring of one leader per host, on meshcast's transport"),
]  # fmt: skip

"""meshcast's strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from meshcast.groups.parent import parent_group
from meshcast.planning.plan import STRATEGIES, Problem
from meshcast.resharding.reshard import reshard_local
from meshcast.transfers.transfer import PersistentTransfer, PlanOptions, new_transfer

from ..cases import Case
from ..groups import Groups
from ..move import CaseBatch, CaseMove
from .method import Method

BALANCES = ("none", "size", "search")  # of broadcast, beside the usual "greedy"
LIMIT = (
    90.0  # seconds; less than a session waits (benchmarks/session.py), so that the error says who is missing
)


def reshard(batch: CaseBatch, strategy: str) -> None:
    """The call that a user makes: for one tensor, for one under Partial, and for many as one plan."""
    if any(move.source_mesh is not None for move in batch.moves):
        for move in batch.moves:
            _reshard_dtensor(batch, move, strategy)
    elif len(batch.moves) == 1:
        (move,) = batch.moves
        reshard_local(
            move.source, move.src, move.destination, move.dst, shape=move.shape, dtype=torch.int32,
            group=batch.group, strategy=strategy, topology=batch.topology, timeout=LIMIT,
        )  # fmt: skip
    else:
        problems = [Problem(move.shape, torch.int32, move.src, move.dst) for move in batch.moves]
        options = PlanOptions(strategy, batch.topology)
        transfer = batch.keep(strategy, lambda: agreed_transfer(batch, problems, options))
        start(transfer, [move.source for move in batch.moves], [move.destination for move in batch.moves])


def agreed_transfer(batch: CaseBatch, problems: list[Problem], options: PlanOptions) -> PersistentTransfer:
    """A transfer that its ranks agree on at once, so that no measured round does."""
    transfer = new_transfer(parent_group(batch.group, "reshard"), problems, "reshard", options)
    transfer.agree_ahead(LIMIT)
    return transfer


def start(
    transfer: PersistentTransfer, src: list[torch.Tensor | None], dst: list[torch.Tensor | None]
) -> None:
    transfer.start(src, dst, timeout=LIMIT).wait()


def _reshard_dtensor(batch: CaseBatch, move: CaseMove, strategy: str) -> None:
    from torch.distributed.tensor import DTensor

    from meshcast.resharding.reshard import reshard_
    from meshcast.spec import TensorSpec

    assert move.source_mesh is not None and move.destination_mesh is not None
    shape, strides = torch.Size(move.shape), torch.empty(move.shape, device="meta").stride()
    sides: list[Any] = []
    for local, layout, mesh in (
        (move.source, move.src, move.source_mesh), (move.destination, move.dst, move.destination_mesh)
    ):  # fmt: skip
        if dist.get_rank() in layout.ranks:
            if local is None:  # an empty shard
                local = torch.empty(layout.local_shapes(move.shape)[dist.get_rank()], dtype=torch.int32)
            sides.append(
                DTensor.from_local(
                    local, mesh, layout.placements, run_check=False, shape=shape, stride=strides
                )
            )
        else:
            sides.append(TensorSpec(move.shape, torch.int32, mesh, layout.placements))
    x, out = sides
    reshard_(out, x, group=batch.group, strategy=strategy, topology=batch.topology, timeout=LIMIT)


def balanced(batch: CaseBatch, name: str, balance: str) -> None:
    problems = [Problem(move.shape, torch.int32, move.summed, move.dst) for move in batch.moves]
    options = PlanOptions("broadcast", batch.topology, balance)
    transfer = batch.keep(name, lambda: agreed_transfer(batch, problems, options))
    start(transfer, [move.source for move in batch.moves], [move.destination for move in batch.moves])


def backend_broadcast(batch: CaseBatch) -> None:
    """torch.distributed.broadcast of a tensor on a group whose backend is meshcast."""
    (move,) = batch.moves
    root = move.src.ranks[0]
    data = move.destination if move.destination is not None else move.source
    assert data is not None
    if dist.get_rank() == root and move.destination is not None and move.source is not None:
        data.copy_(move.source)
    dist.broadcast(data, root, batch.kept["backend broadcast"])


def _only_from_one(case: Case) -> str:
    whole = all(all(p == "Replicate()" for p in tensor.dst.placement_texts) for tensor in case.tensors)
    if len(case.tensors) == 1 and len(case.src.ranks) == 1 and whole:
        return ""
    return "a broadcast goes from one rank to replicas"


def _meshcast_group(case: Case, groups: Groups) -> dist.ProcessGroup:
    return groups.new(case.ranks, "meshcast")


METHODS = [
    *(
        Method(
            strategy, partial(reshard, strategy=strategy), "meshcast's strategy of this name", adds_up=True,
            often=strategy in ("auto", "multicast", "broadcast"),
        )
        for strategy in STRATEGIES
    ),
    *(
        Method(
            f"broadcast-{balance}", partial(balanced, name=f"broadcast-{balance}", balance=balance),
            f'the paper\'s broadcast with balance "{balance}"; plain `broadcast` is "greedy"',
        )
        for balance in BALANCES
    ),
    Method(
        "backend broadcast", backend_broadcast,
        "`torch.distributed.broadcast` on a group of backend meshcast",
        _only_from_one, _meshcast_group,
    ),
]  # fmt: skip

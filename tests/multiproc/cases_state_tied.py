"""One name that the ranks of several meshes hold, as tied embeddings of the first and the last stage of a
pipeline: ranks 0 and 1, and 2, hold; ranks 3 and 4 receive."""

from __future__ import annotations

import functools
import itertools
import re

import meshcast
import pytest
import torch
from meshcast.errors import LayoutError, MeshcastError, PlanMismatchError
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 30.0
FIRST, LAST, SERVERS = [0, 1], [2], [3, 4]
_numbers = itertools.count()


def filled(dtype=torch.float32, rows: int = 7, seed: int = 1) -> torch.Tensor:
    return unique_fill((rows, 3), dtype, seed)


def state_of(rank: int, first: torch.Tensor, last: torch.Tensor, placements=None) -> dict | None:
    """The embedding of the first stage, and of the last one, where it lies in another way."""
    there = [Shard(1)] if placements is None else placements
    if rank in FIRST:
        return {"embed": sharded(first, quiet_mesh(FIRST), [Shard(0)], rank), "own": torch.ones(2)}
    return {"embed": sharded(last, quiet_mesh(LAST), there, rank)} if rank in LAST else None


def where(ranks=SERVERS) -> dict:
    return {"embed": (quiet_mesh(ranks), [Shard(0)])}


def check(result, full: torch.Tensor, rank: int, ranks=SERVERS) -> None:
    if rank in ranks:
        expected = cut(full, (len(ranks),), coordinates(torch.tensor(ranks))[rank], [Shard(0)])
        assert torch.equal(result["embed"].to_local(), expected)


def equal_values(context) -> None:
    """Whichever they come from, and where the destination is on ranks of both."""
    rank = context.rank
    for dtype, rows in ((torch.float32, 7), (torch.bfloat16, 7), (torch.float32, 1)):  # an empty share
        full = filled(dtype, rows)
        for ranks in (SERVERS, [4, 2, 1]):
            for options in ({}, {"digest": True}, {"max_bytes_in_flight": 20}):
                state = state_of(rank, full, full)
                found = meshcast.reshard_state_dict(state, where(ranks), strict=False, **options)
                check(found, full, rank, ranks)


def other_values(context) -> None:
    """Every rank is refused, before a byte moves, at the first call and at later ones; the next one
    succeeds."""
    rank, full = context.rank, filled(torch.bfloat16)
    state, out = state_of(rank, full, full), None
    for turn in range(3):
        found = meshcast.reshard_state_dict(state, where(), strict=False, out=out)
        check(found, full, rank)
        if rank in SERVERS:
            out = {"embed": found["embed"]}
        if rank == (2, 1, 0)[turn]:
            with torch.no_grad():
                state["embed"].to_local()[0, 0] += 8
        with pytest.raises(PlanMismatchError) as caught:
            meshcast.reshard_state_dict(state, where(), strict=False, out=out)
        text = str(caught.value)
        assert "'embed'" in text, text
        assert "ranks 0, 1" in text and "rank 2" in text, text
        digests = re.findall(r"\b[0-9a-f]{16}\b", text)
        assert len(set(digests)) == 2, text
        if out is not None:
            check(out, full, rank)
        if rank == (2, 1, 0)[turn]:
            with torch.no_grad():
                state["embed"].to_local()[0, 0] -= 8


def what_cannot_be_compared(context) -> None:
    """Values that are still to be reduced, other shapes and types, and meshes that share a rank."""
    rank, full = context.rank, filled()
    cases = [
        (state_of(rank, full, full, [Partial()]), PlanMismatchError),
        (state_of(rank, full, full.double()), PlanMismatchError),
        (state_of(rank, full, filled(rows=6)), PlanMismatchError),
    ]
    for state, kind in cases:
        with pytest.raises(kind, match="'embed'"):
            meshcast.reshard_state_dict(state, where(), strict=False)
    meshes = quiet_mesh([0, 1]) if rank == 0 else quiet_mesh([1, 2])
    state = None
    if rank in (0, 1, 2):
        state = {"embed": DTensor.from_local(full[:1], meshes, [Shard(0)], run_check=False)}
    with pytest.raises((PlanMismatchError, LayoutError), match="'embed'"):
        meshcast.reshard_state_dict(state, where(), strict=False)
    check(meshcast.reshard_state_dict(state_of(rank, full, full), where(), strict=False), full, rank)


def copies_that_differ_inside(context) -> None:
    """Replicas of one stage that have drifted apart are named as such."""
    rank, full = context.rank, filled()
    state = state_of(rank, full, full)
    if rank in FIRST:
        mine = full.clone()
        mine[0, 0] += rank
        state["embed"] = DTensor.from_local(mine, quiet_mesh(FIRST), [Replicate()], run_check=False)
    with pytest.raises(MeshcastError, match=r"replicas of 'embed' on ranks 0 and 1 differ"):
        meshcast.reshard_state_dict(state, where(), strict=False)


def stages_of_one_mesh(context) -> None:
    """Slices along "pp", each on one rank."""
    rank, full = context.rank, filled()
    mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [[0], [2]], mesh_dim_names=("pp", "dp"))
    state = None
    if rank in (0, 2):
        state = {"embed": DTensor.from_local(full, mesh["dp"], [Shard(0)], run_check=False)}
    check(meshcast.reshard_state_dict(state, where()), full, rank)


def of_lost_ranks_in_part(context) -> None:
    """Values come from the mesh that still has all of them, where a rank of the other one is lost."""
    rank, full, lost = context.rank, filled(), 4
    if rank == lost:
        return
    state = state_of(rank, full, full)
    if rank in LAST:
        state = {"embed": sharded(full, quiet_mesh([*LAST, lost]), [Shard(0)], rank)}
    found = meshcast.reshard_state_dict(state, where([3]), strict=False, lost=[lost])
    check(found, full, rank, [3])


def in_weight_sync(context) -> None:
    """A push of equal values arrives; one of others raises on all ranks and ends nothing."""
    rank, full = context.rank, filled()
    for buffers in (2, 1):
        state = state_of(rank, full.clone(), full.clone())
        if state is not None:
            state = {"embed": state["embed"]}
        sync = meshcast.WeightSync(state, where(), buffers=buffers)
        for version, change in ((1, 0.0), (2, 1.0), (3, 0.0)):
            if rank == 2:
                state["embed"].to_local().copy_(full + change)
            elif rank in FIRST:
                state["embed"].to_local().copy_(sharded(full, quiet_mesh(FIRST), [Shard(0)], rank).to_local())

            turn = functools.partial(sync.pull if rank in SERVERS else sync.push, version)
            if change:
                with pytest.raises(PlanMismatchError, match="'embed'"):
                    turn()
            else:
                turn()
                if rank in SERVERS:
                    check(sync.state, full, rank)
            context.wait_for_all(f"{next(_numbers)}")
        sync.close()


CASES = [
    equal_values,
    other_values,
    what_cannot_be_compared,
    copies_that_differ_inside,
    stages_of_one_mesh,
    of_lost_ranks_in_part,
    in_weight_sync,
]

"""torch.distributed.checkpoint through MemoryStorage: ranks 0 to 3 train with FSDP2 and tensor parallelism,
or with FSDP2 over three of them, unevenly; ranks 3 to 5 load. The oracle is the whole tensors."""

from __future__ import annotations

import time

import meshcast
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from meshcast.integrations.dcp import MemoryStorage
from multiproc import llama
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
TRAINERS, SERVERS = [0, 1, 2, 3], [3, 4, 5]
_made: dict[str, object] = {}


def trained(context, kind: str) -> tuple[dict | None, dict[str, torch.Tensor]]:
    """The state dict of this rank, None on ranks that do not train, and the whole tensors."""
    if kind not in _made:
        module, fulls = llama.filled()
        if kind == "fsdp_tp":
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
            module = llama.sharded_module(module, mesh) if context.rank in TRAINERS else None
        else:  # 40, 24 and 16 rows over three ranks are uneven
            mesh = DeviceMesh("cpu", TRAINERS[:3])
            module = fully_shard(module, mesh=mesh) if context.rank in TRAINERS[:3] else None
        _made[kind] = module, fulls
    module, fulls = _made[kind]
    return None if module is None else module.state_dict(), fulls


def empty_weights(context, fulls, dtype=None) -> tuple[dict, dict]:
    """Tensor-parallel over SERVERS; norms and buffers whole, the latter as plain tensors."""
    mesh, where, new = quiet_mesh(SERVERS), {}, {}
    for name, full in fulls.items():
        full = torch.zeros_like(full, dtype=dtype or full.dtype)
        where[name] = [Shard(full.ndim - 1) if full.ndim > 1 else Replicate()]
        if context.rank in SERVERS:
            plain = "inv_freq" in name
            new[name] = full if plain else sharded(full, mesh, where[name], context.rank)
    return new, where


def check(context, new, fulls, where, dtype=None) -> None:
    if context.rank not in SERVERS:
        return
    place = coordinates(torch.tensor(SERVERS))[context.rank]
    assert set(new) >= set(fulls)
    for name, full in fulls.items():
        found = new[name]
        expected = cut(full, (3,), place, where[name]) if isinstance(found, DTensor) else full
        found = found.to_local() if isinstance(found, DTensor) else found
        assert torch.equal(found, expected.to(dtype or full.dtype)), name


def fsdp_and_tp_to_tp(context) -> None:
    for dtype in (None, torch.bfloat16):
        state, fulls = trained(context, "fsdp_tp")
        storage = MemoryStorage()
        if state is not None:
            dcp.save(state | {"step": 7, "name": "llama"}, storage_writer=storage, no_dist=True)
        new, where = empty_weights(context, fulls, dtype)
        new |= {"step": 0, "name": ""} if context.rank in SERVERS else {}
        dcp.load(new, storage_reader=storage, no_dist=True)
        check(context, new, fulls, where, dtype)
        if context.rank in SERVERS:
            assert (new["step"], new["name"]) == (7, "llama")


def uneven_fsdp_to_tp_with_collectives(context) -> None:
    """Save and load as torch does them by default: its coordinator drops copies, its planners agree."""
    if "group" not in _made:
        _made["group"] = dist.new_group(TRAINERS[:3])
    state, fulls = trained(context, "fsdp")
    storage = MemoryStorage()
    if state is not None:
        assert state["embed.weight"].to_local().shape[0] == (14, 14, 12)[context.rank]
        dcp.save(state, storage_writer=storage, process_group=_made["group"])
    new, where = empty_weights(context, fulls)
    dcp.load(new, storage_reader=storage)
    check(context, new, fulls, where)


def changed_after_the_save(context) -> None:
    """A save with copies is of its moment; one without sees what the tensors hold when they are loaded."""
    mesh = quiet_mesh([0, 1])
    for copy in (True, False):
        storage, x = MemoryStorage(copy=copy), torch.ones(5, 3)
        if context.rank < 2:
            x = sharded(x, mesh, [Shard(0)], context.rank)
            dcp.save({"x": x}, storage_writer=storage, no_dist=True)
            x.to_local().add_(1)
        new = {"x": torch.zeros(5, 3)} if context.rank in SERVERS else {}
        dcp.load(new, storage_reader=storage, no_dist=True)
        assert context.rank not in SERVERS or bool((new["x"] == (1 if copy else 2)).all())


def saved_again(context) -> None:
    """The second save replaces the first, also its names; ranks that load need not take all of it."""
    storage = MemoryStorage()
    for version in (1.0, 2.0):
        if context.rank == 0:
            held = {"both": torch.full((3,), version), f"only {version}": torch.zeros(()), "nested": {"a": 1}}
            dcp.save(held, storage_writer=storage, no_dist=True)
        new = {"both": torch.zeros(3)} if context.rank in (1, 2) else {}
        dcp.load(new, storage_reader=storage, no_dist=True)
        assert context.rank not in (1, 2) or bool((new["both"] == version).all())
    with pytest.raises(CheckpointException, match=r"only 1\.0"):
        dcp.load({"only 1.0": torch.ones(())}, storage_reader=storage, no_dist=True)
    if context.rank == 1:
        new = {"only 2.0": torch.ones(()), "nested": {"a": 0}}
    dcp.load(new, storage_reader=storage, no_dist=True)
    assert context.rank != 1 or (new["only 2.0"] == 0 and new["nested"]["a"] == 1)


def several_chunks_of_a_rank(context) -> None:
    """Ranks whose shards are several boxes, as a planner of one's own may have them."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor import Shard as Piece
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    full, rank = torch.arange(48.0).reshape(8, 6), context.rank
    # Rank 0 has rows 0 to 1 and 4 to 7; rank 1 rows 2 to 3; ranks 3 and 4 want columns in different pieces.
    rows = [(0, 0, 2), (4, 0, 4), (2, 1, 2)]
    held = [ShardMetadata([at, 0], [size, 6], f"rank:{owner}/cpu") for at, owner, size in rows]
    wanted = [((0, 0), (3, 6), 3), ((3, 0), (5, 2), 4), ((3, 2), (5, 4), 3)]
    asked = [ShardMetadata(list(at), list(size), f"rank:{owner}/cpu") for at, size, owner in wanted]

    def made(shards, fill) -> ShardedTensor:
        own = [s for s in shards if f"rank:{rank}/" in str(s.placement)]
        pieces = [Piece(fill(s), s) for s in own]
        return ShardedTensor._init_from_local_shards(pieces, 8, 6)

    def cut_out(s) -> torch.Tensor:
        (r, c), (h, w) = s.shard_offsets, s.shard_sizes
        return full[r : r + h, c : c + w].clone()

    source = made(held, cut_out)
    target = made(asked, lambda s: torch.zeros(s.shard_sizes))
    storage = MemoryStorage()
    dcp.save({"x": source}, storage_writer=storage)
    dcp.load({"x": target}, storage_reader=storage)
    for piece in target.local_shards():
        assert torch.equal(piece.tensor, cut_out(piece.metadata))


def nothing_saved(context) -> None:  # noqa: ARG001
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"x": torch.zeros(2)}, storage_reader=MemoryStorage(), no_dist=True)
    cause = caught.value.failures[0][0]
    assert isinstance(cause, meshcast.MeshcastError), cause
    assert "has saved" in str(cause)


def a_piece_is_missing(context) -> None:
    """Rank 1 has not saved its half: torch's planner would leave it out, and keep what is there."""
    storage, full = MemoryStorage(), torch.arange(8.0)
    if context.rank == 0:
        dcp.save(
            {"x": sharded(full, quiet_mesh([0, 1]), [Shard(0)], 0)}, storage_writer=storage, no_dist=True
        )
    new = {"x": sharded(full, quiet_mesh([4, 5]), [Shard(0)], context.rank)}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(new, storage_reader=storage, no_dist=True)
    assert isinstance(caught.value.failures[0][0], meshcast.MeshcastError), caught.value
    if context.rank == 0:  # and the group is in use
        dcp.save({"x": full}, storage_writer=storage, no_dist=True)
    dcp.load(new, storage_reader=storage, no_dist=True)


class Refuses(DefaultLoadPlanner):
    def resolve_tensor(self, read_item):  # noqa: ARG002
        raise RuntimeError("no memory for it")


def one_rank_has_nowhere_to_load(context) -> None:
    """All ranks hear of it at once, and the group is in use."""
    storage = MemoryStorage()
    if context.rank == 0:
        dcp.save({"x": torch.ones(3)}, storage_writer=storage, no_dist=True)
    new = {"x": torch.zeros(3)}
    begin = time.monotonic()
    planner = Refuses() if context.rank == 5 else None
    with pytest.raises(CheckpointException, match="no memory for it") as caught:
        dcp.load(new, storage_reader=storage, planner=planner, no_dist=True)
    assert time.monotonic() - begin < 10
    assert isinstance(caught.value.failures[0][0], meshcast.MeshcastError)
    dcp.load(new, storage_reader=storage, no_dist=True)
    assert bool((new["x"] == 1).all())


CASES = [
    fsdp_and_tp_to_tp,
    uneven_fsdp_to_tp_with_collectives,
    changed_after_the_save,
    saved_again,
    several_chunks_of_a_rank,
    nothing_saved,
    a_piece_is_missing,
    one_rank_has_nowhere_to_load,
]

"""reshard_state_dict into the tensors of models, and into several engines at once: ranks 0 and 1 hold, ranks
2 to 4 receive."""

from __future__ import annotations

import meshcast
import torch
from meshcast import LayoutError, PlanMismatchError
from multiproc.cases_state_entries import filled, raises
from multiproc.meshes import quiet_mesh, sharded
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
HOLDERS, RECEIVERS = [0, 1], [2, 3, 4]


class Extra(nn.Module):
    """A module whose state dict has an entry that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.register_buffer("seen", torch.tensor(0))

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


def _weights(rank: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Whole tensors, and what a holder has of them."""
    fulls = {
        "layer.weight": filled((4, 3)),
        "layer.bias": filled((4,), seed=2),
        "seen": torch.tensor(7),
    }
    held = {"seen": fulls["seen"].clone()}
    for name in ("layer.weight", "layer.bias"):
        held[name] = sharded(fulls[name], quiet_mesh(HOLDERS), [Shard(0)], rank)
    return fulls, held if rank in HOLDERS else {}


def state_dict_of_a_model(context) -> None:
    """Plain tensors as destinations are whole on the ranks that name them, and are filled."""
    rank = context.rank
    fulls, held = _weights(rank)
    for options in ({}, {"digest": True}, {"max_bytes_in_flight": 20}):
        model = Extra()
        where = model.state_dict() if rank in RECEIVERS else None
        result = meshcast.reshard_state_dict(held or None, where, **options)
        if rank in RECEIVERS:
            for name, full in fulls.items():
                assert result[name] is where[name]
                assert torch.equal(model.state_dict()[name], full), name
        # As out= alone: the same, on one rank less.
        outs = dict(Extra().named_parameters()) if rank in (2, 4) else None
        parts = {name: x for name, x in held.items() if name != "seen"}
        result = meshcast.reshard_state_dict(parts or None, out=outs, **options)
        if outs is not None:
            assert all(torch.equal(outs[name], fulls[name]) and result[name] is outs[name] for name in outs)


def dtensors_of_a_model(context) -> None:
    """A DTensor as a destination lies where it lies; its dtype is that of the result."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    full = filled((7, 2))
    held = {"w": sharded(full, quiet_mesh(HOLDERS), [Shard(1)], rank)} if rank in HOLDERS else None
    empty = sharded(torch.zeros(7, 2, dtype=torch.bfloat16), mesh, [Shard(0)], rank)
    result = meshcast.reshard_state_dict(held, {"w": empty} if rank in RECEIVERS else None)
    if rank in RECEIVERS:
        assert result["w"] is empty
        local = empty.to_local()
        assert torch.equal(local, full.bfloat16()[sum(_sizes(7)[: rank - 2]) :][: len(local)])
    # Beside an output under the same name, which is what is filled.
    other = torch.zeros(7, 2)
    where = {"w": torch.empty(7, 2)} if rank in RECEIVERS else None
    result = meshcast.reshard_state_dict(held, where, {"w": other} if rank == 2 else None)
    if rank in RECEIVERS:
        assert torch.equal(result["w"], full)
        assert (result["w"] is other) == (rank == 2)


def _sizes(rows: int) -> list[int]:
    return [len(part) for part in torch.arange(rows).chunk(3)]


def several_engines(context) -> None:
    """Meshes that share no rank receive one name in one call, each under its own placements; so do a mesh
    and a model on one rank."""
    rank = context.rank
    full, other = filled((5, 4)), filled((3,), seed=2)
    mesh = quiet_mesh(HOLDERS)
    held = {"w": sharded(full, mesh, [Shard(0)], rank), "v": other.clone()} if rank in HOLDERS else None
    two, one = quiet_mesh([2, 3]), quiet_mesh([4])
    engine = (two, [Shard(0)]) if rank < 4 else (one, [Replicate()])
    for last in (engine, torch.zeros(5, 4), meshcast.Layout([4], [Replicate()])):
        for options in ({}, {"digest": True}, {"max_bytes_in_flight": 20}):
            where = None
            if rank in RECEIVERS:
                mine = engine if rank < 4 else last
                where = {"w": mine, "v": torch.zeros(3)}
            result = meshcast.reshard_state_dict(held, where, **options)
            if rank in (2, 3):
                assert isinstance(result["w"], DTensor) and result["w"].device_mesh == two
                assert torch.equal(result["w"].to_local(), full.chunk(2)[rank - 2])
            if rank == 4:
                found = result["w"].to_local() if isinstance(result["w"], DTensor) else result["w"]
                assert torch.equal(found, full)
            if rank in RECEIVERS:
                assert torch.equal(result["v"], other)


def engines_with_empty_shards(context) -> None:
    """More ranks than rows on one of the meshes."""
    rank = context.rank
    full = filled((2, 2))
    held = {"w": full.clone()} if rank == 0 else None
    three, one = quiet_mesh([1, 2, 3]), quiet_mesh([4])
    where = {"w": (three, [Shard(0)]) if rank < 4 else (one, [Shard(1)])} if rank else None
    result = meshcast.reshard_state_dict(held, where)
    if rank:
        expected = full if rank == 4 else full[rank - 1 : rank]
        assert torch.equal(result["w"].to_local(), expected)
        if rank < 4:
            assert result["w"].shape == (2, 2)


def calls_of_one_kind(context) -> None:
    """A StateResharder and a WeightSync fill the tensors of their destinations at each call."""
    rank = context.rank
    fulls, held = _weights(rank)
    model = Extra()
    where = model.state_dict() if rank in RECEIVERS else None
    send = meshcast.StateResharder(where)
    for step in (1, 2, 3):
        given = {name: x * step for name, x in held.items()} or None
        send.run(given)
        if rank in RECEIVERS:
            assert torch.equal(model.layer.weight, fulls["layer.weight"] * step)
            assert int(model.seen) == 7 * step
    fresh = Extra()
    if rank in RECEIVERS:  # other outputs than before: taken, not passed over
        send.run(None, fresh.state_dict() | {"layer.bias": fresh.layer.bias.detach()})
        assert torch.equal(fresh.layer.weight, fulls["layer.weight"])
    else:
        send.run(held)
    sync = meshcast.WeightSync(held or None, where, buffers=1, timeout=30)
    for version in (1, 2):
        if rank in HOLDERS:
            for x in held.values():
                x.zero_().add_(version)
            sync.push(version)
        else:
            assert sync.pull(version) == version
            assert bool((model.layer.weight == version).all())
    sync.close()


def what_is_refused(context) -> None:
    """Each with what to do, and without values of tensors."""
    rank = context.rank
    full = filled((4, 3))
    held = {"w": full.clone()} if rank in HOLDERS else None
    mine = rank == 3
    text = "a plain tensor takes all of it"
    where = {"w": torch.zeros(2, 3)} if rank == 3 else None
    raises(LayoutError, text, lambda: meshcast.reshard_state_dict(held, where))
    where = {"w": torch.zeros(4, 3, device="meta")} if mine else None
    raises(
        LayoutError if mine else PlanMismatchError,
        "to_empty",
        lambda: meshcast.reshard_state_dict(held, where),
    )
    where = {"w": [torch.full((2,), 12345.0)]} if mine else None
    kind = LayoutError if mine else PlanMismatchError
    try:
        meshcast.reshard_state_dict(held, where)
    except kind as error:
        assert "a tensor to receive into, found [tensor(...)" in str(error), error
    else:
        raise AssertionError("not refused")
    model = torch.nn.Linear(3, 4) if mine else None
    text = "must be a mapping by name, found Linear: pass its state_dict()"
    raises(kind, text, lambda: meshcast.reshard_state_dict(held, model))
    # Two meshes that share a rank.
    both = {3: quiet_mesh([3, 4]), 4: quiet_mesh([2, 4])}
    raises(
        PlanMismatchError,
        "the destination of 'w' is",
        lambda: meshcast.reshard_state_dict(held, {"w": (both[rank], [Shard(0)])} if rank in both else None),
    )
    if rank in RECEIVERS:
        text = "destinations has the only buffer"
    else:
        text = "has the only buffer"
    try:
        sync = meshcast.WeightSync(held, {"w": torch.zeros(4, 3)} if rank in RECEIVERS else None, timeout=30)
        sync.push(1)
    except (LayoutError, PlanMismatchError) as error:
        assert text in str(error), error
    else:
        raise AssertionError("not refused")


CASES = [
    state_dict_of_a_model,
    dtensors_of_a_model,
    several_engines,
    engines_with_empty_shards,
    calls_of_one_kind,
    what_is_refused,
]

"""reshard_state_dict with entries of every kind: ranks 0 to 2 hold, ranks 2 to 4 receive."""

from __future__ import annotations

import collections
import enum
import random

import meshcast
import numpy as np
import torch
from meshcast import elastic
from meshcast.transfers import transfer as transfers
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
HOLDERS, RECEIVERS = [0, 1, 2], [2, 3, 4]


def raises(kind: type[Exception], text: str, function) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def filled(shape, dtype=torch.float32, seed: int = 1) -> torch.Tensor:
    return unique_fill(shape, dtype, seed)


def plain_tensors(context) -> None:
    """Buffers, DDP weights and AdamW's step: copies on those that have them, also where ranks have others."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    fulls = {
        "inv_freq": filled((5,)),
        "weight": filled((7, 3), torch.bfloat16, 2),
        "step": torch.tensor(7.0),
        "only0": filled((4,), torch.int64, 3),
        "only12": filled((2, 2), torch.float16, 4),
        "sharded": filled((6, 2), seed=5),
    }
    held = {n: fulls[n].clone() for n in ("inv_freq", "weight", "step")} if rank in HOLDERS else {}
    if rank == 0:
        held["only0"] = torch.nn.Buffer(fulls["only0"].clone())
    if rank in (1, 2):
        held["only12"] = torch.nn.Parameter(fulls["only12"].clone())
    if rank in HOLDERS:
        held["sharded"] = sharded(fulls["sharded"], quiet_mesh(HOLDERS), [Shard(0)], rank)
    where = {name: (mesh, [Shard(0) if full.ndim > 1 else Replicate()]) for name, full in fulls.items()}
    for options in ({}, {"digest": True}, {"max_bytes_in_flight": 20}):
        result = meshcast.reshard_state_dict(held or None, where, **options)
        assert list(result) == list(where)
        if rank in RECEIVERS:
            for name, full in fulls.items():
                expected = full if full.ndim < 2 else _third(full, RECEIVERS.index(rank))
                assert torch.equal(result[name].to_local(), expected), name


def _third(full: torch.Tensor, index: int) -> torch.Tensor:
    parts = full.chunk(3)
    return parts[index] if index < len(parts) else full[:0]


def plain_outputs(context) -> None:
    """Plain tensors as outputs take a whole copy; strict=False leaves out what has no destination."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    full, other = filled((3, 4)), filled((4,), torch.bfloat16, 2)
    held = {"a": full.clone(), "b": other.clone(), "extra": torch.ones(2), "odd": object()}
    where = {"a": (mesh, [Replicate()]), "b": (mesh, [Replicate()])}
    outs = {"a": torch.zeros(4, 3).t(), "b": torch.zeros(4)} if rank in RECEIVERS else {}
    result = meshcast.reshard_state_dict(held if rank in HOLDERS else None, where, outs, strict=False)
    if rank in RECEIVERS:
        assert result["a"] is outs["a"]
        assert torch.equal(outs["a"], full)
        assert outs["b"].dtype == torch.float32
        assert torch.equal(outs["b"], other.float())
    given = held if rank in HOLDERS else None
    kind = meshcast.LayoutError
    raises(
        kind if rank in HOLDERS else meshcast.PlanMismatchError,
        "'odd'",
        lambda: meshcast.reshard_state_dict(given, where),
    )
    held.pop("odd")
    raises(kind, "'extra'", lambda: meshcast.reshard_state_dict(given, where))
    bad = {"a": torch.zeros(3, 5)} if rank == 3 else {}
    raises(kind, "(3, 5)", lambda: meshcast.reshard_state_dict(given, where, bad, strict=False))
    odd = {"a": (mesh, [Shard(0)]), "b": (mesh, [Replicate()])}
    bad = {"a": torch.zeros(1, 4)} if rank == 3 else {}
    raises(
        kind if rank == 3 else meshcast.PlanMismatchError,
        "no whole copy",
        lambda: meshcast.reshard_state_dict(given, odd, bad, strict=False),
    )


def plain_results(context) -> None:
    """A Layout as destination: the result is the local tensor itself, as load_state_dict takes it."""
    rank = context.rank
    full = filled((7, 2), torch.bfloat16)
    where = {"w": meshcast.Layout(RECEIVERS, [Shard(0)]), "v": (meshcast.Layout([4], [Replicate()]), "cpu")}
    held = {"w": sharded(full, quiet_mesh(HOLDERS), [Shard(1)], rank), "v": full.clone()}
    for outs in ({}, {"v": torch.zeros_like(full)} if rank == 4 else {}):
        result = meshcast.reshard_state_dict(held if rank in HOLDERS else None, where, outs, digest=True)
        assert not any(isinstance(x, DTensor) for x in result.values())
        if rank in RECEIVERS:
            assert torch.equal(result["w"], _third(full, RECEIVERS.index(rank)))
        assert torch.equal(result["v"], full) if rank == 4 else result["v"].numel() == 0


def unlike_plain_tensors(context) -> None:
    """Copies that are no copies: other shapes raise, other values are found by the digest."""
    rank, where = context.rank, {"w": (quiet_mesh([4]), [Replicate()])}

    def call(value, **options):
        state = {"w": value} if rank in HOLDERS else None
        return meshcast.reshard_state_dict(state, where, **options)

    raises(meshcast.PlanMismatchError, "plain tensor", lambda: call(torch.zeros(3 + (rank == 1))))
    raises(
        meshcast.PlanMismatchError,
        "'w'",
        lambda: call(torch.zeros(3, dtype=[torch.int8, torch.int32][rank % 2])),
    )
    odd = sharded(torch.zeros(3), quiet_mesh([0]), [Replicate()], 0) if rank == 0 else torch.zeros(3)
    raises(meshcast.PlanMismatchError, "'w'", lambda: call(odd))
    raises(meshcast.MeshcastError, "replicas", lambda: call(torch.full((3,), float(rank)), digest=True))
    call(torch.full((3,), 2.0), digest=True)


def entries_that_are_no_tensors(context) -> None:
    """Numbers, text and their like come along to every rank, and may change from call to call."""
    rank = context.rank
    where = {"w": (quiet_mesh(RECEIVERS), [Replicate()])}
    for lr in (0.1, 0.1, 0.05):
        held = None
        if rank in HOLDERS:
            held = {
                "w": torch.ones(3),
                "lr": lr,
                "betas": (0.9, [1, None]),
                "name": {"a": b"\x00\xff", "b": True},
            }
        if rank == 1:
            held["mine"] = "x"
        result = meshcast.reshard_state_dict(held, where)
        assert result["lr"] == lr
        assert result["betas"] == (0.9, [1, None])
        assert type(result["betas"]) is tuple
        assert result["name"] == {"a": b"\x00\xff", "b": True}
        assert result["mine"] == "x"
        assert list(result) == ["w", "lr", "betas", "name", "mine"]
    held = {"w": torch.ones(3), "lr": float(rank)} if rank in HOLDERS else None
    raises(meshcast.PlanMismatchError, "'lr'", lambda: meshcast.reshard_state_dict(held, where))
    only = meshcast.reshard_state_dict(
        {"lr": 1} if rank == 0 else None, {"lr": (quiet_mesh([3]), [Replicate()])}
    )
    assert only == {"lr": 1}


class Mode(enum.Enum):
    FAST = "fast"


def held_by_others() -> dict:
    """What optimizers, schedulers, data loaders and random generators have as their state."""
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.5)
    with torch.no_grad():
        for number, each in enumerate(layer.parameters()):
            each.grad = torch.full_like(each, 1.0 + number)
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])
    return {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "loader": {
            "seen": {3, 1, 2},
            "epoch": np.int64(4),
            "weights": np.arange(3, dtype=np.float32),
            0: None,
            (1, 2): b"\x00\xff",
            "mode": Mode.FAST,
            "sampler": torch.Generator().manual_seed(3).get_state(),
        },
        "python": random.Random(1).getstate(),
        "numpy": np.random.RandomState(1).get_state(),
        "bits": np.random.default_rng(1).bit_generator.state,
        "nan": float("nan"),
        "losses": [1.0, float("nan"), {"best": float("-inf"), "last": float("nan"), 2: float("nan")}],
        "rates": {"first": float("nan"), "last": 0.5},
        "order": collections.OrderedDict([(2, "b"), (1, "a")]),
    }


def equal(found, expected) -> bool:
    """Of one type and value; NaN is NaN."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(equal(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(equal, found, expected))
    if isinstance(expected, torch.Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, np.ndarray):
        return found.dtype == expected.dtype and np.array_equal(found, expected)
    return found == expected or (found != found and expected != expected)


def types_of_entries(context) -> None:
    """What is no tensor arrives as it was sent, its types too; NaN on several ranks is one value."""
    rank = context.rank
    torch.manual_seed(1)
    expected = held_by_others()
    for turn in range(3):
        held = None
        if rank in HOLDERS:
            held = {"w": torch.ones(3), **expected, "turn": [turn, float("nan")]}
            if rank == 1:  # in another order
                *others, losses = expected["losses"]
                held["losses"] = [*others, dict(reversed(losses.items()))]
                held["rates"] = dict(reversed(expected["rates"].items()))
        result = meshcast.reshard_state_dict(held, {"w": (quiet_mesh(RECEIVERS), [Replicate()])})
        for name, value in expected.items():
            assert equal(result[name], value), (name, result[name], value)
        assert result["turn"][0] == turn
    new = {"w": (quiet_mesh([0, 1, 2, 3, 4]), [Replicate()])}
    found = elastic.remesh(held, None, new)
    for name, value in expected.items():
        assert equal(found[name], value), (name, found[name], value)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [9])
    scheduler.load_state_dict(found["scheduler"])
    assert scheduler.milestones == collections.Counter([2, 2, 5])
    where = {"w": (quiet_mesh(RECEIVERS), [Replicate()])}
    for bad, kind, text in (
        ({"nan": float("nan") if rank else 0.0}, meshcast.PlanMismatchError, "nan"),
        ({"nan": {1: 2} if rank else {"1": 2}}, meshcast.PlanMismatchError, "'1'"),
        ({"big": {"a": torch.zeros(1 << 20)}}, meshcast.MeshcastError, "entry of its own"),
        ({7: torch.zeros(2)}, meshcast.MeshcastError, "names are text"),
    ):
        given = {"w": torch.ones(3), **bad} if rank in HOLDERS else None
        raises(kind, text, lambda given=given: meshcast.reshard_state_dict(given, where))


def tied_weights(context) -> None:
    """Two names of one tensor: its bytes travel once, and the results are one tensor again."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    full = filled((64, 8))
    x = sharded(full, quiet_mesh(HOLDERS), [Shard(0)], rank)
    tied = {"embed": x, "norm": torch.ones(3), "head": DTensor(x._local_tensor, x._spec, requires_grad=False)}
    where = {"embed": (mesh, [Shard(1)]), "norm": (mesh, [Replicate()]), "head": (mesh, [Shard(1)])}
    held = tied if rank in HOLDERS else None

    def sizes(*arguments, **options):
        counted = []
        original = transfers.PersistentTransfer.launch

        def launch(self, sources, *rest, **more):
            if self._op == "reshard_state_dict" and len(sources) != 1:
                counted.append(len(sources))
            return original(self, sources, *rest, **more)

        transfers.PersistentTransfer.launch = launch
        try:
            return meshcast.reshard_state_dict(*arguments, **options), counted
        finally:
            transfers.PersistentTransfer.launch = original

    result, counted = sizes(held, where, digest=True)
    assert counted == [2]
    assert result["embed"] is result["head"]
    whole = full.chunk(3, 1)
    if rank in RECEIVERS:
        assert torch.equal(result["head"].to_local(), whole[RECEIVERS.index(rank)])
    outs = {}
    if rank in RECEIVERS:
        out = sharded(torch.zeros(64, 8), mesh, [Shard(1)], rank)
        outs = {"embed": out, "head": DTensor(out._local_tensor, out._spec, requires_grad=False)}
    result, counted = sizes(held, where, outs)
    assert counted == [2]
    if rank in RECEIVERS:
        assert result["head"] is outs["head"]
        assert torch.equal(outs["embed"].to_local(), whole[RECEIVERS.index(rank)])
    # Elsewhere they have destinations of their own, or are not tied: then each travels.
    apart = {**where, "head": (mesh, [Replicate()])}
    result, counted = sizes(held, apart)
    assert counted == [3]
    if rank in RECEIVERS:
        assert torch.equal(result["head"].to_local(), full)
        assert torch.equal(result["embed"].to_local(), whole[RECEIVERS.index(rank)])
    untied = {**tied, "head": sharded(full + 1, quiet_mesh(HOLDERS), [Shard(0)], rank)}
    raises(
        meshcast.LayoutError,
        "share memory",
        lambda: meshcast.reshard_state_dict(untied if rank in HOLDERS else None, where, outs),
    )
    result = meshcast.reshard_state_dict(untied if rank in HOLDERS else None, where)
    if rank in RECEIVERS:
        assert torch.equal(result["head"].to_local(), whole[RECEIVERS.index(rank)] + 1)


def views(context) -> None:
    """Views of one storage, strided and overlapping, travel as the tensors that they are."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    base = filled((6, 8), torch.bfloat16, 9)
    made = {
        "whole": base,
        "rows": base[1:4],
        "columns": base[:, ::2],
        "turned": base.t(),
        "expanded": base[0].expand(3, 8),
    }
    where = {name: (mesh, [Shard(0)]) for name in made}
    result = meshcast.reshard_state_dict(made if rank in HOLDERS else None, where, digest=True)
    if rank in RECEIVERS:
        for name, full in made.items():
            assert torch.equal(result[name].to_local(), _third(full, RECEIVERS.index(rank))), name


def destinations_of_others(context) -> None:
    """Each rank names what it is in: stages of a pipeline, experts."""
    rank = context.rank
    fulls = {f"stage{i}.w": filled((4, 3), seed=i) for i in (2, 3, 4)} | {"shared": filled((6,), seed=9)}
    held = {n: sharded(f, quiet_mesh(HOLDERS), [Shard(0)], rank) for n, f in fulls.items()}
    own = {}
    if rank in RECEIVERS:
        own[f"stage{rank}.w"] = (quiet_mesh([rank]), [Replicate()])
    if rank in (3, 4):
        own["shared"] = (quiet_mesh([3, 4]), [Shard(0)])
    for outs in (False, True):
        given = {n: sharded(torch.zeros_like(fulls[n]), *own[n], rank) for n in own} if outs else {}
        result = meshcast.reshard_state_dict(held if rank in HOLDERS else None, own or None, given)
        assert list(result) == list(own)
        if rank in RECEIVERS:
            assert torch.equal(result[f"stage{rank}.w"].to_local(), fulls[f"stage{rank}.w"])
        if rank in (3, 4):
            assert torch.equal(result["shared"].to_local(), fulls["shared"].chunk(2)[rank - 3])
    # A rank that is meant must say so: it has to have memory for it.
    lazy = {} if rank == 4 else own
    raises(
        meshcast.PlanMismatchError,
        "'shared'",
        lambda: meshcast.reshard_state_dict(held if rank in HOLDERS else None, lazy, strict=False),
    )
    raises(meshcast.LayoutError, "no destinations", lambda: meshcast.reshard_state_dict(None))
    other = dict(own)
    if rank == 4:
        other["shared"] = (quiet_mesh([3, 4]), [Replicate()])
    raises(
        meshcast.PlanMismatchError,
        "'shared'",
        lambda: meshcast.reshard_state_dict(held if rank in HOLDERS else None, other),
    )


CASES = [
    plain_tensors,
    plain_outputs,
    plain_results,
    unlike_plain_tensors,
    entries_that_are_no_tensors,
    types_of_entries,
    tied_weights,
    views,
    destinations_of_others,
]

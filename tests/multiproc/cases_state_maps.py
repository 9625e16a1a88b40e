"""reshard_state_dict with names mapped and tensors joined, cut, stacked and turned; layouts by boxes. Ranks
0 to 2 hold, ranks 2 to 4 receive."""

from __future__ import annotations

import itertools
import random

import meshcast
import torch
from meshcast import Layout, TensorMap
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 30.0
HOLDERS, RECEIVERS = [0, 1, 2], [2, 3, 4]


def raises(kind: type[Exception], text: str, function) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def held_by(rank: int, fulls, placements):
    mesh = quiet_mesh(HOLDERS)
    if rank not in HOLDERS:
        return None
    return {name: sharded(full, mesh, placements, rank) for name, full in fulls.items()}


def check(result, expected, where, rank: int) -> None:
    assert list(result) == list(where)
    for name, (mesh, placements) in where.items():
        place = coordinates(mesh.mesh).get(rank)
        if place is not None:
            part = cut(expected[name], mesh.mesh.shape, place, placements)
            assert result[name].dtype == part.dtype
            assert torch.equal(result[name].to_local(), part), name


def moved(context, fulls, expected, maps, *, dtype=torch.float32, **options) -> None:
    """Every layout of the sources to every layout of the targets, into new memory and into that given."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    fulls = {name: full.to(dtype) for name, full in fulls.items()}
    expected = {name: full.to(dtype) for name, full in expected.items()}
    ndim = min(full.ndim for full in (*fulls.values(), *expected.values()))
    ways = [[Replicate()], *([Shard(dim)] for dim in range(ndim))]
    for source, target in ((a, b) for a in ways for b in ways):
        where = dict.fromkeys(expected, (mesh, target))
        held = held_by(rank, fulls, source)
        result = meshcast.reshard_state_dict(held, where, maps=maps, digest=True, **options)
        check(result, expected, where, rank)
    outs = {}
    if rank in RECEIVERS:
        outs = {name: sharded(torch.zeros_like(x), mesh, ways[-1], rank) for name, x in expected.items()}
    where = dict.fromkeys(expected, (mesh, ways[-1]))
    result = meshcast.reshard_state_dict(
        held_by(rank, fulls, ways[-1]), where, outs, maps=maps, max_bytes_in_flight=64, **options
    )
    check(result, expected, where, rank)
    assert all(result[name] is out for name, out in outs.items())


def fused(context) -> None:
    """q, k, v to qkv; gate and up to gate_up; by turns of the key heads; along columns."""
    q, k, v = (unique_fill((rows, 6), torch.float32, seed) for rows, seed in ((8, 1), (4, 2), (4, 3)))
    gate, up = unique_fill((5, 4), torch.float32, 4), unique_fill((5, 4), torch.float32, 5)
    fulls = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    maps = [TensorMap(["q", "k", "v"], "qkv"), TensorMap(["gate", "up"], "gate_up", dim=-1)]
    moved(context, fulls, {"qkv": torch.cat([q, k, v]), "gate_up": torch.cat([gate, up], 1)}, maps)
    turns = torch.cat(
        [part for group in zip(q.chunk(2), k.chunk(2), v.chunk(2), strict=True) for part in group]
    )
    turned = [TensorMap(["q", "k", "v"], "qkv", groups=2)]
    for dtype in (torch.float32, torch.bfloat16):
        moved(context, {"q": q, "k": k, "v": v}, {"qkv": turns}, turned, dtype=dtype)


def split(context) -> None:
    """The way back: qkv to q, k, v, with sizes and by turns; equal parts without sizes."""
    qkv, both = unique_fill((16, 6), torch.float32, 1), unique_fill((10, 4), torch.float32, 2)
    maps = [TensorMap("qkv", ["q", "k", "v"], sizes=[8, 4, 4]), TensorMap("both", ["gate", "up"])]
    expected = dict(zip("qkv", qkv.split([8, 4, 4]), strict=True))
    expected |= dict(zip(("gate", "up"), both.chunk(2), strict=True))
    moved(context, {"qkv": qkv, "both": both}, expected, maps)
    groups = [group.split([4, 2, 2]) for group in qkv.chunk(2)]
    expected = {name: torch.cat([group[i] for group in groups]) for i, name in enumerate("qkv")}
    moved(context, {"qkv": qkv}, expected, [TensorMap("qkv", ["q", "k", "v"], sizes=[8, 4, 4], groups=2)])
    # A part alone is what a rank may want.
    only = [TensorMap("qkv", ["q", "k", "v"], sizes=[8, 4, 4])]
    moved(context, {"qkv": qkv}, {"k": qkv[8:12]}, only)


def stacked(context) -> None:
    """Experts as one tensor, and one by one again; scalars as a vector; a stack of joined ones."""
    experts = {f"experts.{i}.w": unique_fill((3, 5), torch.float32, i) for i in range(4)}
    together = torch.stack(list(experts.values()))
    for dim in (0, 2):
        whole = {"w": torch.stack(list(experts.values()), dim)}
        moved(context, experts, whole, [TensorMap(list(experts), "w", dim=dim, stack=True)])
        moved(context, whole, experts, [TensorMap("w", list(experts), dim=dim, stack=True)])
    scalars = {f"s{i}": torch.tensor(float(i + 5)) for i in range(3)}
    moved(context, scalars, {"s": torch.arange(5.0, 8)}, [TensorMap(list(scalars), "s", stack=True)])
    moved(context, {"s": torch.arange(5.0, 8)}, scalars, [TensorMap("s", list(scalars), stack=True)])
    pairs = [TensorMap([f"experts.{i}.w", f"experts.{i + 1}.w"]) for i in (0, 2)]
    expected = {"w13": together.reshape(2, 6, 5)}
    moved(context, experts, expected, [TensorMap(pairs, "w13", stack=True)])


def experts_apart(context) -> None:
    """Gate and up of each expert out of one tensor of all: the same maps as targets as to join them, so there
    and back again is what it was. Interleaved by groups, of unequal sizes, transposed, and one expert."""
    whole = unique_fill((3, 4, 5), torch.float32, 1)
    parts = {}
    for i, expert in enumerate(whole):
        parts[f"{i}.gate"], parts[f"{i}.up"] = expert[:2].contiguous(), expert[2:].contiguous()
    each = [TensorMap([f"{i}.gate", f"{i}.up"]) for i in range(3)]
    for dtype in (torch.float32, torch.bfloat16):
        moved(context, {"w13": whole}, parts, [TensorMap("w13", each, stack=True)], dtype=dtype)
    moved(context, parts, {"w13": whole}, [TensorMap(each, "w13", stack=True)])
    moved(context, {"w13": whole}, {"2.up": parts["2.up"]}, [TensorMap("w13", each, stack=True)])
    one = TensorMap("w13", [each[0]], stack=True)
    moved(context, {"w13": whole[:1].contiguous()}, {n: parts[n] for n in ("0.gate", "0.up")}, [one])
    turns = {
        f"{i}.{n}": whole[i, at::2].contiguous() for i in range(3) for at, n in enumerate(("gate", "up"))
    }
    by_turns = [TensorMap([f"{i}.gate", f"{i}.up"], groups=2) for i in range(3)]
    moved(context, {"w13": whole}, turns, [TensorMap("w13", by_turns, stack=True)])
    turned = {
        f"{i}.{n}": part.t().contiguous()
        for i in range(3)
        for n, part in zip(("gate", "up"), whole[i].split([1, 3]), strict=True)
    }
    uneven = [TensorMap([f"{i}.gate", f"{i}.up"], sizes=[1, 3], permute=(1, 0)) for i in range(3)]
    moved(context, {"w13": whole}, turned, [TensorMap("w13", uneven, stack=True)])
    kernels = unique_fill((2, 3, 4, 2), torch.float32, 2)  # a turn of three dimensions has another back
    around = [TensorMap([f"{i}.a", f"{i}.b"], dim=1, permute=(1, 2, 0)) for i in range(2)]
    apart = {
        f"{i}.{n}": part.permute(2, 0, 1).contiguous()
        for i, kernel in enumerate(kernels)
        for n, part in zip("ab", kernel.chunk(2, 1), strict=True)
    }
    moved(context, {"k": kernels}, apart, [TensorMap("k", around, stack=True)])
    moved(context, apart, {"k": kernels}, [TensorMap(around, "k", stack=True)])


def turned(context) -> None:
    """Transposes, alone and with what else a map does."""
    a, b = unique_fill((4, 6), torch.float32, 1), unique_fill((4, 2, 3), torch.bfloat16, 2).float()
    maps = [TensorMap("a", "at", permute=(1, 0)), TensorMap("b", "bt", permute=(2, 0, 1))]
    moved(context, {"a": a, "b": b}, {"at": a.t().contiguous(), "bt": b.permute(2, 0, 1).contiguous()}, maps)
    c = unique_fill((4, 3), torch.float32, 3)
    joined = [TensorMap(["a", "c"], "ac", permute=(1, 0))]
    moved(context, {"a": a, "c": c}, {"ac": torch.cat([a.t(), c.t()])}, joined)


def with_casts(context) -> None:
    """A cast, sources of different dtypes, and a Partial source, mapped."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    a, b = unique_fill((4, 3), torch.bfloat16, 1), unique_fill((2, 3), torch.float32, 2)
    where = {"ab": (mesh, [Shard(0)])}
    held = held_by(rank, {"a": a, "b": b}, [Shard(1)])
    maps = TensorMap(["a", "b"], "ab")
    move = lambda: meshcast.reshard_state_dict(held, where, maps=maps)  # noqa: E731
    raises(meshcast.LayoutError, "different dtypes", move)
    for dtype in (torch.bfloat16, torch.float64):
        result = meshcast.reshard_state_dict(held, where, maps=maps, dtype=dtype, digest=True)
        check(result, {"ab": torch.cat([a.to(dtype), b.to(dtype)])}, where, rank)
    if rank in HOLDERS:
        local = torch.full((2, 3), float(rank + 1))
        held = {
            "p": DTensor.from_local(local, quiet_mesh(HOLDERS), [Partial()], run_check=False),
            "b": held["b"],
        }
    where = {"pb": (mesh, [Shard(1)])}
    result = meshcast.reshard_state_dict(held, where, maps=[TensorMap(["p", "b"], "pb")])
    check(result, {"pb": torch.cat([torch.full((2, 3), 6.0), b])}, where, rank)


def of_two_dtypes(context) -> None:
    """A target made of a narrower tensor, which is cast where it arrives, and of one of its own dtype."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    fulls = {
        "a": torch.arange(12.0).reshape(4, 3).to(torch.bfloat16),
        "b": torch.arange(9.0).reshape(3, 3) / 7,
    }
    out = {"ab": sharded(torch.zeros(7, 3), mesh, [Shard(0)], rank)} if rank in RECEIVERS else {}
    where = {"ab": (mesh, [Shard(0)])}
    result = meshcast.reshard_state_dict(
        held_by(rank, fulls, [Shard(0)]), where, out, maps=TensorMap(["a", "b"], "ab"), digest=True
    )
    check(result, {"ab": torch.cat([fulls["a"].float(), fulls["b"]])}, where, rank)


def renamed(context) -> None:
    """Names by a mapping and by a function, before maps; entries left out; a subset."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    fulls = {f"model.{i}.w": unique_fill((4, 3), torch.float32, i) for i in range(3)}
    held = held_by(rank, fulls, [Shard(0)])
    where = {f"{i}.w": (mesh, [Shard(1)]) for i in range(3)}
    expected = {f"{i}.w": fulls[f"model.{i}.w"] for i in range(3)}

    def call(where=where, **options):
        return meshcast.reshard_state_dict(held, where, **options)

    check(call(rename=lambda name: name.removeprefix("model.")), expected, where, rank)
    check(call(rename={name: name.removeprefix("model.") for name in fulls}), expected, where, rank)
    two = {name: where[name] for name in ("0.w", "1.w")}
    left_out = {"model.0.w": "0.w", "model.1.w": "1.w", "model.2.w": None}
    check(call(two, rename=left_out), expected, two, rank)
    joined = {"w": (mesh, [Shard(1)])}
    short = lambda name: name.removeprefix("model.")  # noqa: E731
    result = call(joined, rename=short, maps=[TensorMap(["2.w", "0.w", "1.w"], "w")])
    check(result, {"w": torch.cat([expected[name] for name in ("2.w", "0.w", "1.w")])}, joined, rank)
    for only in (["1.w"], lambda name: name.startswith("1")):
        result = call(rename=short, only=only)
        check(result, expected, {"1.w": where["1.w"]}, rank)
    other = {"model.0.w": "x"} if rank == 1 else {"model.0.w": "0.w"}
    raises(meshcast.PlanMismatchError, "'model.0.w'", lambda: call(rename=other))
    raises(meshcast.LayoutError, "'nowhere'", lambda: call(rename={"nowhere": "0.w"}))
    raises(meshcast.LayoutError, "'nowhere'", lambda: call(rename=short, only=["nowhere", "1.w"]))
    raises(meshcast.LayoutError, "'0.w'", lambda: call())
    kind = meshcast.LayoutError if rank in HOLDERS else meshcast.PlanMismatchError
    raises(kind, "rename makes 'w'", lambda: call(rename=lambda _: "w"))
    check(call(rename=short), expected, where, rank)


def maps_that_do_not_fit(context) -> None:
    """One typed error on every rank, before a byte moves: names, shapes, another version of the map."""
    rank, mesh = context.rank, quiet_mesh(RECEIVERS)
    fulls = {"q": torch.ones(8, 6), "k": torch.ones(4, 6), "odd": torch.ones(4, 5)}
    held = held_by(rank, fulls, [Shard(0)])
    where = {"qk": (mesh, [Shard(0)])}
    out = {"qk": sharded(torch.zeros(12, 6), mesh, [Shard(0)], rank)} if rank in RECEIVERS else {}

    def call(*maps, where=where):
        return meshcast.reshard_state_dict(held, where, out, maps=maps, strict=False)

    error = meshcast.LayoutError
    raises(error, "'missing'", lambda: call(TensorMap(["q", "missing"], "qk")))
    raises(error, "cannot be joined", lambda: call(TensorMap(["q", "odd"], "qk")))
    raises(error, "3 groups", lambda: call(TensorMap(["q", "k"], "qk", groups=3)))
    raises(error, "permute", lambda: call(TensorMap(["q", "k"], "qk", permute=(0, 1, 2))))
    raises(error, "dimension 2", lambda: call(TensorMap(["q", "k"], "qk", dim=2)))
    raises(error, "add up to 7", lambda: call(TensorMap("q", ["qk", "z"], sizes=[3, 4])))
    whole = {"kk": (mesh, [Replicate()])}
    twice = TensorMap(["k", "k"], "kk", stack=True)
    raises(
        error,
        "'k': rank 2 wants the box [0:4, 0:6] at two places of its memory",
        lambda: meshcast.reshard_state_dict(held, whole, maps=twice, strict=False),
    )
    raises(error, "'qk'", lambda: call())
    raises(error, "(12, 6)", lambda: call(TensorMap("q", "qk")))
    other = TensorMap(["k", "q"] if rank == 4 else ["q", "k"], "qk")
    raises(meshcast.PlanMismatchError, "maps", lambda: call(other))
    raises(meshcast.PlanMismatchError, "maps", lambda: call(*([other] if rank != 2 else [])))
    assert not any(x.to_local().any() for x in out.values())
    for sources in (["q", "k"], ["k", "k", "k"]):  # a rank gets each element once
        result = call(TensorMap(sources, "qk"))
        assert rank not in RECEIVERS or bool((result["qk"].to_local() == 1).all())


def heads(rank: int, ways: int, query: int, key: int, size: int) -> list:
    """The rows of a fused qkv that tensor parallelism gives a rank: its query heads, and the key head of
    these, which ranks share where there are fewer of them."""
    q = query // ways
    first, last = rank * q * key // query, ((rank + 1) * q - 1) * key // query + 1
    rows = [(rank * q, (rank + 1) * q)]
    rows += [(query + first, query + last), (query + key + first, query + key + last)]
    return [((low * size, high * size), (0, 6)) for low, high in rows]


def boxes_of_heads(context) -> None:
    """qkv by heads, with fewer key heads than ranks; Mamba's in_proj by segments; interleaved rows."""
    rank = context.rank
    query, key, size = 12, 2, 2
    shape = ((query + 2 * key) * size, 6)
    segments = Layout.from_boxes(
        {
            r: [((low + i * n, low + (i + 1) * n), (0, 6)) for low, n in ((0, 6), (18, 2), (24, 1))]
            for i, r in enumerate(RECEIVERS)
        }
    )
    layouts = {
        "heads": (
            shape,
            Layout.from_boxes({r: heads(i, 3, query, key, size) for i, r in enumerate(RECEIVERS)}),
        ),
        "in_proj": ((27, 6), segments),
        "rows": (
            (9, 6),
            Layout.from_boxes(
                {r: [((row, row + 1), (0, 6)) for row in range(i, 9, 3)] for i, r in enumerate(RECEIVERS)}
            ),
        ),
        "flat": (
            (6, 6),
            Layout.from_boxes(
                {
                    r: [((i, i + 2), (i, i + 3)), ((5, 6), (0, 1)), ((0, 1), (4, 6))]
                    for i, r in enumerate(RECEIVERS)
                }
            ),
        ),
    }
    for dtype in (torch.float32, torch.bfloat16):
        fulls = {n: unique_fill(shape, dtype, i) for i, (n, (shape, _)) in enumerate(layouts.items())}
        where = {name: layout for name, (_, layout) in layouts.items()}
        for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
            held = held_by(rank, fulls, placements)
            result = meshcast.reshard_state_dict(held, where, digest=True)
            local = {}
            for name, (shape, layout) in layouts.items():
                local[name] = result[name]
                if rank in RECEIVERS:
                    assert torch.equal(result[name], joined(fulls[name], layout.shards(shape)[rank])), name
            # And back again, from boxes to placements.
            back = {name: (quiet_mesh(HOLDERS), placements) for name in where if name != "flat"}
            given = {name: x for name, x in local.items() if name != "flat"} if rank in RECEIVERS else None
            returned = meshcast.reshard_state_dict(
                given, back, layouts={name: where[name] for name in back}, digest=True
            )
            check(returned, fulls, back, rank)


def joined(full: torch.Tensor, boxes) -> torch.Tensor:
    """The boxes of a tensor as a rank's memory holds them: along the one dimension that differs, or flat."""
    parts = [full[tuple(slice(*side) for side in box)] for box in boxes]
    unlike = [d for d in range(full.ndim) if len({box[d] for box in boxes}) > 1]
    if len(unlike) < 2:
        return torch.cat(parts, unlike[0] if unlike else 0)
    return torch.cat([part.reshape(-1) for part in parts])


def boxes_that_miss(context) -> None:
    """A source that does not have what is wanted; boxes outside of the tensor; a local tensor that does not
    fit."""
    rank = context.rank
    source = Layout.from_boxes({0: [((0, 2), (0, 3))], 1: [((3, 4), (0, 3))]})
    held = {"w": torch.ones(2 if rank == 0 else 1, 3)} if rank < 2 else None

    def call(where, held=held, **options):
        return meshcast.reshard_state_dict(held, {"w": where}, layouts={"w": source}, **options)

    raises(meshcast.LayoutError, "held by no rank", lambda: call(Layout([3], [Replicate()])))
    raises(meshcast.LayoutError, "not inside", lambda: call(Layout.from_boxes({3: [((0, 5), (0, 3))]})))
    kind = meshcast.LayoutError if rank == 0 else meshcast.PlanMismatchError
    raises(
        kind,
        "local shape",
        lambda: call(Layout([3], [Replicate()]), {"w": torch.ones(3, 3)} if rank == 0 else held),
    )
    source = Layout.from_boxes({0: [((2, 2), (0, 3))]})  # nothing of a tensor of any size
    empty = {"w": torch.ones(0, 0)} if rank == 0 else None
    raises(kind, "does not say how large the tensor is", lambda: call(Layout([3], [Replicate()]), empty))
    source = Layout.from_boxes({0: [((0, 2), (0, 3))], 1: [((3, 4), (0, 3))]})
    misspelt = {"v": Layout([3], [Replicate()])}
    raises(
        meshcast.LayoutError,
        "layouts= on rank 0 names",
        lambda: meshcast.reshard_state_dict(held, {"w": misspelt["v"]}, layouts=misspelt),
    )
    raises(
        meshcast.LayoutError,
        "no such key",
        lambda: call(Layout.from_boxes({3: [((0, 1), (0, 3))]}), None if rank == 1 else held),
    )
    result = call(Layout.from_boxes({3: [((3, 4), (0, 3)), ((0, 1), (0, 3))]}))
    assert rank != 3 or torch.equal(result["w"], torch.ones(2, 3))


def boxes_with_maps(context) -> None:
    """q, k, v of a trainer to the fused rows by heads of the receivers, and back."""
    rank = context.rank
    query, key, size = 6, 2, 4
    fulls = {
        name: unique_fill((count * size, 6), torch.bfloat16, seed)
        for seed, (name, count) in enumerate((("q", query), ("k", key), ("v", key)))
    }
    whole = torch.cat(list(fulls.values()))
    layout = Layout.from_boxes({r: heads(i, 3, query, key, size) for i, r in enumerate(RECEIVERS)})
    held = held_by(rank, fulls, [Shard(0)])
    maps = [TensorMap(["q", "k", "v"], "qkv")]
    result = meshcast.reshard_state_dict(held, {"qkv": layout}, maps=maps, digest=True)
    if rank in RECEIVERS:
        assert torch.equal(result["qkv"], joined(whole, layout.shards(whole.shape)[rank]))
    back = {name: (quiet_mesh(HOLDERS), [Shard(1)]) for name in fulls}
    maps = [TensorMap("qkv", list(fulls), sizes=[len(full) for full in fulls.values()])]
    given = {"qkv": result["qkv"]} if rank in RECEIVERS else None
    returned = meshcast.reshard_state_dict(given, back, maps=maps, layouts={"qkv": layout}, digest=True)
    check(returned, fulls, back, rank)


def boxes_in_reshard_local(context) -> None:
    """Random boxes from ranks to ranks, without a state dict; ranks in both."""
    rng = random.Random(11)
    for seed in range(12):
        shape = tuple(rng.randint(2, 7) for _ in range(rng.randint(1, 3)))
        full = unique_fill(shape, [torch.float32, torch.bfloat16][seed % 2], seed)
        source, target = (_drawn(rng, shape, ranks) for ranks in (HOLDERS, RECEIVERS))
        local = source.shards(shape).get(context.rank)
        mine = None if not local else joined(full, local)
        found = meshcast.reshard_local(mine, source, None, target, shape=shape, dtype=full.dtype)
        wanted = target.shards(shape).get(context.rank)
        if wanted:
            assert torch.equal(found, joined(full, wanted))


def _drawn(rng: random.Random, shape, ranks) -> Layout:
    cuts = [sorted({0, size, rng.randint(0, size), rng.randint(0, size)}) for size in shape]
    boxes = [()]
    for each in cuts:
        boxes = [(*box, side) for box in boxes for side in itertools.pairwise(each)]
    held = {rank: [] for rank in ranks}
    for box in boxes:
        for rank in rng.sample(ranks, rng.randint(1, 2)):
            held[rank].append(box)
    return Layout.from_boxes(held)


def many_equal_boxes(context) -> None:
    """Tensors of two kinds, by boxes that lie anywhere in the local tensors. They are more boxes than a
    plan has room for one by one: they are planned as two, and each element arrives in its place."""
    rank, rows, count = context.rank, 1024, 260
    boxes = {each: [((row, row + 1), (0, 2)) for row in range(each, rows, 2)] for each in (0, 1)}
    layout = Layout.from_boxes(boxes)
    turned = Layout.from_boxes(
        {r: [((row, row + 1), (0, 2)) for row in reversed(range(rows))] for r in (3, 4)}
    )
    fulls = {}
    for at in range(count):
        dtype = torch.bfloat16 if at % 2 else torch.float32
        fulls[f"w{at}"] = unique_fill((rows, 2), dtype, at)
    held = None
    if rank in (0, 1):
        held = {name: full[rank::2].clone() for name, full in fulls.items()}
    where = dict.fromkeys(fulls, turned) if rank in (3, 4) else None
    layouts = dict.fromkeys(fulls, (layout, (rows, 2))) if rank in (0, 1) else None
    result = meshcast.reshard_state_dict(held, where, layouts=layouts, timeout=100)
    for name, full in fulls.items() if where else ():
        assert torch.equal(result[name], full.flip(0)), name


CASES = [
    fused,
    split,
    stacked,
    experts_apart,
    turned,
    with_casts,
    of_two_dtypes,
    renamed,
    maps_that_do_not_fit,
    boxes_of_heads,
    boxes_that_miss,
    boxes_with_maps,
    many_equal_boxes,
    boxes_in_reshard_local,
]

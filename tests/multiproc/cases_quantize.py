"""reshard_state_dict and WeightSync with quantize=: bits equal to quantising whole tensors in one process.
The lower ranks hold, the upper ones receive; one may do both."""

from __future__ import annotations

import os
import random

import meshcast
import torch
from meshcast import Layout, LayoutError, PlanMismatchError, TensorMap
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut
from quantize_formula import quantized, same
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
SCHEMES = ("fp8_e4m3:128x128", "fp8_e4m3:1x128", "fp8_e4m3:4x6", "mxfp8", "nvfp4")


def names_of(name: str, scheme: str) -> list[str]:
    if scheme == "nvfp4":
        return [name, f"{name}_scale", f"{name}_scale_2"]
    return [name, f"{name}_scale{'_inv' if scheme in ('fp8_e4m3:128x128', 'fp8_e4m3:4x6') else ''}"]


def values(shape, seed: int, dtype=torch.float32) -> torch.Tensor:
    """Blocks of different sizes, some of zeros, and ties."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=draw) * torch.exp2(torch.randint(-8, 8, shape, generator=draw))
    x = torch.where(torch.rand(shape, generator=draw) < 0.1, torch.zeros(()), x)
    x[..., : max(1, shape[-1] // 5)] *= 1e-3
    return x.to(dtype)


def check(result, full, name, scheme, mesh, rank, names=None) -> None:
    """Every local tensor is that part of what the formula makes of the whole one."""
    place = coordinates(mesh.mesh).get(rank)
    for each, expected in zip(names or names_of(name, scheme), quantized(full, scheme), strict=True):
        got = result[each]
        assert got.shape == expected.shape, (each, got.shape, expected.shape)
        assert got.dtype == expected.dtype, (each, got.dtype)
        if place is not None:
            part = cut(expected, mesh.mesh.shape, place, got.placements)
            assert same(got.to_local(), part), f"{each} of {scheme}, {tuple(full.shape)}"


def held(rank, ranks, fulls, placements, shape=(-1,)):
    if rank not in ranks:
        return None
    mesh = quiet_mesh(torch.tensor(ranks).reshape(shape).tolist())
    return {name: sharded(full, mesh, placements, rank) for name, full in fulls.items()}


def split(context):
    """Holders and receivers, which share a rank."""
    world, half = list(range(context.world)), context.world // 2
    return world[: half + 1], world[half:]


def drawn(context) -> None:
    """Shapes, layouts, types of values, and types on the way."""
    if context.rank == 0:
        drawn_seed = os.environ.get("MESHCAST_TEST_SEED") or random.SystemRandom().randrange(1 << 30)
        context.store.set("quantize seed", str(drawn_seed))
    first = int(context.store.get("quantize seed"))
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + 40):
        draw = random.Random(seed)
        scheme = draw.choice(SCHEMES)
        multiple = {"mxfp8": 32, "nvfp4": 16}.get(scheme, 1)
        shape = (draw.randrange(1, 20) * draw.choice([1, 1, 13]), draw.randrange(1, 12) * max(multiple, 7))
        shape = (shape[0], -(-shape[1] // multiple) * multiple)
        if draw.random() < 0.2:
            shape = (draw.randrange(1, 4), *shape)
        full = values(shape, seed, draw.choice([torch.float32, torch.bfloat16, torch.float16]))
        ranks = draw.sample(range(context.world), draw.randrange(1, context.world + 1))
        wanted = draw.sample(range(context.world), draw.randrange(1, context.world + 1))
        ways = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        source, target = draw.choice(ways), draw.choice(ways)
        mesh = quiet_mesh(wanted)
        text = f"seed {seed}: {scheme} {shape} {full.dtype} {ranks} {source} to {wanted} {target}"
        try:
            result = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"w": full}, [source]),
                {"w": (mesh, [target])},
                quantize={"w": scheme},
                digest=draw.random() < 0.3,
            )
            assert list(result) == names_of("w", scheme), list(result)
            check(result, full, "w", scheme, mesh, context.rank)
        except BaseException as error:
            raise AssertionError(text) from error


def straddling(context) -> None:
    """Blocks that lie on several ranks, of both dimensions, with replicas; odd columns of 4 bits."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    for scheme, shape in (
        ("fp8_e4m3:128x128", (200, 300)),
        ("fp8_e4m3:1x128", (5, 300)),
        ("mxfp8", (7, 96)),
        ("nvfp4", (6, 80)),
        ("nvfp4", (3, 16)),
    ):
        for way in ([Shard(0)], [Shard(1)]):
            full = values(shape, 3, torch.bfloat16)
            state = held(context.rank, ranks, {"w": full}, way)
            result = meshcast.reshard_state_dict(state, {"w": (mesh, [Replicate()])}, quantize=scheme)
            check(result, full, "w", scheme, mesh, context.rank)
        if len(ranks) >= 2 and context.world >= 5:
            four = [0, 1, 2, 3]
            for way in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]):
                full = values(shape, 4)
                state = held(context.rank, four, {"w": full}, way, (2, 2))
                result = meshcast.reshard_state_dict(state, {"w": (mesh, [Shard(0)])}, quantize=scheme)
                check(result, full, "w", scheme, mesh, context.rank)


def maps(context) -> None:
    """Tensors that are fused, stacked and turned before they are quantised."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    a, b = values((50, 96), 1), values((78, 96), 2)
    for scheme in SCHEMES:
        for way in ([Shard(0)], [Shard(1)]):
            state = held(context.rank, ranks, {"a": a, "b": b}, way)
            fused = meshcast.reshard_state_dict(
                state, {"ab": (mesh, [Shard(0)])}, maps=[TensorMap(["a", "b"], "ab")], quantize=scheme
            )
            check(fused, torch.cat([a, b]), "ab", scheme, mesh, context.rank)
            side = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"a": a, "b": a + 1}, way),
                {"ab": (mesh, [Shard(1)])},
                maps=[TensorMap(["a", "b"], "ab", dim=1)],
                quantize=scheme,
            )
            check(side, torch.cat([a, a + 1], 1), "ab", scheme, mesh, context.rank)
            stacked = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"a": a, "b": a + 1}, way),
                {"ab": (mesh, [Shard(0)])},
                maps=[TensorMap(["a", "b"], "ab", stack=True)],
                quantize=scheme,
            )
            check(stacked, torch.stack([a, a + 1]), "ab", scheme, mesh, context.rank)
            second = torch.randn(901, 81, generator=torch.Generator().manual_seed(7))
            odd = {"a": values((901, 15), 6, torch.bfloat16), "b": second}  # bytes that have one of each
            joined = meshcast.reshard_state_dict(
                held(context.rank, ranks, odd, way),
                {"ab": (mesh, [Shard(0)])},
                maps=[TensorMap(["a", "b"], "ab", dim=1)],
                quantize=scheme,
            )
            check(joined, torch.cat([*odd.values()], 1), "ab", scheme, mesh, context.rank)
            square = values((96, 64), 5)
            turned = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"a": square}, way),
                {"t": (mesh, [Shard(0)])},
                maps=[TensorMap("a", "t", permute=(1, 0))],
                quantize=scheme,
            )
            check(turned, square.t(), "t", scheme, mesh, context.rank)


def entries(context) -> None:
    """Names, layouts and dtypes of what arrives; other tensors are left alone."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    full, bias = values((256, 256), 1), values((256,), 2)
    state = held(context.rank, ranks, {"w": full, "b": bias}, [Shard(0)])
    where = {"w": (mesh, [Shard(0)]), "b": (mesh, [Replicate()])}
    result = meshcast.reshard_state_dict(state, where, quantize="fp8_e4m3:128x128")
    assert list(result) == ["w", "w_scale_inv", "b"], list(result)
    assert result["b"].dtype == torch.float32
    # Scales of 2 rows of blocks, of which one rank's values cut one, or not.
    cuts = len(wanted) != 2
    assert result["w_scale_inv"].placements == ((Replicate(),) if cuts else (Shard(0),))
    check(result, full, "w", "fp8_e4m3:128x128", mesh, context.rank)
    # A function of the name, names of the scales, a destination of their own.
    result = meshcast.reshard_state_dict(
        state,
        {**where, "s": (mesh, [Replicate()])},
        quantize=lambda name: ("mxfp8", "s") if name == "w" else None,
    )
    assert list(result) == ["w", "s", "b"], list(result)
    assert result["s"].placements == (Replicate(),)
    check(result, full, "w", "mxfp8", mesh, context.rank, ["w", "s"])
    # Plain tensors of a layout, and tensors to receive into.
    layout = Layout(wanted, [Shard(0)])
    own = {"w": layout} if context.rank in wanted else None
    quantize = {"w": "nvfp4"} if own else None
    result = meshcast.reshard_state_dict(
        None if state is None else {"w": state["w"]}, own, quantize=quantize, max_bytes_in_flight=1
    )
    if context.rank in wanted:
        packed, scales, tensor = quantized(full, "nvfp4")
        (low, high), _ = layout.shards(packed.shape)[context.rank][0]
        assert same(result["w"], packed[low:high])
        assert same(result["w_scale"], scales[low:high])
        assert same(result["w_scale_2"], tensor)
    into = {}
    if context.rank in wanted:
        expected = quantized(full, "fp8_e4m3:128x128")
        into = {"w": torch.empty_like(expected[0]), "w_scale_inv": torch.empty_like(expected[1])}
    result = meshcast.reshard_state_dict(
        None if state is None else {"w": state["w"]},
        into,
        quantize={"w": "fp8_e4m3:128x128"} if into else None,
    )
    assert not into or all(same(into[name], x) for name, x in zip(into, expected, strict=True))
    # Boxes that lie anywhere: rows by turns.
    rows = {rank: [((64 * i, 64 * i + 64), (0, 256)) for i in range(4) if i % len(ranks) == at]
            for at, rank in enumerate(ranks)}  # fmt: skip
    layout = Layout.from_boxes(rows)
    mine = None
    if context.rank in ranks:
        mine = {"w": torch.cat([full[low:high] for (low, high), _ in rows[context.rank]] or [full[:0]])}
    result = meshcast.reshard_state_dict(
        mine,
        {"w": (mesh, [Shard(0)])},
        layouts={"w": (layout, (256, 256))} if mine else None,
        quantize="mxfp8",
    )
    check(result, full, "w", "mxfp8", mesh, context.rank)


def engines(context) -> None:
    """Two engines with meshes and layouts of their own receive one name; replicas in a mesh of two
    dimensions."""
    if context.world < 5:
        return
    full = values((256, 512), 1, torch.bfloat16)
    for scheme in SCHEMES:
        state = held(context.rank, [0, 1, 2], {"w": full}, [Shard(0)])
        mesh = quiet_mesh([1, 2]) if context.rank in (1, 2) else quiet_mesh([3, 4])
        where = {"w": (mesh, [Shard(1)] if context.rank in (1, 2) else [Replicate()])}
        inside = context.rank != 0
        result = meshcast.reshard_state_dict(
            state, where if inside else None, quantize=scheme if inside else None
        )
        if inside:
            check(result, full, "w", scheme, mesh, context.rank)
        square = quiet_mesh([[1, 2], [3, 4]])
        for way in ([Replicate(), Shard(1)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
            result = meshcast.reshard_state_dict(state, {"w": (square, way)}, quantize=scheme, digest=True)
            check(result, full, "w", scheme, square, context.rank)
            if scheme == "fp8_e4m3:1x128":  # no block is cut, so that scales are in as many parts as values
                assert result["w_scale"].placements == tuple(way)


def bytes_on_the_wire(context) -> None:
    """As the type says; of shared blocks 4 bytes for each that is open, and nothing else."""
    ranks, wanted = [0, 1], [2]
    mesh = quiet_mesh(wanted)
    for scheme, each in (
        ("mxfp8", 1 + 1 / 32),
        ("nvfp4", 0.5 + 1 / 16),
        ("fp8_e4m3:128x128", 1 + 4 / 128**2),
    ):
        for rows in (256, 200):  # cut between blocks of 128, and in one
            full = values((rows, 384), 1)
            handle = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"w": full}, [Shard(0)]),
                {"w": (mesh, [Replicate()])},
                quantize={"w": scheme},
                async_op=True,
            )
            check(handle.wait(), full, "w", scheme, mesh, context.rank)
            if context.rank not in wanted:
                continue
            blocks = -(-rows // 128) * 3 if scheme.startswith("fp8") else 0
            expected = rows * 384 + 4 * blocks if blocks else rows * 384 * each + 4 * (scheme == "nvfp4")
            assert handle.stats.bytes == expected, (scheme, rows, handle.stats.bytes, expected)
    shared = meshcast.reshard_state_dict(
        held(context.rank, ranks, {"w": values((200, 384), 1)}, [Shard(0)]),
        {"w": (mesh, [Replicate()])},
        quantize={"w": "fp8_e4m3:128x128"},
        async_op=True,
    )
    shared.wait()
    # Rank 0 sends 100 rows, 3 scales or 6, and its magnitudes of the 3 blocks that both have; it gets 3.
    if context.rank == 0:
        assert shared.stats.bytes <= 100 * 384 + 2 * 4 * 3 + 2 * 4 * 3, shared.stats.bytes


def pushes(context) -> None:
    """Each version is quantised again, and nothing is planned again."""
    ranks, wanted = list(range(context.world - 1)), [context.world - 1]
    mesh = quiet_mesh(wanted)
    for scheme, shape in (("fp8_e4m3:128x128", (200, 300)), ("nvfp4", (5, 48))):
        full = values(shape, 1)
        state = held(context.rank, ranks, {"w": full}, [Shard(1)])
        with meshcast.WeightSync(
            state, {"w": (mesh, [Shard(0)])}, quantize={"w": scheme}, timeout=60
        ) as sync:
            batches = None
            for version in (1, 2, 3):
                now = full * (1 + version)
                if state is not None:
                    state["w"].to_local().copy_(
                        held(context.rank, ranks, {"w": now}, [Shard(1)])["w"].to_local()
                    )
                    sync.push(version)
                    known = next(iter(sync._side._calls._kept.values()))
                    assert batches is None or batches is known._before, "planned again"
                    batches = known._before
                    assert batches is not None
                else:
                    assert sync.pull(version) == version
                    check(sync.state, now, "w", scheme, mesh, context.rank)
                context.wait_for_all(f"pulled {scheme} {version}")  # else a pull may find the next one


def refused_pushes(context) -> None:
    """A version that is not finite raises on all ranks, moves nothing, and the next one arrives."""
    ranks, wanted = list(range(context.world - 1)), [context.world - 1]
    mesh, full = quiet_mesh(wanted), values((65, 96), 1, torch.bfloat16)
    state = held(context.rank, ranks, {"w": full}, [Shard(0)])
    with meshcast.WeightSync(state, {"w": (mesh, [Shard(0)])}, quantize="nvfp4", timeout=60) as sync:
        for version, bad in ((1, None), (2, float("inf")), (3, None), (4, float("nan")), (5, None)):
            now = full * version
            if bad is not None:
                now[64, 5] = bad
            if state is not None:
                state["w"].to_local().copy_(held(context.rank, ranks, {"w": now}, [Shard(0)])["w"].to_local())
            try:
                if state is not None:
                    sync.push(version)
                else:
                    sync.pull(version)
            except (LayoutError, PlanMismatchError) as error:
                assert bad is not None, error
                assert "not finite" in str(error), error
                assert str(error).startswith("WeightSync.pu"), error
            else:
                assert bad is None
                if state is None:
                    assert sync.version == version
                    check(sync.state, now, "w", "nvfp4", mesh, context.rank)
            context.wait_for_all(f"version {version}")


def again(context) -> None:
    """A StateResharder that keeps its memory, copies of what changes at once, ranks that are lost, and
    sources that share memory with an output."""
    ranks, wanted = split(context)
    mesh, full = quiet_mesh(wanted), values((70, 96), 1)
    send = meshcast.StateResharder({"w": (mesh, [Shard(0)])}, reuse_output=True, quantize={"w": "mxfp8"})
    first = None
    for step in (1, 2, 3):
        state = held(context.rank, ranks, {"w": full * step}, [Shard(1)])
        handle = send.start(state, copy=True)
        if state is not None:
            state["w"].to_local().zero_()
        result = handle.wait()
        check(result, full * step, "w", "mxfp8", mesh, context.rank)
        if context.rank in wanted:
            where = result["w"].to_local().data_ptr(), result["w_scale"].to_local().data_ptr()
            assert first in (None, where)
            first = where
    # Replicas in rows of two ranks, of which the last rank is lost.
    if context.world >= 5 and context.rank < 4:
        state = held(context.rank, [0, 1, 2, 4], {"w": full}, [Replicate(), Shard(0)], (2, 2))
        there, scheme = quiet_mesh([0, 3]), "fp8_e4m3:128x128"
        result = meshcast.reshard_state_dict(
            state, {"w": (there, [Shard(1)])}, quantize={"w": scheme}, lost=[4]
        )
        check(result, full, "w", scheme, there, context.rank)
    shared = torch.arange(64 * 64 * 4, dtype=torch.uint8).reshape(64, 256)
    source, out = shared.view(torch.float32), shared[:, :64].view(torch.float8_e4m3fn)
    expected = quantized(source.clone().nan_to_num(1.0, 1.0, 1.0).clamp(-9.0, 9.0), "mxfp8")
    source.copy_(source.clone().nan_to_num(1.0, 1.0, 1.0).clamp(-9.0, 9.0))
    result = meshcast.reshard_state_dict({"w": source}, {"w": out}, quantize={"w": "mxfp8"})
    assert result["w"] is out
    assert same(out, expected[0])


def refused(context) -> None:
    """The same error on every rank, before anything moves; the group goes on."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    good = {"w": values((64, 64), 1)}

    def all_raise(
        text, fulls, where, way=(Shard(0),), kinds=(LayoutError, PlanMismatchError), **options
    ) -> None:
        state = held(context.rank, ranks, fulls, list(way))
        out = options.pop("out", None)
        into = {name: x.clone() for name, x in (out or {}).items()} if context.rank in wanted else {}
        before = {name: x.clone() for name, x in into.items()}
        try:
            meshcast.reshard_state_dict(state, where, into, **options)
        except kinds as error:
            assert text in str(error), f"expected {text!r} in: {error}"
            assert str(error).startswith("reshard_state_dict"), error
        else:
            raise AssertionError(f"no error about {text!r}")
        assert all(same(before[name], x) for name, x in into.items())
        result = meshcast.reshard_state_dict(
            held(context.rank, ranks, good, [Shard(0)]), {"w": (mesh, [Shard(0)])}, quantize="mxfp8"
        )
        check(result, good["w"], "w", "mxfp8", mesh, context.rank)

    there = {"w": (mesh, [Shard(0)])}
    for wrong in ("fp8", "mxfp4", "fp8_e4m3:0x128", "fp8_e4m3:128", "", "MXFP8"):
        all_raise("no block-scaled type", good, there, quantize={"w": wrong})
    all_raise("quantize", good, there, quantize=3)
    all_raise("allowed are", good, there, quantize={"w": torch.float8_e4m3fn})
    all_raise("no destination is given", good, there, quantize={"v": "mxfp8"})
    all_raise("multiple of 32", {"w": values((64, 40), 1)}, there, quantize={"w": "mxfp8"})
    all_raise("multiple of 16", {"w": values((64, 40), 1)}, there, quantize="nvfp4")
    all_raise("have 2 dimensions", {"w": values((64,), 1)}, there, quantize={"w": "fp8_e4m3:128x128"})
    all_raise("two dimensions or more", {"w": values((64,), 1)}, there, quantize="mxfp8")
    integers = {"w": torch.arange(64 * 64).reshape(64, 64)}
    all_raise("int64", integers, there, quantize={"w": "mxfp8"})
    all_raise("int64", integers, there, quantize="mxfp8")
    all_raise("float64", {"w": values((64, 64), 1, torch.float64)}, there, quantize={"w": "mxfp8"})
    all_raise(
        "have 1 dimension", {"w": torch.tensor(2.0)}, {"w": (mesh, [Replicate()])}, [Replicate()],
        quantize={"w": "mxfp8"},
    )  # fmt: skip
    all_raise("nothing to make scales of", {"w": values((0, 64), 1)}, there, quantize={"w": "mxfp8"})
    all_raise("give one", good, there, quantize={"w": "mxfp8"}, dtype={"w": torch.bfloat16})
    all_raise("one name", good, there, quantize={"w": ("mxfp8", "w")})
    all_raise("names", good, there, quantize={"w": ("nvfp4", "s")})
    both = {**good, "w_scale": values((64, 2), 1)}
    all_raise("holds as well", both, {**there, "w_scale": (mesh, [Shard(0)])}, quantize={"w": "mxfp8"})
    for bad in (float("inf"), float("nan"), -float("inf")):
        for scheme in SCHEMES:
            for dtype in (torch.float32, torch.bfloat16):
                full = values((64, 64), 1, dtype)
                full[40, 63] = bad
                all_raise("not finite", {"w": full}, there, quantize={"w": scheme})
    wrong = {"w": torch.zeros(64, 64, dtype=torch.bfloat16)}
    all_raise(
        "has dtype bfloat16",
        good,
        None,
        out=wrong,
        quantize={"w": "mxfp8"} if context.rank in wanted else None,
    )
    wrong = {"w": torch.zeros(64, 64, dtype=torch.uint8)}
    all_raise("and shape", good, None, out=wrong, quantize={"w": "nvfp4"} if context.rank in wanted else None)
    only_some = {"w": "mxfp8"} if context.rank == wanted[0] else None
    if len(wanted) > 1:
        all_raise("the destination of 'w'", good, there, kinds=(PlanMismatchError,), quantize=only_some)


CASES = [drawn, straddling, maps, entries, engines, bytes_on_the_wire, pushes, refused_pushes, again, refused]

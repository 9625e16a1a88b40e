"""reshard_state_dict and WeightSync with a BlockScaled: what arrives is what the user's function makes of the
whole tensor in one process, cut. The lower ranks hold, the upper ones receive; one may do both."""

from __future__ import annotations

import os
import random
import weakref

import meshcast
import torch
from meshcast import BlockScaled, LayoutError, MeshcastError, PlanMismatchError, TensorMap
from multiproc.cases_quantize import held, split, values
from multiproc.meshes import quiet_mesh
from multiproc.oracle import coordinates, cut
from quantize_formula import same
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0


def by_absmax(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The example of the docstring: groups of 64."""
    groups = part.float().unflatten(-1, (-1, 64))
    scale = groups.abs().amax(-1) / 127
    quantised = (groups / scale.clamp(min=1e-12)[..., None]).round().to(torch.int8)
    return quantised.flatten(-2), scale


def by_blocks(one, block, packed=1):
    """A function of whole blocks, by one of a single block. Blocks at the end may be smaller."""

    def quantize(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert part.is_contiguous()
        rows, columns = block if part.ndim > 1 else (1, block[1])
        flat = part.reshape(-1, *(part.shape[-2:] if part.ndim > 1 else (1, part.shape[-1])))
        made = [
            [[one(each) for each in band.split(columns, -1)] for band in matrix.split(rows, -2)]
            for matrix in flat
        ]
        joined = torch.stack([torch.cat([torch.cat([x[0] for x in band], -1) for band in m]) for m in made])
        scales = [
            torch.stack([torch.stack([torch.stack([x[at] for x in band]) for band in m]) for m in made])
            for at in range(1, len(made[0][0][0]))
        ]
        results = [joined.reshape(*part.shape[:-1], part.shape[-1] // packed)]
        counts = [
            -(-size // by)
            for size, by in zip(part.shape[-2:], (rows, columns)[-min(2, part.ndim) :], strict=True)
        ]
        return (*results, *(x.reshape(*part.shape[:-2], *counts) for x in scales))

    return quantize


def by_median(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One that the largest magnitudes of parts do not give. The dtype of the source counts."""
    scale = block.abs().flatten().median() + 2.0**-20
    return (block / scale).clamp(-9, 9).to(torch.float16), scale.float()


def to_int4(block: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Scales and zero points, two values in a byte."""
    low, high = block.float().min(), block.float().max()
    scale = ((high - low) / 15).clamp(min=1e-9)
    codes = ((block.float() - low) / scale).round().clamp(0, 15).to(torch.uint8)
    packed = codes[..., ::2] | codes[..., 1::2] << 4
    return packed, scale.to(torch.bfloat16), low


TYPES = {
    "int8": BlockScaled(by_absmax, block=(1, 64), dtype=torch.int8),
    "median": BlockScaled(
        by_blocks(by_median, (6, 10)), block=(6, 10), dtype=torch.float16, scales=torch.float32, name="median"
    ),
    "int4": BlockScaled(
        by_blocks(to_int4, (1, 32), 2),
        block=(1, 32),
        dtype=torch.uint8,
        scales={"_scale": torch.bfloat16, "_zero": torch.float32},
        packed=2,
        name="int4",
    ),
    "square": BlockScaled(
        by_blocks(to_int4, (16, 8), 2),
        block=(16, 8),
        dtype=torch.uint8,
        scales={".s": torch.bfloat16, ".z": torch.float32},
        packed=2,
        name="int4",
    ),
}


def multiple_of(kind: BlockScaled) -> int:
    """The columns that the function of a type takes."""
    return 64 if kind is TYPES["int8"] else kind.scheme.packed


def names_of(name: str, kind: BlockScaled) -> list[str]:
    return [name, *(name + suffix for suffix in kind.scheme.suffixes)]


def check(result, full, name, kind, mesh, rank, names=None) -> None:
    place = coordinates(mesh.mesh).get(rank)
    for each, expected in zip(names or names_of(name, kind), kind.quantize(full.contiguous()), strict=True):
        got = result[each]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (each, got.shape, got.dtype)
        if place is not None:
            part = cut(expected, mesh.mesh.shape, place, got.placements)
            assert same(got.to_local(), part), f"{each} as {kind.scheme.text}, {tuple(full.shape)}"


def drawn(context) -> None:
    """Shapes, layouts, types of values, and types on the way; uneven and empty shards."""
    if context.rank == 0:
        drawn_seed = os.environ.get("MESHCAST_TEST_SEED") or random.SystemRandom().randrange(1 << 30)
        context.store.set("own seed", str(drawn_seed))
    first = int(context.store.get("own seed"))
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + 30):
        draw = random.Random(seed)
        which = draw.choice(list(TYPES))
        kind = TYPES[which]
        multiple = multiple_of(kind)
        shape = (draw.randrange(1, 30), -(-draw.randrange(1, 90) // multiple) * multiple)
        if draw.random() < 0.2:
            shape = (draw.randrange(1, 4), *shape)
        full = values(shape, seed, draw.choice([torch.float32, torch.bfloat16, torch.float16]))
        ranks = draw.sample(range(context.world), draw.randrange(1, context.world + 1))
        wanted = draw.sample(range(context.world), draw.randrange(1, context.world + 1))
        ways = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        source, target = draw.choice(ways), draw.choice(ways)
        mesh = quiet_mesh(wanted)
        text = f"seed {seed}: {which} {shape} {full.dtype} {ranks} {source} to {wanted} {target}"
        try:
            result = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"w": full}, [source]),
                {"w": (mesh, [target])},
                quantize={"w": kind},
                digest=draw.random() < 0.3,
                max_bytes_in_flight=draw.choice([None, 1]),
            )
            assert list(result) == names_of("w", kind), list(result)
            check(result, full, "w", kind, mesh, context.rank)
        except BaseException as error:
            raise AssertionError(text) from error


def straddling(context) -> None:
    """Blocks that lie on several ranks, in both dimensions, with replicas and parts that have no first
    element; one dimension; each block is made by the holders of its first element alone."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    for which, shape in (("median", (13, 47)), ("int4", (5, 96)), ("square", (40, 20)), ("int8", (3, 192))):
        kind = TYPES[which]
        for way in ([Shard(0)], [Shard(1)]):
            for dtype in (torch.float32, torch.bfloat16):
                full = values(shape, 3, dtype)
                state = held(context.rank, ranks, {"w": full}, way)
                result = meshcast.reshard_state_dict(state, {"w": (mesh, [Replicate()])}, quantize=kind)
                check(result, full, "w", kind, mesh, context.rank)
        if context.world >= 5:
            for way in ([Shard(0), Shard(1)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]):
                full = values(shape, 4)
                state = held(context.rank, [0, 1, 2, 3], {"w": full}, way, (2, 2))
                result = meshcast.reshard_state_dict(state, {"w": (mesh, [Shard(0)])}, quantize=kind)
                check(result, full, "w", kind, mesh, context.rank)
    full = values((192,), 5)
    for kind in (TYPES["int8"], TYPES["int4"]):
        state = held(context.rank, ranks, {"w": full}, [Shard(0)])
        result = meshcast.reshard_state_dict(state, {"w": (mesh, [Replicate()])}, quantize={"w": kind})
        check(result, full, "w", kind, mesh, context.rank)
    # What the function is given.
    given = []

    def seen(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert part.is_contiguous() and not part.requires_grad and type(part) is torch.Tensor
        given.append((tuple(part.shape), part.dtype))
        return TYPES["median"].quantize(part)

    kind = BlockScaled(seen, block=(6, 10), dtype=torch.float16)
    full = values((24, 40), 6, torch.bfloat16)
    state = held(context.rank, ranks, {"w": full}, [Shard(0)])
    result = meshcast.reshard_state_dict(state, {"w": (mesh, [Shard(1)])}, quantize=kind)
    check(result, full, "w", TYPES["median"], mesh, context.rank)
    per = -(-24 // len(ranks))  # 12 rows of 2 ranks, and 8 of 3 with blocks from 0, 6; 12; 18
    low, high = context.rank * per, (context.rank + 1) * per
    mine = range(-(-low // 6), -(-high // 6)) if context.rank in ranks else ()
    assert given == ([((6 * len(mine), 40), torch.bfloat16)] if mine else []), given


def maps(context) -> None:
    """Tensors that are fused, stacked and turned before, of two dtypes; parts of a rank that share blocks."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    a, b = values((13, 64), 1), values((22, 64), 2, torch.bfloat16)
    for kind in TYPES.values():
        for way in ([Shard(0)], [Shard(1)], [Replicate()]):
            state = held(context.rank, ranks, {"a": a, "b": b}, way)
            fused = meshcast.reshard_state_dict(
                state, {"ab": (mesh, [Shard(0)])}, maps=[TensorMap(["a", "b"], "ab")], quantize=kind
            )
            check(fused, torch.cat([a, b]), "ab", kind, mesh, context.rank)
            square = values((64, 30), 5)
            turned = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"a": square}, way),
                {"t": (mesh, [Shard(0)])},
                maps=[TensorMap("a", "t", permute=(1, 0))],
                quantize=kind,
            )
            check(turned, square.t(), "t", kind, mesh, context.rank)
            stacked = meshcast.reshard_state_dict(
                held(context.rank, ranks, {"a": a, "b": a + 1}, way),
                {"ab": (mesh, [Shard(0)])},
                maps=[TensorMap(["a", "b"], "ab", stack=True)],
                quantize=kind,
            )
            check(stacked, torch.stack([a, a + 1]), "ab", kind, mesh, context.rank)


def entries(context) -> None:
    """Names, one type for all, a function of the name, several types, tensors to receive into, receivers that
    hold nothing and holders that name no destination."""
    ranks, wanted = split(context)
    mesh = quiet_mesh(wanted)
    full, bias = values((24, 64), 1), values((24,), 2)
    int8, int4 = TYPES["int8"], TYPES["int4"]
    state = held(context.rank, ranks, {"w": full, "v": full + 1, "b": bias}, [Shard(0)])
    where = {"w": (mesh, [Shard(0)]), "v": (mesh, [Shard(1)]), "b": (mesh, [Replicate()])}
    result = meshcast.reshard_state_dict(state, where, quantize=int8)
    assert list(result) == ["w", "w_scale", "v", "v_scale", "b"], list(result)
    assert result["b"].dtype == torch.float32
    check(result, full, "w", int8, mesh, context.rank)
    result = meshcast.reshard_state_dict(
        state, where, quantize=lambda name: {"w": (int4, ("s", "z")), "v": "mxfp8"}.get(name)
    )
    assert list(result) == ["w", "s", "z", "v", "v_scale", "b"], list(result)
    check(result, full, "w", int4, mesh, context.rank, ["w", "s", "z"])
    result = meshcast.reshard_state_dict(
        state if state is None else {"w": state["w"]},
        {"w": where["w"], "w_zero": (mesh, [Replicate()])} if context.rank in wanted else None,
        quantize={"w": int4},
    )
    if context.rank in wanted:
        assert result["w_zero"].placements == (Replicate(),)
        check(result, full, "w", int4, mesh, context.rank)
    into = {}
    if context.rank in wanted:
        expected = int8.quantize(full)
        into = {"w": torch.empty_like(expected[0]), "w_scale": torch.empty_like(expected[1])}
    meshcast.reshard_state_dict(
        state if state is None else {"w": state["w"]}, into, quantize={"w": int8} if into or state else None
    )
    assert not into or all(same(into[name], x) for name, x in zip(into, expected, strict=True))
    # On a rank alone, and without changing what is held.
    alone = full.clone()
    result = meshcast.reshard_state_dict({"w": alone}, {"w": torch.empty(24, 64, dtype=torch.int8)},
                                         quantize={"w": int8})  # fmt: skip
    assert same(alone, full) and same(result["w"], int8.quantize(full)[0])


def again(context) -> None:
    """Handles, calls that are compiled once, and versions of a WeightSync, each with its own values."""
    ranks, wanted = split(context)
    mesh, full, kind = quiet_mesh(wanted), values((70, 40), 1), TYPES["square"]
    send = meshcast.StateResharder({"w": (mesh, [Shard(0)])}, reuse_output=True, quantize={"w": kind})
    for step in (1, 2, 3):
        state = held(context.rank, ranks, {"w": full * step}, [Shard(1)])
        handle = send.start(state, copy=True)
        if state is not None:
            state["w"].to_local().zero_()
        check(handle.wait(), full * step, "w", kind, mesh, context.rank)
    ranks, wanted = list(range(context.world - 1)), [context.world - 1]
    mesh = quiet_mesh(wanted)
    state = held(context.rank, ranks, {"w": full}, [Shard(1)])
    with meshcast.WeightSync(state, {"w": (mesh, [Shard(0)])}, quantize={"w": kind}, timeout=60) as sync:
        for version in (1, 2, 3):
            now = full * (1 + version)
            if state is not None:
                state["w"].to_local().copy_(held(context.rank, ranks, {"w": now}, [Shard(1)])["w"].to_local())
                sync.push(version)
            else:
                assert sync.pull(version) == version
                check(sync.state, now, "w", kind, mesh, context.rank)
            context.wait_for_all(f"pulled {version}")


def bytes_on_the_wire(context) -> None:
    """Values, scales, and the elements of open blocks that go to the holder of the first one."""
    mesh = quiet_mesh([2])
    for rows, open_rows in ((32, 0), (40, 12)):  # cut at 16, and at 20: rows 20 to 32 of the block from 16
        full, kind = values((rows, 24), 1), TYPES["square"]
        handle = meshcast.reshard_state_dict(
            held(context.rank, [0, 1], {"w": full}, [Shard(0)]),
            {"w": (mesh, [Replicate()])},
            quantize={"w": kind},
            async_op=True,
        )
        check(handle.wait(), full, "w", kind, mesh, context.rank)
        arrives = rows * 12 + -(-rows // 16) * 3 * (2 + 4)
        expected = {0: 4 * open_rows * 24, 2: arrives}.get(context.rank, 0)
        assert handle.stats.bytes_received == expected, (rows, handle.stats)


class OddError(ValueError):
    def __str__(self) -> str:
        return "the weights are odd\nand more"


def refused(context) -> None:
    """A typed error on every rank, with the cause where the function is; outputs are as they were, and the
    group goes on."""
    ranks, wanted = split(context)
    mesh, full, int8 = quiet_mesh(wanted), values((24, 64), 1), TYPES["int8"]
    there = {"w": (mesh, [Replicate()])}

    def all_raise(text, quantize, *, fulls=None, where=there, at=None) -> None:
        """at: the ranks that find what is wrong; None: all."""
        state = held(context.rank, ranks, fulls or {"w": full}, [Shard(0)])
        out = {}
        if fulls is None and context.rank in wanted:
            out = {"w": torch.full((24, 64), 7, dtype=torch.int8)}
        try:
            meshcast.reshard_state_dict(state, where, out, quantize=quantize)
        except (LayoutError, PlanMismatchError) as error:
            assert text in str(error), f"expected {text!r} in: {error}"
            assert "reshard_state_dict" in str(error), error
            if at is not None:
                assert isinstance(error, LayoutError) == (context.rank in at), (error, at)
                assert ("raised" in text and context.rank in at) == isinstance(error.__cause__, Exception)
        else:
            raise AssertionError(f"no error about {text!r}")
        assert all(bool((x == 7).all()) for x in out.values())
        result = meshcast.reshard_state_dict(
            held(context.rank, ranks, {"w": full}, [Shard(0)]), there, quantize=int8
        )
        check(result, full, "w", int8, mesh, context.rank)

    def own(function, **options):
        chosen = {"block": (1, 64), "dtype": torch.int8, "name": "own"} | options
        return {"w": BlockScaled(function, **chosen)}

    def raises(_):
        raise OddError

    for at in (ranks, [ranks[-1]], [ranks[0]]):
        function = raises if context.rank in at else by_absmax
        all_raise("raised OddError: the weights are odd", own(function), at=at)
    for text, wrong in (
        ("returned float32 of shape", lambda x, s: (x.float(), s)),
        ("63) on cpu for the values", lambda x, s: (x[:, 1:], s)),
        ("returned float64 of shape", lambda x, s: (x, s.double())),
        ("for what is called 'w_scale'; expected float32 of shape", lambda x, s: (x, s.unsqueeze(-1))),
        ("returned a Tensor of torch.int8", lambda x, _: x),
        ("returned None; expected a tuple of 2 tensors", lambda *_: None),
        ("expected a tuple of 2 tensors", lambda x, s: (x, s, s)),
        ("expected a tuple of 2 tensors", lambda x, _: (x, 3.0)),
        ("on meta for the values", lambda x, s: (x.to("meta"), s)),
        ("cannot be used", lambda x, s: (x.to_sparse(), s)),
    ):
        for at in (ranks, [ranks[-1]]):
            one = wrong if context.rank in at else lambda x, s: (x, s)
            all_raise(text, own(lambda part, one=one: one(*by_absmax(part))), at=at)
    # A holder that names no destination, and has no function while others wait for its part of a block.
    square, open_ = TYPES["square"], {"w": values((40, 24), 1)}
    for given, text in (
        (None, "no type"),
        ({"w": int8}, "<BlockScaled by_absmax (int8 by blocks of 1x64, _scale float32)>"),
        ({"w": "mxfp8"}, "'mxfp8'"),
    ):
        inside = context.rank in wanted
        all_raise(
            f"was given {text} for it",
            {"w": square} if inside or context.rank != ranks[0] else given,
            fulls=open_,
            where=there if inside else None,
            at=[ranks[0]],
        )
    first = context.rank == 0
    all_raise("64, _scale float16)", own(by_absmax, scales=torch.float16 if first else torch.float32))
    all_raise("as own (uint8", own(by_absmax, dtype=torch.uint8 if first else torch.int8))
    all_raise("as other (int8", own(by_absmax, name="other" if first else "own"))
    all_raise("as mxfp8", {"w": "mxfp8" if first else int8})
    all_raise("multiple of 2", {"w": TYPES["int4"]}, fulls={"w": values((24, 63), 1)})
    all_raise("have 2 dimensions", {"w": square}, fulls={"w": values((64,), 1)})
    all_raise("int64", int8, fulls={"w": torch.arange(24 * 64).reshape(24, 64)})
    all_raise("one name", {"w": (int8, "w")})
    all_raise("names", {"w": (int8, ("a", "b"))})
    all_raise("raised RuntimeError", {"w": int8}, fulls={"w": values((24, 63), 1)})  # a smaller block


def functions(context) -> None:
    """Each is called once for each tensor of a call, whatever its name, and nothing of it is kept."""
    ranks, wanted = split(context)
    mesh, full = quiet_mesh(wanted), values((24, 64), 1)
    state = held(context.rank, ranks, {"w": full, "v": full}, [Shard(0)])
    where = {"w": (mesh, [Shard(0)]), "v": (mesh, [Shard(1)])}
    calls, kept = [], []

    def turned(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(tuple(part.shape))
        values, scale = by_absmax(part)
        made = -values, scale
        kept.extend(map(weakref.ref, (part, *made)))
        return made

    one = BlockScaled(by_absmax, block=(1, 64), dtype=torch.int8, name="one")
    other = BlockScaled(turned, block=(1, 64), dtype=torch.int8, name="one")
    for options in ({}, {"max_bytes_in_flight": 1}, {"digest": True}):
        for w, v in ((one, other), (other, one), (one, one), (other, other)):
            quantize = {"w": w, "v": v}
            calls.clear()
            kept.clear()
            found = [
                meshcast.reshard_state_dict(state, where, quantize=quantize, **options),
                meshcast.StateResharder(where, quantize=quantize, **options).start(state).wait(),
            ]
            times = len(found) * (w is other) + len(found) * (v is other)
            assert len(calls) == (times if context.rank in ranks else 0), calls
            assert not [each for each in kept if each() is not None]
            for result in found:
                for name, kind in quantize.items():
                    check(result, full, name, kind, mesh, context.rank)


def dtypes_of_values(context) -> None:
    """Those that torch can do little with as well, and ranks that are outside."""
    ranks, wanted = split(context)
    mesh, full = quiet_mesh(wanted), values((13, 30), 1)

    def stored(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        raw = (part > 0).to(torch.uint8)
        made = raw.view(dtype) if dtype.itemsize == 1 else raw.to(dtype)
        return made, part[:, ::10].contiguous()

    for dtype in (
        torch.bool,
        torch.float8_e5m2,
        torch.float4_e2m1fn_x2,
        torch.bits8,
        torch.uint64,
        torch.complex64,
        torch.float64,
    ):
        kind = BlockScaled(stored, block=(1, 10), dtype=dtype)
        state = held(context.rank, ranks, {"w": full}, [Shard(1)])
        result = meshcast.reshard_state_dict(state, {"w": (mesh, [Replicate()])}, quantize={"w": kind})
        assert result["w"].dtype == dtype
        if context.rank in wanted:
            expected = stored(full)
            for name, x in zip(("w", "w_scale"), expected, strict=True):
                raw = result[name].to_local().reshape(-1).view(torch.uint8)
                assert torch.equal(raw, x.reshape(-1).view(torch.uint8)), (dtype, name)


def failing_versions(context) -> None:
    """A function that raises on one rank alone: a version fails on all, and the next one arrives."""
    ranks, receiver = list(range(context.world - 1)), [context.world - 1]
    mesh, full = quiet_mesh(receiver), values((24, 64), 1)
    state, version = held(context.rank, ranks, {"w": full}, [Shard(0)]), 0

    def odd(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if version == 2 and context.rank == 0:
            raise OddError
        return by_absmax(part)

    kind = BlockScaled(odd, block=(1, 64), dtype=torch.int8)
    with meshcast.WeightSync(state, {"w": (mesh, [Shard(0)])}, quantize={"w": kind}, timeout=60) as sync:
        for version in (1, 2, 3):
            try:
                if state is not None:
                    sync.push(version)
                else:
                    assert sync.pull(version) == version
            except (LayoutError, PlanMismatchError) as error:
                assert version == 2 and "raised OddError: the weights are odd" in str(error), error
            else:
                assert version != 2
                if state is None:
                    check(sync.state, full, "w", TYPES["int8"], mesh, context.rank)
            context.wait_for_all(f"at {version}")


def replicas(context) -> None:
    """With digests, copies of one block of which holders make different values are noticed."""
    ranks, wanted = split(context)
    mesh, full = quiet_mesh(wanted), values((24, 64), 1)

    def odd(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made, scale = by_absmax(part)
        return made + context.rank, scale

    kind = BlockScaled(odd, block=(1, 64), dtype=torch.int8)
    state = held(context.rank, ranks, {"w": full}, [Replicate()])
    try:
        meshcast.reshard_state_dict(state, {"w": (mesh, [Replicate()])}, quantize={"w": kind}, digest=True)
    except MeshcastError as error:
        assert "the replicas of \"values of 'w' as odd" in str(error), error
    else:
        raise AssertionError("two holders made different values of one block")


def clashing_names(context) -> None:
    """Scales never take the place of something else."""
    ranks, wanted = split(context)
    mesh, full, int8 = quiet_mesh(wanted), values((24, 64), 1), TYPES["int8"]
    state = held(context.rank, ranks, {"w": full, "v": full + 1}, [Shard(0)])
    w, v, s = ({name: (mesh, [Replicate()])} for name in ("w", "v", "s"))
    for kind in (int8, "mxfp8"):
        for more, where, options, text in (
            ({}, w | v, {"quantize": {"w": (kind, "s"), "v": (kind, "s")}}, "the scales of 'w' and of 'v'"),
            (
                {},
                w | s,
                {"quantize": {"w": (kind, "s")}, "maps": TensorMap("v", "s")},
                "which a map makes as well",
            ),
            ({"s": 3.5}, w, {"quantize": {"w": (kind, "s")}}, "holds as well"),
        ):
            given = state if state is None else {**state, **more}
            if given is not None and "v" not in where and "maps" not in options:
                del given["v"]
            try:
                meshcast.reshard_state_dict(given, where, **options)
            except (LayoutError, PlanMismatchError) as error:
                assert text in str(error), error
            else:
                raise AssertionError(f"no error about {text!r}")
    # What a map could make under that name, and no rank asks for.
    result = meshcast.reshard_state_dict(
        state, w, quantize={"w": (int8, "s")}, maps=TensorMap("v", "s"), strict=False
    )
    assert list(result) == ["w", "s"]
    check(result, full, "w", int8, mesh, context.rank, ["w", "s"])


def lost_ranks(context) -> None:
    """Where no living rank holds any of a tensor, that is said."""
    lost = context.world - 1
    if context.rank == lost:
        return
    mesh, alone = quiet_mesh([0, 1]), quiet_mesh([lost])
    state = {"w": meshcast.TensorSpec((24, 64), torch.float32, alone, [Shard(0)])}
    for kind in (None, "mxfp8", TYPES["int8"]):
        try:
            meshcast.reshard_state_dict(
                state, {"w": (mesh, [Replicate()])}, quantize=kind and {"w": kind}, lost=[lost]
            )
        except LayoutError as error:
            assert "1 box is on no live rank: 'w' [0:24, 0:64]" in str(error), error
        else:
            raise AssertionError("a tensor that is lost has arrived")


def recorded_loaders(context) -> None:
    """They take tensors as they are: a type for them would otherwise be left out without a word."""
    full, receiver = values((24, 64), 1), context.world - 1
    held_here = {"w": full} if context.rank == 0 else None
    for kind in ("mxfp8", TYPES["int8"]):
        engine = torch.nn.Linear(64, 24, bias=False) if context.rank == receiver else None
        if engine is not None:
            engine.load_weights = lambda pairs, own=engine: [own.weight.data.copy_(x) for _, x in pairs]
        where = meshcast.record_destinations(engine, names_and_shapes=held_here)
        try:
            meshcast.reshard_state_dict(held_here, where, quantize=kind)
        except (LayoutError, PlanMismatchError) as error:
            assert "quantize= with recorded destinations" in str(error), error
        else:
            raise AssertionError("a recorded loader was given a type")
        meshcast.reshard_state_dict(held_here, where)
        assert engine is None or torch.equal(engine.weight.data, full)


CASES = [
    drawn,
    straddling,
    maps,
    entries,
    again,
    bytes_on_the_wire,
    refused,
    functions,
    dtypes_of_values,
    failing_versions,
    replicas,
    clashing_names,
    lost_ranks,
    recorded_loaders,
]

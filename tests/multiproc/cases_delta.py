"""WeightSync(delta=True): each version arrives with the bits that the trainers have, and costs the bytes of
its changes. The lower half of the ranks trains, the others serve, unless a case says otherwise."""

from __future__ import annotations

import os
import random

import meshcast
import pytest
import torch
from meshcast import Layout, LayoutError, MeshcastError, PlanMismatchError, TensorMap, Topology
from meshcast.resharding import state_delta
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut
from multiproc.weight_job import raises
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 60.0
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, as integers."""
    real = torch.view_as_real(x) if x.is_complex() else x
    return real.contiguous().view(_BITS[real.element_size()])


def filled(shape, dtype, draw) -> torch.Tensor:
    """Any bits that the type has, with NaNs, infinities and zeros of both signs."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=draw).bool()
    size = dtype.itemsize
    return torch.randint(0, 256, (*shape, size), generator=draw, dtype=torch.uint8).view(dtype).reshape(shape)


def changed(full: torch.Tensor, part: float, draw) -> torch.Tensor:
    """A part of the elements gets other bits."""
    other = filled(full.shape, full.dtype, draw)
    chosen = torch.rand(full.shape, generator=draw) < part
    return torch.where(chosen, other, full)


class Weights:
    """A WeightSync, and the whole tensors that trainers have. source, where: a mesh as nested lists, and
    placements by name; dtypes: what servers get."""

    def __init__(self, context, fulls, source, where, **options) -> None:
        self.context, self.rank, self.fulls = context, context.rank, dict(fulls)
        self.source, self.where = source, where
        self.trainers = torch.tensor(source[0]).flatten().tolist()
        self.servers = torch.tensor(where[0]).flatten().tolist()
        self.trains, self.serves = self.rank in self.trainers, self.rank in self.servers
        mesh, place = quiet_mesh(source[0]), quiet_mesh(where[0])
        self.held = {name: sharded(x, mesh, source[1][name], self.rank) for name, x in fulls.items()}
        places = {name: (place, placements) for name, placements in where[1].items()}
        self.version, self.dtype = 0, options.get("dtype")
        self.sync = meshcast.WeightSync(
            self.held if self.trains else None, places, **{"delta": True, **options}
        )

    def become(self, fulls) -> None:
        self.fulls |= fulls
        for name, full in fulls.items():
            if self.trains:
                part = sharded(full, quiet_mesh(self.source[0]), self.source[1][name], self.rank).to_local()
                self.held[name].to_local().copy_(part)

    def turn(self, fulls=None, pull=True):
        """The next version on all ranks; returns the stats of this one."""
        self.become(fulls or {})
        self.version += 1
        if self.trains:
            self.sync.push(self.version)
        if pull and (self.serves or not self.trains):
            assert self.sync.pull(self.version) == self.version
        if pull and self.serves:
            self.check()
        self.meet(f"version {self.version}")
        return self.sync.stats

    def check(self) -> None:
        state = self.sync.state
        for name, full in self.fulls.items():
            place = coordinates(torch.tensor(self.where[0]))[self.rank]
            part = cut(full, torch.tensor(self.where[0]).shape, place, self.where[1][name])
            part = part if self.dtype is None else part.to(self.dtype)
            assert torch.equal(bits(state[name].to_local()), bits(part)), (name, self.version)

    def meet(self, name: str) -> None:
        self.context.wait_for_all(f"{self.sync._name} {name}", limit=40.0)

    def close(self) -> None:
        self.meet("close")
        self.sync.close()


def halves(context):
    ranks = list(range(context.world))
    return ranks[: context.world // 2], ranks[context.world // 2 :]


def model(draw, dtype=torch.bfloat16):
    return {
        "w": filled((300, 200), dtype, draw),
        "v": filled((31, 7, 11), dtype, draw),
        "b": filled((77,), dtype, draw),
    }


_OTHER = {"w": [Shard(1)], "v": [Shard(0)], "b": [Replicate()]}


def usual(context, fulls=None, **options) -> Weights:
    trainers, servers = halves(context)
    draw = torch.Generator().manual_seed(1)
    fulls = model(draw) if fulls is None else fulls
    source = {name: [Shard(0)] for name in fulls}
    return Weights(context, fulls, (trainers, source), (servers, {n: _OTHER[n] for n in fulls}), **options)


def drawn(context) -> None:
    """Models, layouts, buffers and changes."""
    if context.rank == 0:
        drawn_seed = os.environ.get("MESHCAST_TEST_SEED") or random.SystemRandom().randrange(1 << 30)
        context.store.set("delta seed", str(drawn_seed))
    first = int(context.store.get("delta seed"))
    print(f"seeds from {first}", flush=True)
    for seed in range(first, first + 14):
        rng, draw = random.Random(seed), torch.Generator().manual_seed(seed)

        def mesh(rng=rng):
            ranks = rng.sample(range(context.world), rng.randrange(1, context.world + 1))
            half = len(ranks) // 2
            return [ranks[:half], ranks[half:]] if len(ranks) % 2 == 0 and rng.random() < 0.5 else ranks

        meshes, fulls, layouts = (mesh(), mesh()), {}, ({}, {})
        for at in range(rng.randrange(1, 5)):
            name = f"x{at}"
            dtype = rng.choice(
                [
                    *[torch.bfloat16, torch.bfloat16, torch.float32, torch.float64],
                    *[torch.int8, torch.bool, torch.complex64, torch.complex128],
                ]
            )
            shape = tuple(rng.choice([1, 2, 3, 5, 17, 64, 130]) for _ in range(rng.randrange(0, 4)))
            ways = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
            fulls[name] = filled(shape, dtype, draw)
            for side in (0, 1):
                layouts[side][name] = [rng.choice(ways) for _ in torch.tensor(meshes[side]).shape]
        buffers = rng.choice([1, 2, 2])
        digest = rng.random() < 0.3
        text = f"seed {seed}: {fulls.keys()} {[x.shape for x in fulls.values()]} {meshes} {layouts} {buffers}"
        try:
            job = Weights(
                context,
                fulls,
                (meshes[0], layouts[0]),
                (meshes[1], layouts[1]),
                buffers=buffers,
                digest=digest,
            )
            for _ in range(5):
                parts = {name: rng.choice([0, 0, 0.001, 0.02, 0.1, 0.4, 1]) for name in fulls}
                pull = buffers == 1 or rng.random() < 0.7
                job.turn({n: changed(job.fulls[n], part, draw) for n, part in parts.items()}, pull)
            job.close()
        except BaseException as error:
            raise AssertionError(text) from error


def costs_what_changed(context) -> None:
    """Bytes on the wire: none where nothing changed, all where all did, and in between those of the bit maps,
    of the values and of some room. A stream that several ranks want leaves its holder once."""
    job, draw = usual(context, strategy="broadcast"), torch.Generator().manual_seed(2)
    whole = job.turn()
    assert whole.ratio == 1.0
    assert "does not have the version before" in whole.whole
    assert not job.trains or whole.bytes_sent > 0
    for _ in range(2):
        stats = job.turn()
        assert (stats.bytes_sent, stats.bytes_received) == (0, 0), stats
        assert (stats.ratio, stats.whole) == (0.0, "")
    for part in (0.001, 0.01, 0.01, 0.03, 0.1, 0.3):
        stats = job.turn({"w": changed(job.fulls["w"], part, draw)})
        groups = 1 - (1 - part) ** 64
        maps = (1 / 64 + groups / 8 + (1 - (1 - part) ** 8)) / 16  # of 16 bits
        expected = 1.13 * (part + maps) + 1 / 16
        assert stats.ratio < expected, (part, stats.ratio, expected)
        assert stats.whole == ""
        moved, before = (s.bytes_sent + s.bytes_received for s in (stats, whole))
        assert 0 < moved < before * expected, (part, moved, before)
    stats = job.turn({name: changed(x, 1.0, draw) for name, x in job.fulls.items()})
    assert (stats.ratio, stats.whole) == (1.0, "all tensors: their changes are no smaller")
    assert (stats.bytes_sent, stats.bytes_received) == (whole.bytes_sent, whole.bytes_received)
    assert job.turn().bytes_sent == 0
    job.close()
    # One holder, all others get all of it.
    full = {"w": filled((200, 300), torch.float32, draw)}
    ranks = list(range(1, context.world))
    job = Weights(
        context,
        full,
        ([0], {"w": [Replicate()]}),
        (ranks, {"w": [Replicate()]}),
        strategy="broadcast",
        topology=Topology.uniform(1, 1),
    )
    whole = job.turn()
    stats = job.turn({"w": changed(full["w"], 0.02, draw)})
    print(f"multicast {whole} {stats}", flush=True)
    assert not job.trains or 0 < stats.bytes_sent < whole.bytes_sent * 0.2, (stats, whole)
    job.close()


def bits_count(context) -> None:
    """Signs of zeros and payloads of NaNs change; NaNs that stay do not."""
    for dtype in (torch.bfloat16, torch.float32):
        fulls = {"w": torch.zeros(64, 50, dtype=dtype)}
        job = usual(context, fulls)
        job.turn()
        full = fulls["w"].clone()
        full[5, 7] = -0.0
        flat = bits(full).view(-1)
        flat[1000] = 0x7FC1 if dtype == torch.bfloat16 else 0x7FC00001
        flat[2000] = flat[1000]
        full = flat.view(dtype).view(64, 50)
        assert 0 < job.turn({"w": full}).ratio < 0.3
        flat = bits(full).clone().view(-1)
        flat[1000] += 1
        assert 0 < job.turn({"w": flat.view(dtype).view(64, 50)}).ratio < 0.3
        assert job.turn().ratio == 0.0
        job.close()


def not_every_version_is_pulled(context) -> None:
    """The version that is served is not written, and the next one is made of the newest, pulled or not."""
    for buffers in (2, 1):
        job, draw, kept = usual(context, buffers=buffers), torch.Generator().manual_seed(3), None
        for version in range(1, 10):
            pull = buffers == 1 or version % 3 == 0
            stats = job.turn({"w": changed(job.fulls["w"], 0.01, draw)}, pull)
            if kept is not None and not pull:
                assert all(torch.equal(bits(x), bits(job.sync.state[n].to_local())) for n, x in kept.items())
            if job.serves and pull:
                kept = {name: x.to_local().clone() for name, x in job.sync.state.items()}
            if job.trains and version > 1:
                assert stats.ratio < 0.2, stats
        job.close()


def torn_versions(context) -> None:
    """A version that was changed on its way is none: the next one is whole, and changes follow again."""
    for buffers in (2, 1):
        job, draw = usual(context, buffers=buffers), torch.Generator().manual_seed(4)
        job.turn()
        job.turn({"b": changed(job.fulls["b"], 0.1, draw)})
        job.become({"w": changed(job.fulls["w"], 0.01, draw)})
        job.version += 1
        if job.trains:
            calls = job.sync._side._conversation
            original = calls.run

            def run(*arguments, job=job, original=original):
                if job.rank == 0:
                    job.held["w"].to_local().add_(1)
                return original(*arguments)

            calls.run = run
            raises(MeshcastError, "changed 'w' in place", lambda job=job: job.sync.push(job.version))
            calls.run = original
        else:
            raises(MeshcastError, "changed 'w' in place", lambda job=job: job.sync.pull(job.version))
        job.meet("torn")
        stats = job.turn({"w": changed(job.fulls["w"], 0.01, draw)})
        assert stats.ratio == 1.0
        assert "does not have the version before" in stats.whole
        stats = job.turn({"w": changed(job.fulls["w"], 0.01, draw)})
        assert stats.ratio < 0.2
        job.close()


def results_that_changed(context) -> None:
    """A rank that has changed what it was given gets the version whole."""
    for buffers in (2, 1):
        job, draw = usual(context, buffers=buffers), torch.Generator().manual_seed(5)
        job.turn()
        assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio < 0.2
        if job.rank == job.servers[-1]:
            job.sync.state["v"].to_local().zero_()
        job.meet("zeroed")
        stats = job.turn({"w": changed(job.fulls["w"], 0.01, draw)})
        assert f"rank {job.servers[-1]} does not have" in stats.whole, stats
        assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio < 0.2
        job.close()


def into_outputs(context) -> None:
    """Into the weights of a model, in their memory; where they move, the next version is whole."""
    draw = torch.Generator().manual_seed(6)
    trainers, _ = halves(context)
    full = {"w": filled((90, 40), torch.bfloat16, draw)}
    out = {"w": torch.zeros(90, 40, dtype=torch.bfloat16)}
    held = {"w": sharded(full["w"], quiet_mesh(trainers), [Shard(0)], context.rank)}
    trains = context.rank in trainers
    sync = meshcast.WeightSync(
        held if trains else None, buffers=1, out=None if trains else (lambda: out), delta=True
    )
    for version in range(1, 7):
        full = {"w": changed(full["w"], 0.01, draw)}
        if version == 4:
            out = {"w": out["w"].clone()}
        if trains:
            held["w"].to_local().copy_(
                sharded(full["w"], quiet_mesh(trainers), [Shard(0)], context.rank).to_local()
            )
            sync.push(version)
        else:
            assert sync.pull(version) == version
            assert torch.equal(bits(out["w"]), bits(full["w"]))
        assert (sync.stats.ratio == 1.0) is (version in (1, 4)), (version, sync.stats)
        context.wait_for_all(f"into {version}")
    sync.close()


def casts(context) -> None:
    """The changes are those of what travels: a cast to fewer bytes comes before, one to more bytes makes a
    tensor travel whole, and so do partial values and GPUs. Others of the same call travel as changes."""
    draw = torch.Generator().manual_seed(7)
    fulls = {name: torch.randn(x.shape, generator=draw) for name, x in model(draw).items()}
    fulls["b"][:3] = torch.tensor([float("nan"), -0.0, float("inf")])
    job = usual(context, fulls, dtype=torch.bfloat16)
    job.turn()
    small = {"w": job.fulls["w"] * (1 + 1e-5)}
    rounded = (bits(small["w"].bfloat16()) != bits(fulls["w"].bfloat16())).float().mean()
    assert 0 < rounded < 0.02
    stats = job.turn(small)
    assert 0 < stats.ratio < 0.15, stats
    assert stats.whole == ""
    job.close()
    narrow = {name: x.bfloat16() for name, x in fulls.items()}
    job = usual(context, narrow, dtype={"w": torch.float32})
    job.dtype = None
    job.check = lambda: None
    job.turn()
    stats = job.turn({"b": changed(narrow["b"], 0.1, draw)})
    assert stats.whole == "'w', which is cast where it arrives", stats
    assert 0.5 < stats.ratio < 1.0
    assert not job.serves or job.sync.state["w"].dtype == torch.float32
    job.close()
    trainers, servers = halves(context)
    mesh, place = quiet_mesh(trainers), quiet_mesh(servers)
    trains = context.rank in trainers
    held = {"p": DTensor.from_local(torch.ones(8, 4), mesh, [Partial()], run_check=False) if trains else None}
    sync = meshcast.WeightSync(held if trains else None, {"p": (place, [Replicate()])}, delta=True)
    for version in (1, 2):
        if trains:
            sync.push(version)
        else:
            assert sync.pull(version) == version
            assert bool((sync.state["p"].to_local() == len(trainers)).all())
        assert sync.stats.ratio == 1.0
        assert sync.stats.whole == "all tensors: 'p' is reduced on the way"
        context.wait_for_all(f"partial {version}")
    sync.close()


def maps_and_kinds(context) -> None:
    """Fused and turned tensors, and a state that comes to hold others."""
    draw = torch.Generator().manual_seed(8)
    trainers, servers = halves(context)
    trains = context.rank in trainers
    fulls = {name: filled((40, 30), torch.bfloat16, draw) for name in ("q", "k", "t")}
    mesh = quiet_mesh(trainers)
    where = {"qk": (quiet_mesh(servers), [Shard(1)]), "t.T": Layout(servers, [Replicate()])}
    maps = [TensorMap(["q", "k"], "qk"), TensorMap("t", "t.T", permute=(1, 0))]
    held = {name: sharded(x, mesh, [Shard(0)], context.rank) for name, x in fulls.items()}
    sync = meshcast.WeightSync(held if trains else None, where, maps=maps, delta=True)
    for version in range(1, 9):
        if version == 5:  # more rows, on all ranks
            fulls |= {name: filled((46, 30), torch.bfloat16, draw) for name in ("q", "k")}
            held |= {name: sharded(fulls[name], mesh, [Shard(0)], context.rank) for name in ("q", "k")}
        elif version > 1:
            fulls = {name: changed(x, 0.02, draw) for name, x in fulls.items()}
            for name, x in fulls.items():
                held[name].to_local().copy_(sharded(x, mesh, [Shard(0)], context.rank).to_local())
        if trains:
            sync.push(version)
        else:
            assert sync.pull(version) == version
            qk = torch.cat([fulls["q"], fulls["k"]])
            part = cut(qk, (len(servers),), (servers.index(context.rank),), [Shard(1)])
            assert torch.equal(bits(sync.state["qk"].to_local()), bits(part)), version
            assert torch.equal(bits(sync.state["t.T"]), bits(fulls["t"].T)), version
        assert (sync.stats.ratio == 1.0) is (version in (1, 5)), (version, sync.stats)
        context.wait_for_all(f"maps {version}")
    sync.close()


def into_a_loader(context) -> None:
    """Recorded destinations, into the memory of parameters; one box into two places."""
    draw = torch.Generator().manual_seed(9)
    trainers, _ = halves(context)
    trains = context.rank in trainers

    class Engine(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Parameter(torch.empty(30, 20, dtype=torch.bfloat16))
            self.b = torch.nn.Parameter(torch.empty(20, 30, dtype=torch.bfloat16))

        def load_weights(self, weights) -> None:
            for _, tensor in weights:
                self.a.data.copy_(tensor)
                self.b.data.copy_(tensor.t())

    engine = None if trains else Engine()
    full = filled((30, 20), torch.bfloat16, draw)
    held = {"w": sharded(full, quiet_mesh(trainers), [Shard(0)], context.rank)} if trains else None
    recorded = meshcast.record_destinations(engine, names_and_shapes=held)
    sync = meshcast.WeightSync(held, recorded, buffers=1, delta=True)
    for version in range(1, 5):
        full = changed(full, 0.03, draw)
        if trains:
            held["w"].to_local().copy_(
                sharded(full, quiet_mesh(trainers), [Shard(0)], context.rank).to_local()
            )
            sync.push(version)
        else:
            assert sync.pull(version) == version
            assert torch.equal(bits(engine.a.data), bits(full))
            assert torch.equal(bits(engine.b.data), bits(full.T))
        assert (sync.stats.ratio == 1.0) is (version == 1), sync.stats
        context.wait_for_all(f"loader {version}")
    sync.close()


def pushed(context, sync, w, version, now) -> None:
    """One version from rank 0 to all others, each of which has now() of it."""
    sync.push(version) if context.rank == 0 else sync.pull(version)
    if context.rank:
        assert torch.equal(now(), w), version
    context.wait_for_all(f"{sync._name} {version}")


def outputs_with_other_memory(context) -> None:
    """`x.data = y` counts no change, and y is not the version before."""
    w, out = torch.arange(4000.0).view(40, 100), {"w": torch.zeros(40, 100)}
    mine = {"w": w} if context.rank == 0 else None
    sync = meshcast.WeightSync(mine, out=out if context.rank else None, buffers=1, delta=True)
    for version in range(1, 5):
        w[version, 3] += 1
        if version == 3 and context.rank:
            out["w"].data = torch.full((40, 100), -7.0)
        pushed(context, sync, w, version, lambda: out["w"])
        assert (sync.stats.ratio < 0.1) is (version in (2, 4)), sync.stats
    sync.close()


def a_version_changes_while_the_next_is_made_of_it(context) -> None:
    """All ranks raise, and the next version is whole."""
    job, draw = usual(context), torch.Generator().manual_seed(12)
    job.turn()
    job.become({"w": changed(job.fulls["w"], 0.01, draw)})
    job.version += 1
    last, original = job.servers[-1], state_delta.Delta.run
    if job.rank == last:

        def run(self, deadline):
            job.sync.state["b"].to_local().zero_()
            return original(self, deadline)

        state_delta.Delta.run = run
        kind, text = MeshcastError, "'b' of the version before was changed in place"
    else:
        kind, text = PlanMismatchError, f"rank {last} could not take part"
    job.meet("ready")  # a push may begin on a rank's own thread
    raises(kind, text, lambda: (job.sync.push if job.trains else job.sync.pull)(job.version))
    state_delta.Delta.run = original
    job.meet("changed")
    assert job.turn().ratio == 1.0
    assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio < 0.2
    job.close()


class Loaded(torch.nn.Module):
    """What it loads is negated in place first, or not."""

    def __init__(self, negates) -> None:
        super().__init__()
        self.negates, self.a = negates, torch.nn.Parameter(torch.empty(40, 100))

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.a.data.copy_(tensor.neg_() if self.negates else tensor)


def loaders_that_change_what_they_load(context) -> None:
    """Nor are later writes into the memory of a recorded engine the version before."""
    for negates in (True, False):
        w, engine = torch.arange(4000.0).view(40, 100), Loaded(negates)
        held = {"a": w} if context.rank == 0 else None
        names = {"a": (w.shape, w.dtype)}
        recorded = meshcast.record_destinations(engine if context.rank else None, names_and_shapes=names)
        sync = meshcast.WeightSync(held, recorded, buffers=1, delta=True)
        for version in range(1, 4):
            w[version, 3] += 1
            if version == 3:
                zeros = {"a": torch.zeros(40, 100)} if context.rank == 0 else None
                meshcast.reshard_state_dict(zeros, recorded)
            pushed(context, sync, -w if negates else w, version, lambda engine=engine: engine.a.data)
            assert (sync.stats.ratio < 0.1) is (version == 2 and not negates), (negates, sync.stats)
        sync.close()


def versions_of_two_kinds(context) -> None:
    """The names of what is held change, and with them the numbers begin again."""
    w, draw = torch.zeros(40, 100), torch.Generator().manual_seed(13)
    extra = ["z"]

    def state():
        return {"w" if context.rank == 0 else "own": w, f"{extra[0]}{context.rank}": torch.ones(3)}

    place = Layout(list(range(1, context.world)), [Replicate()])
    chosen = ("w", "own", "z0", "z1", "u0", "u1")
    sync = meshcast.WeightSync(
        state, {"w": place}, delta=True, only=lambda name: name in chosen, strict=False
    )
    for kind, version, pulls in (("z", 5, True), *(("u", n, False) for n in (3, 4, 5, 6)), ("u", 7, True)):
        extra[0] = kind
        w[version] = torch.randn(100, generator=draw)
        sync.push(version)
        if pulls and context.rank:
            sync.pull()
            assert torch.equal(sync.state["w"], w), version
        context.wait_for_all(f"{sync._name} {kind} {version}")
    sync.close()


def bad_input(context) -> None:
    """Typed, on all ranks, before anything moves."""
    trainers, servers = halves(context)
    held = {"w": sharded(torch.ones(8, 6), quiet_mesh(trainers), [Shard(0)], context.rank)}
    where = {"w": (quiet_mesh(servers), [Shard(1)])}
    trains = context.rank in trainers

    def made(**options):
        return meshcast.WeightSync(held if trains else None, where, **options)

    raises(LayoutError, "delta='yes'", lambda: made(delta="yes"))
    raises(LayoutError, "delta=True with quantize=", lambda: made(delta=True, quantize="mxfp8"))
    context.wait_for_all("refused")
    sync = made(delta=context.rank != servers[-1])
    for version in (1, 2):
        with pytest.raises(PlanMismatchError, match="the options are"):
            sync.push(version) if trains else sync.pull(version)
        context.wait_for_all(f"options {version}")
    sync.close()
    # A rank that fails while it compares: all raise, and the next version is whole.
    job, draw = usual(context), torch.Generator().manual_seed(10)
    job.turn()
    earlier = job.sync._side._earlier
    if job.rank == 0:
        earlier.values = {number: x[:-1] for number, x in earlier.values.items()}
    job.version += 1
    if job.trains:
        kind = LayoutError if job.rank == 0 else PlanMismatchError
        raises(kind, "expected a dense tensor", lambda: job.sync.push(job.version))
    else:
        raises(PlanMismatchError, "could not compare its weights", lambda: job.sync.pull(job.version))
    job.meet("failed")
    assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio == 1.0
    assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio < 0.2
    job.close()


def damaged_changes(context) -> None:
    """A stream that is none is found before anything is written of it; the next version is whole."""
    job, draw = usual(context, buffers=1), torch.Generator().manual_seed(11)
    job.turn()
    job.become({"w": changed(job.fulls["w"], 0.01, draw)})
    job.version += 1
    last = job.servers[-1]
    if job.trains:
        raises(PlanMismatchError, f"rank {last} could not take part", lambda: job.sync.push(job.version))
    elif job.rank != last:
        raises(PlanMismatchError, f"rank {last} could not take part", lambda: job.sync.pull(job.version))
    else:
        before = [bits(x.to_local()).clone() for x in job.sync.state.values()]
        kept = [x.to_local() for x in job.sync.state.values()]
        original = state_delta.apply_changes
        state_delta.apply_changes = lambda stream, boxes: original(stream[:-1], boxes)
        raises(MeshcastError, "damaged, and nothing was written", lambda: job.sync.pull(job.version))
        state_delta.apply_changes = original
        assert all(torch.equal(bits(x), was) for x, was in zip(kept, before, strict=True))
        raises(MeshcastError, "torn", lambda: job.sync.state)
    job.meet("damaged")
    assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio == 1.0
    assert job.turn({"w": changed(job.fulls["w"], 0.01, draw)}).ratio < 0.2
    job.close()


CASES = [
    drawn,
    costs_what_changed,
    bits_count,
    not_every_version_is_pulled,
    torn_versions,
    results_that_changed,
    into_outputs,
    casts,
    maps_and_kinds,
    into_a_loader,
    outputs_with_other_memory,
    a_version_changes_while_the_next_is_made_of_it,
    loaders_that_change_what_they_load,
    versions_of_two_kinds,
    bad_input,
    damaged_changes,
]

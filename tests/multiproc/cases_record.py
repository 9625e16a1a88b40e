"""record_destinations: engines whose layouts nobody writes down. Ranks 0 to 2 train, ranks 3 and 4 are the
tensor-parallel ranks of an engine, or an engine each."""

from __future__ import annotations

import random
import tempfile
from functools import partial

import meshcast
import torch
from meshcast.resharding.record_destinations import _read_names, _record
from multiproc.engines import SHAPES, Engine, Shape
from multiproc.meshes import quiet_mesh, sharded
from python.resharding.drawn_loaders import DrawnLoader, loaded
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 40.0
TRAINERS, SERVERS = [0, 1, 2], [3, 4]


def raises(kinds, text: str, function) -> None:
    try:
        function()
    except kinds as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no error with {text!r}")


def held_by(rank: int, fulls) -> dict | None:
    """The shards of a trainer, uneven ones, as FSDP2 has them; None elsewhere."""
    if rank not in TRAINERS:
        return None
    mesh = quiet_mesh(TRAINERS)
    return {
        name: sharded(full, mesh, [Shard(0) if full.ndim else Replicate()], rank)
        for name, full in fulls.items()
    }


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8) if x.ndim else x.detach().view(1).view(torch.uint8)


def check_same(model: nn.Module, expected: nn.Module) -> None:
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, wanted in expected.named_parameters(remove_duplicate=False):
        assert torch.equal(bits(own[name]), bits(wanted)), name


def engine_of(shape: Shape, rank: int, dtype: torch.dtype) -> Engine:
    return Engine(shape, SERVERS.index(rank), len(SERVERS), pad_to=8).to(dtype)


def served(context, make, fulls, *, whole: int = 0, **options):
    """Records the engine that make() gives, moves the checkpoint, and compares it with one that has loaded
    the whole. whole: how many entries are left to the loader."""
    rank = context.rank
    held = held_by(rank, fulls)
    model = make() if rank in SERVERS else None
    recorded = meshcast.record_destinations(model, names_and_shapes=held)
    memory = {} if model is None else {name: x.data_ptr() for name, x in model.named_parameters()}
    assert len(recorded._whole()) == (whole if model is not None else 0), recorded.left
    result = meshcast.reshard_state_dict(held, recorded, digest=True, **options)
    if model is not None:
        expected = make()
        expected.load_weights(fulls.items())
        check_same(model, expected)
        assert all(x is model.get_parameter(name) for name, x in result.items() if name in memory)
        assert {name: x.data_ptr() for name, x in model.named_parameters()} == memory
    return model, recorded


def engines(context) -> None:
    """Loaders in the manner of vLLM's: fused, stacked, padded, replicated heads, uneven shares of experts."""
    for shape in SHAPES.values():
        for dtype in (torch.float32, torch.bfloat16):
            fulls = shape.values(torch.float32)  # the engine has bfloat16, the trainer float32
            served(context, lambda shape=shape, dtype=dtype: engine_of(shape, context.rank, dtype), fulls)


def in_batches(context) -> None:
    shape = SHAPES["moe"]
    fulls = shape.values(torch.bfloat16)
    make = lambda: engine_of(shape, context.rank, torch.bfloat16)  # noqa: E731
    served(context, make, fulls, max_bytes_in_flight=1000)


class Written(nn.Module):
    """Loaders by hand: a transpose, a stack, a cast, one entry in two places, and what cannot be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(3, 5))
        self.stacked = nn.Parameter(torch.zeros(2, 5, 3))
        self.low = nn.Parameter(torch.zeros(5, 3, dtype=torch.bfloat16))
        self.twice = nn.Parameter(torch.zeros(10, 3))
        self.doubled = nn.Parameter(torch.zeros(5, 3))
        self.asked = nn.Parameter(torch.zeros(4))
        self.register_buffer("scale", torch.zeros(()))

    def load_weights(self, weights) -> None:
        for name, x in weights:
            if name in ("a", "b"):
                self.stacked.data[int(name == "b")].copy_(x)
            if name == "a":
                self.turned.data.copy_(x.t())
                self.low.data.copy_(x.to(torch.bfloat16))
                self.twice.data.copy_(torch.cat([x, x]))
            elif name == "c":
                self.doubled.data.copy_(x * 2)
            elif name == "d" and x[0].item() > 0:
                self.asked.data.copy_(x)
            elif name == "s":
                self.scale.copy_(x)


def by_hand(context) -> None:
    fulls = {name: torch.arange(15.0).reshape(5, 3) + at for at, name in enumerate("abc")}
    fulls |= {"d": torch.arange(1.0, 5), "s": torch.tensor(3.5)}
    model, recorded = served(context, Written, fulls, whole=2)
    if model is not None:
        assert model.scale == 3.5
        assert recorded.left.keys() == {"doubled", "d"}
        for why in recorded.left.values():
            assert "cases_record.py:" in why, why


def versions(context) -> None:
    """WeightSync into the engine's own memory, which moves; a part is left to the loader."""
    rank = context.rank
    fulls = {name: torch.arange(15.0).reshape(5, 3) + at for at, name in enumerate("abc")}
    fulls |= {"d": torch.arange(1.0, 5), "s": torch.tensor(3.5)}
    model = Written() if rank in SERVERS else None
    held = held_by(rank, fulls)
    recorded = meshcast.record_destinations(model, names_and_shapes=held)
    layout = meshcast.LayoutError
    with meshcast.WeightSync(held, recorded, buffers=1, timeout=30) as sync:
        for version in (1, 2, 3):
            for x in (held or {}).values():
                x.to_local().add_(version)
            fulls = {name: x + version for name, x in fulls.items()}
            if model is not None and version == 2:
                model.turned.data = model.turned.data.clone()
            if model is None:
                sync.push(version)
            else:
                assert sync.pull(version) == version
                expected = Written()
                expected.load_weights(fulls.items())
                check_same(model, expected)
                assert sync.state["turned"] is model.turned
    if rank in SERVERS:
        raises(layout, "buffers=1", lambda: meshcast.WeightSync(None, recorded)._side.check())
    else:
        raises(meshcast.PlanMismatchError, "", lambda: meshcast.WeightSync(held).push(1))


def saved(context) -> None:
    """A restart does not record again."""
    rank, shape = context.rank, SHAPES["gemma"]
    fulls = shape.values(torch.float32)
    held = held_by(rank, fulls)
    make = lambda: engine_of(shape, rank, torch.bfloat16) if rank in SERVERS else None  # noqa: E731
    recorded = meshcast.record_destinations(make(), names_and_shapes=held)
    model = make()
    with tempfile.TemporaryDirectory() as folder:
        recorded.save(f"{folder}/recorded.json")
        again = meshcast.RecordedDestinations.load(f"{folder}/recorded.json", model)
    meshcast.reshard_state_dict(held, again)
    if model is not None:
        expected = make()
        expected.load_weights(fulls.items())
        check_same(model, expected)


def refusals(context) -> None:
    """Bad input raises on all ranks, before a byte moves."""
    rank, shape = context.rank, SHAPES["llama"]
    mismatch, layout = meshcast.PlanMismatchError, meshcast.LayoutError
    fulls = shape.values(torch.float32)
    held = held_by(rank, fulls)
    engine = engine_of(shape, rank, torch.float32) if rank in SERVERS else None
    names = fulls if rank in TRAINERS else None

    def fails(bad: int, kind, text, told: str, record) -> None:
        raises(kind if rank == bad else mismatch, text if rank == bad else told, record)

    def failing(weights) -> None:
        for name, _ in weights:
            if name == "model.norm.weight" and rank == 4:
                raise RuntimeError("disk on fire")
        engine.load_weights([])

    record = meshcast.record_destinations
    fails(
        4,
        layout,
        "disk on fire",
        "rank 4 could not record its loader" if rank != 3 else "",
        lambda: record(engine, engine and failing, names, strict=False),
    )
    raises((layout, mismatch), "names_and_shapes 3", lambda: record(engine, None, 3 if rank == 2 else names))
    less = {name: x for name, x in fulls.items() if "norm" not in name}
    raises((layout, mismatch), "norm", lambda: record(engine, names_and_shapes=less))
    other = dict(fulls) | {"model.norm.weight": torch.ones(13 if rank == 1 else 12)}
    raises(mismatch, "'model.norm.weight'", lambda: record(engine, names_and_shapes=other))
    unlike = (
        engine_of(shape, rank, torch.float32 if rank == 3 else torch.bfloat16) if rank in SERVERS else None
    )
    raises(mismatch, "is float32 on rank 3, but bfloat16 on rank 4", lambda: record(unlike, None, names))
    raises(
        (layout, mismatch),
        "uses anything",
        lambda: record(engine, engine and (lambda _: None), names, strict=False),
    )
    raises(layout, "no rank", lambda: record(engine))

    recorded = record(engine, names_and_shapes=names)
    wider = None if held is None else held_by(rank, dict(fulls) | {"model.norm.weight": torch.ones(13)})
    raises(layout, "record again", lambda: meshcast.reshard_state_dict(wider, recorded))
    more = None if held is None else held_by(rank, dict(fulls) | {"more": torch.ones(13)})
    raises(layout, "'more'", lambda: meshcast.reshard_state_dict(more, recorded))
    fewer = None if held is None else held_by(rank, {n: x for n, x in fulls.items() if "norm" not in n})
    raises(layout, "norm", lambda: meshcast.reshard_state_dict(fewer, recorded))
    if rank == 4:
        kept = engine.get("model.norm.weight")
        setattr(engine, "model/norm/weight", nn.Parameter(torch.zeros(12, dtype=torch.bfloat16)))
    fails(4, layout, "record again", "rank 4 refused", lambda: meshcast.reshard_state_dict(held, recorded))
    if rank == 4:
        setattr(engine, "model/norm/weight", kept)
    meshcast.reshard_state_dict(held, recorded)
    if engine is not None:
        expected = engine_of(shape, rank, torch.float32)
        expected.load_weights(fulls.items())
        check_same(engine, expected)


def with_maps(context) -> None:
    """The trainer has q, k and v fused, and other names: entries are made of its tensors."""
    rank, shape = context.rank, SHAPES["llama"]
    fulls = shape.values(torch.float32)
    trained, maps = {}, []
    for name, full in fulls.items():
        if "q_proj" in name:
            parts = [name, name.replace("q_proj", "k_proj"), name.replace("q_proj", "v_proj")]
            fused = name.replace("q_proj", "qkv")
            trained[fused] = torch.cat([fulls[part] for part in parts])
            maps.append(meshcast.TensorMap(fused, parts, sizes=[fulls[part].shape[0] for part in parts]))
        elif "k_proj" not in name and "v_proj" not in name:
            trained["trainer." + name] = full
    held = held_by(rank, trained)
    engine = engine_of(shape, rank, torch.float32) if rank in SERVERS else None
    recorded = meshcast.record_destinations(engine, names_and_shapes=fulls if rank == 0 else None)
    rename = lambda name: name.removeprefix("trainer.")  # noqa: E731
    meshcast.reshard_state_dict(held, recorded, rename=rename, maps=maps, digest=True)
    if engine is not None:
        expected = engine_of(shape, rank, torch.float32)
        expected.load_weights(fulls.items())
        check_same(engine, expected)


def _assigning(model: nn.Module, assign: bool, weights) -> None:
    model.load_state_dict(dict(weights), assign=assign)


def assigned(context) -> None:
    """Loaders that put tensors in the place of parameters: load_state_dict with and without assign."""
    rank = context.rank
    fulls = {"weight": torch.arange(12.0).reshape(4, 3), "bias": torch.arange(4.0)}
    held = held_by(rank, fulls)
    for assign, device in ((False, "cpu"), (True, "cpu"), (True, "meta")):
        model = nn.Linear(3, 4, device=device) if rank in SERVERS else None
        load = None if model is None else partial(_assigning, model, assign)
        recorded = meshcast.record_destinations(model, load, held)
        meshcast.reshard_state_dict(held, recorded)
        if model is not None:
            assert type(model.weight) is nn.Parameter
            assert torch.equal(model.weight, fulls["weight"])
            assert torch.equal(model.bias, fulls["bias"])


def assigned_dtensors(context) -> None:
    """A loader that cuts whole tensors and puts DTensors in the place of those that the model has, as the
    tensor-parallel plans of transformers. One that puts others there is refused."""
    rank, mesh = context.rank, quiet_mesh(SERVERS)
    kinds = (meshcast.LayoutError, meshcast.PlanMismatchError)
    fulls = {"weight": torch.arange(15.0).reshape(5, 3), "bias": torch.arange(5.0)}
    held = held_by(rank, fulls)
    for dtype in (torch.float32, torch.bfloat16):
        for bad in ("", "other values", "another dtype"):
            model = None
            if rank in SERVERS:
                model = nn.Module()
                for name, full in fulls.items():
                    empty = sharded(torch.zeros_like(full, dtype=dtype), mesh, [Shard(0)], rank)
                    setattr(model, name, nn.Parameter(empty))

            def load(weights, model=model, dtype=dtype, bad=bad) -> None:
                for name, x in weights:
                    part = x[:3] if rank == SERVERS[0] else x[3:]
                    part = part.double() if bad == "another dtype" else part.to(dtype)
                    part = torch.ones(part.shape, dtype=dtype) if bad == "other values" else part
                    made = DTensor.from_local(
                        part, mesh, [Shard(0)], run_check=False, shape=x.shape, stride=x.stride()
                    )
                    setattr(model, name, nn.Parameter(made))

            record = partial(meshcast.record_destinations, model, model and load, held)
            if bad:
                raises(
                    kinds, {"other values": "", "another dtype": "where the model has 'weight'"}[bad], record
                )
                continue
            recorded = record()
            memory = None if model is None else model.weight.to_local().data_ptr()
            meshcast.reshard_state_dict(held, recorded, digest=True)
            if model is not None:
                for name, full in fulls.items():
                    part = full[:3] if rank == SERVERS[0] else full[3:]
                    assert torch.equal(getattr(model, name).to_local(), part.to(dtype)), name
                assert model.weight.to_local().data_ptr() == memory


def drawn(context) -> None:
    """Loaders that are drawn, between two ranks that hold and two that receive, each with its own."""
    rng = random.Random(53)
    rank = context.rank
    for _ in range(25):
        seed = rng.randrange(1 << 30)
        dtype = rng.choice((torch.float32, torch.bfloat16))
        loader = DrawnLoader(seed, dtype)
        model = dict(loader.parameters) if rank in SERVERS else None
        load = loader.load_weights if model is not None else None
        held = held_by(rank, loader.checkpoint)
        entries = _read_names(loader.checkpoint)
        if _record(dict(loader.parameters), loader.load_weights, entries, strict=False).left:
            continue  # to a loader that would draw other steps from a part of the checkpoint
        recorded = meshcast.record_destinations(model, load, held, strict=False)
        meshcast.reshard_state_dict(held, recorded, digest=True)
        expected = loaded(seed, dtype, loader.checkpoint)
        for name, x in (model or {}).items():
            assert torch.equal(bits(x), bits(expected[name])), f"DrawnLoader({seed}, {dtype}): {name}"


def colocated(context) -> None:
    """Ranks that train and serve, on five ranks; one parameter of the engine is the trainer's memory."""
    rank, shape = context.rank, SHAPES["deepseek"]
    everyone, fulls = list(range(5)), shape.values(torch.float32)
    mesh = quiet_mesh(everyone)
    held = {name: sharded(full, mesh, [Shard(0)], rank) for name, full in fulls.items()}
    held["model.norm.weight"] = fulls["model.norm.weight"].clone()  # a copy on each
    engine = engine_of(shape, rank, torch.float32) if rank in SERVERS else None
    if engine is not None:
        engine.get("model.norm.weight").data = held["model.norm.weight"]
    recorded = meshcast.record_destinations(engine, names_and_shapes=held)
    send = meshcast.StateResharder(recorded)
    for step in range(3):
        if step == 1:
            fulls = {name: 2 * full for name, full in fulls.items()}
            for x in held.values():
                (x.to_local() if isinstance(x, DTensor) else x).mul_(2)
        send.run(held)
        if engine is not None:
            expected = engine_of(shape, rank, torch.float32)
            expected.load_weights(fulls.items())
            check_same(engine, expected)


class Processed(nn.Module):
    """Processes its weights after loading: halves of one are swapped in place, with its padding, one gets
    other memory, and one is repacked into another shape where `repacks`."""

    def __init__(self, repacks: bool) -> None:
        super().__init__()
        self.swapped = nn.Parameter(torch.full((6, 3), -1.0))
        self.moved = nn.Parameter(torch.zeros(5, 3))
        self.plain = nn.Parameter(torch.zeros(5, 3))
        self.repacks = repacks
        self.times = 0

    def load_weights(self, weights) -> None:
        for name, x in weights:
            if name == "a":
                self.swapped.data[:5].copy_(x)
                self.swapped.data[5:].zero_()
            else:
                getattr(self, {"b": "moved", "c": "plain"}[name]).data.copy_(x)

    def process(self) -> None:
        self.times += 1
        self.swapped.data.copy_(torch.cat([self.swapped.data[3:] + 1, self.swapped.data[:3] + 1]))
        self.moved.data = self.moved.data * 2
        if self.repacks:
            self.plain = nn.Parameter(self.plain.data.t().contiguous())


def processed(context) -> None:
    """after=: called once values have arrived, again for each version. Where it puts a tensor of another
    shape in the place of one, the next call raises on all ranks and names the line."""
    rank, layout = context.rank, meshcast.LayoutError
    fulls = {name: torch.arange(15.0).reshape(5, 3) + at for at, name in enumerate("abc")}
    held = held_by(rank, fulls)
    for repacks in (False, True):
        model = Processed(repacks) if rank in SERVERS else None
        after = None if model is None else model.process
        recorded = meshcast.record_destinations(model, None, held, after=after)
        assert model is None or (model.times == 0 and not recorded.processed)
        for version in (1, 2):
            if repacks and version == 2:
                text = "the parameter 'plain' is (3, 5)"
                told = (layout, meshcast.PlanMismatchError)
                raises(told, text, partial(meshcast.reshard_state_dict, held, recorded))
                raises(
                    told,
                    "cases_record.py:",
                    partial(meshcast.reshard_state_dict, held, recorded),
                )
                break
            for x in (held or {}).values():
                x.to_local().add_(version)
            fulls = {name: x + version for name, x in fulls.items()}
            meshcast.reshard_state_dict(held, recorded, digest=True)
            if model is not None:
                expected = Processed(repacks)
                expected.load_weights(fulls.items())
                expected.process()
                check_same(model, expected)
                changed = {"swapped", "moved"} | ({"plain"} if repacks else set())
                assert recorded.processed.keys() == changed, recorded.processed
                assert all("cases_record.py:" in line for line in recorded.processed.values())
                with tempfile.TemporaryDirectory() as folder:
                    recorded.save(f"{folder}/recorded.json")
                    again = Processed(False)
                    meshcast.RecordedDestinations.load(f"{folder}/recorded.json", again, None, again.process)
                    assert bool((again.swapped[5] == 0).all()) and again.times == 0
        if not repacks:
            only = None if model is None else ["plain"]
            raises(
                (layout, meshcast.PlanMismatchError),
                "only= with after=",
                partial(meshcast.reshard_state_dict, held, recorded, only=only),
            )
    fails = None if rank not in SERVERS else (lambda: 1 / 0)
    recorded = meshcast.record_destinations(Processed(False) if fails else None, None, held, after=fails)
    failed = lambda: meshcast.reshard_state_dict(held, recorded)  # noqa: E731
    raises(meshcast.MeshcastError, "after= failed: ZeroDivisionError", failed)
    bad = 3 if rank == 4 else None
    model = Processed(False) if rank in SERVERS else None
    raises(
        (layout, meshcast.PlanMismatchError),
        "after is a int",
        lambda: meshcast.record_destinations(model, None, held, after=bad),
    )


def late(context) -> None:
    """A rank that does not come: the others name the call. Last: the group is of no use any longer."""
    if context.rank != 3:
        text = "record_destinations"
        try:
            meshcast.record_destinations(None, names_and_shapes={"x": (3,)}, timeout=1)
        except meshcast.MeshcastError as error:
            assert error.op == text, error.op
            assert str(error).startswith(text) or f": {text} call" in str(error), error
            assert "reshard_state_dict" not in str(error), error
        else:
            raise AssertionError("no error")
    context.wait_for_all("late", limit=30.0)


CASES = [
    engines,
    in_batches,
    by_hand,
    versions,
    saved,
    refusals,
    with_maps,
    assigned,
    assigned_dtensors,
    drawn,
    colocated,
    processed,
    late,
]

"""reshard_state_dict in five processes: ranks 0 to 2 hold a model, ranks 2 to 4 receive it."""

from __future__ import annotations

import random

import meshcast
import torch
import torch.distributed as dist
from meshcast.groups.parent import parent_group
from meshcast.transfers.digest import added, shard_digest
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 30.0
HOLDERS, RECEIVERS = [0, 1, 2], [2, 3, 4]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float16]


def raises(kind: type[Exception], text: str, function) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def fresh(context) -> dist.ProcessGroup:
    return dist.new_group(list(range(context.world)))


def model(seed: int, tensors: int = 23):
    """Full tensors of different shapes and dtypes, their layouts, and where they go."""
    rng = random.Random(seed)
    fulls, layouts, destinations = {}, {}, {}
    for index in range(tensors):
        name = f"layer{index}.weight"
        shape = [rng.randint(1, 12) for _ in range(rng.randint(0, 3))]
        fulls[name] = unique_fill(shape, DTYPES[index % len(DTYPES)], seed * 100 + index)
        source = quiet_mesh(rng.choice([HOLDERS, [0, 1], [[0, 1, 2]], [1]]))
        target = quiet_mesh(rng.choice([RECEIVERS, [3, 4], [[2], [4]], [4]]))
        layouts[name] = (source, _placements(rng, source, len(shape)))
        destinations[name] = (target, _placements(rng, target, len(shape)))
    return fulls, layouts, destinations


def _placements(rng: random.Random, mesh: DeviceMesh, ndim: int):
    def one():
        return Shard(rng.randrange(ndim)) if ndim and rng.random() < 0.7 else Replicate()

    return [one() for _ in range(mesh.ndim)]


def held_by(rank: int, fulls, layouts, step: int = 0):
    """This rank's state dict: only what it holds, None on ranks that know nothing."""
    state = {
        name: sharded(_moved_on(full, step), *layouts[name], rank)
        for name, full in fulls.items()
        if rank in coordinates(layouts[name][0].mesh)
    }
    return state or None


def _moved_on(full: torch.Tensor, step: int) -> torch.Tensor:
    return full if full.dtype == torch.bool else full + step


def check(result, fulls, destinations, rank: int, step: int = 0, dtype=None) -> None:
    assert list(result) == list(destinations)
    for name, y in result.items():
        full = _moved_on(fulls[name], step)
        if dtype is not None and full.is_floating_point():
            full = full.to(dtype)
        assert y.dtype == full.dtype
        assert tuple(y.shape) == tuple(full.shape)
        place = coordinates(destinations[name][0].mesh).get(rank)
        if place is None:
            assert y.to_local().numel() == 0 or full.ndim == 0
        else:
            expected = cut(full, y.device_mesh.mesh.shape, place, destinations[name][1])
            assert torch.equal(y.to_local(), expected), name


def moved(context) -> None:
    """Several calls of several kinds; a known kind exchanges nothing through the store."""
    for seed in (1, 2):
        fulls, layouts, destinations = model(seed)
        for step in range(3):
            result = meshcast.reshard_state_dict(
                held_by(context.rank, fulls, layouts, step), destinations, digest=step == 1
            )
            check(result, fulls, destinations, context.rank, step)
            assert result.version is None
            connector = parent_group(None, "test").private(range(context.world))._connector
            if step == 2:
                assert connector.conversation.writes == 0, "a known kind of call wrote to the store"
            connector.conversation = _Counting(connector.conversation)


class _Counting:
    """The group's conversation, counting what this rank says."""

    def __init__(self, conversation) -> None:
        self._conversation = conversation
        self.writes = 0

    def say(self, topic: str, text: str) -> None:
        self.writes += 1
        self._conversation.say(topic, text)

    def __getattr__(self, name: str):
        return getattr(self._conversation, name)


def cast_and_bounded(context) -> None:
    """dtype casts floating-point tensors alone; batches of a bounded size give the same."""
    fulls, layouts, destinations = model(3)
    for limit in (None, 1, 1000):
        for dtype in (torch.bfloat16, torch.float64):
            result = meshcast.reshard_state_dict(
                held_by(context.rank, fulls, layouts),
                destinations,
                dtype=dtype,
                max_bytes_in_flight=limit,
                digest=True,
            )
            check(result, fulls, destinations, context.rank, dtype=dtype)


def into_storage(context) -> None:
    """Some outputs given, of another dtype: the holders learn it."""
    fulls, layouts, destinations = model(4)
    given = [name for name, full in fulls.items() if full.dtype == torch.float32]
    outs = {
        name: sharded(torch.zeros(fulls[name].shape, dtype=torch.bfloat16), *destinations[name], context.rank)
        for name in given
        if context.rank in coordinates(destinations[name][0].mesh)
    }
    result = meshcast.reshard_state_dict(
        held_by(context.rank, fulls, layouts), destinations, outs, digest=True
    )
    expected = {name: full.bfloat16() if name in given else full for name, full in fulls.items()}
    check(result, expected, destinations, context.rank)
    assert all(result[name] is out for name, out in outs.items())


def partial(context) -> None:
    """A Partial source arrives summed up."""
    mesh = _holders()
    local = torch.full((4, 3), float(context.rank + 1))
    state = {}
    if context.rank in HOLDERS:
        state["sum"] = DTensor.from_local(local, mesh, [Partial()], run_check=False)
    target = quiet_mesh(RECEIVERS)
    result = meshcast.reshard_state_dict(state, {"sum": (target, [Shard(0)])}, digest=True)
    check(result, {"sum": torch.full((4, 3), 6.0)}, {"sum": (target, [Shard(0)])}, context.rank)


_meshes: list[DeviceMesh] = []


def _holders() -> DeviceMesh:
    if not _meshes:
        _meshes.append(DeviceMesh("cpu", HOLDERS))
    return _meshes[0]


def versions(context) -> None:
    """Versions travel along, must agree, and must rise."""
    fulls, layouts, destinations = model(5, 4)
    state = held_by(context.rank, fulls, layouts)
    holds = state is not None

    def call(version, **options):
        return meshcast.reshard_state_dict(state, destinations, version=version, **options)

    assert call(7 if holds else None).version == 7
    assert call(8).version == 8
    raises(meshcast.PlanMismatchError, "no newer", lambda: call(8))
    raises(meshcast.PlanMismatchError, "no newer", lambda: call(3 if holds else None))
    raises(meshcast.PlanMismatchError, "differ", lambda: call(9 if context.rank != 1 else 10))
    raises(meshcast.PlanMismatchError, "differ", lambda: call(9 if holds else 10))  # it expects a later one
    raises(meshcast.PlanMismatchError, "give none", lambda: call(9 if context.rank == 0 else None))
    raises(meshcast.PlanMismatchError, "no newer", lambda: call(8, digest=True))  # of another kind of call
    outs = {
        name: sharded(torch.zeros_like(full), *destinations[name], context.rank)
        for name, full in fulls.items()
        if context.rank in coordinates(destinations[name][0].mesh)
    }
    raises(meshcast.PlanMismatchError, "no newer", lambda: call(8, out=outs))
    assert not any(out.to_local().any() for out in outs.values()), "a refused version was written"
    assert call(9).version == 9


def torn(context) -> None:
    """A holder that changes a tensor while it travels: no rank returns the weights."""
    fulls, layouts, destinations = model(6, 6)
    state = held_by(context.rank, fulls, layouts)
    victim = next(name for name in fulls if fulls[name].numel() and 1 in coordinates(layouts[name][0].mesh))
    call = lambda **options: meshcast.reshard_state_dict(state, destinations, **options)  # noqa: E731
    check(call(), fulls, destinations, context.rank)
    _between(context, lambda: state[victim].to_local().view(-1)[0].fill_(0), call, victim)
    state = held_by(context.rank, fulls, layouts)
    check(call(digest=True), fulls, destinations, context.rank)

    def behind() -> None:
        """No version counter sees this one."""
        memory = (
            state[victim]
            .to_local()
            .view(torch.uint8 if fulls[victim].dtype == torch.bool else fulls[victim].dtype)
        )
        memory.numpy().reshape(-1)[:] = 1

    # The digest that rank 1 takes is of other values than what it has sent.
    _between(context, behind, call, victim, digest=True)


def _between(context, change, call, victim: str, **options) -> None:
    """Runs `change` on rank 1 once its data has left, and before its digests are taken."""
    from meshcast.transfers import transfer as transfers

    original = transfers.PersistentTransfer.launch

    def launch(self, sources, *arguments, **options):
        call = original(self, sources, *arguments, **options)
        if len(sources) > 1 and context.rank == 1:
            call.wait()
            change()
        return call

    transfers.PersistentTransfer.launch = launch
    try:
        raises(meshcast.MeshcastError, victim, lambda: call(**options))
    finally:
        transfers.PersistentTransfer.launch = original


def flipped(context) -> None:
    """One bit of what arrives, anywhere, is another than at the source: no rank returns the weights."""
    from meshcast.transfers import transfer as transfers

    fulls, layouts, destinations = model(6, 6)
    state = held_by(context.rank, fulls, layouts)
    rng = random.Random(7)
    original = transfers.PersistentTransfer.launch
    names = [name for name in fulls if fulls[name].numel()]
    for turn in range(12):
        name, place = rng.choice(names), rng.randrange(1 << 30)
        victim = None if state is None or name not in state else state[name].to_local()

        def launch(self, sources, *arguments, victim=victim, place=place, **options):
            """All holders send a copy with the bit flipped; the digests are of the tensor itself."""
            sent = list(sources)
            for at, tensor in enumerate(sources):
                if victim is None or tensor is None or not tensor.numel():
                    continue
                if tensor.data_ptr() == victim.data_ptr():
                    sent[at] = tensor.contiguous().clone()
                    memory = sent[at].reshape(-1).view(torch.uint8).numpy()
                    memory[place % memory.size] ^= 1
            return original(self, sent, *arguments, **options)

        transfers.PersistentTransfer.launch = launch
        try:
            raises(
                meshcast.MeshcastError, repr(name),
                lambda: meshcast.reshard_state_dict(state, destinations, digest=True),
            )  # fmt: skip
        finally:
            transfers.PersistentTransfer.launch = original
        context.wait_for_all(f"flipped {turn}")
    check(meshcast.reshard_state_dict(state, destinations, digest=True), fulls, destinations, context.rank)


def replicas_differ(context) -> None:
    """Replicas that have drifted apart are found by the digest."""
    mesh = quiet_mesh([0, 1])
    full = torch.arange(6.0)
    state = None
    if context.rank in (0, 1):
        local = full.clone()
        local[3] += context.rank
        state = {"w": DTensor.from_local(local, mesh, [Replicate()], run_check=False)}
    where = {"w": (quiet_mesh([3]), [Replicate()])}
    meshcast.reshard_state_dict(state, where)
    raises(meshcast.MeshcastError, "replicas", lambda: meshcast.reshard_state_dict(state, where, digest=True))


def refused(context) -> None:
    """What is wrong on one rank raises on all, by name, and the group goes on."""
    fulls, layouts, destinations = model(7, 5)
    state = held_by(context.rank, fulls, layouts)
    group = fresh(context)
    name = next(name for name in fulls if 0 in coordinates(layouts[name][0].mesh))

    def call(state, where=destinations, **options):
        return meshcast.reshard_state_dict(state, where, group=group, **options)

    def on_rank_0(other):
        return {**state, **other} if context.rank == 0 else state

    kind = meshcast.LayoutError if context.rank == 0 else meshcast.PlanMismatchError
    raises(kind, "'step'", lambda: call(on_rank_0({"step": object()})))
    raises(
        meshcast.PlanMismatchError,
        "plain tensor",
        lambda: call(on_rank_0({name: torch.zeros(fulls[name].shape)})),
    )
    raises(kind, "version", lambda: call(state, version=-1 if context.rank == 0 else 4))
    listed = ["auto"] if context.rank == 0 else "auto"
    raises(kind, "strategy", lambda: call(state, strategy=listed))
    extra = {"extra": sharded(torch.zeros(3), quiet_mesh([0]), [Shard(0)], 0)} if context.rank == 0 else {}
    raises(meshcast.LayoutError, "'extra'", lambda: call(on_rank_0(extra)))
    check(call(on_rank_0(extra), strict=False), fulls, destinations, context.rank)
    missing = {key: value for key, value in (state or {}).items() if context.rank != 0 or key != name}
    raises(meshcast.LayoutError, repr(name), lambda: call(missing))
    nowhere = {**destinations, "nowhere": destinations[name]}
    raises(meshcast.LayoutError, "'nowhere'", lambda: call(state, nowhere))
    other = nowhere if context.rank == 4 else destinations
    raises(meshcast.PlanMismatchError, "'nowhere'", lambda: call(state, other))
    options = {"digest": context.rank == 2}
    raises(meshcast.PlanMismatchError, "options", lambda: call(state, **options))
    bad = {name: sharded(torch.zeros(77), quiet_mesh([0]), [Shard(0)], 0)}
    outs = bad if context.rank == 0 else {}
    raises(kind, repr(name), lambda: call(state, out=outs))
    mesh, placements = destinations[name]
    turned = [Shard(0) if placement.is_replicate() else Replicate() for placement in placements]
    bad = {name: sharded(fulls[name], mesh, turned, context.rank)}
    outs = bad if context.rank == 0 else {}
    raises(kind, f"{name!r} is under" if context.rank == 0 else repr(name), lambda: call(state, out=outs))
    check(call(state), fulls, destinations, context.rank)


def changed_shapes(context) -> None:
    """A holder's shapes change between calls: the others, who think they know them, learn the new ones."""
    for size in (4, 6, 4):
        full = unique_fill((size, 3), torch.float32, size)
        where = {"w": (quiet_mesh(RECEIVERS), [Shard(0)])}
        state = {"w": sharded(full, quiet_mesh(HOLDERS), [Shard(1)], context.rank)}
        result = meshcast.reshard_state_dict(state if context.rank in HOLDERS else None, where)
        check(result, {"w": full}, where, context.rank)


def digests(context) -> None:
    """The digest of a tensor is the same under any layout, and differs for any other tensor."""
    if context.rank:
        return
    for dtype in (*DTYPES, torch.complex64, torch.float64):
        full = unique_fill((7, 5, 2), dtype, 3)
        whole = shard_digest(full, meshcast.Layout([0], [Replicate()]), full.shape, 0)
        for placements in ([Shard(0), Shard(1)], [Shard(2), Shard(0)], [Shard(1), Shard(1)]):
            mesh = torch.arange(6).reshape(2, 3)
            layout = meshcast.Layout(mesh, placements)
            parts = [
                shard_digest(cut(full, (2, 3), place, placements), layout, full.shape, rank)
                for rank, place in coordinates(mesh).items()
            ]
            assert added(parts) == added([whole])
        swapped = full.clone()
        swapped[0], swapped[1] = full[1], full[0]
        if not torch.equal(swapped, full):
            assert shard_digest(swapped, meshcast.Layout([0], [Replicate()]), full.shape, 0) != whole


CASES = [
    moved,
    cast_and_bounded,
    into_storage,
    partial,
    versions,
    torn,
    flipped,
    replicas_differ,
    refused,
    changed_shapes,
    digests,
]

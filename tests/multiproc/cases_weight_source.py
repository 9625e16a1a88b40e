"""A WeightSource as the state of a call: plain objects in the form of vLLM's trainer-side sources. Ranks 0 to
2 train, with uneven shards, ranks 3 and 4 receive."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import meshcast
import torch
from meshcast import LayoutError, MeshcastError, PlanMismatchError
from multiproc.meshes import quiet_mesh
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 30.0
TRAINERS, SERVERS = [0, 1, 2], [3, 4]


@dataclass(frozen=True)
class Sharded:
    """As vLLM's own Shard, which is none of torch's. The name is what counts."""

    dim: int


Sharded.__name__ = "Shard"


@dataclass(frozen=True)
class Meta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple | None = None


class Source:
    """One pass after the other over `fulls`. wrong: what an iteration does in the place of a name."""

    whole = False

    def __init__(self, rank: int, fulls: dict, metadata: list[Meta]) -> None:
        self.rank, self.fulls, self.metadata = rank, fulls, metadata
        self.passes, self.wrong = 0, {}

    def iter_local(self):
        self.passes += 1
        for meta in self.metadata:
            if meta.owners is not None and self.rank not in meta.owners:
                continue
            name, tensor = meta.name, self.fulls[meta.name]
            if meta.placements is not None and not self.whole:
                mesh = torch.tensor(meta.owners).view(meta.mesh_shape or (len(meta.owners),))
                places = [Replicate() if isinstance(p, Replicate) else Shard(p.dim) for p in meta.placements]
                tensor = cut(tensor, mesh.shape, coordinates(mesh)[self.rank], places)
            if name in self.wrong:
                name, tensor = self.wrong[name](name, tensor)
                if name is None:
                    continue
            yield name, tensor
        if "" in self.wrong:
            yield self.wrong[""]("", torch.ones(2))


class Whole(Source):
    """Yields whole tensors alone, and says so."""

    whole = True

    def implements_iter_local(self) -> bool:
        return False

    def iter_full(self):
        yield from Source.iter_local(self)

    def iter_local(self):
        raise NotImplementedError


def fulls_of(dtype: torch.dtype, factor: int = 1) -> dict[str, torch.Tensor]:
    shapes = {"rows": (7, 3), "columns": (2, 5), "grid": (4, 4), "one": (5,), "all": (4, 2), "few": (1, 3)}
    return {n: factor * unique_fill(s, dtype, at) for at, (n, s) in enumerate(shapes.items())}


def metadata_of(fulls: dict) -> list[Meta]:
    """Shards of the first and second dimension; a mesh in another order than the ranks; one owner of several,
    all, and more owners than rows."""
    owned = {
        "rows": {"owners": (0, 1, 2), "placements": (Sharded(0),)},
        "columns": {"owners": (2, 0), "placements": (Shard(1),)},
        "grid": {"owners": (1, 0), "mesh_shape": (2, 1), "placements": (Sharded(0), Replicate())},
        "one": {"owners": (1,)},
        "few": {"owners": (2, 1, 0), "placements": (Sharded(0),)},
    }
    return [Meta(n, x.dtype, tuple(x.shape), **owned.get(n, {})) for n, x in fulls.items()]


def where_of(fulls: dict) -> dict:
    mesh = quiet_mesh(SERVERS)
    return {name: (mesh, [Shard(0)]) for name in fulls}


def check(received: dict, fulls: dict, rank: int) -> None:
    for name, full in fulls.items():
        expected = full.chunk(len(SERVERS))
        mine = SERVERS.index(rank)
        expected = expected[mine] if mine < len(expected) else full[:0]
        assert torch.equal(received[name].to_local(), expected), name


def one_call(context) -> None:
    rank = context.rank
    for kind in (Source, Whole):
        for dtype in (torch.float32, torch.bfloat16):
            fulls = fulls_of(dtype)
            source = kind(rank, fulls, metadata_of(fulls)) if rank in TRAINERS else None
            where = where_of(fulls) if rank in SERVERS else None
            received = meshcast.reshard_state_dict(source, where, digest=True)
            if rank in SERVERS:
                check(received, fulls, rank)
            else:
                assert source.passes == 1


def again_and_again(context) -> None:
    """StateResharder and WeightSync take the tensors of each pass, and compile once."""
    rank = context.rank
    fulls = fulls_of(torch.float32)
    metadata = metadata_of(fulls)
    where = where_of(fulls) if rank in SERVERS else None
    send = meshcast.StateResharder(where)
    for factor in (1, 2, 3):
        now = fulls_of(torch.float32, factor)
        received = send.run(Source(rank, now, metadata) if rank in TRAINERS else None)
        if rank in SERVERS:
            check(received, now, rank)
        assert len(send._calls._kept) == 1
    # The same names and local shapes, under other layouts.
    turned = [replace(m, owners=(0, 1), mesh_shape=(2, 1)) if m.name == "grid" else m for m in metadata]
    received = send.run(Source(rank, fulls, turned) if rank in TRAINERS else None)
    if rank in SERVERS:
        check(received, fulls, rank)
    source = Source(rank, dict(fulls), metadata)
    for state in (source, lambda: source):
        with meshcast.WeightSync(state if rank in TRAINERS else None, where) as sync:
            for version in (1, 2):
                source.fulls.update(fulls_of(torch.float32, version))
                if rank in TRAINERS:
                    sync.push(version)
                else:
                    assert sync.pull(version) == version
                    check(sync.state, source.fulls, rank)


def renamed_and_joined(context) -> None:
    """Options concern a source's tensors as any others."""
    rank = context.rank
    fulls = fulls_of(torch.float32)
    source = Source(rank, fulls, metadata_of(fulls)) if rank in TRAINERS else None
    joined = meshcast.TensorMap(["model.rows", "model.few"], "joined")
    received = meshcast.reshard_state_dict(
        source,
        {"joined": (quiet_mesh(SERVERS), [Shard(1)])} if rank in SERVERS else None,
        rename=lambda name: f"model.{name}",
        maps=[joined],
        dtype=torch.bfloat16,
        strict=False,
    )
    if rank in SERVERS:
        both = torch.cat([fulls["rows"], fulls["few"]]).bfloat16()
        assert torch.equal(received["joined"].to_local(), both.chunk(2, 1)[SERVERS.index(rank)])


def refused(context, wrong: int, text: str, kind=LayoutError, *, change=None, metadata=None) -> None:
    """Rank `wrong` gives a source that does not fit: it raises `kind`, the others PlanMismatchError."""
    rank = context.rank
    fulls = fulls_of(torch.float32)
    source = None
    if rank in TRAINERS:
        source = Source(rank, fulls, metadata_of(fulls))
        if rank == wrong:
            source.wrong = change or {}
            source.metadata = source.metadata if metadata is None else metadata(source.metadata)
    outs = {n: torch.full_like(x, -1) for n, x in fulls.items()} if rank in SERVERS else None
    send = meshcast.StateResharder()
    for call in (lambda: meshcast.reshard_state_dict(source, out=outs), lambda: send.run(source, outs)):
        try:
            call()
        except MeshcastError as error:
            expected = kind if rank == wrong else PlanMismatchError
            assert type(error) is expected, f"{type(error)}: {error}"
            assert text in str(error), error
        else:
            raise AssertionError(f"no error with {text!r}")
    assert outs is None or all(bool((x == -1).all()) for x in outs.values())


def bad_tensors(context) -> None:
    def raises(*_):
        raise RuntimeError("disk full")

    as_bf16 = {"grid": lambda name, x: (name, x.bfloat16())}
    refused(context, 1, "yields torch.bfloat16 (2, 4) for 'grid'", change=as_bf16)
    shorter = {"rows": lambda name, x: (name, x[:1])}
    refused(context, 0, "torch.float32 (1, 3) for 'rows', where its metadata gives rank 0", change=shorter)
    other = {"one": lambda _, x: ("two", x)}
    refused(context, 1, "yields 'two' where its metadata has 'one'", change=other)
    none = {"all": lambda name, _: (name, 3)}
    refused(context, 2, "no tensor for 'all'", change=none)
    never = {"few": lambda *_: (None, None)}
    refused(context, 2, "ended before 'few', which its metadata gives rank 2", change=never)
    more = {"": lambda _, x: ("more", x)}
    refused(context, 1, "yields 'more', which is not in its metadata", change=more)
    refused(context, 0, "failed before 'all': RuntimeError: disk full", MeshcastError, change={"all": raises})


def memory_that_is_filled_again(context) -> None:
    """A source with one buffer for all that it yields would move the values of the last one several times."""
    room = torch.zeros(64)

    def again(name, x):
        return name, room[: x.numel()].view(x.shape).copy_(x)

    text = "the source has filled the memory of 'one' again for 'all'"
    refused(context, 1, text, change={"one": again, "all": again})
    # Buffers that are filled in parts, also interleaved ones, and a tensor under two names are in order.
    rank, at = context.rank, 0

    def next_part(name, x):
        nonlocal at
        at += x.numel()
        return name, room[at - x.numel() : at].view(x.shape).copy_(x)

    def column(number):
        return lambda name, x: (name, room[-16:].view(8, 2)[:, number][: x.numel()].view(x.shape).copy_(x))

    fulls = fulls_of(torch.float32)
    fulls["few"] = fulls["all"].clone()
    source = Source(rank, fulls, [Meta(name, x.dtype, tuple(x.shape)) for name, x in fulls.items()])
    last = {}
    source.wrong = dict.fromkeys(("rows", "columns", "grid"), next_part)
    source.wrong["one"] = column(0)
    source.wrong["all"] = lambda name, x: (name, last.setdefault(0, column(1)(name, x)[1]))
    source.wrong["few"] = lambda name, _: (name, last.pop(0))
    where = where_of(fulls) if rank in SERVERS else None
    received = meshcast.reshard_state_dict(source if rank in TRAINERS else None, where)
    if rank in SERVERS:
        check(received, fulls, rank)


def errors_of_the_source_itself(context) -> None:
    """They are raised as they are."""
    own = LayoutError("own words")

    def raises(*_):
        raise own

    refused(context, 2, "own words", change={"few": raises})
    assert own.__cause__ is not own
    written = [replace(m, owners=[*m.owners], placements=m.placements and [*m.placements]) if m.owners else m
               for m in metadata_of(fulls_of(torch.float32))]  # fmt: skip
    written = [replace(m, mesh_shape=[*m.mesh_shape]) if m.mesh_shape else m for m in written]
    fulls = fulls_of(torch.float32)
    source = Source(context.rank, fulls, written) if context.rank in TRAINERS else None
    received = meshcast.reshard_state_dict(source, where_of(fulls) if context.rank in SERVERS else None)
    if context.rank in SERVERS:
        check(received, fulls, context.rank)


def bad_metadata(context) -> None:
    refused(context, 1, "names 'rows' twice", metadata=lambda metas: [metas[0], *metas])
    refused(context, 0, "metadata of the source has 3", metadata=lambda metas: [3, *metas])
    fewer = lambda metas: metas[:-1]  # noqa: E731
    source = Source(context.rank, fulls_of(torch.float32), metadata_of(fulls_of(torch.float32)))
    assert math.prod(source.metadata[0].shape) == 21
    # A rank that knows fewer tensors than the others: it is in the mesh of one that it does not have.
    state = None
    if context.rank in TRAINERS:
        source.metadata = fewer(source.metadata) if context.rank == 1 else source.metadata
        state = source
    where = where_of(source.fulls) if context.rank in SERVERS else None
    try:
        meshcast.reshard_state_dict(state, where)
    except MeshcastError as error:
        assert "rank 1 is in the mesh of 'few'" in str(error), error
    else:
        raise AssertionError("no error")
    strange = lambda metas: [replace(metas[0], placements=(object(),)), *metas[1:]]  # noqa: E731
    source.wrong = {}
    try:
        broken = Source(context.rank, source.fulls, strange(metadata_of(source.fulls)))
        broken.iter_local = lambda: iter(source.fulls.items())
        meshcast.reshard_state_dict(broken if context.rank in TRAINERS else None, where)
    except MeshcastError as error:
        assert "Shard and Replicate are known" in str(error), error
    else:
        raise AssertionError("no error")


def errors_of_a_push(context) -> None:
    """A source that fails in a push: all raise, and the WeightSync stays in use."""
    rank = context.rank
    fulls = fulls_of(torch.float32)
    source = Source(rank, fulls, metadata_of(fulls))
    where = where_of(fulls) if rank in SERVERS else None
    with meshcast.WeightSync(source if rank in TRAINERS else None, where, timeout=20) as sync:
        if rank == 0:
            source.wrong = {"all": lambda name, x: (name, x.double())}
        try:
            if rank in TRAINERS:
                sync.push(1)
            else:
                sync.pull(1)
        except MeshcastError as error:
            assert "yields torch.float64 (4, 2) for 'all'" in str(error), error
        else:
            raise AssertionError("no error")
        source.wrong = {}
        if rank in TRAINERS:
            sync.push(2)
        else:
            assert sync.pull(2) == 2
            check(sync.state, fulls, rank)


CASES = [
    one_call,
    again_and_again,
    renamed_and_joined,
    bad_tensors,
    memory_that_is_filled_again,
    errors_of_the_source_itself,
    bad_metadata,
    errors_of_a_push,
]

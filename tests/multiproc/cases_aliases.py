"""Destinations whose elements overlap, that share memory with each other, or with sources; in three
processes."""

from __future__ import annotations

from collections.abc import Callable

import meshcast
import torch
import torch.distributed as dist
from multiproc.cases_many import fresh, raises
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
A, B = [0, 1], [1, 2]  # source and destination: rank 1 is in both
FULL = torch.arange(18.0).reshape(6, 3)
SPEC = {"shape": (6, 3), "dtype": torch.float32}
WIDE = 200_000  # elements of a row: enough to be on its way for a while


def overlapping() -> torch.Tensor:
    return torch.zeros(32).as_strided((6, 3), (2, 1))


def wrapped(local: torch.Tensor, ranks: list[int], placement) -> DTensor:
    return DTensor.from_local(local, quiet_mesh(ranks), [placement], run_check=False)


def shell_or(local: torch.Tensor, rank: int) -> DTensor:
    """All of FULL on each rank of B."""
    return DTensor.from_local(
        local if rank in B else torch.empty(0),
        quiet_mesh(B),
        [Replicate()],
        run_check=False,
        shape=FULL.shape,
        stride=FULL.stride(),
    )


def _reshard_(context, group, local) -> None:
    x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
    meshcast.reshard_(shell_or(local, context.rank), x, group=group)


def _reshard_local(context, group, local) -> None:
    source = FULL[3 * context.rank : 3 * context.rank + 3].clone() if context.rank in A else None
    target = local if context.rank in B else None
    layouts = meshcast.Layout(A, [Shard(0)]), meshcast.Layout(B, [Replicate()])
    meshcast.reshard_local(source, layouts[0], target, layouts[1], **SPEC, group=group)


def _reshard_state_dict(context, group, local) -> None:
    x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
    meshcast.reshard_state_dict(
        {"w": x} if context.rank in A else None,
        {"w": (quiet_mesh(B), [Replicate()])},
        {"w": wrapped(local, B, Replicate())} if context.rank in B else None,
        group=group,
    )


def _resharder() -> Callable:
    made = []

    def run(context, group, local) -> None:
        if not made:
            source = meshcast.TensorSpec((6, 3), torch.float32, quiet_mesh(A), [Shard(0)])
            target = meshcast.TensorSpec((6, 3), torch.float32, quiet_mesh(B), [Replicate()])
            made.append(resharder_between(source, target, group))
        x = sharded(FULL, quiet_mesh(A), [Shard(0)], context.rank)
        made[0].run(x, out=shell_or(local, context.rank))

    return run


def elements_overlap(context) -> None:
    """Every rank raises before anything moves, whether all outputs are wrong or that of one rank; then the
    group goes on. A state dict's group goes on where the kind of call is known to all, too."""
    groups: dict[Callable, dist.ProcessGroup] = {}
    for function in (_reshard_, _reshard_local, _resharder(), _reshard_state_dict, _reshard_state_dict):
        if function not in groups:
            groups[function] = fresh(context)
        group = groups[function]
        for wrong in ([1, 2], [2], [1]):
            local = overlapping() if context.rank in wrong else torch.zeros(6, 3)
            kind = meshcast.LayoutError if context.rank in wrong else meshcast.PlanMismatchError
            raises(kind, "one address", lambda: function(context, group, local))  # noqa: B023
            assert not local.any(), f"{function}, wrong on ranks {wrong}"
        local = torch.zeros(12, 3)[::2]
        function(context, group, local)
        assert context.rank not in B or torch.equal(local, FULL)


def outputs_share_memory(context) -> None:
    """Two outputs of one state dict: interleaved ones get their values, overlapping ones are refused."""
    group = fresh(context)
    fulls = {"v": FULL, "w": FULL + 100}

    def call(outs) -> None:
        state = {name: sharded(full, quiet_mesh(A), [Shard(0)], context.rank) for name, full in fulls.items()}
        given = {name: wrapped(local, B, Replicate()) for name, local in zip(fulls, outs, strict=True)}
        meshcast.reshard_state_dict(
            state if context.rank in A else None,
            dict.fromkeys(fulls, (quiet_mesh(B), [Replicate()])),
            given if context.rank in B else None,
            group=group,
        )

    rows, columns, apart = torch.zeros(12, 3), torch.zeros(6, 6), torch.zeros(12, 3)
    for wrong in ([1, 2], [2]):
        outs = (rows[:6], rows[5:11]) if context.rank in wrong else (apart[:6], apart[6:])
        kind = meshcast.LayoutError if context.rank in wrong else meshcast.PlanMismatchError
        raises(kind, "'v' and 'w' share memory", lambda: call(outs))  # noqa: B023
    assert not rows.any()
    assert not apart.any()
    for outs in (
        (rows[::2], rows[1::2]),
        (columns[:, :3], columns[:, 3:]),
        (columns[:, ::2], columns[:, 1::2]),
    ):
        call(outs)
        if context.rank in B:
            for out, full in zip(outs, fulls.values(), strict=True):
                assert torch.equal(out, full)


def weights_change_places(context) -> None:
    """The output of one name is the source of the other, in whole or in part, in one batch and in two. The
    source is copied first, and its change is not that of a careless caller."""
    group = fresh(context)
    ranks, turned = [0, 1, 2], [2, 0, 1]  # row r goes to the rank before r
    rows = torch.arange(6.0 * WIDE).reshape(2, 3, WIDE)
    for shift in (0, 1, WIDE // 2):
        for options in ({}, {"max_bytes_in_flight": 1}, {"digest": True}):
            memory = torch.zeros(2, WIDE + shift)
            sources = [memory[i : i + 1, :WIDE] for i in range(2)]
            outs = [memory[1 - i : 2 - i, shift:] for i in range(2)]
            if shift == 1:  # behind the back of version counters
                outs = [out.data for out in outs]
            for source, full in zip(sources, rows, strict=True):
                source.copy_(full[context.rank])
            meshcast.reshard_state_dict(
                {name: wrapped(source, ranks, Shard(0)) for name, source in zip("vw", sources, strict=True)},
                dict.fromkeys("vw", (quiet_mesh(turned), [Shard(0)])),
                {name: wrapped(out, turned, Shard(0)) for name, out in zip("vw", outs, strict=True)},
                group=group,
                **options,
            )
            for out, full in zip(outs, rows, strict=True):
                assert torch.equal(out[0], full[(context.rank + 1) % 3]), f"shift {shift}, {options}"


def halves_of_one_buffer(context) -> None:
    """Views of one buffer share a version counter: that the call writes to one is no change of the other."""
    group = fresh(context)
    turned = [2, 0, 1]
    layouts = meshcast.Layout([0, 1, 2], [Shard(0)]), meshcast.Layout(turned, [Shard(0)])
    spec = meshcast.TensorSpec((6, 3), torch.float32, quiet_mesh([0, 1, 2]), [Shard(0)])
    there = resharder_between(
        spec, meshcast.TensorSpec((6, 3), torch.float32, quiet_mesh(turned), [Shard(0)])
    )
    here = resharder_between(spec, spec, reuse_output=True)
    for source, out in (
        (slice(2), slice(2, 4)),
        (slice(0, 4, 2), slice(1, 4, 2)),
        (slice(3, 5), slice(4, 6)),
    ):
        views = []
        for _ in range(6):
            memory = torch.zeros(6, 3)
            memory[source] = FULL[2 * context.rank :][:2]
            views.append((memory[source], memory[out]))
        meshcast.reshard_local(views[0][0], layouts[0], views[0][1], layouts[1], **SPEC, group=group)
        meshcast.reshard_local(
            views[1][0], layouts[0], views[1][1], layouts[1], **SPEC, group=group, async_op=True
        ).wait()
        pairs = [(wrapped(x, [0, 1, 2], Shard(0)), wrapped(y, turned, Shard(0))) for x, y in views]
        meshcast.reshard_(pairs[2][1], pairs[2][0], group=group)
        meshcast.reshard_(pairs[3][1], pairs[3][0], group=group, async_op=True).wait()
        there.start(pairs[4][0], out=pairs[4][1]).wait()
        where = {"w": (quiet_mesh(turned), [Shard(0)])}
        meshcast.reshard_state_dict({"w": pairs[5][0]}, where, {"w": pairs[5][1]}, group=group)
        for _, y in views:
            assert torch.equal(y, FULL[2 * ((context.rank + 1) % 3) :][:2])
        kept = here.start(pairs[0][0]).wait()
        assert here.start(kept).wait() is here.run(kept) is kept
    dist.barrier()


def results_of_functional_collectives(context) -> None:
    """The wrapper that such a collective returns has no address; what is behind it does."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    group = fresh(context)
    turned = [2, 0, 1]
    rows = torch.arange(3.0 * WIDE).reshape(3, WIDE)
    layouts = meshcast.Layout([0, 1, 2], [Shard(0)]), meshcast.Layout(turned, [Shard(0)])
    memory = rows[context.rank :][:1].clone()
    pending = AsyncCollectiveTensor(memory)
    meshcast.reshard_(wrapped(pending, turned, Shard(0)), wrapped(pending, [0, 1, 2], Shard(0)), group=group)
    assert torch.equal(memory[0], rows[(context.rank + 1) % 3])
    meshcast.reshard_local(
        pending, layouts[0], memory, layouts[1], shape=(3, WIDE), dtype=torch.float32, group=group
    )
    assert torch.equal(memory[0], rows[(context.rank + 2) % 3])


CASES = [
    elements_overlap,
    outputs_share_memory,
    weights_change_places,
    halves_of_one_buffer,
    results_of_functional_collectives,
]

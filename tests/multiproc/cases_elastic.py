"""meshcast.elastic in five processes: ranks leave, join and are lost; in one process group, and in groups
that are made anew. In the last case a rank is killed."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from meshcast import Layout, LayoutError, MeshcastError, PlanMismatchError, TensorMap, TensorSpec, elastic
from multiproc import llama
from multiproc.elastic_training import Job, Reference
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
ALL = [0, 1, 2, 3, 4]
HYBRID = [Replicate(), Shard(0)]
_made = {"groups": 0}


def raised(kind: type[Exception], text: str, function) -> Exception:
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
        assert str(error).startswith("remesh"), error
        assert "reshard_state_dict" not in str(error)
        return error
    raise AssertionError(f"no {kind.__name__}")


def with_error(text: str, function) -> None:
    """One of the typed errors."""
    try:
        function()
    except (LayoutError, PlanMismatchError) as error:
        assert text in str(error), f"expected {text!r} in: {error}"
    else:
        raise AssertionError(f"no error with {text!r}")


def check(result: torch.Tensor, full: torch.Tensor, mesh, placements) -> None:
    place = coordinates(mesh.mesh).get(dist.get_rank())
    if place is not None:
        expected = cut(full, mesh.mesh.shape, place, placements)
        assert result.to_local().dtype == full.dtype
        assert torch.equal(result.to_local(), expected)


def world_of(context, members: list[int], all_call: bool = True) -> None:
    """Ends the default group and makes one of these processes, whose ranks are their places in the list. The
    others have none then. all_call: no process is dead."""
    _made["groups"] += 1
    name = f"default {_made['groups']}"
    if all_call:
        context.wait_for_all(name)
    if dist.is_initialized():
        dist.destroy_process_group()
    if context.rank in members:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(name, context.store),
            rank=members.index(context.rank),
            world_size=len(members),
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )
        context.wait_for_all(f"{name} is there", members)  # else one may still connect when another ends it


def resumed(state, mesh: DeviceMesh, inside: bool, **options) -> tuple[Job | None, dict]:
    """The job on a new mesh, with the state of before, filled in place."""
    job = Job(mesh, mesh.get_group()) if inside else None
    new = {} if job is None else job.state()
    result = elastic.remesh(state, None, new, own=["rng"], **options)
    if job is not None:
        for name, tensor in new.items():
            assert not isinstance(tensor, torch.Tensor) or result[name] is tensor
        job.take(result)
    return job, result


def goes_on_as_one_that_began_here(job: Job, mesh: DeviceMesh, reference: Reference) -> None:
    """Three steps: as one process, and as a job that began on these ranks at this step."""
    other = Job(mesh, mesh.get_group())
    other.load(reference.before[job.position], job.position)
    losses, expected = job.train(3), other.train(3)
    job.check(reference, losses)
    other.check(reference, expected)
    assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True))
    for mine, theirs in zip(job.module.parameters(), other.module.parameters(), strict=True):
        assert mine.device_mesh == theirs.device_mesh
        assert torch.allclose(mine.to_local(), theirs.to_local(), rtol=0, atol=1e-5)


def fsdp2_and_adamw_from_4_to_3_to_5_ranks(context) -> None:
    """In one process group: rank 1 leaves, hands over what it has, and joins again."""
    members = ([0, 1, 2, 3], [0, 2, 3], ALL)
    meshes = [DeviceMesh("cpu", ranks) for ranks in members]
    reference = Reference(9)
    state = None
    if context.rank in members[0]:
        job = Job(meshes[0], meshes[0].get_group())
        job.begin()
        losses = job.train(3)
        job.check(reference, losses)
        state = job.state()
    first = torch.Generator().manual_seed(1000).get_state()
    for mesh, ranks in zip(meshes[1:], members[1:], strict=True):
        inside = context.rank in ranks
        job, result = resumed(state, mesh, inside)
        assert result["position"] == reference.steps // 3 * (1 + members.index(ranks)) - 3
        state = None
        if inside:
            assert torch.equal(result["rng"], first)  # of the lowest rank
            goes_on_as_one_that_began_here(job, mesh, reference)
            state = {**job.tensors(), "rng": first, "position": job.position}


def a_lost_rank_and_groups_made_anew(context) -> None:
    """Hybrid sharding over 4 ranks; one is lost, and the others go on as 3; two join in, and all have other
    numbers then."""
    reference = Reference(9)
    world_of(context, [0, 1, 2, 3])
    state = mesh = None
    if context.rank != 4:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
        job = Job(mesh, dist.group.WORLD)
        job.begin()
        job.check(reference, job.train(3))
        state = job.state()
    world_of(context, [0, 2, 3])
    if context.rank in (0, 2, 3):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        job, _ = resumed(state, mesh, True, lost=[1], ranks={0: 0, 2: 1, 3: 2})
        goes_on_as_one_that_began_here(job, mesh, reference)
        state = job.state()
    else:
        state = None
    world_of(context, [4, 0, 2, 3, 1])
    mesh = DeviceMesh("cpu", ALL)
    job, result = resumed(state, mesh, True, ranks={0: 1, 1: 2, 2: 3})
    assert torch.equal(
        result["rng"], torch.Generator().manual_seed(1000).get_state()
    )  # of the lowest that had one
    goes_on_as_one_that_began_here(job, mesh, reference)
    world_of(context, ALL)


def sub_meshes_of_a_group_made_anew(context) -> None:
    """What FSDP2 beside tensor parallelism leaves on mesh["dp"]: which column a rank is in, its new number
    does not say."""
    world_of(context, [0, 1, 2, 3])
    state, fulls = None, llama.filled()[1]
    names = [name for name in fulls if "norm" in name or "embed" in name]
    assert len(names) > 3
    if context.rank != 4:
        mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        module = llama.sharded_module(llama.filled()[0], mesh)
        state = {name: x for name, x in module.state_dict().items() if name in names}
        assert {x.device_mesh.ndim for x in state.values()} == {1}
    for lost in ([], [1]):
        after = [process for process in (3, 4, 0, 1, 2) if process not in lost]
        world_of(context, after)
        if context.rank in after:
            ranks = {process: after.index(process) for process in range(4) if process not in lost}
            new = quiet_mesh(range(len(after)))
            result = elastic.remesh(state, None, lambda _, new=new: (new, [Shard(0)]), lost=lost, ranks=ranks)
            assert sorted(result) == sorted(names)
            for name in names:
                check(result[name], fulls[name], new, [Shard(0)])
    world_of(context, ALL)


def filled_state(rank: int, mesh, placements) -> tuple[dict, dict]:
    """What a rank holds, and the whole tensors of it."""
    fulls = {"a": unique_fill((7, 3), torch.float32, 1), "b": unique_fill((5,), torch.bfloat16, 2)}
    state = {name: sharded(full, mesh, placements, rank) for name, full in fulls.items()}
    state |= {"copy": torch.arange(4.0), "step": 12, "options": {"betas": (0.9, 0.99), "name": None}}
    return state, fulls


def places_of_all_kinds(context) -> None:
    """Shards that are no DTensors, with layouts by `old`; new by a function, and as layouts; renames,
    maps."""
    rank = context.rank
    new = quiet_mesh([0, 3, 4])
    full, rows = unique_fill((5, 4), torch.float32, 1), unique_fill((6, 2), torch.bfloat16, 2)
    boxes = {0: [((0, 2), (0, 4))], 1: [((2, 5), (0, 4))], 2: [((0, 2), (0, 4))], 3: [((2, 5), (0, 4))]}
    old = {
        "rows": (quiet_mesh([0, 1, 2]), [Shard(0)], (6, 2)),
        "full": (Layout.from_boxes(boxes), (5, 4)),
        "copy": None,
        "dtensor": (quiet_mesh([[0, 1], [2, 3]]), [Replicate(), Shard(-1)]),
    }
    state = None
    if rank < 4:
        state = {"full": full[:2] if rank % 2 == 0 else full[2:], "copy": torch.arange(3.0), "step": 3}
        state["dtensor"] = sharded(full, quiet_mesh([[0, 1], [2, 3]]), [Replicate(), Shard(1)], rank)
        if rank < 3:
            state["rows"] = rows.chunk(3)[rank]
    wanted = {
        "rows": (new, [Shard(1)]),
        "full": (new, [Replicate()]),
        "copy": (new, [Shard(0)]),
        "dtensor": (new, [Shard(0)]),
    }

    def checked(found) -> None:
        check(found["rows"], rows, new, [Shard(1)])
        check(found["full"], full, new, [Replicate()])
        check(found["copy"], torch.arange(3.0), new, [Shard(0)])
        check(found["dtensor"], full, new, [Shard(0)])
        assert found["step"] == 3

    checked(elastic.remesh(state, old, wanted))
    checked(elastic.remesh(state, old, wanted.get))
    checked(elastic.remesh(state, old.get, wanted.get))
    if rank != 1:  # whose rows nobody else has
        less = {name: value for name, value in (state or {}).items() if name != "rows"}
        places = {name: place for name, place in wanted.items() if name != "rows"}
        known = {name: place for name, place in old.items() if name != "rows"}
        found = elastic.remesh(less, known, places.get, lost=[1])
        check(found["full"], full, new, [Replicate()])
        check(found["dtensor"], full, new, [Shard(0)])
        found = elastic.remesh(
            less,
            known,
            lambda name: None if name in ("copy", "dtensor") else Layout([4, 0], [Shard(0)]),
            lost=[1],
            rename={"full": "whole"},
            maps=TensorMap("dtensor", ("left", "right"), dim=1),
            strict=False,
        )
        assert set(found) == {"whole", "left", "right", "step"}
        if rank in (4, 0):
            at = [4, 0].index(rank)
            assert torch.equal(found["whole"], full.chunk(2)[at])
            assert torch.equal(found["left"], full[:, :2].chunk(2)[at])
            assert torch.equal(found["right"], full[:, 2:].chunk(2)[at])


def entries_of_a_ranks_own(context) -> None:
    """Those of the lowest rank that has one go to all; others must be alike."""
    rank = context.rank
    state = {"rng": torch.tensor([rank, 7]), "python": (rank, "state"), "step": 4} if 0 < rank < 4 else None
    everywhere = Layout(ALL, [Replicate()])
    for own in (["rng", "python"], lambda name: name != "step"):
        for _ in range(2):
            found = elastic.remesh(state, None, {"rng": everywhere}, own=own)
            assert found["rng"].tolist() == [1, 7]
            assert (found["python"], found["step"]) == ((1, "state"), 4)
    raised(
        PlanMismatchError, "'python'", lambda: elastic.remesh(state, None, {"rng": everywhere}, own=["rng"])
    )
    raised(
        MeshcastError,
        "the replicas of 'rng' on ranks 1 and 2 differ",
        lambda: elastic.remesh(state, None, {"rng": everywhere}, own=["python"]),
    )


def only_copies_that_are_lost(context) -> None:
    """FSDP without replicas: one error lists what no rank has, of all tensors, and nothing was written."""
    new = quiet_mesh([0, 2, 3])
    state, fulls = filled_state(context.rank, quiet_mesh([0, 1, 2, 3]), [Shard(0)])
    state = state if context.rank < 4 else None
    outs = {
        "a": sharded(torch.zeros(7, 3), new, [Shard(0)], context.rank),
        "b": sharded(torch.zeros(5, dtype=torch.bfloat16), new, [Shard(0)], context.rank),
        "copy": (new, [Replicate()]),
    }
    if context.rank != 1:
        error = raised(
            LayoutError,
            "2 boxes are on no live rank: 'a' [2:4, 0:3] of rank 1; 'b' [2:4] of rank 1",
            lambda: elastic.remesh(state, None, outs, lost=[1]),
        )
        assert error.gone == (("a", ((2, 4), (0, 3)), (1,)), ("b", ((2, 4),), (1,)))
        assert not outs["a"].to_local().any()
        # Read again from elsewhere: one part by a rank that holds others, one by a rank that joins.
        loaded = {}
        for index, (name, box, _) in enumerate(error.gone):
            if context.rank == (2, 4)[index]:
                loaded[name] = [(box, fulls[name][box[0][0] : box[0][1]].clone())]
        for _ in range(2):
            for out in (outs["a"], outs["b"]):
                out.to_local().zero_()
            elastic.remesh(state, None, outs, lost=[1], loaded=loaded)
            check(outs["a"], fulls["a"], new, [Shard(0)])
            check(outs["b"], fulls["b"], new, [Shard(0)])
        parts = (
            [] if context.rank else [(((2, 3), (0, 3)), fulls["a"][2:3]), (((3, 4), (0, 3)), fulls["a"][3:4])]
        )
        more = {"a": parts, "b": loaded.get("b", [])}
        found = elastic.remesh(state, None, {**outs, "a": (new, [Shard(1)])}, lost=[1], loaded=more)
        check(found["a"], fulls["a"], new, [Shard(1)])
        raised(
            LayoutError,
            "1 box is on no live rank: 'b' [2:4] of rank 1",
            lambda: elastic.remesh(state, None, outs, lost=[1], loaded={"a": parts}),
        )
        box = ((2, 4), (0, 3))
        for wrong, text in (
            ({"a": [(box, torch.zeros(2, 4))]}, "for tensors of shapes [(2, 4)]"),
            ({"a": [(box, torch.zeros(2, 3)), (box, torch.zeros(2, 3))]}, "overlap"),
            ({"a": [box]}, "expected (box, tensor) pairs"),
            (
                {"a": [(((4, 6), (0, 3)), torch.zeros(2, 3))]},
                "rank 2 has loaded [4:6, 0:3], and holds [4:6, 0:3]",
            ),
            ({"a": [(((6, 9), (0, 3)), torch.zeros(3, 3))]}, "'a'"),
            ({"a": [(box, torch.zeros(2, 3, dtype=torch.int64))]}, "has loaded int64"),
            ({"copy": [(((0, 1),), torch.zeros(1))]}, "of which no rank holds a shard"),
            ({"nothing": [(((0, 1),), torch.zeros(1))]}, "of which no rank holds a shard"),
            ([], "loaded must be a mapping"),
        ):
            with_error(
                text,
                lambda w=wrong: elastic.remesh(
                    state, None, outs, lost=[1], loaded=w if context.rank == 2 else loaded
                ),
            )
    context.wait_for_all("refused")
    elastic.remesh(state, None, outs)
    check(outs["a"], fulls["a"], new, [Shard(0)])
    check(outs["b"], fulls["b"], new, [Shard(0)])


def input_that_is_wrong(context) -> None:
    """One typed error on all ranks, and the group goes on."""
    rank = context.rank
    if rank == 3:
        return
    mesh, new = quiet_mesh([[0, 1], [2, 3]]), quiet_mesh([0, 1, 2, 4])
    state, fulls = filled_state(rank, mesh, HYBRID)
    state = state if rank < 4 else {}
    where = {"a": (new, [Shard(1)]), "b": (new, [Shard(0)]), "copy": (new, [Replicate()])}

    def call(state=state, old=None, where=where, lost=(3,), **options):
        return lambda: elastic.remesh(state, old, where, lost, **options)

    def unlike(**entries):
        return call({**state, **entries} if rank == 1 else state)

    # Ranks that lost= names.
    raised(LayoutError, "lost= names [8]", call(lost=[3, 8]))
    raised(
        LayoutError,
        "rank 3 is lost, and yet in the destination of 'a'",
        call(where={**where, "a": (quiet_mesh([2, 3]), [Shard(0)])}),
    )
    raised(LayoutError, "lost rank", call(lost=["3"]))
    for bad in ([3, 1], 3):
        kind = LayoutError if rank == 1 else PlanMismatchError
        error = None
        try:
            call(lost=bad if rank == 1 else [3])()
        except kind as found:
            error = found
        assert error is not None
        assert "lost" in str(error)
    # State that differs among ranks.
    raised(PlanMismatchError, "'step'", unlike(step=13))
    raised(PlanMismatchError, "'copy'", unlike(copy=torch.arange(5.0)))
    raised(PlanMismatchError, "'copy'", unlike(copy=torch.arange(4)))
    raised(MeshcastError, "the replicas of 'copy' on ranks 0 and 1 differ", unlike(copy=torch.ones(4)))
    raised(
        PlanMismatchError, "'a'", unlike(a=sharded(fulls["a"], quiet_mesh([[2, 3], [0, 1]]), HYBRID, rank))
    )
    raised(
        LayoutError,
        "rank 1 is in the mesh of 'b'",
        call({n: x for n, x in state.items() if rank != 1 or n != "b"}),
    )
    # Arguments of one rank.
    for wrong, text in (
        ({"old": 5}, "old must be"),
        ({"old": {"a": 5}}, "expected a Layout"),
        ({"old": {"a": (mesh, [Shard(0), Shard(1)])}}, "but it is under"),
        ({"where": 5}, "new must be"),
        ({"where": lambda _: torch.ones(4)}, "pass a mapping"),
        ({"state": [1]}, "state must be"),
        ({"layouts": {}}, "given by `old`"),
        ({"own": "a"}, "own"),
        ({"own": ["a"]}, "'a'"),
    ):
        both = wrong.get("own") == ["a"]  # all hear what is its own
        kind = LayoutError if rank == 1 or both else PlanMismatchError
        raised(kind, text, call(**(wrong if rank == 1 else {})))
    raised(
        LayoutError, "'copy'", call(where={name: place for name, place in where.items() if name != "copy"})
    )
    raised(LayoutError, "'c'", call(where={**where, "c": (new, [Replicate()])}))
    spec = TensorSpec((7, 3), torch.float32, mesh, HYBRID)
    kind = LayoutError if rank == 1 else PlanMismatchError
    raised(kind, "must pass its DTensor", unlike(a=spec))
    found = call()()
    check(found["a"], fulls["a"], new, [Shard(1)])
    assert found["options"] == {"betas": (0.9, 0.99), "name": None}


def maps_of_ranks_that_are_wrong(context) -> None:
    """Old number 3 is lost, the others kept theirs."""
    rank = context.rank
    mesh, new = quiet_mesh([[0, 1], [2, 3]]), quiet_mesh([0, 1, 2, 4])
    state, fulls = filled_state(rank, mesh, HYBRID)
    state = state if rank < 3 else None
    where = {"a": (new, [Shard(1)]), "b": (new, [Shard(0)]), "copy": (new, [Replicate()])}
    right = {0: 0, 1: 1, 2: 2}

    def call(ranks, lost=(3,)):
        return lambda: elastic.remesh(state, None, where, lost, ranks=ranks)

    for ranks, text in (
        ([0, 1, 2], "expected {old rank: new rank}"),
        ({}, "expected {old rank: new rank}"),
        ({0: 0, 1: 1, 2: 1}, "several old ranks the new rank 1"),
        ({**right, 3: 3}, "old rank 3 is named in lost="),
        ({**right, 5: 17}, "new rank 17, which is not in the group"),
        ({0: "0"}, "new rank of 0"),
    ):
        raised(LayoutError, text, call(ranks))
    raised(LayoutError, "lost= names [6]", call(right, [3, 6]))
    error = None
    try:
        call({0: 0, 1: 1}, [3])()
    except (LayoutError, PlanMismatchError) as found:
        error = found
    assert "no new rank" in str(error)
    found = call(right)()
    check(found["a"], fulls["a"], new, [Shard(1)])
    check(found["b"], fulls["b"], new, [Shard(0)])


def a_rank_is_killed(context) -> None:
    """The others make a new group without waiting for it, and go on with what its replica had."""
    state, fulls = filled_state(context.rank, quiet_mesh([[0, 1], [2, 3]]), HYBRID)
    if context.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    after = [4, 2, 1, 0]
    world_of(context, after, all_call=False)
    new = quiet_mesh(range(4))
    ranks = {process: after.index(process) for process in (0, 1, 2)}
    found = elastic.remesh(
        state if context.rank < 4 else None, None, lambda _: (new, [Shard(0)]), [3], ranks=ranks
    )
    for name, full in fulls.items():
        assert isinstance(found[name], DTensor)
        check(found[name], full, new, [Shard(0)])
    assert found["step"] == 12
    error = raised(
        LayoutError,
        "of ranks 1, 3",
        lambda: elastic.remesh(
            state if context.rank in (0, 2) else None,
            None,
            lambda _: (new, [Shard(0)]),
            [1, 3],
            ranks={0: after.index(0), 2: after.index(2)},
        ),
    )
    assert error.gone[0] == ("a", ((4, 7), (0, 3)), (1, 3))


CASES = [
    fsdp2_and_adamw_from_4_to_3_to_5_ranks,
    a_lost_rank_and_groups_made_anew,
    sub_meshes_of_a_group_made_anew,
    places_of_all_kinds,
    entries_of_a_ranks_own,
    only_copies_that_are_lost,
    input_that_is_wrong,
    maps_of_ranks_that_are_wrong,
    a_rank_is_killed,
]

"""meshcast.elastic.Replicas in five processes on three emulated hosts: what is lost comes from the copies of
the step that all ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from meshcast import Layout, LayoutError, PlanMismatchError, Topology, elastic
from multiproc.cases_elastic import check, goes_on_as_one_that_began_here, raised, world_of
from multiproc.elastic_training import Job, Reference
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 30.0
ALL = [0, 1, 2, 3, 4]
HOSTS = Topology.from_hosts({0: "a", 1: "a", 2: "b", 3: "b", 4: "c"})


def refused(text: str, function) -> Exception:
    """One of the typed errors of Replicas."""
    try:
        function()
    except (LayoutError, PlanMismatchError) as error:
        assert text in str(error), f"expected {text!r} in: {error}"
        assert str(error).startswith("Replicas"), error
        assert "reshard_state_dict" not in str(error)
        return error
    raise AssertionError(f"no error with {text!r}")


def whole(state: dict) -> dict:
    """The state on one process, copied by torch."""
    found = {}
    for name, value in state.items():
        full = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = full.clone() if isinstance(full, torch.Tensor) else full
    return found


def place(value, mesh) -> tuple:
    """Where an entry goes: shards, and copies of what has no dimension to cut."""
    return mesh, [Shard(0) if isinstance(value, torch.Tensor) and value.dim() else Replicate()]


def same(found: dict, expected: dict, mesh) -> None:
    """All of it, bit by bit."""
    assert {*found} == {*expected}
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            check(found[name], value, *place(value, mesh))
        else:
            assert found[name] == value, name


def recovered(replicas, expected: dict, living: list[int], mesh, lost, **options) -> dict:
    """expected: of the step that must be there, all but the states of random generators."""
    copies = ["rng"]
    found = elastic.remesh(
        None,
        None,
        lambda name: (mesh, [Replicate()]) if name in copies else place(expected[name], mesh),
        lost,
        replicas=replicas,
        **options,
    )
    rng = torch.Generator().manual_seed(1000 + living[0]).get_state()
    check(found.pop("rng"), rng, mesh, [Replicate()])  # of the lowest rank that had one
    same(found, expected, mesh)
    return found


def trained(job: Job, replicas, steps: range) -> dict[int, dict]:
    """The states after each step, without those of random generators."""
    expected = {}
    for step in steps:
        job.train(1)
        expected[step] = {name: x for name, x in whole(job.state()).items() if name != "rng"}
        replicas.step(step)
    replicas.wait()
    return expected


def _any_host_dies(context, dtype: torch.dtype) -> None:
    mesh = DeviceMesh("cpu", ALL)
    job = Job(mesh, mesh.get_group(), dtype=dtype)
    job.begin()
    job.train(1)  # else get_state_dict makes the moments, by a step that they count
    replicas = elastic.Replicas(job.state, 2, own=["rng"], topology=HOSTS)
    assert replicas.steps == ()
    expected = trained(job, replicas, range(2, 6))
    assert replicas.steps == (2, 4)
    empty = [name for name, x in job.state().items() if isinstance(x, DTensor) and not x.to_local().numel()]
    assert bool(empty) == (context.rank > 1)
    for lost in ([0], [1], [2], [3], [4], [0, 1], [2, 3]):
        living = [rank for rank in ALL if rank not in lost]
        if context.rank in living:
            found = recovered(replicas, expected[4], living, quiet_mesh(living), lost)
            assert found.version == 4
        context.wait_for_all(f"without {lost}")
    replicas.close()
    recovered(replicas, expected[4], ALL, quiet_mesh([4, 2, 0]), [])


def any_host_dies_float32(context) -> None:
    """FSDP2 and AdamW on uneven and empty shards: with a host one rank dies, or two."""
    _any_host_dies(context, torch.float32)


def any_host_dies_bfloat16(context) -> None:
    _any_host_dies(context, torch.bfloat16)


def a_group_made_anew(context) -> None:
    """Rank 1 of four is lost, one joins, all have other numbers: as a job that began there at that step. They
    make copies of their own, and the next is lost."""
    reference = Reference(9)
    world_of(context, [0, 1, 2, 3])
    replicas = None
    if context.rank < 4:
        mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        job = Job(mesh, dist.group.WORLD)
        job.begin()
        job.train(1)
        replicas = elastic.Replicas(job.state, 3, own=["rng"], topology=Topology.uniform(2, nic_gbps=10))
        trained(job, replicas, range(2, 6))
        assert replicas.steps == (3,)
    after = [4, 0, 2, 3]
    world_of(context, after)
    if context.rank in after:
        mesh = DeviceMesh("cpu", [0, 1, 2, 3])
        job, found = resumed(replicas, mesh, [1], {0: 1, 2: 2, 3: 3})
        assert found.version == job.position == 3
        replicas = elastic.Replicas(job.state, 10, own=["rng"])  # on one host: any one rank
        replicas.refresh(3)
        goes_on_as_one_that_began_here(job, mesh, reference)  # beside it
        replicas.wait()
    world_of(context, [0, 2, 3])
    if context.rank in (0, 2, 3):
        mesh = DeviceMesh("cpu", [0, 1, 2])
        job, found = resumed(replicas, mesh, [0], {1: 0, 2: 1, 3: 2})
        assert found.version == job.position == 3
        goes_on_as_one_that_began_here(job, mesh, reference)
    world_of(context, ALL)


def resumed(replicas, mesh: DeviceMesh, lost: list[int], ranks: dict[int, int]) -> tuple[Job, dict]:
    """The job on a new mesh of all ranks, filled in place."""
    job = Job(mesh, dist.group.WORLD)
    new = job.state()
    found = elastic.remesh(None, None, new, lost, ranks=ranks, replicas=replicas)
    job.take(found)
    return job, found


def layouts_of_all_kinds(context) -> None:
    """Stages whose entries others do not have, replicas on other hosts, which need no copies, plain shards,
    several boxes, tied weights, and what is no tensor; a rank that holds nothing keeps copies too."""
    rank = context.rank
    fulls = {
        "stage": unique_fill((7, 3), torch.bfloat16, 1),
        "far": unique_fill((5, 2), torch.float32, 2),
        "boxes": unique_fill((6, 4), torch.float32, 3),
        "alone": unique_fill((3,), torch.float32, 4),
        "tied": unique_fill((7, 3), torch.bfloat16, 1),
        "scalar": torch.tensor(6.0),
    }
    boxes = {
        0: [((0, 1), (0, 4)), ((3, 4), (1, 3))],
        1: [((1, 3), (0, 4)), ((3, 4), (0, 1))],
        3: [((4, 6), (0, 4)), ((3, 4), (3, 4))],
    }
    layout = Layout.from_boxes(boxes)
    near, far = quiet_mesh([0, 1]), quiet_mesh([[0, 1], [2, 3]])
    state: dict = {}
    if rank < 2:
        state["stage"] = state["tied"] = sharded(fulls["stage"], near, [Shard(0)], rank)
        state |= {"lr": 0.5, "scalar": fulls["scalar"].clone()}
    if rank == 3:
        state |= {"alone": fulls["alone"].clone(), "name": ("of", 3)}
    if rank < 4:
        state["far"] = sharded(fulls["far"], far, [Replicate(), Shard(1)], rank)
    if rank in boxes:
        parts = [fulls["boxes"][tuple(slice(*side) for side in box)].reshape(-1) for box in boxes[rank]]
        state["boxes"] = torch.cat(parts)
    replicas = elastic.Replicas(state, 1, old={"boxes": (layout, (6, 4))}, topology=HOSTS)
    replicas.step(1)
    replicas.step(2)
    for x in state.values():
        if isinstance(x, torch.Tensor):
            (x.to_local() if isinstance(x, DTensor) else x).zero_()
    copied = {name for name, _ in replicas._keepers.keeper}
    assert copied == {"stage", "tied", "boxes", "alone", "scalar"}
    for lost in ([0], [1], [0, 1], [3], [2, 3], [4]):
        living = [each for each in ALL if each not in lost]
        new = quiet_mesh(living)
        if rank in living:
            given = elastic.remesh(
                None, None, lambda name, new=new: place(fulls[name], new), lost, replicas=replicas
            )
            same(given, {**fulls, "lr": 0.5, "name": ("of", 3)}, new)
            assert given.version == 2
        context.wait_for_all(f"without {lost}")


def more_dead_than_it_bears(context) -> None:
    """One error lists what is gone, on all ranks; also on one that has no copies."""
    mesh = quiet_mesh([0, 1, 2, 3])
    full = unique_fill((7, 2), torch.float32, 1)
    group = dist.new_group([0, 1, 2, 3])
    replicas = None
    if context.rank < 4:
        state = {"w": sharded(full, mesh, [Shard(0)], context.rank), "step": 8}
        replicas = elastic.Replicas(
            lambda: state, 4, group=group, topology=Topology.uniform(2, nic_gbps=10), timeout=20
        )
        for _ in range(2):
            replicas.wait()
            replicas.step(8) if replicas.steps == () else replicas.step(9)
    for lost in ([0, 2], [1, 2, 3]):
        living = [rank for rank in ALL if rank not in lost]
        new = quiet_mesh(living)
        if context.rank not in lost:
            keepers = replicas._keepers.keeper if replicas is not None else {}
            error = raised(
                LayoutError,
                "on no live rank",
                lambda new=new, lost=lost: elastic.remesh(
                    None, None, lambda _: (new, [Shard(0)]), lost, replicas=replicas
                ),
            )
            boxes = [((2 * rank, min(2 * rank + 2, 7)), (0, 2)) for rank in range(4)]
            keeper = [keepers.get(("w", box)) for box in boxes]
            assert len(error.gone) > 0
            for name, box, had in error.gone:
                assert name == "w"
                assert set(had) <= set(lost)
                if replicas is not None:
                    owner = boxes.index(box)
                    assert had == tuple(sorted((owner, keeper[owner])))
            if replicas is not None:
                expected = {boxes[r] for r in lost if r < 4 and keeper[r] in lost}
                assert {box for _, box, _ in error.gone} == expected
        context.wait_for_all(f"without {lost}")
    new = quiet_mesh([0, 1, 4])
    if context.rank in (0, 1, 4):  # one host, which it does bear
        found = elastic.remesh(None, None, lambda _: (new, [Shard(0)]), [2, 3], replicas=replicas)
        check(found["w"], full, new, [Shard(0)])
        assert (found["step"], found.version) == (8, 8)
    context.wait_for_all("borne")


def input_that_is_wrong(context) -> None:
    """One typed error on all ranks, and nothing of what is whole is lost."""
    rank = context.rank
    mesh, new = quiet_mesh(ALL), quiet_mesh([0, 1, 2, 3])
    full = unique_fill((6, 2), torch.float32, 1)
    good = {"w": sharded(full, mesh, [Shard(0)], rank), "step": 1}
    make = elastic.Replicas
    for wrong, text in (
        ({"every": 0}, "every"),
        ({"every": 3}, "every"),
        ({"state": [1]}, "state must be a mapping"),
        ({"state": {**good, "w": object()}}, "'w'"),
        ({"state": {}}, "rank 1 is in the mesh of 'w'"),
        ({"old": 5}, "old must be"),
        ({"topology": Topology.from_hosts({0: "a"})}, "on no host"),
        ({"timeout": -1}, "timeout"),
    ):
        arguments = {"state": good, "every": 2, **(wrong if rank == 1 else {})}
        refused(text if rank == 1 else "", lambda a=arguments: make(a.pop("state"), a.pop("every"), **a))
    partial = DTensor.from_local(full, mesh, [Partial()], run_check=False)
    refused("Partial", lambda: make({"p": partial}, 1))
    replicas = make(lambda: good, 2, topology=HOSTS)
    where = lambda _: (new, [Shard(0)])  # noqa: E731
    if rank != 4:
        raised(
            LayoutError,
            "no step has whole copies",
            lambda: elastic.remesh(None, None, where, [4], replicas=replicas),
        )
    replicas.refresh(2)
    replicas.wait()
    if rank != 4:
        for wrong, text in (
            ({"replicas": 5}, "expected Replicas"),
            ({"own": ["w"]}, "replicas stand for"),
            ({"state": good}, "replicas stand for"),
        ):
            mine = {"state": None, "replicas": replicas, **(wrong if rank == 1 else {})}
            kind = LayoutError if rank == 1 else PlanMismatchError
            raised(
                kind,
                text if rank == 1 else "",
                lambda m=mine: elastic.remesh(m.pop("state"), None, where, [4], **m),
            )
        mine = {"replicas": replicas} if rank != 1 else {}
        raised(
            LayoutError,
            "a state comes from rank 1, but replicas from rank 0",
            lambda: elastic.remesh(good if rank == 1 else None, None, where, [4], **mine),
        )
    context.wait_for_all("refused")
    # A state that became another one ends the copies, and leaves what was whole.
    if rank == 1:
        good["w"] = sharded(full[:5].clone(), mesh, [Shard(0)], rank)
        refused("other tensors than at first: 'w'", lambda: replicas.refresh(4))
    else:
        replicas.refresh(4)
    refused("other tensors than at first: 'w'", replicas.wait)
    refused("other tensors than at first: 'w'", lambda: replicas.refresh(6))
    if rank != 4:
        found = elastic.remesh(None, None, where, [4], replicas=replicas)
        assert found.version == 2
        check(found["w"], full, new, [Shard(0)])
    context.wait_for_all("kept")


CASES = [
    any_host_dies_float32,
    any_host_dies_bfloat16,
    layouts_of_all_kinds,
    more_dead_than_it_bears,
    input_that_is_wrong,
    a_group_made_anew,
]

"""WeightSync between processes. Ranks 0 and 1 train, the others serve, unless a case says otherwise."""

from __future__ import annotations

import itertools
import os
import threading
import time

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 40.0
TRAINERS = [0, 1]
# No size is a multiple of the number of its ranks.
SHAPES = {"w": (7, 5), "v": (11, 3), "b": (3,)}


def raises(kind: type[Exception], text: str, function):
    try:
        function()
    except kind as error:
        assert text in str(error), f"expected {text!r} in: {error}"
        return error
    raise AssertionError(f"no {kind.__name__} of {text!r}")


def values(version: int) -> dict[str, torch.Tensor]:
    """The whole weights of a version: float32, and bfloat16 for "v"."""
    full = {name: unique_fill(shape, torch.float32, version) for name, shape in SHAPES.items()}
    return full | {"v": full["v"].remainder(97).to(torch.bfloat16)}


class Job:
    """The weights on this rank, and where they go. where: of "w" and "v"; "b" is whole on each server."""

    def __init__(self, context, trainers=TRAINERS, servers=None, **options) -> None:
        self.context, self.rank, self.trainers = context, context.rank, trainers
        self.servers = list(range(len(trainers), context.world)) if servers is None else servers
        mesh = quiet_mesh(self.servers)
        self.where = {"w": (mesh, [Shard(1)]), "v": (mesh, [Shard(0)]), "b": (mesh, [Replicate()])}
        self.trains, self.serves = self.rank in trainers, self.rank in self.servers
        self.held = {
            name: sharded(full, quiet_mesh(trainers), [Shard(0)], self.rank)
            for name, full in values(0).items()
        }
        self.sync = meshcast.WeightSync(self.held if self.trains else None, self.where, **options)

    def become(self, version: int) -> None:
        """A step of the optimiser, in place."""
        for name, full in values(version).items():
            self.held[name].to_local().copy_(
                sharded(full, quiet_mesh(self.trainers), [Shard(0)], self.rank).to_local()
            )

    def push(self, version: int) -> None:
        self.become(version)
        self.sync.push(version)

    def check(self, version: int, state=None) -> None:
        """This rank serves exactly that version."""
        state = self.sync.state if state is None else state
        assert state.version == version, state.version
        for name, full in values(version).items():
            mesh, placements = self.where[name]
            part = cut(full, mesh.mesh.shape, coordinates(mesh.mesh)[self.rank], placements)
            assert state[name].dtype == full.dtype
            assert torch.equal(state[name].to_local(), part), (name, version)

    def meet(self, name: str, limit: float = 30.0) -> None:
        self.context.wait_for_all(name, limit=limit)

    def close(self) -> None:
        self.meet(f"close {self.sync._name}")
        self.sync.close()


def versions_arrive(context) -> None:
    """Each version is whole; the one that is served is not written while later ones arrive."""
    job = Job(context)
    for version in range(1, 6):
        if job.trains:
            job.push(version)
        else:
            assert job.sync.pull(version) == version
            job.check(version)
            assert job.sync.version == version
            assert job.sync.stats.version == version
            assert job.sync.stats.bytes_received > 0
        job.meet(f"version {version}")
    if job.trains:
        assert job.sync.stats.version == 5
        assert job.sync.stats.bytes_sent > 0
        for version in (6, 7, 8):
            job.push(version)
    else:
        kept = {name: x.to_local().clone() for name, x in job.sync.state.items()}
        job.meet("three more")
        job.check(5)
        assert all(torch.equal(kept[name], x.to_local()) for name, x in job.sync.state.items())
        assert job.sync.pull() == 8
        job.check(8)
        assert job.sync.pull() == 8
        assert job.sync.pull(3) == 8
    if job.trains:
        job.meet("three more")
    job.close()
    if job.serves:
        job.check(8)
        raises(meshcast.AbortedError, "closed", job.sync.pull)
    else:
        raises(meshcast.AbortedError, "closed", lambda: job.sync.push(9))


def two_memories(context) -> None:
    """Two buffers, whatever the number of versions, and whoever pulls in between; one with buffers=1."""
    for buffers in (2, 1):
        job, places = Job(context, buffers=buffers), set()
        for version in range(1, 8):
            if job.trains:
                job.push(version)
            elif buffers == 1 or version % 3:
                assert job.sync.pull(version) == version
                job.check(version)
                places.add(job.sync.state["w"].to_local().data_ptr())
            job.meet(f"{buffers} {version}")
        assert len(places) == (buffers if job.serves else 0), places
        job.close()


def store_does_not_fill(context) -> None:
    """What the ranks say in the rendezvous store goes again."""
    job = Job(context)
    found = []
    for last in (5, 25):
        for version in range(last - 4 if last == 5 else 6, last + 1):
            if job.trains:
                job.sync.push(version)
            else:
                job.sync.pull(version)
        job.meet(f"{last}")
        found.append(context.store.num_keys())
        job.meet(f"counted {last}")
    assert found[1] - found[0] <= 3 * context.world, found  # those of the two meetings between
    job.close()


def beside_others(context) -> None:
    """Pushes while servers make other calls, in no order with them, and no thread is in the way."""
    job = Job(context)
    done = threading.Event()

    def train() -> None:
        for version in range(1, 11):
            job.push(version)
        done.set()

    if job.trains:
        threading.Thread(target=train).start()
    full = torch.arange(24.0).reshape(6, 4)
    for turn in range(10):
        given = sharded(full + turn, quiet_mesh(TRAINERS), [Shard(0)], job.rank)
        got = meshcast.reshard(given, quiet_mesh(job.servers), [Replicate()])
        assert job.trains or torch.equal(got.to_local(), full + turn)
        held = {"x": given} if job.trains else None
        again = meshcast.reshard_state_dict(held, {"x": (quiet_mesh(job.servers), [Replicate()])})
        assert job.trains or torch.equal(again["x"].to_local(), full + turn)
        x = torch.full((3,), float(job.rank))
        dist.all_reduce(x)
        assert x[0] == sum(range(context.world))
        if job.serves and job.sync.pull(1):
            job.check(job.sync.version)
    assert job.trains or job.sync.pull(10) == 10
    assert job.serves or done.wait(30)
    job.close()


def a_slow_server(context) -> None:
    """One that is not there, or in no pull, stops a push for its limit and no longer. Nothing is moved."""
    limit = 2.0
    last = context.world - 1
    if context.rank == last:
        context.wait_for_all("first push is over")
    job = Job(context, timeout=limit if context.rank in TRAINERS else 30.0)
    if job.trains:
        begin = time.monotonic()
        error = raises(meshcast.DeadlineExceededError, "have not constructed", lambda: job.push(1))
        assert limit * 0.9 < time.monotonic() - begin < limit + 2.5
        assert f"ranks [{last}]" in str(error)
        assert error.peer == last
    if context.rank != last:
        context.wait_for_all("first push is over")
    job.meet("constructed")
    if job.trains:
        job.push(1)  # which has not arrived before
        job.push(2)
    elif context.rank == last:
        assert job.sync.pull(2) == 2
        job.check(2)
    job.close()

    job = Job(context, buffers=1 if context.rank == last else 2, timeout=limit if job.trains else 30.0)
    job.meet("again")
    if job.trains:
        error = raises(meshcast.DeadlineExceededError, "not ready", lambda: job.push(1))
        assert error.peer == last
    job.meet("missed")
    if job.trains:
        time.sleep(0.5)
        job.push(2)
    else:
        assert job.sync.pull() == 2
        job.check(2)
    job.close()


def one_buffer(context) -> None:
    """Into the weights that are served, which may be the user's own."""
    job = Job(context, buffers=1)
    for version in (1, 2, 3):
        if job.trains:
            job.push(version)
        else:
            assert job.sync.pull() == version
            job.check(version)
    if job.serves:
        assert job.sync.pull(2) == 3
    job.close()

    out = {"b": torch.zeros(3)} if context.rank == 2 else None
    job = Job(context, buffers=1, out=out)
    for version in (1, 2):
        if job.trains:
            job.push(version)
        else:
            assert job.sync.pull() == version
            assert context.rank != 2 or torch.equal(out["b"], values(version)["b"])
    job.close()
    sync = meshcast.WeightSync({} if job.trains else None, None, buffers=1, timeout=1.0)
    if job.serves:
        begin = time.monotonic()
        raises(meshcast.DeadlineExceededError, "nobody has pushed one", sync.pull)
        assert 0.9 < time.monotonic() - begin < 3.0
    job.meet("waited")
    sync.close()


def colocated(context) -> None:
    """Ranks that train and serve receive in their push."""
    for buffers in (2, 1):
        servers = list(range(1, context.world))
        job = Job(context, servers=servers, buffers=buffers)
        for version in (3, 5, 6):
            if job.trains:
                job.push(version)
            if job.serves:
                assert job.sync.pull(version) == version
                job.check(version)
        job.close()


def from_five_boxes(context) -> None:
    """Uneven layouts by boxes, plain tensors, renamed; the last rank trains too and gets nothing."""
    rank, last = context.rank, context.world - 1
    boxes = Layout.from_boxes({1: [((0, 1), (0, 4)), ((5, 6), (0, 4))], 2: [((1, 5), (0, 4))]})
    full = torch.arange(24.0).reshape(6, 4)
    source = quiet_mesh([0, last])
    held = {"model.w": sharded(full, source, [Shard(0)], rank), "lr": 0.0} if rank in (0, last) else None
    where = {"w": boxes} if rank in (1, 2) else None
    sync = meshcast.WeightSync(held, where, rename={"model.w": "w"} if held else None)
    for version in (1, 2):
        if held is not None:
            held["model.w"].to_local().mul_(2)
            held["lr"] = version / 4
            sync.push(version)
        else:
            assert sync.pull(version) == version
            state = sync.state
            assert state["lr"] == version / 4
            if rank in (1, 2):
                rows = [0, 5] if rank == 1 else [1, 2, 3, 4]
                assert torch.equal(state["w"], full[rows] * 2**version)
    context.wait_for_all("close")
    sync.close()


def other_shapes(context) -> None:
    """The state may come to hold tensors of another shape: those that receive hear of it in the push."""
    job = Job(context)
    if job.trains:
        job.push(1)
        job.push(2)
    else:
        assert job.sync.pull(2) == 2
    job.meet("two")
    for version, rows in ((3, 4), (4, 4), (5, 9)):
        full = unique_fill((rows, 5), torch.float32, version)
        if job.trains:
            job.held["w"] = sharded(full, quiet_mesh(TRAINERS), [Shard(0)], job.rank)
            job.sync.push(version)
        else:
            assert job.sync.pull(version) == version
            mesh, placements = job.where["w"]
            part = cut(full, mesh.mesh.shape, coordinates(mesh.mesh)[job.rank], placements)
            assert torch.equal(job.sync.state["w"].to_local(), part)
    job.close()


def refusals(context) -> None:
    """Wrong pushes raise on all ranks, move nothing, and the next one succeeds."""
    job, count = Job(context), itertools.count()
    mismatch, layout = meshcast.PlanMismatchError, meshcast.LayoutError

    def all_raise(kind, text, version, told=(mismatch, "")) -> None:
        """told: what the other ranks get, where they are told by one."""
        if job.trains:
            raises(kind, text, lambda: job.sync.push(version))
        else:
            raises(*told, lambda: job.sync.pull(1000))
            assert job.sync.version is None or job.sync.state.version == job.sync.version
        job.meet(f"refused {next(count)}")

    def whole(version) -> None:
        if job.trains:
            job.push(version)
        else:
            assert job.sync.pull(version) == version
            job.check(version)
        job.meet(f"whole {version}")

    all_raise(mismatch, "the versions differ", 10 + context.rank, (mismatch, "the versions differ"))
    whole(12)
    all_raise(mismatch, "no newer", 12, (mismatch, "no newer"))
    for wrong in (None, "x", -1, True, 1.5):
        all_raise(layout, "version", wrong, (mismatch, "refused its arguments"))
    whole(13)
    if job.trains:
        job.held["more"] = job.held.pop("b")
    all_raise(layout, "'b'", 14, (layout, "'b'"))
    if job.trains:
        job.held["b"] = job.held.pop("more")
    whole(15)
    if job.serves:
        job.check(15)
        raises(layout, "version", lambda: job.sync.pull("x"))
        raises(layout, "gave no state", lambda: job.sync.push(16))
    whole(16)
    job.close()


def changed_on_the_way(context) -> None:
    """A state that is changed while it travels is no version: those that serve keep the old one, or know
    that what they have is torn."""
    for buffers in (2, 1):
        _change_on_the_way(Job(context, buffers=buffers), buffers)


def _change_on_the_way(job: Job, buffers: int) -> None:
    if job.trains:
        job.push(1)
    else:
        assert job.sync.pull(1) == 1
    job.meet(f"{buffers} one")
    if job.trains:
        job.become(2)
        calls = job.sync._side._calls
        original = calls.run

        def run(*arguments):
            if job.rank == 0:
                job.held["w"].to_local().add_(1)
            return original(*arguments)

        calls.run = run
        raises(meshcast.MeshcastError, "changed 'w' in place", lambda: job.sync.push(2))
        calls.run = original
    else:
        raises(meshcast.MeshcastError, "changed 'w' in place", lambda: job.sync.pull(2))
        if buffers == 2:
            job.check(1)
        else:
            raises(meshcast.MeshcastError, "torn", lambda: job.sync.state)
            assert job.sync.version is None
    job.meet(f"{buffers} torn")
    if job.trains:
        job.push(3)
    else:
        assert job.sync.pull(3) == 3
        job.check(3)
    job.close()


def constructors_disagree(context) -> None:
    """One rank refuses its arguments, or has another destination: all hear of it."""
    rank = context.rank
    held = {"x": sharded(torch.arange(8.0), quiet_mesh(TRAINERS), [Shard(0)], rank)} if rank < 2 else None

    def calling(sync):
        return (lambda: sync.push(1)) if rank < 2 else (lambda: sync.pull(1))

    def refused(wrong: dict) -> None:
        where = {"x": (quiet_mesh([2, 3]), [Shard(0)])}
        if rank == 2:
            raises(meshcast.LayoutError, "", lambda: meshcast.WeightSync(held, where, **wrong))
            return
        sync = meshcast.WeightSync(held, where)
        raises(meshcast.PlanMismatchError, "rank 2 refused its arguments", calling(sync))
        raises(meshcast.MeshcastError, "rank 2 refused its arguments", calling(sync))
        sync.close()

    for wrong in ({"buffers": 3}, {"buffers": "2"}, {"timeout": -1}, {"out": {}}, {"maps": 7}):
        refused(wrong)
        context.wait_for_all(f"refused {wrong}")
    where = {"x": (quiet_mesh([2, 3]), [Replicate() if rank == 3 else Shard(0)])}
    sync = meshcast.WeightSync(held, where)
    raises(meshcast.PlanMismatchError, "the destination of 'x'", calling(sync))
    context.wait_for_all("close")
    sync.close()


def idle(context) -> dict:
    """Between pushes nobody burns a core, and every thread is gone after close()."""
    before = {thread.name for thread in threading.enumerate()}
    job = Job(context)
    if job.trains:
        job.push(1)
    else:
        assert job.sync.pull(1) == 1
    job.meet("idle")
    begin, cpu = time.monotonic(), time.process_time()
    time.sleep(2.0)
    share = (time.process_time() - cpu) / (time.monotonic() - begin)
    assert share < 0.05, share
    names = [thread.name for thread in threading.enumerate()]
    assert names.count("meshcast-weights") == int(job.serves)
    job.close()
    assert {thread.name for thread in threading.enumerate()} <= before
    return {"share": share}


def a_forked_child(context) -> None:
    """It gets an error, and its parent goes on."""
    job = Job(context)
    if job.trains:
        job.push(1)
    else:
        assert job.sync.pull(1) == 1
    child = os.fork()
    if child == 0:
        try:
            call = (lambda: job.sync.push(2)) if job.trains else job.sync.pull
            raises(meshcast.AbortedError, "was forked from process", call)
            raises(meshcast.AbortedError, "was forked from process", job.sync.close)
        except BaseException as error:
            print(error, flush=True)
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if job.trains:
        job.push(2)
    else:
        assert job.sync.pull(2) == 2
        job.check(2)
    job.close()


def group_is_destroyed(context) -> None:
    """The thread ends with the process group, and calls say why nothing comes any more."""
    ranks = list(range(context.world))
    group = dist.new_group(ranks)
    job = Job(context, group=group)
    if job.trains:
        job.push(1)
    else:
        assert job.sync.pull(1) == 1
    job.meet("destroy")
    begin = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begin < 4.0
    assert not any(thread.name == "meshcast-weights" for thread in threading.enumerate())
    call = (lambda: job.sync.push(2)) if job.trains else (lambda: job.sync.pull(2))
    raises(meshcast.AbortedError, "destroyed", call)
    if job.serves:
        job.check(1)


CASES = [
    versions_arrive,
    two_memories,
    store_does_not_fill,
    beside_others,
    a_slow_server,
    one_buffer,
    colocated,
    from_five_boxes,
    other_shapes,
    refusals,
    changed_on_the_way,
    constructors_disagree,
    idle,
    a_forked_child,
    group_is_destroyed,
]

"""WeightSync between processes. Ranks 0 and 1 train, the others serve, unless a case says otherwise."""

from __future__ import annotations

import threading
import time

import meshcast
import torch
import torch.distributed as dist
from meshcast import Layout
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import coordinates, cut, unique_fill
from multiproc.own_threads import left_running
from multiproc.weight_job import TRAINERS, Job, raises, values
from patience import patient
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 40.0


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
        assert job.sync.pull(8) == 8  # a push has returned when the bytes are here; this waits for the rest
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
    for first, last in ((1, 5), (6, 45)):
        for version in range(first, last + 1):
            if job.trains:
                job.sync.push(version)
            else:
                job.sync.pull(version)
        job.meet(f"{last}")
        if last == 5:
            before = context.store.num_keys()
            job.meet("counted")
    deadline, more = time.monotonic() + 10.0, 4 * context.world  # those of the meetings
    while (found := context.store.num_keys() - before) > more and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread may still take back what it said of the last push
    assert found <= more, (before, found)
    job.meet("counted again")
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


def progress_is_seen(context) -> None:
    """By another thread, while a version is on its way; its last figures are those of stats."""
    full = unique_fill((4096, 4099), torch.float32, 1)
    trains = context.rank in TRAINERS
    where = {"big": (quiet_mesh(list(range(2, context.world))), [Shard(1)])}
    held = {"big": sharded(full, quiet_mesh(TRAINERS), [Shard(0)], context.rank)} if trains else None
    for buffers in (2, 1):
        sync, between = meshcast.WeightSync(held, where, buffers=buffers), 0
        for version in range(1, 5):
            seen, over = [], threading.Event()

            def look(sync=sync, seen=seen, over=over) -> None:
                while not over.is_set():
                    seen.append(sync.progress)
                    time.sleep(0.0005)

            thread = threading.Thread(target=look)
            thread.start()
            if trains:
                sync.push(version)
            else:
                assert sync.pull(version) == version
            over.set()
            thread.join()
            assert sync.progress is None
            found = [each for each in seen if each is not None]
            expected = sync.stats.bytes_sent + sync.stats.bytes_received
            assert expected > full.nbytes // 4
            known = {expected} if version > 1 else {0, expected}
            assert {each.bytes_expected for each in found} <= known, (found, expected)
            done = [each.bytes_done for each in found]
            assert done == sorted(done), done
            assert not done or done[-1] <= expected
            between += sum(0 < each < expected for each in done)
            context.wait_for_all(f"progress {buffers} {version}")
        assert between, "no version was seen on its way"
        sync.close()


def a_slow_server(context) -> None:
    """One that is not there, or in no pull, stops a push for half of its limit. Nothing is moved."""
    limit = 4.0
    last = context.world - 1
    if context.rank == last:
        context.wait_for_all("first push is over")
    job = Job(context, timeout=limit if context.rank in TRAINERS else 30.0)
    if job.trains:
        begin = time.monotonic()
        error = raises(meshcast.DeadlineExceededError, "have not constructed", lambda: job.push(1))
        assert limit * 0.45 < time.monotonic() - begin < limit / 2 + 2.5
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
        raises(meshcast.DeadlineExceededError, "no rank has pushed one", sync.pull)
        assert 0.9 < time.monotonic() - begin < 1.0 + patient(5.0)
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
            job.meet(f"{buffers} {version}")  # else the next push may make its version the newest
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
        context.wait_for_all(f"version {version}")
    sync.close()


def some_ranks(context) -> None:
    """A group of some ranks; the others know of nothing. Two WeightSyncs at a time."""
    ranks = [1, 2, 3]
    group = dist.new_group(ranks)
    if context.rank not in ranks:
        return
    jobs = [Job(context, trainers=[1], servers=[2, 3], group=group, buffers=2) for _ in range(2)]
    for version in (1, 2):
        for job in jobs if context.rank == 2 else reversed(jobs):
            if job.trains:
                job.push(version)
            else:
                job.sync.pull(version)
                job.check(job.sync.version)
    context.wait_for_all("close", ranks)
    for job in jobs:
        job.sync.close()
    dist.destroy_process_group(group)


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
        job.meet(f"version {version}")
    job.close()


def idle(context) -> dict:
    """Between pushes nobody burns a core, and every thread is gone after close()."""
    before = frozenset(thread.name for thread in threading.enumerate())
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
    assert left_running(before) == []
    return {"share": share}


CASES = [
    versions_arrive,
    progress_is_seen,
    two_memories,
    store_does_not_fill,
    beside_others,
    a_slow_server,
    one_buffer,
    colocated,
    from_five_boxes,
    some_ranks,
    other_shapes,
    idle,
]

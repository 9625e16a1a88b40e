"""WeightReader where no rank that has received can serve: ranks 0 and 1 train, 2 serves in some cases, and 3
is outside. The trainers serve in their pushes, or from a copy that they keep."""

from __future__ import annotations

import functools
import threading

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding import weight_offers
from meshcast.transfers.digest import values_digest
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from multiproc.own_threads import left_running
from multiproc.weight_job import raises, values
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 40.0
LIMIT = 30.0  # seconds
TRAINERS, SERVER, READER = [0, 1], 2, 3
TRAINERS_PREFIX = "meshcast weights of trainers"


def everything(rank: int = 0) -> dict[str, Layout]:
    return {name: Layout([rank], [Replicate()]) for name in ("w", "v", "b")}


@functools.cache
def groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of the trainers, and with the server. Made once, by all ranks."""
    return dist.new_group(TRAINERS), dist.new_group([*TRAINERS, SERVER])


def group(servers: bool) -> dist.ProcessGroup:
    return groups()[int(servers)]


class Training:
    """The trainers' weights, and a store that readers ask in. serves: rank 2 receives whole copies."""

    def __init__(self, context, name: str = "", serves: bool = False, where=None, **options) -> None:
        groups()
        self.context, self.rank = context, context.rank
        self.readers = dist.PrefixStore(f"readers of {context.case}{name}", context.store)
        self.trains, self.reads = self.rank in TRAINERS, self.rank == READER
        self.serves = serves and self.rank == SERVER
        self.held = {
            name: sharded(full, quiet_mesh(TRAINERS), [Shard(0)], self.rank)
            for name, full in values(0).items()
        }
        if where is None:
            mesh = quiet_mesh([SERVER])
            where = {name: (mesh, [Replicate()]) for name in self.held} if serves else {}
        self.sync = None
        if self.trains or self.serves:
            self.sync = meshcast.WeightSync(
                self.held if self.trains else None,
                where,
                group=group(serves),
                readers=self.readers,
                **{"timeout": LIMIT, **options},
            )

    def become(self, version: int) -> None:
        for name, full in values(version).items():
            part = sharded(full, quiet_mesh(TRAINERS), [Shard(0)], self.rank)
            self.held[name].to_local().copy_(part.to_local())

    def push(self, version: int) -> None:
        """With other values as soon as the push is over."""
        self.become(version)
        self.sync.push(version)
        for x in self.held.values():
            x.to_local().fill_(-1)

    def reader(self, where=None, **options) -> meshcast.WeightReader:
        where = everything() if where is None else where
        return meshcast.WeightReader(self.readers, where, **{"rank": 0, "timeout": LIMIT, **options})

    def waiting(self, count: int = 1) -> None:
        """Waits until so many questions have been put to those that train."""
        store = dist.PrefixStore(TRAINERS_PREFIX, self.readers)
        self.context.wait_until(lambda: store.check([f"ask/{count}"]), "a reader waits", LIMIT)

    def meet(self, name: str) -> None:
        self.context.wait_for_all(name, limit=LIMIT)

    def done(self) -> None:
        self.meet("done")
        if self.sync is not None:
            self.sync.close()


def is_version(state, version: int) -> None:
    assert state.version == version
    for name, full in values(version).items():
        x = state[name]
        assert x.dtype == full.dtype
        assert torch.equal(x.full_tensor() if isinstance(x, DTensor) else x, full), (name, version)


def served_by(monkeypatched: list) -> None:
    """Notes the versions that this rank sends in pushes, from now on."""
    send = weight_offers.Pushing._send

    def noted(self, number, meet, whole, *rest):
        monkeypatched.append(whole[0])
        return send(self, number, meet, whole, *rest)

    weight_offers.Pushing._send = noted


def push_until(job, version: int, said: str, among: dist.ProcessGroup) -> int:
    """Pushes later versions until the reader has said so. Returns the last one."""
    while True:
        done = [job.context.store.check([f"{job.context.case}/{said}/{READER}"])]
        dist.broadcast_object_list(done, 0, group=among)
        if done[0]:
            return version
        version += 1
        job.push(version)


def in_the_next_push(context) -> None:
    """Of trainers alone. Into one rank, another mesh, and boxes; then pushes wait for nobody."""
    job = Training(context)
    if job.trains:
        job.push(1)  # nobody waits
    job.meet("one")
    if job.trains:
        job.waiting(1)
        job.push(2)
        job.waiting(2)
        job.push(3)
        assert job.sync._answers[0]._open == {}
        job.push(4)
    elif job.reads:
        with job.reader() as reader:
            assert reader.pull() == 2
            is_version(reader.state, 2)
            assert reader.pull() == 2  # what is current will do
            assert reader.pull(1) == 2
        parts = {
            "w": Layout.from_boxes({7: [((1, 4), (2, 5)), ((6, 7), (0, 1))], 9: [((0, 1), (0, 5))]}),
            "v": Layout([7, 9], [Shard(1)]),
        }
        with job.reader(parts, rank=7, digest=True) as reader:
            assert reader.pull(3) == 3
            full = values(3)
            found = torch.cat([full["w"][1:4, 2:5].flatten(), full["w"][6:7, 0]])
            assert torch.equal(reader.state["w"], found)
            assert torch.equal(reader.state["v"], full["v"][:, :2])
    job.done()


def into_a_mesh(context) -> None:
    job = Training(context)
    if job.trains:
        job.waiting()
        job.push(1)
    elif job.reads:
        mesh = quiet_mesh([READER])
        with job.reader({"w": (mesh, [Shard(-1)]), "v": (mesh, [Replicate()])}, rank=None) as reader:
            assert reader.pull() == 1
            assert isinstance(reader.state["w"], DTensor)
            assert torch.equal(reader.state["w"].to_local(), values(1)["w"])
            assert torch.equal(reader.state["v"].to_local(), values(1)["v"])
    job.done()


def never_torn(context) -> None:
    """Each version that is read is whole, while others are pushed as fast as that goes; from pushes, and from
    copies that are replaced."""
    for keep in (False, True):
        job = Training(context, f"{keep}", keep=keep)
        if job.trains:
            push_until(job, 0, f"read {keep}", group(False))
        elif job.reads:
            seen = []
            with job.reader() as reader:
                for _ in range(8):
                    seen.append(reader.pull(seen[-1] + 1 if seen else 1))
                    is_version(reader.state, seen[-1])
            context.say(f"read {keep}")
            assert seen == sorted(set(seen))
        context.wait_for_all(f"{keep} done", limit=LIMIT)
        if job.sync is not None:
            job.sync.close()


def from_a_kept_copy(context) -> None:
    """At once, while the trainers are elsewhere and their weights are others by now."""
    job = Training(context, keep=True)
    if job.reads:
        error = raises(meshcast.DeadlineExceededError, "any version", job.reader(timeout=1.2).pull)
        assert "2 ranks have answered, and have none" in str(error)
    job.meet("none")
    if job.trains:
        job.push(1)
        job.push(2)
    job.meet("pushed")
    reader = job.reader() if job.reads else None
    if job.reads:
        found = reader.manifest(digest=True)
        assert found.version == 2
        assert {name: (each.shape, each.dtype, each.digest) for name, each in found.tensors.items()} == {
            name: (tuple(full.shape), full.dtype, values_digest(full)) for name, full in values(2).items()
        }
        assert reader.pull() == 2
        is_version(reader.state, 2)
        assert reader.pull() == 2
    job.meet("read")
    if job.trains:
        job.push(3)
    job.meet("pushed again")
    if job.reads:
        assert reader.pull() == 3
        is_version(reader.state, 3)
    job.done()


def pushed_while_it_is_read(context) -> None:
    """A copy that is being read stays, and the next push replaces it. One that was replaced all the same, in
    a moment that no rank sees, is not read: the reader gets the later one."""
    send = weight_offers.Keeping._send
    for stays in (True, False):
        job = Training(context, f"{stays}", keep=True)
        if job.trains:
            job.push(1)
            if not stays:
                job.sync._side.serving._list.agreed = lambda *_: False

            def late(self, *given, stays=stays) -> None:
                weight_offers.Keeping._send = send
                context.say(f"{stays} chosen")
                replaced = [f"{context.case}/{stays} replaced/{rank}" for rank in TRAINERS]
                context.wait_until(lambda: context.store.check(replaced), "it is replaced")
                send(self, *given)

            weight_offers.Keeping._send = late
        job.meet(f"{stays} ready")
        if job.reads:
            with job.reader() as reader:
                assert reader.pull() == (1 if stays else 2)
                is_version(reader.state, reader.version)
                context.say(f"{stays} read")
                assert reader.pull(3) == 3
                is_version(reader.state, 3)
        elif job.trains:
            chosen = [f"{context.case}/{stays} chosen/{rank}" for rank in TRAINERS]
            context.wait_until(lambda keys=chosen: context.store.check(keys), "it is chosen")
            job.push(2)
            context.say(f"{stays} replaced")
            read = [f"{context.case}/{stays} read/{READER}"]
            context.wait_until(lambda keys=read: context.store.check(keys), "it is read")
            serving = job.sync._side.serving
            context.wait_until(lambda own=serving: not own._offers, "no rank reads it")
            context.wait_for_all(f"{stays} is read", ranks=TRAINERS)
            job.push(3)
        weight_offers.Keeping._send = send
        context.wait_for_all(f"{stays} done", limit=LIMIT)
        if job.sync is not None:
            job.sync.close()


def changed_in_the_push(context) -> None:
    """A thread of the trainer's program that changes the weights in a push that serves: nobody gets these."""
    job = Training(context)
    if job.trains:
        send = weight_offers.Pushing._send

        def changing(self, number, meet, whole, *rest) -> None:
            if whole[0] == 1 and context.rank == 1:
                moved = weight_offers.Meeting.move

                def move(meeting, *given, **options):
                    still = options.pop("still")

                    def now() -> bool:
                        nonlocal asked
                        asked += 1
                        if asked == 2:  # at the end
                            job.held["w"].add_(1)  # which counts for the DTensor alone
                        return still()

                    asked = 0
                    return moved(meeting, *given, still=now, **options)

                weight_offers.Meeting.move = move
                try:
                    send(self, number, meet, whole, *rest)
                finally:
                    weight_offers.Meeting.move = moved
            else:
                send(self, number, meet, whole, *rest)

        weight_offers.Pushing._send = changing
        job.waiting()
        job.push(1)
        job.waiting(2)
        job.push(2)
        weight_offers.Pushing._send = send
    elif job.reads:
        with job.reader() as reader:
            assert reader.pull() == 2
            is_version(reader.state, 2)
    job.done()


def casts(context) -> None:
    """In the dtype that ranks of the WeightSync receive: for all, and by name."""
    for keep in (False, True):
        for kind, dtype in (("all", torch.bfloat16), ("names", {"w": torch.bfloat16}), ("own", None)):
            job = Training(context, f"{keep} {kind}", keep=keep, dtype=dtype)
            if job.trains:
                if not keep:
                    job.waiting()
                job.push(5)
            elif job.reads:
                with job.reader(digest=True) as reader:
                    assert reader.pull() == 5
                    for name, full in values(5).items():
                        cast = kind == "all" or (kind == "names" and name == "w")
                        expected = full.to(torch.bfloat16) if cast else full
                        assert reader.state[name].dtype == expected.dtype
                        assert torch.equal(reader.state[name], expected), (kind, name)
            context.wait_for_all(f"{keep} {kind}", limit=LIMIT)
            if job.sync is not None:
                job.sync.close()


def states_that_differ_by_rank(context) -> None:
    """Stages of a pipeline hold other names; copies, a rank with an empty shard, integers, and a scalar."""
    groups()
    readers = dist.PrefixStore(context.case, context.store)
    full = {"first": unique_fill((5, 3), torch.float32, 1), "last": unique_fill((4,), torch.float32, 2)}
    both, count, scalar = torch.arange(6.0), torch.arange(3), torch.tensor(7.5)
    one = unique_fill((1, 4), torch.float32, 3)
    if context.rank in TRAINERS:
        name = "first" if context.rank == 0 else "last"
        held = {
            name: full[name].clone(),
            "both": both.clone(),
            "count": count.clone(),
            "scalar": scalar.clone(),
            "one": sharded(one, quiet_mesh(TRAINERS), [Shard(0)], context.rank),
            "sum": DTensor.from_local(torch.ones(2), quiet_mesh(TRAINERS), [Partial()], run_check=False),
        }
        sync = meshcast.WeightSync(held, {}, group=group(False), readers=readers, timeout=LIMIT)
        store = dist.PrefixStore(TRAINERS_PREFIX, readers)
        for version in (1, 2):
            context.wait_until(lambda v=version: store.check([f"ask/{v}"]), "a reader waits", LIMIT)
            sync.push(version)
        context.wait_for_all("read")
        sync.close()
        return
    if context.rank == READER:
        where = {name: Layout([0], [Replicate()]) for name in (*full, "both", "count", "scalar", "one")}
        with meshcast.WeightReader(readers, where, rank=0, timeout=LIMIT, digest=True) as reader:
            assert reader.pull() == 1
            for name, expected in {
                **full,
                "both": both,
                "count": count,
                "scalar": scalar,
                "one": one,
            }.items():
                assert torch.equal(reader.state[name], expected), name
        where = {"sum": Layout([0], [Replicate()])}
        with meshcast.WeightReader(readers, where, rank=0, timeout=LIMIT) as reader:
            raises(meshcast.LayoutError, "'sum': version 2 has no such tensor", reader.pull)
    context.wait_for_all("read")


def peers_first(context) -> None:
    """A reader that waits for the first version gets it from those that have received it. The trainers serve
    it where these have not for a while, and where they do not have it whole."""
    job = Training(context, serves=True)
    sent: list[int] = []
    if job.trains:
        served_by(sent)
        job.waiting()
        job.push(1)
    elif job.serves:
        assert job.sync.pull(1) == 1
    elif job.reads:
        reader = job.reader()
        assert reader.pull() == 1
        is_version(reader.state, 1)
    job.meet("from the server")
    assert sent == []
    if job.serves:
        job.sync.state["w"].to_local().add_(1)  # so that it offers nothing
        job.sync._answers[0]._buffers.whole = lambda: None
    job.meet("offers nothing")
    if job.trains:
        job.waiting(2)
        job.push(2)
        assert sent == []
        push_until(job, 2, "read", group(True))
        assert sent and sent[0] > 2
    elif job.serves:
        done = [False]
        while not done[0]:
            dist.broadcast_object_list(done, 0, group=group(True))
    else:
        newest = job.reader().pull()
        assert newest > 2
        context.say("read")
    job.done()


def once_no_receiver_is_left(context) -> None:
    """The trainers construct a WeightSync without destinations, and serve."""
    job = Training(context, serves=True)
    if job.trains:
        job.push(1)
    elif job.serves:
        assert job.sync.pull(1) == 1
    job.meet("one")
    if job.serves:
        job.sync.close()
    job.meet("it is closed")
    if job.trains:
        with pytest.raises(meshcast.MeshcastError):
            job.push(2)
        job.sync.close()
        again = meshcast.WeightSync(
            job.held, {}, group=group(True), readers=job.readers, lost=[SERVER], timeout=LIMIT
        )
        job.sync = again
        job.waiting()
        job.push(3)
    elif job.reads:
        with job.reader() as reader:
            assert reader.pull(2) == 3
            is_version(reader.state, 3)
    job.meet("done")
    if job.trains:
        job.sync.close()


def several_readers(context) -> None:
    """That wait for one push; one of them wants a version that comes later."""
    job = Training(context)
    if job.trains:
        job.waiting(4)
        job.push(1)
        job.push(2)
    elif job.reads:
        readers = [job.reader({"w": Layout([0, 1, 2], [Shard(0)])}, rank=rank) for rank in range(3)]
        later = job.reader()
        got: list[int] = []
        threads = [threading.Thread(target=reader.pull) for reader in readers]
        threads.append(threading.Thread(target=lambda: got.append(later.pull(2))))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert torch.equal(torch.cat([reader.state["w"] for reader in readers]), values(1)["w"])
        assert got == [2]
        is_version(later.state, 2)
    job.done()


def readers_that_give_up(context) -> None:
    """Their question is withdrawn, and a push that comes later serves nobody. What does not fit is an error
    of the reader alone."""
    job = Training(context)
    sent: list[int] = []
    if job.reads:
        raises(meshcast.DeadlineExceededError, "any version", job.reader(timeout=0.7).pull)
        raises(meshcast.DeadlineExceededError, "any version", job.reader(timeout=0.7).manifest)
    job.meet("has given up")
    if job.trains:
        served_by(sent)
        job.push(1)
        assert sent == []
        assert job.sync._answers[0]._open == {}
    job.meet("one")
    if job.trains:
        for version, count in ((2, 3), (3, 4), (4, 5)):
            job.waiting(count)
            job.push(version)
        assert sent == [4]
        job.waiting(6)
        job.push(5)
    elif job.reads:
        where = {"u": Layout([0], [Replicate()])}
        raises(meshcast.LayoutError, "'u': version 2 has no such tensor; it has 'w'", job.reader(where).pull)
        where = {"w": Layout.from_boxes({0: [((0, 9), (0, 5))]})}
        raises(meshcast.LayoutError, "is not inside a tensor of shape (7, 5)", job.reader(where).pull)
        assert job.reader().pull() == 4
        found = job.reader().manifest(digest=True)
        assert found.version == 5
        assert found.tensors["v"].digest == values_digest(values(5)["v"])
    job.done()


def two_jobs_on_one_store(context) -> None:
    """Versions of one number: those of the later WeightSync are read, and never parts of both."""
    for keep in (False, True):
        job = Training(context, f"{keep}", keep=keep)
        if job.trains:
            again = meshcast.WeightSync(
                job.held, {}, group=group(False), readers=job.readers, keep=keep, timeout=LIMIT
            )
            if keep:
                job.push(1)
            else:
                job.waiting()
            job.become(2)
            again.push(1)
        context.wait_for_all(f"{keep} pushed", ranks=TRAINERS) if job.trains else None
        if job.trains and keep:
            context.say("both")
        elif job.reads:
            if keep:
                context.wait_until(
                    lambda: context.store.check([f"{context.case}/both/{rank}" for rank in TRAINERS]), "both"
                )
            reader = job.reader()
            assert reader.pull() == 1
            assert all(torch.equal(reader.state[name], full) for name, full in values(2).items())
        context.wait_for_all(f"{keep} read", limit=LIMIT)
        if job.trains:
            again.close()
            job.sync.close()


def wrong_arguments(context) -> None:
    job = Training(context)
    if job.trains:
        for keep in (1, "yes"):
            with pytest.raises(meshcast.LayoutError, match="keep="):
                meshcast.WeightSync(job.held, {}, group=group(False), readers=job.readers, keep=keep)
        with pytest.raises(meshcast.LayoutError, match="readers= with it"):
            meshcast.WeightSync(job.held, {}, group=group(False), keep=True)
        apart = meshcast.WeightSync(
            job.held, {}, group=group(False), readers=job.readers if context.rank else None, timeout=LIMIT
        )
        with pytest.raises(meshcast.PlanMismatchError, match="the options are"):
            apart.push(1)
        alone = meshcast.WeightSync(job.held, {}, group=group(False), timeout=LIMIT)
        with pytest.raises(meshcast.LayoutError, match="no destinations"):
            alone.push(1)
        context.wait_for_all("refused", ranks=TRAINERS)
        apart.close()
        alone.close()
    job.done()


def a_store_that_fails(context) -> None:
    """Pushes go on without readers; no rank waits long."""
    job = Training(context, timeout=20.0)
    if job.trains:
        serving = job.sync._answers[0]
        if context.rank == 1:

            def fail(*_):
                raise dist.DistNetworkError("the store is not there")

            serving._questions.asked = fail
        for version in (1, 2):
            job.push(version)
        assert serving._over == (context.rank == 1)
    job.done()


def nothing_is_left(context) -> None:
    """Neither threads nor keys, whatever the number of pushes and questions."""
    job = Training(context)
    sizes, version = [], 0
    for turn in range(3):
        if job.trains:
            version = push_until(job, version, f"read {turn}", group(False))
            for _ in range(150):
                version += 1
                job.push(version)
        elif job.reads:
            reader = job.reader()
            for _ in range(3):
                reader._state = None
                reader.pull()
            for _ in range(320):
                reader._trainers.close(reader._trainers.ask(""))
            context.say(f"read {turn}")
        job.meet(f"turn {turn}")
        if job.reads:
            sizes.append(context.store.num_keys())
        job.meet(f"counted {turn}")
    assert not sizes or abs(sizes[2] - sizes[1]) < 100, sizes
    job.done()
    context.wait_until(lambda: not [each for each in left_running() if "readers" in each], "threads end")


CASES = [
    in_the_next_push,
    into_a_mesh,
    never_torn,
    from_a_kept_copy,
    pushed_while_it_is_read,
    changed_in_the_push,
    casts,
    states_that_differ_by_rank,
    peers_first,
    once_no_receiver_is_left,
    several_readers,
    readers_that_give_up,
    two_jobs_on_one_store,
    wrong_arguments,
    a_store_that_fails,
    nothing_is_left,
]

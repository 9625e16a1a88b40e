"""WeightReader: ranks 0 and 1 train, 2 and 3 serve, and 4 is outside: it reads from those that serve."""

from __future__ import annotations

import functools
import threading
import time
from types import SimpleNamespace

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding.weight_offers import Offering
from meshcast.transfers.digest import values_digest
from multiproc.cases_record import Written
from multiproc.engines import SHAPES, Engine
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from multiproc.own_threads import left_running
from multiproc.weight_job import Job, raises, values
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 40.0
TRAINERS, SERVERS, READER = [0, 1], [2, 3], 4


def everything(rank: int = 0) -> dict[str, Layout]:
    return {name: Layout([rank], [Replicate()]) for name in ("w", "v", "b")}


@functools.cache
def inner_group() -> dist.ProcessGroup:
    """The ranks of the WeightSync. One for all cases: torch waits for ever where one is made again."""
    return dist.new_group(TRAINERS + SERVERS, use_local_synchronization=True)


class Outside(Job):
    """The weights of the two groups, and a reader on the last rank."""

    def __init__(self, context, **options) -> None:
        self.readers = dist.PrefixStore(f"readers of {context.case}", context.store)
        self.reads = context.rank == READER
        if not self.reads:
            self.group = inner_group()
            super().__init__(context, servers=SERVERS, group=self.group, readers=self.readers, **options)
        else:
            self.context, self.rank, self.trains, self.serves = context, context.rank, False, False

    def reader(self, where=None, **options) -> meshcast.WeightReader:
        where = everything() if where is None else where
        return meshcast.WeightReader(self.readers, where, **{"rank": 0, "timeout": 20.0, **options})

    def all_turn(self, version: int) -> None:
        """The next version, on all but the reader."""
        if not self.reads:
            self.turn(version)
        self.meet(f"turn {version}")

    def done(self) -> None:
        self.meet("done")
        if not self.reads:
            self.sync.close()


def is_version(state, version: int) -> None:
    assert state.version == version
    for name, full in values(version).items():
        x = state[name]
        assert x.dtype == full.dtype
        assert torch.equal(x.full_tensor() if isinstance(x, DTensor) else x, full), (name, version)


def moved() -> int:
    """Bytes that this rank has sent and received."""
    return sum(each.bytes for each in meshcast.counters().pairs.values())


def newest_from_replicas(context) -> None:
    """While the trainers are busy elsewhere; in other layouts than those that serve; a part of the names."""
    job = Outside(context)
    for version in (1, 2, 3):
        job.all_turn(version)
    if job.reads:
        with job.reader() as reader:
            raises(meshcast.MeshcastError, "no version has been pulled", lambda: reader.state)
            assert reader.version is None
            assert reader.pull() == 3
            is_version(reader.state, 3)
            kept = reader.state["w"]
            assert reader.pull() == 3
            assert reader.state["w"] is kept
            assert reader.pull(2) == 3
        parts = {
            "w": Layout.from_boxes({7: [((1, 4), (2, 5)), ((6, 7), (0, 1))], 9: [((0, 1), (0, 5))]}),
            "v": Layout([7, 9], [Shard(0)]),
        }
        with job.reader(parts, rank=7, digest=True) as reader:
            assert reader.pull(3) == 3
            full = values(3)
            assert torch.equal(
                reader.state["w"], torch.cat([full["w"][1:4, 2:5].flatten(), full["w"][6:7, 0]])
            )
            assert torch.equal(reader.state["v"], full["v"][:6])
            assert list(reader.state) == ["w", "v"]
    job.done()


def into_a_mesh(context) -> None:
    """A destination on a DeviceMesh gives a DTensor; ranks without elements get empty ones."""
    job = Outside(context)
    job.all_turn(1)
    if job.reads:
        mesh = quiet_mesh([READER])
        with job.reader({"w": (mesh, [Shard(-1)]), "b": (mesh, [Replicate()])}, rank=None) as reader:
            assert reader.pull() == 1
            assert isinstance(reader.state["w"], DTensor)
            assert reader.state["w"].placements == (Shard(1),)
            assert torch.equal(reader.state["w"].to_local(), values(1)["w"])
        with job.reader({"b": Layout([0, 1, 2, 3], [Shard(0)])}, rank=3) as reader:
            assert reader.pull() == 1
            assert reader.state["b"].shape == (0,)
            assert reader.state["b"].dtype == torch.float32
    job.done()


def manifest_before_any_byte(context) -> None:
    job = Outside(context)
    job.all_turn(4)
    if job.reads:
        before = moved()
        with job.reader() as reader:
            found = reader.manifest()
            assert found.version == 4
            assert {name: (each.shape, each.dtype) for name, each in found.tensors.items()} == {
                name: (tuple(full.shape), full.dtype) for name, full in values(4).items()
            }
            assert all(each.digest is None for each in found.tensors.values())
            digests = {name: each.digest for name, each in reader.manifest(digest=True).tensors.items()}
            assert digests == {name: values_digest(full) for name, full in values(4).items()}
            assert reader.version is None
        assert moved() == before
    job.done()


def versions_while_training_goes_on(context) -> None:
    """Every version that is read is whole, while others are pushed and pulled as fast as that goes."""
    job = Outside(context)
    job.all_turn(1)
    last = 40
    if job.reads:
        seen = []
        with job.reader() as reader:
            while not seen or seen[-1] < last:
                seen.append(reader.pull())
                is_version(reader.state, seen[-1])
        assert seen == sorted(seen)
    else:
        for version in range(2, last + 1):
            job.turn(version)
            context.wait_for_all(f"version {version}", ranks=TRAINERS + SERVERS)
    job.done()


def a_version_that_comes_later(context) -> None:
    """pull(n) waits for it, and says so where it does not come."""
    job = Outside(context)
    job.meet("all are here")
    if job.reads:
        with job.reader(timeout=1.2) as reader:
            error = raises(meshcast.DeadlineExceededError, "any version: 2 ranks have answered", reader.pull)
            assert error.limit == 1.2
    job.meet("none yet")
    found = []
    if job.reads:
        reader = job.reader()
        thread = threading.Thread(target=lambda: found.append(reader.pull(2)))
        thread.start()
    job.all_turn(1)
    job.all_turn(2)
    if job.reads:
        thread.join(20)
        assert found == [2]
        is_version(reader.state, 2)
        raises(
            meshcast.DeadlineExceededError,
            "version 3 or a newer one",
            lambda: job.reader(timeout=0.8).pull(3),
        )
        raises(
            meshcast.DeadlineExceededError,
            "version 3 or a newer one",
            lambda: job.reader(timeout=0.8).manifest(3),
        )
    job.done()


def several_readers(context) -> None:
    """At once, each with what it wants."""
    job = Outside(context)
    job.all_turn(1)
    if job.reads:
        readers = [job.reader({"w": Layout([0, 1, 2], [Shard(0)])}, rank=rank) for rank in range(3)]
        threads = [threading.Thread(target=reader.pull) for reader in readers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert torch.equal(torch.cat([reader.state["w"] for reader in readers]), values(1)["w"])
    job.done()


def what_was_changed_is_not_served(context) -> None:
    """Neither where all that have it were written to, nor where one was: then the others have it."""
    job = Outside(context)
    job.all_turn(1)
    if job.rank == 3:
        job.sync.state["b"].to_local().add_(1)
    job.meet("one changed")
    if job.reads:
        with job.reader({"b": Layout([0], [Replicate()])}) as reader:
            assert reader.pull() == 1
            assert torch.equal(reader.state["b"], values(1)["b"])
        with job.reader(timeout=1.0) as reader:
            error = raises(meshcast.PeerLostError, "in version 1; ranks [3] have not answered", reader.pull)
            assert error.peer == 3
    job.meet("read")
    if job.rank == 2:
        job.sync.state["b"].add_(1)  # which counts for the DTensor alone
    job.meet("both changed")
    if job.reads:
        raises(
            meshcast.DeadlineExceededError,
            "2 ranks have answered, and have none",
            job.reader(timeout=1.0).pull,
        )
    job.meet("asked")
    job.all_turn(2)
    if job.reads:
        with job.reader() as reader:
            assert reader.pull() == 2
            is_version(reader.state, 2)
    job.done()


def own_dict_of_the_program(context) -> None:
    """A program may put other tensors into the state that it serves: what arrived is offered all the same."""
    job = Outside(context)
    job.all_turn(1)
    if job.serves:
        job.sync.state["w"] = torch.zeros(1)
        del job.sync.state["b"]
    job.meet("changed")
    if job.reads:
        with job.reader(digest=True) as reader:
            assert reader.pull() == 1
            is_version(reader.state, 1)
    job.done()


def two_jobs_on_one_store(context) -> None:
    """Versions of one number: those of the later WeightSync are read, and never parts of both."""
    job = Outside(context)
    job.all_turn(1)
    if not job.reads:
        again = Job(context, servers=SERVERS, group=job.group, readers=job.readers)
        if again.trains:
            for x in again.held.values():
                x.to_local().fill_(5)
            again.sync.push(1)
        else:
            assert again.sync.pull(1) == 1
    job.meet("both")
    if job.reads:
        for _ in range(3):
            reader = job.reader()
            assert reader.pull() == 1
            assert all(bool((x == 5).all()) for x in reader.state.values())
    job.meet("read")
    if not job.reads:
        again.sync.close()
    job.done()


def far_behind(context) -> None:
    """A rank that was busy with one question while hundreds of others were put answers the next ones."""
    job = Outside(context)
    job.all_turn(1)
    if job.rank in SERVERS:
        answer = Offering._answer_now

        def late(self, number) -> None:
            Offering._answer_now = answer
            many = [f"{context.case}/many/{READER}"]
            context.wait_until(lambda: context.store.check(many), "many were put")
            answer(self, number)

        Offering._answer_now = late
    context.wait_for_all("ready")
    if job.reads:
        questions = job.reader()._questions
        for _ in range(600):
            questions.close(questions.ask(""))
        context.say("many")
        assert job.reader().pull() == 1
    job.done()


def overwritten_between_offer_and_transfer(context) -> None:
    """A version that its rank has offered is replaced before it is sent: the reader gets another one."""
    job = Outside(context)
    job.all_turn(1)
    send = Offering._send
    if job.rank in SERVERS:

        def late(self, *given) -> None:
            Offering._send = send
            context.say("chosen")
            context.wait_until(
                lambda: context.store.check([f"{context.case}/replaced/{context.rank}"]), "it is replaced"
            )
            send(self, *given)

        Offering._send = late
    context.wait_for_all("ready")
    if job.reads:
        with job.reader() as reader:
            newest = reader.pull()
            assert newest == 3
            is_version(reader.state, 3)
    else:
        context.wait_until(lambda: context.store.check([f"{context.case}/chosen/2"]), "it is chosen")
        for version in (2, 3):
            job.turn(version)
            context.wait_for_all(f"version {version}", ranks=TRAINERS + SERVERS)
        context.say("replaced")
    job.done()


def served_as(job, version: int) -> dict[str, torch.Tensor]:
    """The bytes of the tensors of the version that rank 2 serves, on all ranks."""
    full = [None]
    if job.rank == 2:
        full = [{name: x.to_local().view(torch.uint8).clone() for name, x in job.sync.state.items()}]
        assert job.sync.version == version
    dist.broadcast_object_list(full, 2)
    return full[0]


def other_kinds_of_versions(context) -> None:
    """Values of block-scaled types with their scales, casts, and versions that arrived as changes."""
    for kind, options in (
        ("scaled", {"quantize": {"q": "mxfp8"}}),
        ("cast", {"dtype": torch.bfloat16}),
        ("changes", {"delta": True}),
    ):
        readers = dist.PrefixStore(f"{context.case} {kind}", context.store)
        reads = context.rank == READER
        job = None
        if not reads:
            mesh, serving = quiet_mesh(TRAINERS), quiet_mesh([2])
            held = {"q": sharded(torch.zeros(66, 96), mesh, [Shard(0)], context.rank)}
            trains = context.rank in TRAINERS
            where = {"q": (serving, [Replicate()])}
            sync = meshcast.WeightSync(
                held if trains else None, where, group=inner_group(), readers=readers, **options
            )
            job = SimpleNamespace(rank=context.rank, sync=sync)
            for version in (1, 2):
                if trains:
                    held["q"].to_local()[: version + 1, 3:].normal_()
                    sync.push(version)
                elif context.rank == 2:
                    assert sync.pull(version) == version
        context.wait_for_all(f"{kind} pushed")
        full = served_as(job or SimpleNamespace(rank=context.rank), 2)
        if reads:
            where = {name: Layout([0, 1, 2], [Shard(0)]) for name in full}
            parts = []
            for rank in range(3):
                reader = meshcast.WeightReader(readers, where, rank=rank, timeout=20.0, digest=True)
                assert reader.pull() == 2
                parts.append(reader.state)
            for name, x in full.items():
                found = torch.cat([part[name].view(torch.uint8) for part in parts])
                assert torch.equal(found, x), (kind, name)
            assert len(full) == (2 if kind == "scaled" else 1)
        context.wait_for_all(f"{kind} read")
        if not reads:
            job.sync.close()


def engines_with_other_cuts(context) -> None:
    """Two engines that serve one name in two cuts: the parts come from both."""
    readers = dist.PrefixStore(context.case, context.store)
    full = unique_fill((7, 5), torch.float32, 1)
    sync = None
    if context.rank != READER:
        engine = {2: (quiet_mesh([2]), [Replicate()]), 3: (quiet_mesh([3]), [Replicate()])}
        held = {"w": sharded(full, quiet_mesh(TRAINERS), [Shard(0)], context.rank)}
        wants = {3: {"w": Layout.from_boxes({3: [((0, 7), (1, 4))]})}}.get(context.rank, {"w": engine[2]})
        sync = meshcast.WeightSync(
            held if context.rank in TRAINERS else None, wants, group=inner_group(), readers=readers
        )
        if context.rank in TRAINERS:
            sync.push(1)
        else:
            assert sync.pull(1) == 1
    context.wait_for_all("pushed")
    if context.rank == READER:
        reader = meshcast.WeightReader(readers, {"w": Layout([0], [Replicate()])}, rank=0, timeout=20.0)
        assert reader.pull() == 1
        assert torch.equal(reader.state["w"], full)
        assert reader.manifest(digest=True).tensors["w"].digest == values_digest(full)
    context.wait_for_all("read")
    if sync is not None:
        sync.close()


def wrong_arguments(context) -> None:
    """Typed, at once, before a byte moves; the reader and those that serve stay in use."""
    job = Outside(context)
    job.all_turn(1)
    if job.reads:
        wrong = meshcast.LayoutError
        raises(wrong, "expected a torch.distributed.Store", lambda: meshcast.WeightReader(None, {}, rank=0))
        raises(wrong, "rank 3 is not in the destination of 'w'", lambda: job.reader(rank=3))
        raises(wrong, "is a tensor; give (mesh, placements)", lambda: job.reader({"w": torch.zeros(3)}))
        raises(wrong, "holds Partial", lambda: job.reader({"w": Layout.parse("1:Partial(sum)")}))
        raises(wrong, "must be (mesh, placements)", lambda: job.reader({"w": 3}))
        raises(wrong, "rank", lambda: job.reader(rank=-1))
        with job.reader() as reader:
            raises(wrong, "version", lambda: reader.pull(-1))
            assert reader.pull() == 1
        raises(meshcast.AbortedError, "closed", reader.pull)
        raises(meshcast.AbortedError, "closed", reader.manifest)
        is_version(reader.state, 1)
        where = {"u": Layout([0], [Replicate()])}
        raises(wrong, "'u': version 1 has no such tensor; it has 'w', 'v', 'b'", job.reader(where).pull)
        raises(
            wrong,
            "is not inside a tensor of shape (7, 5)",
            job.reader({"w": Layout.from_boxes({0: [((0, 9), (0, 5))]})}).pull,
        )
        assert job.reader().pull() == 1
    else:
        with pytest.raises(meshcast.LayoutError, match="readers=7: expected a torch"):
            meshcast.WeightSync(None, job.where, group=job.group, readers=7)
    job.done()


def nothing_is_left(context) -> None:
    """Neither threads nor keys, whatever the number of questions."""
    job = Outside(context)
    job.all_turn(1)
    sizes = []
    if job.reads:
        reader = job.reader()
        for _ in range(3):
            for _ in range(6):
                reader._state = None
                assert reader.pull() == 1
            for _ in range(320):
                reader._questions.close(reader._questions.ask(""))
            sizes.append(context.store.num_keys())
        assert abs(sizes[2] - sizes[1]) < 100, sizes
    job.done()
    context.wait_until(lambda: not [each for each in left_running() if "readers" in each], "threads end")


def one_buffer(context) -> None:
    """Weights of a model that serves, received in pull: served as long as nobody writes to them."""
    job = Outside(context, buffers=1)
    job.all_turn(1)
    if job.reads:
        with job.reader(digest=True) as reader:
            assert reader.pull() == 1
            is_version(reader.state, 1)
    job.meet("read")
    job.all_turn(2)
    if job.reads:
        assert job.reader().pull() == 2
    job.done()


def after_a_failed_push(context) -> None:
    """The version that was served stays to be read; what did not arrive is never served."""
    job = Outside(context)
    job.all_turn(1)
    if job.trains:
        job.sync.close()
    elif job.serves:
        raises(meshcast.AbortedError, "closed", lambda: job.sync.pull(2))
    job.meet("failed")
    if job.reads:
        assert job.reader().pull() == 1
    job.done()


def recorded(context, name: str, fulls, make, others, expected, after=None) -> None:
    """One version through the memory of engines on the servers, and what a reader gets of it. others(): what
    the other ranks do meanwhile."""
    readers = dist.PrefixStore(f"{context.case} {name}", context.store)
    if context.rank != READER:
        mesh = quiet_mesh(TRAINERS)
        trains = context.rank in TRAINERS
        held = {
            each: sharded(full, mesh, [Shard(0) if full.ndim else Replicate()], context.rank)
            for each, full in fulls.items()
        }
        model = None if trains else make()
        where = meshcast.record_destinations(
            model,
            names_and_shapes=held if trains else None,
            group=inner_group(),
            after=None if after is None or trains else lambda: after(model),
        )
        sync = meshcast.WeightSync(
            held if trains else None, where, buffers=1, group=inner_group(), readers=readers, timeout=30.0
        )
        if trains:
            sync.push(1)
        else:
            assert sync.pull(1) == 1
    context.wait_for_all(f"{name} pushed")
    if context.rank == READER:
        where = {
            each: Layout([0, 1], [Shard(0) if full.ndim else Replicate()]) for each, full in fulls.items()
        }
        parts = []
        for rank in range(2):
            reader = meshcast.WeightReader(readers, where, rank=rank, timeout=20.0, digest=True)
            reader.pull()
            parts.append(reader.state)
        context.say("read")
        for each, full in expected.items():
            found = torch.cat([part[each] for part in parts]) if full.ndim else parts[0][each]
            assert found.dtype == full.dtype, each
            assert torch.equal(found, full), each
    elif others is not None:
        others(sync, trains)
    context.wait_for_all(f"{name} read", limit=40.0)
    if context.rank != READER:
        sync.close()


def engine(kind: str, dtype: torch.dtype, rank: int) -> Engine:
    return Engine(SHAPES[kind], SERVERS.index(rank), len(SERVERS), pad_to=8).to(dtype)


def engines_whose_loaders_were_recorded(context) -> None:
    """They have fused, stacked and padded parameters; entries in several places, transposed and cast ones,
    and some that the loader gets whole."""
    for kind in ("llama", "moe", "gemma"):
        for dtype in (torch.float32, torch.bfloat16):
            fulls = SHAPES[kind].values(torch.float32)
            make = functools.partial(engine, kind, dtype, context.rank)
            expected = {name: full.to(dtype) for name, full in fulls.items()}
            recorded(context, f"{kind} {dtype}", fulls, make, None, expected)
    fulls = {name: torch.arange(15.0).reshape(5, 3) + at for at, name in enumerate("abc")}
    fulls |= {"d": torch.arange(1.0, 5), "s": torch.tensor(3.5)}
    recorded(context, "by hand", fulls, Written, None, fulls)


def engines_that_change_what_they_have(context) -> None:
    """after= changes a parameter: these ranks offer nothing, and the trainers serve."""
    fulls = {name: torch.arange(15.0).reshape(5, 3) + at for at, name in enumerate("abc")}
    fulls |= {"d": torch.arange(1.0, 5), "s": torch.tensor(3.5)}

    def others(sync, trains: bool) -> None:
        version = 1
        while True:
            done = [context.store.check([f"{context.case}/read/{READER}"])]
            dist.broadcast_object_list(done, 0, group=inner_group())
            if done[0]:
                return
            version += 1
            if trains:
                sync.push(version)
            else:
                assert sync.pull(version) == version
            time.sleep(0.02)

    changed = lambda model: model.turned.data.mul_(2)  # noqa: E731
    recorded(context, "changed", fulls, Written, others, fulls, after=changed)


CASES = [
    newest_from_replicas,
    into_a_mesh,
    manifest_before_any_byte,
    versions_while_training_goes_on,
    a_version_that_comes_later,
    several_readers,
    what_was_changed_is_not_served,
    own_dict_of_the_program,
    two_jobs_on_one_store,
    far_behind,
    overwritten_between_offer_and_transfer,
    other_kinds_of_versions,
    engines_with_other_cuts,
    wrong_arguments,
    nothing_is_left,
    one_buffer,
    after_a_failed_push,
    engines_whose_loaders_were_recorded,
    engines_that_change_what_they_have,
]

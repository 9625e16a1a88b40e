"""Edges of serving a WeightReader from ranks that push: forks, stores that end, options that do not fit, and
readers that die between two steps. Ranks 0 and 1 train, and 3 is outside."""

from __future__ import annotations

import gc
import os
import time
import weakref

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding import weight_offers
from meshcast.transfers.digest import values_digest
from multiproc.cases_trainer_reader import (
    LIMIT,
    READER,
    TRAINERS,
    TRAINERS_PREFIX,
    Training,
    group,
    groups,
    is_version,
)
from multiproc.oracle import unique_fill
from multiproc.own_threads import left_running
from multiproc.weight_job import raises
from torch.distributed.tensor import Replicate

GROUP_TIMEOUT = 40.0


def in_a_forked_child(context) -> None:
    """A child that drops what it has inherited leaves the store of its parent alone."""
    for keep in (False, True):
        job = Training(context, f"{keep}", keep=keep)
        if job.trains:
            job.push(1)
            serving = job.sync._side.serving
            key = serving._list._said
            child = os.fork()
            if child == 0:
                serving.stop()
                time.sleep(0.2)  # for a thread that uses the store
                os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert serving._list.questions.store.check([key])
        context.wait_for_all(f"{keep} done", limit=LIMIT)
        if job.sync is not None:
            job.sync.close()


def copies_on_some_ranks_only(context) -> None:
    """Refused on all ranks."""
    groups()
    if context.rank in TRAINERS:
        readers = dist.PrefixStore(context.case, context.store)
        options = {"group": group(False), "readers": readers, "timeout": LIMIT}
        held = {"w": torch.ones(3)}
        if context.rank == 0:
            sync = meshcast.WeightSync(held, {}, keep=True, **options)
        context.wait_for_all("first", ranks=TRAINERS)
        if context.rank == 1:
            raises(meshcast.LayoutError, "keep=", lambda: meshcast.WeightSync(held, {}, **options))
        context.wait_for_all("second", ranks=TRAINERS)
        if context.rank == 0:
            raises(meshcast.PlanMismatchError, "keep=", lambda: sync.push(1))
            sync.close()
    context.wait_for_all("done")


def a_question_that_never_came(context) -> None:
    """A reader that dies between the number of its question and the question: later ones are answered."""
    job = Training(context, keep=True)
    if job.trains:
        job.push(1)
    job.meet("pushed")
    if job.reads:
        with job.reader(timeout=10.0) as reader:
            for _ in range(2):
                reader._trainers.store.add("asked", 1)
            assert reader.pull() == 1
            is_version(reader.state, 1)
    job.done()


def dtypes_that_do_not_fit(context) -> None:
    """What cannot be cast is refused, as for ranks that receive."""
    groups()
    if context.rank in TRAINERS:
        readers = dist.PrefixStore(context.case, context.store)
        held = {"w": torch.ones(3), "count": torch.arange(3)}
        with meshcast.WeightSync(
            held,
            {},
            group=group(False),
            readers=readers,
            timeout=LIMIT,
            dtype={"count": torch.bfloat16},
        ) as sync:
            text = "'count' is torch.int64, what readers get of it is torch.bfloat16; only floating-point"
            raises(meshcast.LayoutError, text, lambda: sync.push(1))
            context.wait_for_all("refused", ranks=TRAINERS)
    context.wait_for_all("done")


def renamed_tied_and_cast(context) -> None:
    """A manifest has digests of what is served."""
    groups()
    readers = dist.PrefixStore(context.case, context.store)
    full = {"a": unique_fill((5, 3), torch.float32, 1), "b": unique_fill((4,), torch.float32, 2)}
    for keep in (False, True):
        where = dist.PrefixStore(f"{keep}", readers)
        if context.rank in TRAINERS:
            held = {name: x.clone() for name, x in full.items()}
            held["tied"] = held["a"]
            sync = meshcast.WeightSync(
                held,
                {},
                group=group(False),
                readers=where,
                timeout=LIMIT,
                keep=keep,
                rename=lambda name: f"model.{name}",
                dtype={"model.a": torch.bfloat16},
            )
            store = dist.PrefixStore(TRAINERS_PREFIX, where)
            for version in (1, 2):
                if not keep:
                    context.wait_until(
                        lambda v=version, s=store: s.check([f"ask/{v}"]), "a reader waits", LIMIT
                    )
                sync.push(version)
        elif context.rank == READER:
            expected = {
                "model.a": full["a"].to(torch.bfloat16),
                "model.b": full["b"],
                "model.tied": full["a"],
            }
            wanted = {name: Layout([0], [Replicate()]) for name in expected}
            with meshcast.WeightReader(where, wanted, rank=0, timeout=LIMIT, digest=True) as reader:
                found = reader.manifest(digest=True)
                assert set(found.tensors) == set(expected)
                for name, x in expected.items():
                    assert found.tensors[name].dtype == x.dtype
                    assert found.tensors[name].digest == values_digest(x), name
                reader.pull()
                for name, x in expected.items():
                    assert torch.equal(reader.state[name], x) and reader.state[name].dtype == x.dtype
        context.wait_for_all(f"{keep} done", limit=LIMIT)
        if context.rank in TRAINERS:
            sync.close()


def changed_before_it_is_served(context) -> None:
    """A thread of a trainer's program that changes, in a push, weights that no rank receives."""
    for kind in (weight_offers.Pushing, weight_offers.Keeping):
        name = kind.__name__
        job = Training(context, name, keep=kind is weight_offers.Keeping)
        if job.trains:
            pushed = kind.pushed
            if context.rank == 1:

                def changing(self, version, state, *rest, pushed=pushed):
                    if version == 1:
                        state["w"].to_local().add_(1)
                    return pushed(self, version, state, *rest)

                kind.pushed = changing
            job.waiting()
            job.push(1)
            job.waiting(2)
            job.push(2)
            kind.pushed = pushed
        elif job.reads:
            with job.reader() as reader:
                assert reader.pull() == 2
                is_version(reader.state, 2)
        context.wait_for_all(f"{name} done", limit=LIMIT)
        if job.sync is not None:
            job.sync.close()


def copies_that_are_given_up(context) -> None:
    """A WeightSync that is closed keeps no copy."""
    job = Training(context, keep=True)
    if job.trains:
        job.push(1)
        kept = weakref.ref(job.sync._side.serving._memory["w"])
        assert kept() is not None
    job.done()
    gc.collect()
    assert not job.trains or kept() is None


def late_at_its_limit(context) -> None:
    """A push that has used up its limit keeps no copy of this version, and a later one does."""
    job = Training(context, keep=True)
    if job.trains:
        serving = job.sync._side.serving
        agreed = serving._list.agreed

        def slow(*given):
            time.sleep(0.3)
            return agreed(*given)

        pushed = weight_offers.Keeping.pushed
        serving._list.agreed = slow
        weight_offers.Keeping.pushed = lambda self, *given: pushed(self, *given[:-1], time.monotonic())
        job.push(1)
        weight_offers.Keeping.pushed, serving._list.agreed = pushed, agreed
        context.wait_for_all("late", ranks=TRAINERS)
        job.push(2)
    job.meet("pushed")
    if job.reads:
        assert job.reader(timeout=10.0).pull() == 2
    job.done()


def the_store_ends(context) -> None:
    """Its process dies: pushes go on, and nothing is left that waits."""
    for keep in (False, True):
        if context.rank == READER:
            server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            context.store.set(f"{context.case} {keep}", str(server.port))
        groups()
        if context.rank in TRAINERS:
            port = int(context.store.get(f"{context.case} {keep}"))
            store = dist.TCPStore("localhost", port, is_master=False)
            held = {"w": torch.ones(3)}
            sync = meshcast.WeightSync(held, {}, group=group(False), readers=store, timeout=LIMIT, keep=keep)
            sync.push(1)
        context.wait_for_all(f"{keep} pushed")
        if context.rank == READER:
            del server
            gc.collect()
        context.wait_for_all(f"{keep} ended")
        if context.rank in TRAINERS:
            begin = time.monotonic()
            for version in (2, 3):
                sync.push(version)
            print(f"pushes took {time.monotonic() - begin:.2f} s", flush=True)
            assert sync._side.serving._over
            context.wait_for_all(f"{keep} pushed again", ranks=TRAINERS)
            sync.close()
        context.wait_for_all(f"{keep} done")
    context.wait_until(lambda: not [each for each in left_running() if "readers" in each], "threads end")


def threads_of_a_start_that_fails(context) -> None:
    """The second of two that answer does not start: the first one ends."""
    groups()
    if context.rank in TRAINERS:
        readers = dist.PrefixStore(context.case, context.store)
        start = weight_offers.Keeping.start

        def fails(self, *_):
            if isinstance(self, weight_offers.Keeping):
                raise meshcast.MeshcastError("no")
            return start(self, *_)

        weight_offers.Keeping.start = fails
        held = {"w": torch.ones(3)}
        where = {"w": Layout(TRAINERS, [Replicate()])}
        with pytest.raises(meshcast.MeshcastError, match="no"):
            meshcast.WeightSync(held, where, group=group(False), readers=readers, timeout=LIMIT, keep=True)
        del weight_offers.Keeping.start
        assert weight_offers.Keeping.start is start
        context.wait_until(
            lambda: not [each for each in left_running() if "readers" in each], "threads end", 10
        )
    context.wait_for_all("done")


CASES = [
    in_a_forked_child,
    copies_on_some_ranks_only,
    a_question_that_never_came,
    dtypes_that_do_not_fit,
    renamed_tied_and_cast,
    changed_before_it_is_served,
    copies_that_are_given_up,
    late_at_its_limit,
    the_store_ends,
    threads_of_a_start_that_fails,
]

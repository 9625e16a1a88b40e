"""torch.distributed.send, recv and their like under backend "meshcast", over UCX or through shared memory: in
three or five processes, with gloo as the oracle where both can do it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import _C, AbortedError, DeadlineExceededError, LayoutError, PlanMismatchError
from multiproc.cases_shared_memory import environment

GROUP_TIMEOUT = 60.0
SEED = int(os.environ["P2P_SEED"])  # the same on all ranks; every failure names it
PROGRAMS = int(os.environ.get("P2P_PROGRAMS", "6"))
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.bool,
    torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128,
)  # fmt: skip
LENGTHS = (0, 1, 5, 1000, 2500, 70_000, 600_000)
SMALL, LARGE = 100, 300_000  # floats: sent at once; announced


def content(length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Differs from place to place and seed to seed."""
    numbers = (torch.arange(length) * 7 + 13 * seed) % 101
    return numbers < 50 if dtype == torch.bool else numbers.to(dtype)


def backend_of(group: dist.ProcessGroup | None):
    found = (dist.group.WORLD if group is None else group)._get_backend(torch.device("cpu"))
    return getattr(found, "wrapped_pg", found)


def over_ucx(group: dist.ProcessGroup | None = None) -> bool:
    return backend_of(group).point_to_point is not None


def exchange_all(context, group) -> None:
    """Each rank with each other one, small and large."""
    others = [rank for rank in range(context.world) if rank != context.rank]
    for tag, length in enumerate((0, SMALL, LARGE)):
        given = content(length, torch.float32, context.rank)
        got = {rank: torch.zeros(length) for rank in others}
        works = [dist.isend(given, rank, group=group, tag=tag) for rank in others]
        works += [dist.irecv(got[rank], rank, group=group, tag=tag) for rank in others]
        for work in works:
            work.wait()
        for rank, tensor in got.items():
            assert torch.equal(tensor, content(length, torch.float32, rank))


def pipes() -> int:
    """Shared memory for messages that this process has: one for each direction of a pair of ranks."""
    return Path("/proc/self/maps").read_text(encoding="utf-8").count("memfd:meshcast-pipe")


# ---- drawn programs ----


@dataclass(frozen=True)
class Drawn:
    source: int
    target: int
    tag: int
    dtype: torch.dtype
    length: int
    number: int


def draw(rng: random.Random, world: int, anybody: bool, least: int = 0) -> list[Drawn]:
    """Messages in one order, which every rank keeps. From anybody: those of one tag are alike. least:
    elements of each."""
    lengths = [max(length, least) for length in LENGTHS]
    alike = {tag: (rng.choice(DTYPES), rng.choice(lengths)) for tag in (0, 3, 2**31 - 1)}
    program = []
    for number in range(rng.randrange(20, 60)):
        source, target = rng.sample(range(world), 2)
        tag = rng.choice(list(alike))
        dtype, length = alike[tag] if anybody else (rng.choice(DTYPES), rng.choice(lengths))
        program.append(Drawn(source, target, tag, dtype, length, number))
    return program


def run_program(rng: random.Random, program: list[Drawn], rank: int, group, anybody: bool) -> list:
    """Starts all that is this rank's, with pauses, and waits in an order of its own. Of each receive its
    message, if it is known, the source, and what came."""
    works, received = [], []
    for drawn in program:
        if rank == drawn.source:
            given = content(drawn.length, drawn.dtype, drawn.number)
            works.append(dist.isend(given, drawn.target, group=group, tag=drawn.tag))
        elif rank == drawn.target:
            tensor = content(drawn.length, drawn.dtype, -1)
            source = None if anybody else drawn.source
            work = dist.irecv(tensor, source, group=group, tag=drawn.tag)
            works.append(work)
            received.append((drawn, work, tensor))
        if rng.random() < 0.1:
            time.sleep(0.003)
    rng.shuffle(works)
    for work in works:
        assert work.wait()
    return [(drawn, work._source_rank(), tensor) for drawn, work, tensor in received]


def drawn_programs(context) -> None:
    assert over_ucx()
    print(f"P2P_SEED={SEED}")
    gloo = dist.new_group(backend="gloo")
    for number in range(PROGRAMS):
        found = {}
        for group in (None, gloo):
            rng = random.Random(SEED + number)
            program = draw(rng, context.world, anybody=False)
            found[group] = run_program(rng, program, context.rank, group, anybody=False)
        for (drawn, source, ours), (_, _, theirs) in zip(found[None], found[gloo], strict=True):
            expected = content(drawn.length, drawn.dtype, drawn.number)
            assert source == drawn.source, (SEED, drawn, source)
            assert torch.equal(ours, expected) and torch.equal(theirs, expected), (SEED, drawn)
    dist.destroy_process_group(gloo)


def check_from_anybody(context, group, seed: int, least: int = 0) -> None:
    """Each message goes to some receive of its tag, and those of one sender in order."""
    rng = random.Random(seed)
    program = draw(rng, context.world, anybody=True, least=least)
    expected, found = defaultdict(list), defaultdict(list)
    for drawn in program:
        if drawn.target == context.rank:
            expected[drawn.source, drawn.tag].append(drawn)
    for drawn, source, tensor in run_program(rng, program, context.rank, group, anybody=True):
        found[source, drawn.tag].append(tensor)
    assert found.keys() == expected.keys(), seed
    for key, sent in expected.items():
        assert len(sent) == len(found[key]), (seed, key)
        for drawn, tensor in zip(sent, found[key], strict=True):
            assert torch.equal(tensor, content(drawn.length, drawn.dtype, drawn.number)), (seed, key)


def drawn_programs_from_anybody(context) -> None:
    gloo = dist.new_group(backend="gloo")
    for number in range(PROGRAMS):
        check_from_anybody(context, None, SEED + 1000 + number)
        # gloo receives nothing without elements from anybody.
        check_from_anybody(context, gloo, SEED + 1000 + number, least=1)
    dist.destroy_process_group(gloo)


# ---- matching ----


def a_receive_behind_one_from_anybody(context) -> None:
    """A message goes to the first call that takes it, whether message or call came before."""
    group = dist.new_group()
    for late in (False, True):
        for length in (SMALL, LARGE):
            name = f"{late} {length}"
            if context.rank == 0:
                if late:
                    context.wait_for_all(f"sent {name}")
                tensors = [torch.zeros(length) for _ in range(4)]
                works = [
                    dist.irecv(tensors[0], 1, group=group, tag=5),
                    dist.irecv(tensors[1], group=group, tag=5),
                    dist.irecv(tensors[2], 1, group=group, tag=5),
                    dist.irecv(tensors[3], group=group, tag=5),
                ]
                other = torch.zeros(length)
                dist.recv(other, 2, group=group, tag=6)  # of another tag, which nothing holds up
                assert torch.equal(other, content(length, torch.float32, 26))
                if not late:
                    context.wait_for_all(f"sent {name}")
                for work in works:
                    work.wait()
                found = [(works[i]._source_rank(), tensors[i]) for i in range(4)]
                count: dict[int, int] = defaultdict(int)
                for source, tensor in found:
                    expected = content(length, torch.float32, 10 * source + count[source])
                    assert torch.equal(tensor, expected), (name, source)
                    count[source] += 1
                assert count == {1: 3, 2: 1}
                assert [found[0][0], found[2][0]] == [1, 1]
            else:
                works = []
                if context.rank == 2:
                    works.append(dist.isend(content(length, torch.float32, 26), 0, group=group, tag=6))
                    works.append(dist.isend(content(length, torch.float32, 20), 0, group=group, tag=5))
                    context.store.set(f"second {name}", "")
                if context.rank == 1:
                    context.store.wait([f"second {name}"])
                    time.sleep(0.1 if late else 0.0)
                    for number in range(3):
                        given = content(length, torch.float32, 10 + number)
                        works.append(dist.isend(given, 0, group=group, tag=5))
                context.wait_for_all(f"sent {name}")
                for work in works:
                    work.wait()
            context.wait_for_all(f"through {name}")
    dist.destroy_process_group(group)


def many_from_anybody(context) -> None:
    """More than any thread's stack would take, were one to start the next from inside."""
    count = 3000
    if context.rank == 0:
        context.wait_for_all("sent")
        tensors = [torch.zeros(2) for _ in range(count * (context.world - 1))]
        works = [dist.irecv(tensor) for tensor in tensors]
        following = defaultdict(int)
        for work, tensor in zip(works, tensors, strict=True):
            work.wait()
            source = work._source_rank()
            assert tensor.tolist() == [source, following[source]]
            following[source] += 1
    else:
        works = [dist.isend(torch.tensor([float(context.rank), float(i)]), 0) for i in range(count)]
        context.wait_for_all("sent")
        for work in works:
            work.wait()
    context.wait_for_all("end")


def nobody_is_waited_for(context) -> None:
    """A call returns at once though the other rank has not called yet, and the order stays."""
    group = dist.new_group()
    if context.rank == 0:
        begin = time.monotonic()
        tensors = [torch.zeros(LARGE if i % 2 else SMALL) for i in range(6)]
        works = [dist.irecv(tensor, 1, group=group) for tensor in tensors]
        works += [dist.isend(content(SMALL, torch.float32, i), 2, group=group) for i in range(3)]
        assert time.monotonic() - begin < 10.0
        assert not any(work.is_completed() for work in works)
        with pytest.raises(DeadlineExceededError, match=r"recv of .* from rank 1.*continues"):
            works[0].wait(timedelta(milliseconds=50))
        context.wait_for_all("called")
        for work in works:
            work.wait()
            assert work.is_completed() and work.is_success()
            if not torch.__version__.startswith(("2.11", "2.12")):  # whose exception() always raises
                assert work.exception() is None
        for i, tensor in enumerate(tensors):
            assert torch.equal(tensor, content(len(tensor), torch.float32, i))
    else:
        context.wait_for_all("called")
        if context.rank == 1:
            for i in range(6):
                dist.send(content(LARGE if i % 2 else SMALL, torch.float32, i), 0, group=group)
        if context.rank == 2:
            for i in range(3):
                tensor = torch.zeros(SMALL)
                assert dist.recv(tensor, 0, group=group) == 0
                assert torch.equal(tensor, content(SMALL, torch.float32, i))
    context.wait_for_all("end")
    dist.destroy_process_group(group)


def batches_and_numbers(context) -> None:
    """A ring, and the number that torch asks for: each call counts, as with gloo."""
    gloo = dist.new_group(backend="gloo")
    numbers = {}
    for group in (gloo, None):
        before = backend_of(group)._get_sequence_number_for_group()
        given, got = torch.full((3,), float(context.rank)), torch.zeros(3)
        following, previous = (context.rank + 1) % context.world, (context.rank - 1) % context.world
        batch = [
            dist.P2POp(dist.isend, given, following, group, tag=4),
            dist.P2POp(dist.irecv, got, previous, group, tag=4),
        ]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert got.tolist() == [float(previous)] * 3
        numbers[group] = backend_of(group)._get_sequence_number_for_group() - before
    assert numbers[None] == numbers[gloo] == 2
    dist.destroy_process_group(gloo)


# ---- refusals ----


def sizes_that_differ(context) -> None:
    """An error at the receiver, and at the sender of a large message; the next message is right."""
    pairs = [(SMALL, SMALL + 1), (SMALL, SMALL - 1), (0, 1), (SMALL, LARGE)]
    pairs += [(LARGE, LARGE + 1), (LARGE, LARGE - 1), (LARGE, SMALL)]
    for sent, expected in pairs:
        text = f"a message of {4 * sent} bytes met a receive of {4 * expected};"
        for source in (1, None):
            if context.rank == 1:
                large = sent == LARGE
                with pytest.raises(PlanMismatchError, match=text) if large else contextlib.nullcontext():
                    dist.send(torch.ones(sent), 0)
                dist.send(torch.full((7,), 3.0), 0)
            if context.rank == 0:
                memory = torch.full((LARGE + 10,), -1.0)
                with pytest.raises(PlanMismatchError, match=text):
                    dist.recv(memory[:expected], source)
                assert bool((memory[expected:] == -1).all())
                tensor = torch.zeros(7)
                assert dist.recv(tensor, source) == 1
                assert bool((tensor == 3).all())
    context.wait_for_all("end")


def refusals_are_gloos(context) -> None:
    if context.rank == 0:
        gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5))
        ours = backend_of(None)
        strided, sparse = torch.ones(4, 4).t(), torch.eye(3).to_sparse()
        for call in (
            lambda backend: backend.send([strided], 1, 0),
            lambda backend: backend.recv([strided], 1, 0),
            lambda backend: backend.recv_anysource([strided], 0),
            lambda backend: backend.send([sparse], 1, 0),
            lambda backend: backend.send([torch.ones(1)] * 2, 1, 0),
            lambda backend: backend.send([torch.ones(1)], 1, -1),
        ):
            said = []
            for backend in (gloo, ours):
                with pytest.raises(Exception) as caught:
                    call(backend)
                said.append(str(caught.value).split("\n", 1)[0].split("Exception raised")[0])
            assert said[0] == said[1], said
        with pytest.raises(RuntimeError):
            dist.isend(torch.ones(1), 0)
    context.wait_for_all("end")


def unlike_settings(context) -> None:
    """All ranks of a group decide alike: before anybody waits for a message."""

    def exchange(group) -> None:
        """All make as many calls: torch's checks compare the numbers of a group's calls, as with gloo."""
        got = torch.zeros(3)
        following, previous = (context.rank + 1) % context.world, (context.rank - 1) % context.world
        work = dist.isend(torch.full((3,), float(context.rank)), following, group=group)
        dist.recv(got, previous, group=group)
        work.wait()
        assert got.tolist() == [float(previous)] * 3

    missing = {"MESHCAST_UCX": "/nonexistent/libucp.so.0"}
    told = "gloo" if context.rank == 1 else "ucx"
    for mine, expected in (
        ({}, "ucx"),
        ({"MESHCAST_TRANSPORT": "gloo"}, "gloo"),
        ({"MESHCAST_TRANSPORT": "gloo"} if context.rank == 1 else {}, "gloo"),
        (missing if context.rank == 2 else {}, "gloo"),
        ({"MESHCAST_TRANSPORT": told}, "found ucx on rank 0, gloo on rank 1"),
        ({"MESHCAST_TRANSPORT": "ucx", **(missing if context.rank == 2 else {})}, "rank 2: MESHCAST_UCX is"),
        ({"MESHCAST_TRANSPORT": "tcp"} if context.rank == 1 else {}, "rank 1: MESHCAST_TRANSPORT is 'tcp'"),
    ):
        with environment(**mine):
            group = dist.new_group()
            if expected in ("ucx", "gloo"):
                assert over_ucx(group) == (expected == "ucx")
                exchange(group)
            else:
                with pytest.raises(LayoutError, match=expected):
                    dist.recv(torch.ones(1), group=group)
                with pytest.raises(LayoutError, match=expected):
                    dist.send(torch.ones(1), (context.rank + 1) % context.world, group=group)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == context.world
        dist.destroy_process_group(group)


def ranks_of_a_host_share_memory(context) -> None:
    """Those that may: the others go over UCX, in one group."""
    on = {"MESHCAST_SHM": "1"}
    everybody, but_one = set(range(context.world)), set(range(context.world)) - {1}
    before = pipes()
    settings = (
        (on, everybody),
        ({"MESHCAST_SHM": "0"}, set()),
        ({"MESHCAST_SHM": "0"} if context.rank == 1 else on, but_one),
        ({**on, "MESHCAST_HOST_ID": "elsewhere"} if context.rank == 1 else on, but_one),
        ({**on, "MESHCAST_SHM_MB": "1"} if context.rank == 1 else on, but_one),
    )
    for number, (mine, sharing) in enumerate(settings):
        with environment(**mine):
            group = dist.new_group()
            exchange_all(context, group)
        expected = 2 * (len(sharing) - 1) if context.rank in sharing else 0
        # What a rank has offered it drops with the address of the other, which has come.
        assert pipes() - before == expected, (mine, sharing)
        context.wait_for_all(f"counted {number}")
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert pipes() == before
    with environment(MESHCAST_SHM="2" if context.rank == 1 else "1"):
        group = dist.new_group()
        with pytest.raises(LayoutError, match=r"rank 1: MESHCAST_SHM is '2'"):
            dist.send(torch.ones(1), (context.rank + 1) % context.world, group=group)
        dist.destroy_process_group(group)


@contextlib.contextmanager
def replaced(where: object, name: str, value: object) -> Iterator[None]:
    real = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, real)


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Those of meshcast."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("meshcast")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


class NotOffered:
    def __init__(self) -> None:
        raise RuntimeError("there is no room")


class NotConnected:
    """Offers memory, and cannot connect it."""

    def __init__(self) -> None:
        self._real = REAL_MEMORY()
        self.address = self._real.address

    def meet(self, *_: object) -> None:
        raise RuntimeError("there is no room to connect")


class Frozen(NotConnected):
    """Does not connect before the group has ended."""

    over = threading.Event()

    def meet(self, *_: object) -> None:
        assert self.over.wait(60.0)
        raise RuntimeError("it took too long")


class NoThread(threading.Thread):
    def start(self) -> None:
        if self.name == "meshcast-share":
            raise RuntimeError("there is no more thread")
        super().start()


REAL_MEMORY = _C.PairMemory
WHY_NOT = "messages to ranks of its host go over UCX, since shared memory cannot be used"


def memory_that_cannot_be_had(context) -> None:
    """By one rank: both ends of its pairs use UCX, and say so once."""
    for where, name, value, mine, others in (
        (_C, "PairMemory", NotOffered, "there is no room", ""),
        (_C, "PairMemory", NotConnected, "there is no room to connect", "gave up"),
        (threading, "Thread", NoThread, "there is no more thread", "gave up"),
    ):
        for again in (False, True):
            before = pipes()
            here = replaced(where, name, value) if context.rank == 1 else contextlib.nullcontext()
            with environment(MESHCAST_SHM="1"), here, warnings_logged() as lines:
                group = dist.new_group()
                exchange_all(context, group)
                shared = pipes() - before
                context.wait_for_all(f"exchanged {mine} {again}")
            assert shared == (0 if context.rank == 1 else 2 * (context.world - 2)), (mine, shared)
            said = [line for line in lines if WHY_NOT in line]
            assert said == lines, lines
            if context.rank == 1:
                assert len(said) == (0 if again else 1), lines
                assert all(mine in line for line in said), lines
            else:  # what it has said of one reason it does not repeat for the next
                assert len(said) <= 1 and not (again and said), lines
                assert all(others and others in line for line in said), lines
            dist.destroy_process_group(group)
            del group
            gc.collect()
            assert pipes() == before


def messages_from_anybody_over_both(context) -> None:
    """From a rank of the same host and from one of another, drawn."""
    elsewhere = {"MESHCAST_HOST_ID": "elsewhere"} if context.rank == 1 else {}
    before = pipes()
    with environment(MESHCAST_SHM="1", **elsewhere):
        group = dist.new_group()
        exchange_all(context, group)
    assert pipes() - before == (0 if context.rank == 1 else 2 * (context.world - 2))
    for number in range(PROGRAMS):
        check_from_anybody(context, group, SEED + 2000 + number)
        context.wait_for_all(f"program {number}")  # else one takes what is for the next
    dist.destroy_process_group(group)


def several_threads_of_each_rank(context) -> None:
    """Each with a tag of its own, and all of them with all ranks at once."""
    failures: list[BaseException] = []

    def exchange(tag: int) -> None:
        try:
            others = [rank for rank in range(context.world) if rank != context.rank]
            for number in range(30):
                length = (0, SMALL, 3000, LARGE)[(number + tag) % 4]
                got = {rank: torch.zeros(length) for rank in others}
                given = content(length, torch.float32, 100 * context.rank + number)
                works = [dist.irecv(got[rank], rank, tag=tag) for rank in others]
                works += [dist.isend(given, rank, tag=tag) for rank in others]
                for work in works:
                    work.wait()
                for rank, tensor in got.items():
                    assert torch.equal(tensor, content(length, torch.float32, 100 * rank + number)), tag
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=exchange, args=(50 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    assert not failures, failures
    context.wait_for_all("threads")


def groups_leave_nothing_behind(context) -> None:
    """No descriptor, memory or thread of messages."""

    def left() -> tuple[int, int, list[str]]:
        gc.collect()
        ours = sorted(thread.name for thread in threading.enumerate() if "meshcast-" in thread.name)
        return len(os.listdir("/proc/self/fd")), pipes(), ours

    def one(name: str) -> None:
        group = dist.new_group()
        exchange_all(context, group)
        context.wait_for_all(name)
        dist.destroy_process_group(group)

    one("first")  # what a process has once stays
    before = left()
    for number in range(5):
        one(f"later {number}")
    end = time.monotonic() + 20.0
    while left() != before and time.monotonic() < end:  # UCX closes connections in its own time
        time.sleep(0.05)
    assert left() == before
    context.wait_for_all("counted")


def a_rank_that_cannot_use_what_it_found(context) -> None:
    """Found out when two meet: both say the same."""
    group = dist.new_group()
    if context.rank == 1:
        with environment(MESHCAST_IFNAMES="nope7"), pytest.raises(LayoutError, match=r"rank 1: .*nope7"):
            dist.send(torch.ones(1), 0, group=group)
    if context.rank == 0:
        with pytest.raises(LayoutError, match=r"rank 1: .*nope7"):
            dist.recv(torch.ones(1), 1, group=group)
        got = torch.zeros(2)
        assert dist.recv(got, 2, group=group) == 2
    if context.rank == 2:
        dist.send(torch.ones(2), 0, group=group)
    context.wait_for_all("end")
    dist.destroy_process_group(group)


# ---- the end of a group ----


def destroyed_with_messages_under_way(context) -> None:
    group = dist.new_group()
    works = []
    if context.rank == 0:
        works = [
            dist.irecv(torch.zeros(SMALL), 1, group=group),  # never met
            dist.irecv(torch.zeros(SMALL), group=group),
            dist.isend(torch.zeros(LARGE), 2, group=group),
        ]
        dist.send(torch.zeros(1), 2, group=group, tag=9)
    if context.rank == 2:
        dist.recv(torch.zeros(1), 0, group=group, tag=9)
        works = [dist.irecv(torch.zeros(SMALL), 0, group=group, tag=1)]
    context.wait_for_all("called")
    begin = time.monotonic()
    dist.destroy_process_group(group)
    assert time.monotonic() - begin < 20.0
    for work in works:
        with pytest.raises((AbortedError, meshcast.PeerLostError)):
            work.wait()
    context.wait_for_all("end")


def destroyed_while_memory_is_connected(context) -> None:
    """The other rank is stuck in it."""
    with environment(MESHCAST_SHM="1"):
        group = dist.new_group()
    if context.rank == 1:
        with replaced(_C, "PairMemory", Frozen):
            work = dist.isend(torch.ones(SMALL), 0, group=group)
            context.store.wait(["destroyed"])
        Frozen.over.set()
        with pytest.raises(meshcast.PeerLostError, match="rank 0"):
            work.wait(timedelta(seconds=30))
    if context.rank == 0:
        work = dist.irecv(torch.ones(SMALL), 1, group=group)
        while "meshcast-share" not in [thread.name for thread in threading.enumerate()]:
            time.sleep(0.01)
        begin = time.monotonic()
        dist.destroy_process_group(group)
        assert time.monotonic() - begin < 20.0
        with pytest.raises(AbortedError):
            work.wait()
        context.store.set("destroyed", "")
    context.wait_for_all("end")
    if context.rank != 0:
        dist.destroy_process_group(group)


def small_messages_outlive_their_sender(context) -> None:
    """A sender may go as soon as its call has returned."""
    group = dist.new_group([0, 1])
    if context.rank == 0:
        dist.recv(torch.zeros(1), 1, group=group)  # they have met
    if context.rank == 1:
        dist.send(torch.zeros(1), 0, group=group)
        for i in range(20):
            dist.send(content(SMALL, torch.float32, i), 0, group=group)
        dist.destroy_process_group(group)
    context.wait_for_all("gone")
    if context.rank == 0:
        for i in range(20):
            tensor = torch.zeros(SMALL)
            dist.recv(tensor, None if i % 2 else 1, group=group)
            assert torch.equal(tensor, content(SMALL, torch.float32, i))
        with pytest.raises(meshcast.PeerLostError, match="rank 1"):
            dist.recv(torch.zeros(SMALL), 1, group=group)
        dist.destroy_process_group(group)


CASES = [
    drawn_programs,
    drawn_programs_from_anybody,
    a_receive_behind_one_from_anybody,
    many_from_anybody,
    nobody_is_waited_for,
    batches_and_numbers,
    sizes_that_differ,
    refusals_are_gloos,
    unlike_settings,
    ranks_of_a_host_share_memory,
    memory_that_cannot_be_had,
    messages_from_anybody_over_both,
    several_threads_of_each_rank,
    groups_leave_nothing_behind,
    a_rank_that_cannot_use_what_it_found,
    destroyed_with_messages_under_way,
    destroyed_while_memory_is_connected,
    small_messages_outlive_their_sender,
]

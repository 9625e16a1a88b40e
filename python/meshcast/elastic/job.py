"""Job: a training job whose ranks may die and join, seen from one of its workers."""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate
from torch.optim import Optimizer
from typing_extensions import Self

from ..base import checks
from ..base.observe import join_job, log
from ..errors import Caller, LayoutError, MeshcastError
from ..layout import Layout
from ..pipelining.action import ScheduleError
from ..resharding.state_entries import local_of
from . import rendezvous as meet
from .places import Nest, Old, Place, check_entries, tensors_in
from .remesh import abort_groups, leave_groups, remesh
from .rendezvous import Version, Watch, Worker
from .replicas import Replicas

__all__ = ["Before", "Job", "Training", "check_budget"]

OP = "elastic.Job"
_CALLER = Caller(OP)
_STEPS = "meshcast.elastic.steps"  # entry of the state, next to the user's
_PAUSE = 0.02  # seconds between two checks for the start of a process group
_MOST_BYTES = 1 << 62
_MOST_STEPS = 10**9
_IN_MAKE = "Make what comes with a step in make(): an optimizer's state as get_state_dict of torch does"


class Before:
    """Random generators, buffers of modules and hyperparameters of optimizers, as they are when it is made.

    training: a module, or an object with modules and optimizers as attributes. Parameters and what optimizers
    hold of them do not change before a step is committed: they are not copied.
    """

    def __init__(self, training: object) -> None:
        self._modules = list(_parts(training, nn.Module))
        self._optimizers = list(_parts(training, Optimizer))
        self._buffers = [(x, x.detach().clone()) for module in self._modules for x in module.buffers()]
        self._options = [(group, _options(group)) for each in self._optimizers for group in each.param_groups]
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Gradients are dropped: they may be of a part of the step."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for group, options in self._options:
            group.update(options)
        # FSDP's modules name other tensors in the middle of a step than the optimizer does.
        for part in (*self._modules, *self._optimizers):
            part.zero_grad()
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    copied = {name: value for name, value in group.items() if name != "params"}
    return {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in copied.items()}


def _parts(training: object, kind: type) -> Iterator[Any]:
    if isinstance(training, kind):
        yield training
    else:
        yield from (each for each in vars(training).values() if isinstance(each, kind))


def check_budget(memory: int | None, new: Any, old: Any, group: dist.ProcessGroup) -> None:
    """Raises LayoutError on all ranks of `group` where the state of one needs more than its `memory`.

    new: the training that was just made on this rank. old: the one whose state it takes over, or None. Both
    are there until all ranks have moved.
    """
    needed = [0, 0, 0] if memory is None else [memory, _held(new), _held(old)]
    of_all = _gathered(needed, group)
    for rank, (limit, share, before) in enumerate(of_all):
        if share + before > limit:
            raise _CALLER.error(
                LayoutError,
                f"{len(of_all)} ranks are too few for the state: rank {rank} needs {share} bytes for its "
                f"share and {before} for what it held before; memory= allows {limit}. Start more workers, or "
                "allow more",
                rank=rank,
            )


def _gathered(row: list[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Returns the rows of all ranks, which have the same length."""
    rows = [torch.zeros(len(row), dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor(row, dtype=torch.int64), group=group)
    return [each.tolist() for each in rows]


def _held(training: Any) -> int:
    """Bytes of the state's tensors on this rank. Views of one storage count once, with all of it."""
    storages = {}
    for tensor in tensors_in({} if training is None else training.state_dict()):
        storage = local_of(tensor).untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class Generations:
    """The copies of the state that this worker has, by the rendezvous whose ranks made them.

    A generation begins with the first step that the ranks of a rendezvous commit. The one before stays until
    every rank of the new one is known to have a whole copy, which is when they commit again.
    """

    def __init__(self, every: int, options: Mapping[str, Any]) -> None:
        """every: steps from one copy to the next; options: of Replicas."""
        self._every = checks.integer("replicas_every", every, 1, _MOST_STEPS)
        self._options = options
        self._kept: dict[int, Replicas] = {}  # the newest last; two at most

    def committed(
        self, steps: int, rendezvous: int, ranks: int, state: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Follows a step of all ranks. A collective of them; raises as Replicas does."""
        if ranks < 2:  # no rank is left that could have a copy
            self._kept.clear()
        elif rendezvous not in self._kept:
            replicas = Replicas(state, self._every, **self._options)
            replicas.refresh(steps)
            replicas.wait()
            previous = list(self._kept.items())[-1:]
            self._kept = dict([*previous, (rendezvous, replicas)])
        else:
            self._kept = {rendezvous: self._kept[rendezvous]}
            self._kept[rendezvous].step(steps)

    def choose(
        self,
        workers: Collection[Worker],
        group: dist.ProcessGroup,
        members_of: Callable[[int], list[Worker]],
    ) -> tuple[list[Worker], Replicas | None] | None:
        """Returns the members of the newest generation of which all that live have copies, and this worker's
        part in it; None where there is no such generation. A collective of the ranks of `group`, which are
        `workers`; all choose the same.

        members_of: returns the members of a rendezvous.
        """
        mine = [number for number, replicas in self._kept.items() if replicas.steps]
        rows = _gathered([*mine, 0, 0][:2], group)
        whole = {worker: set(row) - {0} for worker, row in zip(workers, rows, strict=True)}
        for number in sorted(set.union(*whole.values()), reverse=True):
            members = members_of(number)
            if all(number in whole[each] for each in members if each in whole):
                return members, self._kept.get(number)
        return None


class Training(Protocol):
    """The object that a Job trains, on the ranks of one process group. torch.distributed.checkpoint calls
    such objects Stateful."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that must continue: by names that say nothing of ranks. See remesh for the entries;
        dicts, lists and tuples of such are taken too, and returned as they were. `own`, `old` and errors call
        an entry of them "model.weight", as torch.distributed.checkpoint does."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


T = TypeVar("T", bound=Training)


@dataclass
class _Prepared:
    """Not committed yet. finish: makes it so, on this rank alone."""

    version: Version
    finish: Callable[[], Any]


class Job(Generic[T]):
    """One worker's part in a job that `python -m meshcast.elastic.run` started.

    A step is committed by all ranks or by none. Ranks agree once all have their gradients, and only then does
    any optimizer change what it holds. Where a rank dies, the others look what the furthest of them did: the
    step is completed on all, or undone on all. They then make a new process group in the same processes and
    take the state of the job along by `remesh`.

    Args:
        make: makes model and optimizer on the ranks of the default process group as it is then: any sharding,
            any meshes. Called for each process group. The untrained state is the one that it made.
        backend, timeout: as of init_process_group. A rank that gloo does not wake where another one died
            continues after this limit.
        own: entries of the state of which each rank has its own, see remesh. The name of a dict stands for
            all that is in it.
        old: layouts of plain tensors of the state that are shards, in the ranks that they lie on.
        options: of remesh, such as max_bytes_in_flight.
        replicas_every: steps from one copy of the state on other ranks to the next, see Replicas. Where what
            dead ranks held lives nowhere else, the job then goes back to the newest whole copy: `steps` is
            smaller than before. None: no copies, and an error there.
        memory: bytes that the state may take on this rank, with what it held before while that moves. Where
            one rank needs more for the ranks that are left, all raise and nothing is moved. None: no limit.
        grace: seconds that an error may wait for the agent to report that a rank died. An error without a
            death is raised after that.
        connect_timeout: seconds for making a process group. A worker that dies while the others connect may
            cost them so long.

    Warns:
        RuntimeWarning: workers died, and no rank that lives has the state of the job: it begins at step 0.

    Raises:
        MeshcastError: this process was not started by ``python -m meshcast.elastic.run``.

    Example, ``python -m meshcast.elastic.run --nproc-per-node 1:4 --max-restarts 3 train.py``::

        with elastic.Job(lambda: MyTraining(lr=1e-3)) as job:
            while job.steps < 1000:
                with job.attempt() as training:
                    loss = training.forward_and_backward(job.steps)  # clips gradients as well
                    job.commit(training.optimizer.step)
                    print(job.steps, loss)
    """

    def __init__(
        self,
        make: Callable[[], T],
        *,
        backend: str | None = None,
        timeout: timedelta | None = None,
        own: Iterable[str] | Callable[[str], bool] = (),
        old: Old = None,
        options: Mapping[str, Any] | None = None,
        replicas_every: int | None = None,
        memory: int | None = None,
        grace: float = 30.0,
        connect_timeout: float = 60.0,
    ) -> None:
        self._make = make
        self._backend, self._timeout = backend, timeout
        self._old, self._options = old, dict(options or {})
        self._generations: Generations | None = None
        with _CALLER:
            self._names = frozenset(() if callable(own) else checks.listed("own", own))
            self._own = self._is_own if self._names else own
            if replicas_every is not None:
                copied = {"own": self._own, "old": old, "topology": self._options.get("topology")}
                self._generations = Generations(replicas_every, copied)
            self._memory = None if memory is None else checks.integer("memory", memory, 1, _MOST_BYTES)
        self._grace, self._connect_timeout = grace, timedelta(seconds=connect_timeout)
        self._name, self._store = _agent()
        self._training: T | None = None
        self._nest: Nest | None = None  # of its state
        self._version: Version | None = None
        self._prepared: _Prepared | None = None
        self._before: Before | None = None
        self._number = 0  # of the rendezvous that this worker came to last
        self._members: list[Worker] = []  # of that one
        self._in_group = False
        self._closed = False
        self._failed = False  # for good, whatever the agent calls for
        store = self._store.clone()  # type: ignore[attr-defined]
        self._watch = Watch(store, self._name.host, abort_groups)
        meet.post(self._store, meet.Ready(), self._name)

    def __repr__(self) -> str:
        return f"<elastic.Job, worker {self._name}, step {self.steps}>"

    @property
    def steps(self) -> int:
        """The number of steps that are committed."""
        return 0 if self._version is None else self._version.steps

    @property
    def training(self) -> T:
        """The object made by `make` for the current ranks. Raises MeshcastError before the first attempt."""
        if self._training is None:
            raise _CALLER.error(MeshcastError, "nothing is trained yet; it is there in attempt()")
        return self._training

    @contextmanager
    def attempt(self) -> Iterator[T]:
        """Runs its block on all ranks, once the current ranks have met and have the state of the job.

        Where a rank died, what is inside ends early and nothing is raised; the next attempt begins with the
        ranks that are there then. `steps` is the number of steps committed. Without commit() inside, nothing
        is.

        Raises:
            LayoutError: on all ranks: an entry of state_dict() that cannot travel, before the first step;
                state that no rank holds any longer, listed in the field `gone`; too few ranks for the
                `memory` of one.
            Others as they come from inside.
        """
        if self._closed:
            raise _CALLER.error(MeshcastError, "attempt() after close()")
        self._ready()
        assert self._training is not None
        self._before = Before(self._training)
        with self._or_loss("the attempt"):
            yield self._training
            self._before = None

    def commit(self, update: Callable[[], Any]) -> Any:
        """Ends a step: all ranks call it when their gradients are complete, and none returns from `update`
        unless all will. Returns what `update` did.

        update: changes parameters, optimizer, schedulers and what else the state has, on this rank alone. It
            makes no collective call, since ranks may have exited by then: clip gradients before.

        Raises:
            LayoutError: on all ranks, after the step: an entry of state_dict() that the step made, and that a
                rank that joins could not take.
        """
        version = self._version
        assert version is not None
        result = self._commit(version._replace(steps=version.steps + 1), update)
        self._check_stepped()
        if self._generations is not None and self._in_group:
            self._generations.committed(self.steps, self._number, len(self._members), self._held)
        return result

    def close(self) -> None:
        """Ends the job, together with all ranks: none is left that still needs another one."""
        while not self._closed:
            self._ready()
            if not self._closed:  # else the others had agreed already
                assert self._version is not None
                with self._or_loss("close()"):
                    self._commit(self._version, self._end)
        leave_groups("the job is over")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # the others need not wait for this rank until it has ended
            self._watch.stop()
            abort_groups(f"{OP}: this rank has left the job with {kind.__name__}")

    def _end(self) -> None:
        self._watch.stop()
        self._closed = True
        meet.post(self._store, meet.Finished())

    def _commit(self, version: Version, finish: Callable[[], Any]) -> Any:
        self._prepared = _Prepared(version, finish)
        others_called = self._agree()
        result = self._finish()
        if others_called:
            self._in_group = False  # together with all others, which learnt it in the same call
        return result

    def _agree(self) -> bool:
        """Returns whether any rank knows that others are to join. Ends on no rank before it has begun on
        all."""
        called = torch.tensor(int(self._watch.newest(self._number) is not None))
        dist.all_reduce(called, dist.ReduceOp.MAX, group=self._control_group)
        return bool(called)

    def _finish(self) -> Any:
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        result = prepared.finish()
        self._version = prepared.version
        self._before = None
        return result

    def _ready(self) -> None:
        """Returns once this rank is in a group of all that are there, with the state of the job."""
        while not self._closed and (not self._in_group or self._watch.lost(self._number)):
            with self._or_loss("the meeting of the ranks"):
                self._regroup()

    def _regroup(self) -> None:
        """Raises where a rank is lost meanwhile; another try then begins with what was committed last."""
        begin = time.monotonic()
        leave_groups(f"{OP}: the ranks change")
        self._in_group = False
        met = self._meet()
        if met is None:
            return
        call, start = met
        self._members = call.members
        rank, size = call.members.index(self._name), len(call.members)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
        self._join(start.port, rank, size)
        training = self._make()
        if self._timeout is not None:  # groups of meshes have torch's default
            for group in list(c10d._world.pg_map):
                c10d._set_pg_timeout(self._timeout, group)
        steps = self.steps
        nest = self._nest_of(training)
        check_budget(self._memory, training, self._training, self._control_group)
        if start.version is not None:
            held = steps if self._version is not None else None
            steps = self._move(training, nest, held, call.members, start)
        version = Version(self._number, steps)

        def take() -> None:
            self._training, self._nest = training, nest

        self._in_group = True
        self._commit(version, take)
        if start.version is None and any(worker.restart for worker in call.members):
            warnings.warn(
                f"{OP}: rank {rank} of {size} begins at step 0: workers died, and none that lives has the "
                "state of the job",
                RuntimeWarning,
                stacklevel=2,
            )
        log.info("%s: rank %d of %d at step %d after %.2f s", OP, rank, size, steps, time.monotonic() - begin)

    def _meet(self) -> tuple[meet.Call, meet.Start] | None:
        """Comes to the newest rendezvous, and settles what the ranks were at. None where the job is over."""
        while True:
            newest = self._watch.newest(self._number, 1.0)
            if self._watch.agent_lost:
                raise _CALLER.error(MeshcastError, self._watch.agent_lost)
            if newest is None:
                continue
            self._number, call = newest
            if not call.members:
                self._over()
                return None
            if self._name not in call.members:  # it came while another one joined; the next is for it
                continue
            meet.post(self._store, meet.Arrival(self._version), self._number, self._name)
            start = meet.wait_until(lambda: meet.found(self._store, meet.Start, self._number), _PAUSE)
            assert start is not None
            if start.port:
                self._settle(start)
                return call, start

    def _settle(self, start: meet.Start) -> None:
        """Completes what another rank has committed, or undoes what no one has."""
        latest, prepared = start.version, self._prepared
        if latest is None or self._name not in start.previous:
            self._prepared = None
            return
        if prepared is not None and prepared.version == latest != self._version:
            log.info("%s: step %d is completed, as on other ranks", OP, latest.steps)
            self._finish()
        if self._version != latest:
            self._failed = True
            raise _CALLER.error(
                MeshcastError,
                f"worker {self._name} has the state of step {self.steps}, others that of step "
                f"{latest.steps}; all ranks must make the same calls of commit()",
            )
        self._prepared = None
        if self._before is not None:
            self._before.restore()
            self._before = None

    def _join(self, port: int, rank: int, size: int) -> None:
        dist.init_process_group(
            self._backend,
            store=meet.connect(port, os.environ["MASTER_ADDR"]),
            rank=rank,
            world_size=size,
            timeout=self._connect_timeout,
        )
        group = dist.group.WORLD
        assert group is not None
        try:
            group._get_backend(torch.device("cpu"))
            self._control_group = group
        except RuntimeError:  # a group for GPUs alone
            self._control_group = dist.new_group(backend="gloo", timeout=self._connect_timeout)
        for each in {group, self._control_group}:
            c10d._set_pg_timeout(self._timeout or c10d.default_pg_timeout, each)

    def _nest_of(self, training: T) -> Nest:
        """Returns the names of the state of what was just made. Raises LayoutError for what cannot travel:
        before a rank dies, when it would be too late."""
        with _CALLER:
            state = training.state_dict()
            nest = Nest(state)
            if self._options.get("strict", True):
                check_entries(nest.flat(state))
        return nest

    def _check_stepped(self) -> None:
        assert self._nest is not None
        if not self._options.get("strict", True) or self._options.keys() & {"rename", "maps", "only"}:
            return
        with _CALLER:
            entries = self._nest.flat(self.training.state_dict())
            check_entries(entries, f". {_IN_MAKE}")
            for name, value in entries.items():
                if isinstance(value, torch.Tensor) and name not in self._nest.names:
                    raise LayoutError(
                        f"{name!r} of state_dict() has come with step {self.steps}; what make() returns "
                        f"lacks it, so a rank that joins could not take it over. {_IN_MAKE}"
                    )

    def _is_own(self, name: str) -> bool:
        return self._nest is not None and not self._names.isdisjoint(self._nest.above(name))

    def _move(
        self, training: T, nest: Nest, held: int | None, members: list[Worker], start: meet.Start
    ) -> int:
        """Fills what was just made with the state of the previous ranks. Returns its steps."""
        now = {name: rank for rank, name in enumerate(members)}
        state = {} if held is None else self._held()
        # The previous ranks are all in one layout at least, so that any may be lost; and steps are compared.
        everywhere = (Layout(list(range(len(start.previous))), [Replicate()]), (1,))
        new = {**nest.flat(training.state_dict()), _STEPS: torch.zeros(1, dtype=torch.int64)}
        where = self._places(state, everywhere)
        try:
            moved = remesh(state, where, new, **_changed(start.previous, now), own=self._own, **self._options)
        except LayoutError as error:
            if not error.gone or self._generations is None:
                raise
            moved = self._move_back(new, now, error)
        steps = int(moved.pop(_STEPS))
        training.load_state_dict(nest.nested(moved))
        return steps

    def _move_back(self, new: dict[str, Any], now: Mapping[Worker, int], gone: LayoutError) -> Any:
        """Fills `new` with the newest copies that are whole. On all ranks, as `gone` is."""
        assert self._generations is not None
        chosen = self._generations.choose(now, self._control_group, self._members_of)
        if chosen is None:
            raise gone
        members, replicas = chosen
        moved = remesh(None, None, new, **_changed(members, now), replicas=replicas, **self._options)
        log.warning("%s: back to step %s, of which there are copies: %s", OP, moved.version, gone)
        return moved

    def _members_of(self, rendezvous: int) -> list[Worker]:
        call = meet.found(self._store, meet.Call, rendezvous)
        assert call is not None
        return call.members

    def _held(self) -> dict[str, Any]:
        assert self._nest is not None
        return {**self._nest.flat(self.training.state_dict()), _STEPS: torch.tensor([self.steps])}

    def _places(self, state: Mapping[str, Any], everywhere: Place) -> dict[str, Place]:
        found = {}
        for name in state:
            place = self._old(name) if callable(self._old) else (self._old or {}).get(name)
            if place is not None:
                found[name] = place
        return {**found, _STEPS: everywhere}

    @contextmanager
    def _or_loss(self, what: str) -> Iterator[None]:
        """Ends its block early, without an error, where another rank died. Waits for the agent to say so."""
        try:
            yield
        except Exception as error:
            if self._failed or not _may_be_loss(error):
                raise
            if not self._watch.wait_for_loss(self._number, self._grace) or self._watch.agent_lost:
                raise
            log.info("%s: %s ended early at step %d: %s", OP, what, self.steps, error)
            self._in_group = False

    def _over(self) -> None:
        """The job ended without this worker: in agreement with it, or before it was part of it."""
        if self._prepared is not None and self._prepared.finish == self._end:
            self._finish()
            return
        if self._version is None:
            log.info("%s: the job was over before this worker joined it", OP)
            self._watch.stop()
            sys.exit(0)
        self._failed = True
        raise _CALLER.error(
            MeshcastError,
            f"another worker ended with exit code 0 at step {self.steps} of this one, without close()",
        )


def _changed(previous: Sequence[Worker], now: Mapping[Worker, int]) -> dict[str, Any]:
    """Arguments of remesh, of the previous workers."""
    return {
        "lost": [rank for rank, name in enumerate(previous) if name not in now],
        "ranks": {rank: now[name] for rank, name in enumerate(previous) if name in now},
    }


def _may_be_loss(error: BaseException | None) -> bool:
    if isinstance(error, LayoutError | ScheduleError):  # some calls raise these for any cause
        return not getattr(error, "gone", ()) and _may_be_loss(error.__cause__)
    return isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)


def _agent() -> tuple[Worker, dist.TCPStore]:
    """Returns this worker's name, and the store of the agent."""
    variables = os.environ
    if not {"LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"} <= variables.keys():
        raise _CALLER.error(MeshcastError, "start this program with python -m meshcast.elastic.run")
    store = meet.connect(int(variables["MASTER_PORT"]), variables["MASTER_ADDR"])
    if not store.check([meet.AGENT]):
        raise _CALLER.error(
            MeshcastError,
            "this program was started by torchrun, which ends all ranks where one dies; start it with "
            "python -m meshcast.elastic.run",
        )
    # Its workers differ in their restart counts, and each rendezvous has a store of its own.
    join_job(store.compare_set(meet.JOB, "", os.urandom(8).hex()).decode())
    return Worker.here(), store

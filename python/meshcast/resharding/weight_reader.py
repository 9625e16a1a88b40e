"""WeightReader: versions of a WeightSync for processes outside its group, as one that has just restarted; how
they are offered is in weight_offers.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from typing_extensions import Self

from ..base import checks, forks
from ..base.boxes import Box, box_text, common, extents, without
from ..base.observe import log
from ..base.wire import pack, unpack
from ..errors import (
    AbortedError,
    Caller,
    DeadlineExceededError,
    LayoutError,
    MeshcastError,
    PeerLostError,
)
from ..groups.parent import seconds
from ..groups.private import Contact
from ..groups.store import within
from ..layout import Layout
from ..transfers.digest import added
from .compiled import as_dtensor, tensor_spec
from .meeting import (
    AGAIN,
    CHOOSE,
    PAUSE,
    TORN,
    Ask,
    Holding,
    Meeting,
    Offered,
    Questions,
    Served,
    Taken,
    others,
    waited,
)
from .meshes import positive_placements
from .state_arguments import Reading
from .state_entries import ReshardedState, names_text

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .state_dict import Where

__all__ = ["TensorManifest", "WeightManifest", "WeightReader"]

_T = TypeVar("_T")
_OP = "WeightReader"
_GATHER = 0.2  # seconds that a first offer waits for those of ranks that may have died
_GRACE = 1.0  # seconds that the store gets beyond the limit of a call


@dataclass(frozen=True)
class TensorManifest:
    """A tensor of a version.

    Attributes:
        shape, dtype: of the whole tensor, as it is served.
        digest: of all of its values, as ``digest=True`` compares it, however it is sharded; None where it was
            not asked for, or where the ranks that have the version do not have all of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    digest: int | None = None


@dataclass(frozen=True)
class WeightManifest:
    """A version, before a byte of it moves.

    Attributes:
        version: its number.
        tensors: by name.
    """

    version: int
    tensors: Mapping[str, TensorManifest]


class _Newest(NamedTuple):
    """The newest version that is offered: number of the question, when it was put or first answered, and
    those that have this version, with their ranks and contacts."""

    questions: Questions
    number: int
    asked: float
    version: int
    holding: Holding
    chosen: dict[int, int]  # offer by rank
    contacts: dict[int, str]  # by rank
    ranks: int


class _Placed(NamedTuple):
    """Destinations in a version that was found: layouts that name this process by its number in the meeting,
    and those of the destinations, with the shapes of what this process gets."""

    found: _Newest
    wanted: dict[str, Layout]
    shapes: dict[str, tuple[Layout, tuple[int, ...]]]


class _Place(NamedTuple):
    """A destination by itself. mesh: of a result that is a DTensor."""

    where: Layout
    device_type: str
    mesh: DeviceMesh | None
    placements: tuple[Any, ...]

    def layout(self, ndim: int) -> Layout:
        """The layout of a tensor of so many dimensions."""
        placements = positive_placements(self.placements, ndim)
        return self.where if self.mesh is None else Layout(self.mesh, placements)


def _places(destinations: Mapping[str, Any], rank: int) -> dict[str, _Place]:
    """Returns the destinations of one rank that is in all of them. Raises LayoutError for others, and for
    tensors to receive into."""
    if not isinstance(destinations, Mapping):
        raise LayoutError(f"destinations {checks.shown(destinations)}: expected a mapping by name")
    reading, found = Reading(rank, {}), {}
    for name, where in destinations.items():
        wanted, mesh, placements = reading.wanted(name, where, None, True)
        if wanted.layout is None:
            raise LayoutError(f"the destination of {name!r} is a tensor; give (mesh, placements) or a Layout")
        if rank not in wanted.layout.ranks:
            raise LayoutError(f"rank {rank} is not in the destination of {name!r}, {wanted.layout}")
        found[name] = _Place(wanted.layout, wanted.device_type, mesh, placements or ())
    return found


class WeightReader:
    """Versions of a model's weights for a process outside the group of a `WeightSync`: an engine that has
    restarted, one that was added, an evaluation.

    The ranks of the WeightSync give it the same store as ``readers=``. The reader gets the newest version
    that is whole on ranks that have received it, from all that have it, while training and pushes continue.
    Where these do not have it, the ranks that push serve it: in their next push, or at once with
    ``keep=True``. It may lie in any layout. A version that is replaced while it is read is not returned: the
    reader then asks for the newest again.

    Args:
        store: connected with the server of the store that the WeightSync got, with the same prefixes.
        destinations: {name: (mesh, placements)}, or a Layout, or (Layout, "cuda"), as for
            reshard_state_dict: what this process wants, of the names that the WeightSync receives, or that
            its ranks push.
        rank: the number of this process in these destinations; by default its rank in the default process
            group.
        timeout: seconds that a call may take.
        digest: compare a digest of every tensor at both ends.

    Raises:
        LayoutError: a wrong argument.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``, the last of which reads from outside::

        server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # that of rank 0
        ports, trains, serves = [server.port], dist.get_rank() == 0, dist.get_rank() in (1, 2)
        dist.broadcast_object_list(ports)
        store = dist.TCPStore("localhost", ports[0], is_master=False)
        weights = {"w": distribute_tensor(torch.ones(4, 2), DeviceMesh("cpu", [0]), [Replicate()])}
        where = {"w": (DeviceMesh("cpu", [1, 2]), [Shard(0)])}
        with meshcast.WeightSync(weights if trains else None, where, readers=store) as sync:
            if trains:
                sync.push(1)
            elif serves:
                sync.pull(1)
            else:
                with meshcast.WeightReader(store, {"w": meshcast.Layout([3], [Replicate()])}) as reader:
                    assert reader.pull() == 1
                    assert bool((reader.state["w"] == 1).all())
            dist.barrier()
    """

    def __init__(
        self,
        store: dist.Store,
        destinations: Mapping[str, Where],
        *,
        rank: int | None = None,
        timeout: float | timedelta = 60.0,
        digest: bool = False,
    ) -> None:
        self._fork_count = forks.count
        self._turn = threading.Lock()
        self._closed = False
        self._state: ReshardedState | None = None
        with Caller(_OP):
            if not isinstance(store, dist.Store):
                raise LayoutError(f"store {checks.shown(store)}: expected a torch.distributed.Store")
            if rank is None:
                if not dist.is_initialized():
                    raise LayoutError("rank=None without a process group; give the number of this process")
                rank = dist.get_rank()
            self._rank = checks.integer("rank", rank, 0, (1 << 31) - 2)
            self._limit = seconds(timeout, 60.0)
            self._digest = bool(digest)
            self._where = _places(destinations, self._rank)
        self._questions, self._trainers = Questions(store), Questions(store, pushing=True)
        self._waits: int | None = None  # the question that is open for ranks that push
        self._lacking: PeerLostError | None = None  # of what was offered, since a call has begun to ask
        self._placed: _Placed | None = None
        with Caller(_OP):
            self._contact = Contact(self._limit)

    def manifest(self, version: int | None = None, *, digest: bool = False) -> WeightManifest:
        """The newest version that can be read, and its tensors; nothing is moved. The next `pull` may find a
        newer one.

        version: the oldest that will do. digest: of every tensor, which the ranks that have the version
        compute: each value is read once, on one of them.

        Raises:
            DeadlineExceededError: no rank has offered such a version within the limit.
        """
        wanted = self._checked("manifest", version)
        deadline = time.monotonic() + self._limit
        with self._turn:
            sums: dict[str, int] | None = None
            while sums is None:
                found = self._find(wanted, deadline)
                try:
                    sums = self._summed(found, deadline) if digest else {}
                finally:
                    self._close(found)
        return WeightManifest(
            found.version,
            {
                name: TensorManifest(each.shape, each.dtype, sums.get(name))
                for name, each in found.holding.items()
            },
        )

    def pull(self, version: int | None = None) -> int:
        """Makes the newest version current that can be read, and returns its number. `state` has its tensors;
        those of the version before stay as they are.

        version: the oldest that will do; it waits for that, for a push as well. Without it, the current
        version stays current where no newer one is offered at once.

        Raises:
            DeadlineExceededError: no such version was offered within the limit, or none arrived.
            LayoutError: a name that is not served, or a destination that does not fit its tensor. Nothing
                was moved.
            PeerLostError, MeshcastError: the last attempt failed in this way, and the limit has passed.
                PeerLostError: also where those that have offered do not have all of it.
        """
        wanted = self._checked("pull", version)
        begin = time.monotonic()
        deadline = begin + self._limit
        failed: MeshcastError | None = None
        with self._turn:
            while True:
                current = -1 if self._state is None else self.version or 0
                if version is not None and current >= wanted:
                    return current
                newer = max(wanted, current + 1)
                found = None
                try:
                    if version is None and current >= 0:  # what is current will do
                        found = self._find_now(newer, deadline)
                        if found is None:
                            return current
                    else:
                        try:
                            found = self._find(newer, deadline, self._place)
                        except DeadlineExceededError as late:
                            raise failed or late from None
                    # A rank that freezes must not take all of the time.
                    self._state = self._received(found, (time.monotonic() + deadline) / 2)
                    return found.version
                except LayoutError:
                    raise
                except MeshcastError as error:
                    failed = error
                    log.info("%s: a version was not read: %s", _OP, error)
                    if time.monotonic() >= deadline:
                        raise
                finally:
                    if found is not None:
                        self._close(found)
                time.sleep(max(min(AGAIN, deadline - time.monotonic()), 0.0))

    @property
    def state(self) -> ReshardedState:
        """The current version: {name: tensor}, with its `version`. Raises MeshcastError before the first
        pull."""
        if self._state is None:
            raise Caller(_OP).error(MeshcastError, "no version has been pulled yet")
        return self._state

    @property
    def version(self) -> int | None:
        """The number of the current version; None before the first pull."""
        return None if self._state is None else self._state.version

    def close(self) -> None:
        """Ends it. The current version stays usable."""
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{_OP} of {len(self._where)} names, version {self.version}>"

    def _checked(self, what: str, version: int | None) -> int:
        forks.check(self._fork_count, f"{_OP}.{what}")
        caller = Caller(f"{_OP}.{what}")
        if self._closed:
            raise caller.error(AbortedError, "it was closed")
        with caller:
            return 0 if version is None else checks.integer("version", version, 0, (1 << 62) - 1)

    def _within(self, call: Callable[[], _T], deadline: float) -> _T:
        limit = max(deadline - time.monotonic(), 0.0) + _GRACE
        return within(limit, call, "asking for weights", Caller(_OP, phase="agree"))

    def _late(self, text: str, elapsed: float) -> DeadlineExceededError:
        caller = Caller(_OP, phase="wait")
        return caller.error(DeadlineExceededError, text, elapsed=elapsed, limit=self._limit)

    def _find(
        self, least: int, deadline: float, fits: Callable[[_Newest], object] = lambda _: None
    ) -> _Newest:
        """Asks until a version is offered. fits(): raises where it will not do; PeerLostError where another
        offer may."""
        self._lacking = None
        begin, answers = time.monotonic(), 0
        found: _Newest | None = None
        try:
            while True:
                start = time.monotonic()
                found, answered = self._within(partial(self._asked_all, least, deadline, fits), deadline)
                if found is not None:
                    return found
                answers, now = max(answers, answered), time.monotonic()
                if now >= deadline:
                    if self._lacking is not None:
                        raise self._lacking
                    what = "any version" if not least else f"version {least} or a newer one"
                    why = f"{answers} ranks have answered, and have none" if answers else "none has answered"
                    raise self._late(f"waited {now - begin:.1f} s for {what}: {why}", now - begin)
                time.sleep(max(min(start + AGAIN, deadline) - now, 0.0))
        finally:
            self._stop_waiting(found)

    def _find_now(self, least: int, deadline: float) -> _Newest | None:
        """Asks once, all ranks that answer at any time."""
        self._lacking = None

        def ask() -> _Newest | None:
            found, _ = self._asked(least, deadline)
            if found is not None and self._will_do(found, self._place):
                return found
            if self._trainers.offering() > 0:
                found, _ = self._asked_trainers(least, min(time.monotonic() + AGAIN, deadline))
                if found is not None and self._will_do(found, self._place):
                    return found
            if self._lacking is not None:
                raise self._lacking
            return None

        found: _Newest | None = None
        try:
            found = self._within(ask, deadline)
            return found
        finally:
            self._stop_waiting(found)

    def _stop_waiting(self, found: _Newest | None) -> None:
        """Closes the question to ranks that push, unless that is what was found."""
        number, self._waits = self._waits, None
        if number is not None and (found is None or found.questions is not self._trainers):
            with suppress(Exception):  # ranks that push find that no reader chooses
                self._within(partial(self._trainers.close, number), time.monotonic())

    def _asked_all(
        self, least: int, deadline: float, fits: Callable[[_Newest], object]
    ) -> tuple[_Newest | None, int]:
        """One question to ranks that have received, and a look for answers of those that push."""
        until = min(time.monotonic() + AGAIN, deadline)
        found, answered = self._asked(least, deadline)
        if found is None or not self._will_do(found, fits):
            found, more = self._asked_trainers(least, until)
            answered += more
            if found is not None and not self._will_do(found, fits):
                found = self._waits = None
        return found, answered

    def _will_do(self, found: _Newest, fits: Callable[[_Newest], object]) -> bool:
        try:
            fits(found)
        except PeerLostError as error:
            found.questions.close(found.number)
            self._lacking = error
            return False
        except Exception:
            found.questions.close(found.number)
            raise
        return True

    def _asked(self, least: int, deadline: float) -> tuple[_Newest | None, int]:
        """One question to ranks that have received. Returns the newest version that is offered, and how many
        ranks have answered."""
        questions = self._questions
        now = time.monotonic()
        until = min(deadline, now + AGAIN)
        if questions.offering() < 1:
            return None, 0
        number = questions.ask(pack(Ask(least, max(deadline - now, PAUSE), self._contact.text)))
        offers = self._offers(questions, number, until, _GATHER)
        found = self._newest(questions, number, now, offers)
        if found is None:
            questions.close(number)
        return found, len(offers)

    def _asked_trainers(self, least: int, until: float) -> tuple[_Newest | None, int]:
        """The same of ranks that push. The question stays open where they do not answer."""
        questions = self._trainers
        if self._waits is not None and not questions.heard(f"ask/{self._waits}"):
            self._waits = None  # they have not seen this process choose
        if self._waits is None:
            self._waits = questions.ask(pack(Ask(least, self._limit, self._contact.text)))
        number = self._waits
        offers = self._offers(questions, number, until, CHOOSE / 4)
        found = self._newest(questions, number, time.monotonic(), offers)
        if found is None and offers:
            questions.close(number)
            self._waits = None
        return found, len(offers)

    def _offers(self, questions: Questions, number: int, until: float, gather: float) -> list[Offered]:
        """The answers to a question, the last of which come so many seconds after the first that has a
        version."""
        offers: list[Offered] = []
        first: float | None = None

        def look() -> bool | None:
            nonlocal first
            count = int(questions.store.add(f"offers/{number}", 0))
            while len(offers) < count:
                text = questions.heard(f"offer/{number}/{len(offers) + 1}")
                if text is None:  # it is being written
                    break
                offers.append(unpack(Offered, text))
            now = time.monotonic()
            having = [each for each in offers if each.version >= 0]
            if first is None and having:
                first = now
            if first is None and now >= until:
                return False
            whole = len(offers) >= questions.offering() > 0
            told = bool(having) and all(
                each.of and sum(other.job == each.job for other in having) >= each.of for each in having
            )
            if whole or told or (first is not None and now > first + gather):
                return True
            # An answer of ranks that push is not to wait.
            waits = self._waits if questions is self._questions and not offers else None
            return True if waits and int(self._trainers.store.add(f"offers/{waits}", 0)) else None

        waited(look, max(until, time.monotonic()) + gather + AGAIN)
        return offers

    def _newest(
        self, questions: Questions, number: int, asked: float, offers: Sequence[Offered]
    ) -> _Newest | None:
        version = max((each.version for each in offers), default=-1)
        if version < 0:
            return None
        of_version = [(at + 1, each) for at, each in enumerate(offers) if each.version == version]
        kinds = [(each.job, each.holding) for _, each in of_version]
        kind = max(set(kinds), key=lambda each: (each[0], kinds.count(each)))
        holding = kind[1]
        chosen = {each.rank: at for at, each in of_version if (each.job, each.holding) == kind}
        ranks = max(each.ranks for _, each in of_version)
        read = unpack(Holding, questions.store.get(holding).decode())
        contacts = {rank: offers[at - 1].contact for rank, at in chosen.items()}
        return _Newest(questions, number, asked, version, read, chosen, contacts, ranks)

    def _close(self, found: _Newest) -> None:
        with suppress(Exception):  # the store's keys are all that would be left
            self._within(lambda: found.questions.close(found.number), time.monotonic())

    def _meet(self, found: _Newest, deadline: float, boxes: Any = None) -> Taken:
        questions, number = found.questions, found.number
        late = time.monotonic() > found.asked + CHOOSE / 2
        if late or not self._within(lambda: questions.heard(f"ask/{number}"), deadline):
            text = f"it took too long to choose who sends version {found.version}, and asks again"
            raise Caller(_OP, phase="agree").error(MeshcastError, text)
        ranks = sorted(found.chosen)
        meet = Taken(
            found.version,
            tuple(found.chosen[rank] for rank in ranks),
            tuple(ranks),
            tuple(found.contacts[rank] for rank in ranks),
            found.ranks,
            self._digest,
            max(deadline - time.monotonic(), PAUSE),
            boxes or {},
        )
        self._within(lambda: questions.store.set(f"meet/{number}", pack(meet)), deadline)
        return meet

    def _place(self, found: _Newest) -> _Placed:
        """Returns where the destinations of this process lie in a version that was found. Raises LayoutError
        where they do not fit, and PeerLostError where those that offer it do not have all of them."""
        if self._placed is not None and self._placed.found is found:
            return self._placed
        missing = [name for name in self._where if name not in found.holding]
        if missing:
            raise Caller(_OP, phase="agree").error(
                LayoutError,
                f"{names_text(missing)}: version {found.version} has no such tensor; it has "
                f"{names_text(list(found.holding))}",
            )
        placed = _Placed(found, {}, {})
        with Caller(_OP, phase="agree"):
            for name, place in self._where.items():
                tensor = found.holding[name]
                layout = place.layout(len(tensor.shape))
                local, pieces = layout.pieces(tensor.shape)[self._rank]
                placed.shapes[name] = layout, local
                boxes = [piece[0] for piece in pieces if all(low < high for low, high in piece[0])]
                self._check_served(name, tensor, boxes, found)
                if boxes:
                    held = ((local, pieces),)
                    placed.wanted[name] = Layout._of_held((found.ranks,), held, len(tensor.shape))
        self._placed = placed
        return placed

    def _received(self, found: _Newest, deadline: float) -> ReshardedState:
        """Returns the destinations of this process, filled from a version that was found."""
        _, wanted, shapes = self._place(found)
        self._placed = None
        arrived = self._moved(found, wanted, deadline) if wanted else ReshardedState()
        result = ReshardedState()
        for name, place in self._where.items():
            tensor, (layout, local) = found.holding[name], shapes[name]
            x = arrived.pop(name, None)
            if x is None:
                x = torch.empty(local, dtype=tensor.dtype, device=place.device_type)
            result[name] = (
                x
                if place.mesh is None
                else as_dtensor(x, tensor_spec(place.mesh, layout, tensor.shape, tensor.dtype))
            )
        result.version = found.version
        return result

    def _moved(self, found: _Newest, wanted: dict[str, Layout], deadline: float) -> ReshardedState:
        """Returns the values in these layouts, which name this process by its number in the meeting."""
        meet = self._meet(found, deadline)
        name, ranks, store = str(found.number), (*meet.ranks, meet.number), found.questions.for_meetings
        meeting = Meeting(store, name, ranks, meet.number, meet.timeout, found.contacts)
        # Those that push may hold other types than are served.
        cast = () if found.questions is self._questions else wanted
        dtypes = {name: found.holding[name].dtype for name in cast}
        try:
            return meeting.move(
                {},
                {name: (layout, self._where[name].device_type) for name, layout in wanted.items()},
                deadline=deadline,
                lost=others(found.holding.values(), meet),
                digest=self._digest,
                strict=False,
                dtype={name: dtype for name, dtype in dtypes.items() if dtype.is_floating_point},
            )
        finally:
            meeting.close()

    def _check_served(self, name: str, tensor: Served, boxes: Sequence[Box], found: _Newest) -> None:
        """Raises PeerLostError where the ranks that have the version do not have all of these boxes."""
        pieces = tensor.layout.pieces(tensor.shape)
        served = [piece[0] for rank in found.chosen if rank in pieces for piece in pieces[rank][1]]
        for box in boxes:
            rest = without(box, served)
            if rest:
                others = [rank for rank in tensor.layout.ranks if rank not in found.chosen]
                raise PeerLostError(
                    f"no rank that has answered has {box_text(rest[0])} of {name!r} in version "
                    f"{found.version}; ranks {others} have not answered",
                    phase="agree",
                    peer=others[0] if others else None,
                )

    def _summed(self, found: _Newest, deadline: float) -> dict[str, int] | None:
        """The digests of all tensors that the ranks have all of, each value read on one rank. None where a
        rank has another version by then."""
        boxes: dict[int, dict[str, tuple[Box, ...]]] = {offer: {} for offer in found.chosen.values()}
        whole = []
        for name, tensor in found.holding.items():
            pieces = tensor.layout.pieces(tensor.shape)
            rest: list[Box] = [tuple((0, size) for size in tensor.shape)]
            rest = [box for box in rest if all(extents(box))]
            for rank, offer in found.chosen.items():
                for piece in pieces[rank][1] if rank in pieces else ():
                    mine = [both for box in rest if (both := common(box, piece[0])) is not None]
                    if mine:
                        boxes[offer][name] = (*boxes[offer].get(name, ()), *mine)
                        rest = [left for box in rest for left in without(box, mine)]
            if not rest:
                whole.append(name)
        self._meet(found, deadline, boxes)
        questions, sums = found.questions, dict.fromkeys(whole, 0)

        def gather() -> bool | None:
            torn = False
            for offer in boxes:
                key = f"sums/{found.number}/{offer}"
                text = waited(partial(questions.heard, key), deadline)
                if text is None:
                    return None
                torn = torn or text == TORN
                for name, value in ({} if text == TORN else unpack(dict[str, int], text)).items():
                    if name in sums:
                        sums[name] = added((sums[name], value))
            return not torn

        whole_version = self._within(gather, deadline)
        if whole_version is None:
            text = f"waited {self._limit:.1f} s for digests of version {found.version}"
            raise self._late(text, self._limit)
        return sums if whole_version else None

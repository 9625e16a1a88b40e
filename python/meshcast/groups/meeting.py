"""How the ranks of a private group meet and connect, at the begin of each of its lives."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from .. import _C
from ..base.host import host_identity
from ..base.observe import log
from ..errors import AbortedError, DeadlineExceededError, MeshcastError
from ..topology import Topology
from .board import (
    LOOK,
    Board,
    NotPostedError,
    OtherMeetingError,
    Watches,
    meet,
    refuse_meeting,
)
from .network import Network
from .rails import agreed_count, first_rails, interfaces
from .shared_memory import LocalMemory
from .shortage import Shortage, as_shortage, few_descriptors
from .store import store_failed

__all__ = ["Meeting", "Met", "cause_in"]

_PEER_LOST = "4"  # ErrorKind::PeerLost of a posted cause
_REFUSED_CALL = "64"  # likewise, of csrc/core/group/refusals.cpp


@dataclass
class Met:
    """What a life of a group has. board, control: its stores; interfaces: of each host; first: by lane, the
    ordinal of the first call that all ranks have still to make."""

    core: _C.GroupCore
    board: Board
    control: Any
    topology: Topology
    interfaces: int
    first: dict[int, int]


def cause_in(control: Any) -> str:
    """Returns why a rank ended the group: a line as csrc/core/group/bulletin.cpp encodes it (kind, reporter
    and peer), then the text. "" where there is none, and for a call that a rank refused: the next life goes
    on."""
    try:
        if control is None or not control.check(["cause"]):
            return ""
        text = str(control.get("cause").decode(errors="replace"))
    except Exception:  # the store has gone: it has nothing more to say, and the limit holds
        return ""
    return "" if text.startswith(f"{_REFUSED_CALL} ") else text


class Meeting:
    """One rank's part in one life.

    known: what ranks posted when they met before. closing(): why this rank ends the group, "" while it does
    not. what: the ranks meet for. waits(): called once the meeting takes longer than a moment.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        name: str,
        timeout: float,
        known: dict[int, str],
        closing: Callable[[], str],
        what: str,
        waits: Callable[[], None],
    ) -> None:
        self._ranks, self._rank, self._name, self._timeout = tuple(ranks), rank, name, timeout
        self._known, self._closing, self._what, self._waits = known, closing, what, waits

    def run(self, life: Callable[[], Any], deadline: float, first: Callable[[], dict[int, int]]) -> Met:
        """Waits until every member is here, then connects. Raises Shortage where a rank has run out of
        something before that, or refused what they meet for: the members may meet again, in another life.
        OtherMeetingError: likewise, where that was something else. life(): the
        store of this one. first(): by lane, the first call that this rank has still to make."""
        what = f"connecting the private group of ranks {list(self._ranks)}"
        where: Any = {"rank": self._rank, "op": "connect", "phase": "connect"}
        known = Watches(self._known)
        try:
            store = life()
            board = Board(store, self._rank, len(self._ranks))
            try:
                if few := few_descriptors():
                    raise MeshcastError(few, **where)
                threads = _C.WorkThread()  # kept by the core as well
                memory = LocalMemory(len(self._ranks))
                names, told = interfaces()
                network = Network(names, self._timeout)
            except Exception as error:
                short = as_shortage(error, **where)
                if short is None:
                    raise
                if not refuse_meeting(store, str(short)):
                    raise short from error
                raise Shortage(short) from error
            known.watch_by(lambda text: network.watch(json.loads(text)[3]))
            mine = json.dumps([host_identity(), memory.offer, told, network.offer(), list(first().items())])
            said = meet(
                board,
                self._ranks,
                mine,
                deadline,
                self._closing,
                known,
                self._what,
                self._waits,
            )
        except (MeshcastError, Shortage, OtherMeetingError):
            raise
        except Exception as error:
            short = as_shortage(error, **where)
            raise short or self._meeting_failed(error, what, known, deadline) from error
        control = dist.PrefixStore("control", store)
        try:
            return self._connect(board, control, memory, network, said, known, deadline)
        except Exception as error:
            failure = error
            if not isinstance(error, MeshcastError):
                failure = as_shortage(error, **where) or self._meeting_failed(error, what, known, deadline)
            # The others have met this rank and would wait for it.
            with suppress(Exception):
                _C.post_cause(control, self._rank, failure)
            if failure is error:
                raise
            raise failure from error
        finally:
            del threads

    def _connect(
        self,
        board: Board,
        control: Any,
        memory: LocalMemory,
        network: Network,
        said: dict[int, str],
        watches: Watches,
        deadline: float,
    ) -> Met:
        members: dict[int, list[Any]] = {rank: json.loads(text) for rank, text in said.items()}
        hosts: dict[int, str] = {rank: member[0] for rank, member in members.items()}
        count = agreed_count({rank: member[2] for rank, member in members.items()}, self._rank)
        topology = Topology.from_hosts(hosts, nics_per_host=count)
        first: dict[int, int] = {}
        for member in members.values():
            for lane, ordinal in member[4]:
                first[lane] = max(first.get(lane, 0), ordinal)
        offers = {rank: member[1] for rank, member in members.items() if member[0] == hosts[self._rank]}
        looked = time.monotonic()

        def lost() -> tuple[int, str] | None:
            """Who of those that have met has gone, as far as this rank sees or another told; raises where one
            has given up for another reason."""
            nonlocal looked
            if time.monotonic() - looked < LOOK:
                return None
            looked = time.monotonic()
            head, _, cause = cause_in(control).partition("\n")
            if not cause:
                return watches.lost(board, self._ranks)
            kind, _, peer = head.split()
            if kind == _PEER_LOST and int(peer) != self._rank:
                return int(peer), cause
            raise AbortedError(f"rank {self._rank}: {cause}", rank=self._rank, op="connect", phase="connect")

        memory.meet(board, self._ranks, offers, deadline, lost)
        transport = network.transport(
            {rank: members[rank][3] for rank in self._ranks},
            first_rails(self._ranks, topology, count),
            self._rank,
            board.store,
            deadline,
        )
        self._known.update(said)
        log.info("rank %d: connected with ranks %s", self._rank, self._name)
        core = _C.GroupCore(
            transport,
            control,
            list(self._ranks),
            self._rank,
            self._name,
            memory.settle(board, deadline, lost),
        )
        own = Board(dist.PrefixStore("board", board.store), self._rank, len(self._ranks))
        return Met(core, own, control, topology, count, first)

    def _meeting_failed(
        self, error: Exception, what: str, watches: Watches, deadline: float
    ) -> MeshcastError:
        """For what torch or the system raised. The process of the store may be a member's."""
        if isinstance(error, NotPostedError) and time.monotonic() >= deadline:
            return DeadlineExceededError(
                f"rank {self._rank}: {what} did not finish in time: {error}",
                rank=self._rank,
                peer=error.ranks[0],
                op="connect",
                phase="connect",
            )
        lost = watches.lost_soon(self._ranks, self._rank)
        return store_failed(error, what, lost, rank=self._rank, op="connect", phase="connect")

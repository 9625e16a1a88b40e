"""The network over which the hosts of a private group exchange messages: UCX, or gloo."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import _C
from ..base import settings
from ..base.observe import log
from ..errors import LayoutError, MeshcastError
from .rails import connect
from .shortage import shortage
from .ucx import plane

__all__ = ["Network"]

_told: set[str] = set()


class Network:
    """One rank's end, from its offer to the transport.

    names: the interfaces to use, () for the library's choice. choice: a transport, else that which
    `MESHCAST_TRANSPORT` names. Where this rank cannot have it, its offer says so, and transport() raises on
    every rank.
    """

    def __init__(self, names: Sequence[str], timeout: float, choice: str = "") -> None:
        self._names, self._timeout = names, timeout
        self._plane: _C.UcxPlane | None = None
        self._failure = ""
        try:
            choice = choice or settings.TRANSPORT.choice()
            if choice != "gloo":
                self._plane = plane(names, timeout)
        except MeshcastError as error:
            if shortage(error):  # that is for the caller to tell: gloo needs threads and descriptors likewise
                raise
            if choice != "auto":
                self._failure = str(error)
            elif str(error) not in _told:
                log.warning("hosts exchange messages over gloo, since UCX cannot be used: %s", error)
                _told.add(str(error))

    def offer(self) -> dict[str, Any]:
        """Returns what the other ranks have to know."""
        if self._failure:
            return {"kind": "none", "why": self._failure}
        if self._plane is None:
            return {"kind": "gloo"}
        process, rails, breaks = self._plane.address()
        return {
            "kind": "ucx",
            "wire": _C.UcxPlane.WIRE,
            "process": process,
            "rails": [rail.hex() for rail in rails],
            "breaks": list(breaks.items()),
            "nonce": secrets.token_hex(8),
        }

    def watch(self, offer: Mapping[str, Any]) -> Callable[[], str] | None:
        """Returns a function that says why the rank that made this offer has left, "" while that is not
        known; None over gloo, which knows no rank before all have connected."""
        if self._plane is None or offer["kind"] != "ucx":
            return None
        return self._plane.watch(_member(offer))

    def transport(
        self,
        offers: Mapping[int, Mapping[str, Any]],
        first_rail: list[int],
        rank: int,
        store: Any,
        deadline: float,
    ) -> _C.Transport:
        """Connects with the ranks of `offers`, or is ready to. Blocks; deadline: by time.monotonic().

        Raises LayoutError, alike on every rank, where one has none or they do not all use the same."""
        ranks = list(offers)
        for other, offer in offers.items():
            if offer["kind"] == "none":
                raise LayoutError(
                    f"rank {other}: {offer['why']}", rank=rank, peer=other, op="connect", phase="connect"
                )
        kinds = {offer["kind"] for offer in offers.values()}
        if len(kinds) > 1:
            found = ", ".join(f"{offer['kind']} on rank {other}" for other, offer in offers.items())
            raise LayoutError(
                f"all ranks must use one transport, found {found}; set {settings.TRANSPORT.name} alike, or "
                "install UCX everywhere",
                rank=rank,
                op="connect",
                phase="connect",
            )
        wires = {other: offer.get("wire") for other, offer in offers.items()}
        if len(set(wires.values())) > 1:
            found = ", ".join(f"{wire or 'none'} on rank {other}" for other, wire in wires.items())
            raise LayoutError(
                f"all ranks must run one version of meshcast: they send each other messages of unlike forms, "
                f"found {found}; install the same version everywhere",
                rank=rank,
                op="connect",
                phase="connect",
            )
        if self._plane is None:
            rails = connect(store, ranks, rank, self._names, deadline, self._timeout)
            return _C.gloo_transport(rails, first_rail, ranks.index(rank))
        text = json.dumps([offers[other] for other in ranks], sort_keys=True)
        number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
        members = [_member(offer) for offer in offers.values()]
        return self._plane.join(number, members, ranks.index(rank), first_rail)


def _member(offer: Mapping[str, Any]) -> tuple[int, list[bytes], dict[int, int]]:
    return offer["process"], [bytes.fromhex(rail) for rail in offer["rails"]], dict(offer["breaks"])

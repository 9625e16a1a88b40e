"""What is wrong with what the ranks of a round say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fault.rounds import BREAKS, DEATHS, DELAYS, ENDING, FORMING, SILENCES, TRANSFER, Round
from patience import patient

__all__ = ["Outcome", "judge"]

_SEEN_WITHIN = 1.0 + patient(1.0)  # seconds after the death, or after a rank's own call where that is later
_TOLD_WITHIN = 2.0 + patient(1.0)  # seconds, of a refusal: a rank in a known call looks for one after two
_ENDED_WITHIN = patient(5.0)  # seconds, of destroy_process_group


@dataclass(frozen=True)
class Outcome:
    """wrong: what must not be. before: the victim had not come to the group yet. times: seconds until each
    survivor knew; ended: until its process group was destroyed."""

    round: Round
    wrong: list[str]
    before: bool
    times: list[float]
    ended: list[float]
    said: list[dict[str, Any]]


def judge(round_: Round, said: list[dict[str, Any]], came: bool) -> Outcome:
    """said: by rank. came: whether the victim had posted that it is there, when it failed."""
    return _Judge(round_, said, came).outcome()


class _Judge:
    """What is wrong with what the ranks of a round say."""

    def __init__(self, round_: Round, said: list[dict[str, Any]], came: bool) -> None:
        self._round, self._said = round_, said
        self._wrong: list[str] = []
        self._times: list[float] = []
        self._ended: list[float] = []
        self._at = said[round_.victim].get("failed_at")  # by time.monotonic()
        self._before = round_.moment == "before connect" or (round_.moment in FORMING and not came)

    def outcome(self) -> Outcome:
        round_ = self._round
        self._victim(self._said[round_.victim])
        for rank, found in enumerate(self._said):
            if rank != round_.victim and self._lives(rank, found) and round_.moment not in ENDING:
                self._survivor(f"rank {rank} ", found)
        # Not each of them exchanges bytes with the one that is slow.
        if round_.fault in DELAYS and max(self._times, default=0.0) < 0.9 * round_.delay:
            self._wrong += [f"rank {rank} never waited" for rank in range(round_.world)]
        return Outcome(round_, self._wrong, self._before, self._times, self._ended, self._said)

    def _victim(self, found: dict[str, Any]) -> None:
        round_ = self._round
        wanted: tuple[Any, ...] = (DEATHS.get(round_.fault, 0),)
        if round_.fault == "kill" and not round_.point:
            wanted = (-9, -14)
        if round_.fault == "stop" and not round_.thaws:
            wanted = (-9,)
        if self._at is None or found["status"] not in wanted:
            self._wrong.append(f"the victim did not fail as it should: {found}")
            self._at = self._at or 0.0
            return
        if wanted != (0,) or round_.moment in ENDING:
            return
        who = f"rank {round_.victim}, the victim, "
        if "WRONG BYTES" in found["output"]:
            self._wrong.append(f"{who}has wrong bytes")
        if round_.fault in DELAYS:
            if "error" in found:
                self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
        elif "error" not in found:
            self._wrong.append(f"{who}never raised, in {found['calls']} calls")
        elif not found["typed"]:
            self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
        if found["destroyed"] > _ENDED_WITHIN:
            self._wrong.append(f"{who}took {found['destroyed']:.1f} s to end its process group")

    def _lives(self, rank: int, found: dict[str, Any]) -> bool:
        if found["status"] != 0:
            how = "hung" if found["status"] is None else f"ended with status {found['status']}"
            self._wrong.append(f"rank {rank} {how}: {found['output']}")
            return False
        self._ended.append(found["destroyed"])
        if found["destroyed"] > _ENDED_WITHIN:
            self._wrong.append(f"rank {rank} took {found['destroyed']:.1f} s to end its process group")
        return True

    def _survivor(self, who: str, found: dict[str, Any]) -> None:
        round_ = self._round
        if "WRONG BYTES" in found["output"]:
            self._wrong.append(f"{who}has wrong bytes: {found['text']}")
        if round_.fault in DELAYS:
            if "error" in found:
                self._wrong.append(f"{who}raised {found['error']}: {found['text']}")
            else:
                self._times.append(found["longest"])
            return
        if "error" not in found:
            self._wrong.append(f"{who}never raised, in {found['calls']} calls")
            return
        since = max(self._at, found["begin"])
        called = found["seen"] - found["elapsed"]
        took = found["seen"] - max(since, called)
        self._times.append(took)
        what = f"by {found['error']}: {found['text']}"
        named = found["peer"] == round_.victim or f"rank {round_.victim}" in found["text"]
        if not found["typed"]:
            self._wrong.append(f"{who}raised {what}")
        elif self._at_limit() or self._late_over_gloo(found):
            named = named or round_.fault in BREAKS  # both ends of what broke live: there is no culprit
            named = named or str(round_.victim) in found["text"]
            most = round_.limit * 1.5 if round_.limit >= 4.0 else round_.limit + 2.0
            if found["elapsed"] > most:
                self._wrong.append(f"{who}knew {found['elapsed']:.2f} s after its call, {what}")
        else:
            # On a machine that is short of cores, the process is not gone as soon as it is killed.
            gone = self._said[round_.victim]["gone_at"] if round_.fault in DEATHS else None
            most = _TOLD_WITHIN if round_.fault == "cuda" else _SEEN_WITHIN
            if took > most + max(0.0, (gone or since) - since):
                self._wrong.append(f"{who}knew after {took:.2f} s, {what}")
        if not named:
            self._wrong.append(f"{who}blames rank {found['peer']}, {what}")
        # A refusal moves nothing, and leaves the group in use: so where a GPU fails before its call begins.
        in_use = round_.fault == "cuda" and (round_.moment == "agree" or found["again"] == "it went through")
        if found["again"] and not in_use:
            self._wrong.append(f"{who}called again: {found['again']}")
        if found.get("without"):
            self._wrong.append(f"{who}went on without the victim: {found['without']}")

    def _at_limit(self) -> bool:
        """Whether only the limit can tell, as docs/errors.md says."""
        round_ = self._round
        if round_.fault in SILENCES or self._before:
            return True
        # Over gloo a death is seen by those alone who exchange bytes with the dead rank.
        return round_.transport == "gloo" and round_.moment in (*FORMING, "connecting", "agree", "agreeing")

    def _late_over_gloo(self, found: dict[str, Any]) -> bool:
        """Whether gloo did not end a send over a connection that broke, as docs/errors.md says of it."""
        round_ = self._round
        may = round_.transport == "gloo" and round_.fault in BREAKS
        return may and round_.moment in (*TRANSFER, "moving") and found["error"] == "DeadlineExceededError"

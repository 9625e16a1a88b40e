"""Of which group a refusal is taken to be where nobody waits, and the arguments do not tell."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from meshcast.groups import refusals
from meshcast.groups.refusals import OpenRefusal, OpenRefusals


class Told:
    def wait(self) -> None:
        pass


@dataclass
class Group:
    """A group as this rank sees it: no other rank waits for it."""

    ranks: tuple[int, ...]
    up: bool
    used: bool = True
    rank: int = 0
    refused: list[str] = field(default_factory=list)

    def is_up(self) -> bool:
        return self.up

    def was_used(self) -> bool:
        return self.used or self.up

    def is_untouched(self) -> bool:
        return not self.used

    def is_awaited(self) -> bool:
        return False

    def refuse_call(self, error: Exception, _timeout: float, **_: bool) -> Told:
        self.refused.append(str(error))
        return Told()


def settled(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(refusals, "_HOLD", 0.05)
    opened = OpenRefusals(dist.HashStore, range(4), 0, lambda: list(groups), lambda _: groups[0])
    refusal = OpenRefusal(ValueError("no"), frozenset(), False, 1.0)
    opened.add(refusal, keeps=True)
    OpenRefusals.settle(refusal, [opened])
    opened.close()
    return [group.refused for group in groups]


def test_the_only_group_that_was_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [Group((0, 1), up=True), Group((0, 2), up=False, used=False)]
    assert settled(groups, monkeypatch) == [["no"], []]


def test_a_group_between_two_lives_may_be_meant_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank may see it up: each would tell another group, and ranks would count calls differently."""
    groups = [Group((0, 1), up=True), Group((0, 1, 2), up=False)]
    assert settled(groups, monkeypatch) == [[], []]
    assert settled([groups[1]], monkeypatch) == [[]]

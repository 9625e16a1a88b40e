"""Refuses files of several jobs: those that processes of one job write have the ids of its process groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import LayoutError

__all__ = ["check_one_job"]

_NAMED = 4  # files of each job


def check_one_job(files: Sequence[tuple[str, Sequence[str]]], which: str) -> None:
    """files: with their ids; those without one may be of any job. which: what to give in place of these.

    A process has an id for each store that its groups came from. Where groups are made anew, who goes on has
    both the old id and the new: so files of one job hang together, though no id need be in all.
    """
    known = [(name, set(ids)) for name, ids in files if ids]
    if not known:
        return
    mine, left = set(known[0][1]), known
    while joining := [each for each in left if each[1] & mine]:
        mine.update(*(ids for _, ids in joining))
        left = [each for each in left if not each[1] & mine]
    if left:
        names = [name for name, _ in left]
        of_first = [name for name, ids in known if ids & mine]
        raise LayoutError(
            f"{_listed(of_first)} and {_listed(names)} are of different jobs, by the ids in them; {which}"
        )


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" (and {more} more)" if more > 0 else "")

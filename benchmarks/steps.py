"""How far a benchmark is. Ranks that `run_ranks` has started have no terminal: rank 0 writes a file, which
the process that started them shows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from meshcast.base.progress import Progress

from .cluster.launch import VARIABLE  # of the environment: the path of that file

__all__ = ["VARIABLE", "Steps", "follow", "steps"]

T = TypeVar("T")


class Steps:
    """As Progress, in ranks as well. Makes no thread, so that nothing disturbs what is measured."""

    def __init__(self, what: str, total: int) -> None:
        path = os.environ.get(VARIABLE)
        here = os.environ.get("RANK", "0") == "0"
        self._file = Path(path) if path and here else None
        self._shown = Progress(what, total, ticks=False, here=here and not path)
        self._what, self._total, self._count = what, total, 0

    def __enter__(self) -> Steps:
        self._shown.__enter__()
        self._tell()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._shown.__exit__(kind, error, traceback)

    def done(self) -> None:
        self._count += 1
        self._shown.done()
        self._tell()

    def _tell(self) -> None:
        if self._file is not None:
            self._file.write_text(f"{self._count} {self._total} {self._what}\n")


def steps(items: Collection[T], what: str) -> Iterator[T]:
    """The items, and how many of them are done."""
    with Steps(what, len(items)) as counted:
        for item in items:
            yield item
            counted.done()


def follow(shown: Progress, file: Path) -> None:
    """Shows what rank 0 has written last."""
    text = file.read_text() if file.exists() else ""
    if not text.endswith("\n"):  # nothing yet, or it is being written
        shown.look()
        return
    count, total, what = text.rstrip("\n").split(" ", 2)
    shown.at(int(count), int(total), what)

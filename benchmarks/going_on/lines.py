"""What the processes of a job tell of the steps that they commit, read while it grows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

Line = dict[str, Any]


class Whole(NamedTuple):
    """A step that all ranks of a group have told. time: of the last of them."""

    step: int
    group: str
    ranks: int
    time: float
    parts: dict[int, int]  # of the state, by process


class Lines:
    """folder: that `examples/elastic/train.py --metrics` writes to. of: lines by process, in their order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.of: dict[int, list[Line]] = {}
        self.whole: list[Whole] = []
        self._read: dict[Path, int] = {}  # bytes
        self._open: dict[tuple[int, str], list[tuple[int, Line]]] = defaultdict(list)

    def read(self) -> None:
        """What is new. A line that has no end yet, or never will have, is left alone."""
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            for text in whole.splitlines():
                self._take(int(path.stem), json.loads(text))

    def _take(self, process: int, line: Line) -> None:
        self.of.setdefault(process, []).append(line)
        key = line["step"], line["group"]
        self._open[key].append((process, line))
        said = self._open[key]
        if len(said) == line["ranks"]:
            parts = {each: told["part"] for each, told in said}
            self.whole.append(Whole(*key, line["ranks"], max(told["time"] for _, told in said), parts))
            del self._open[key]

    def all(self) -> Iterable[Line]:
        for lines in self.of.values():
            yield from lines

"""The progress of something long, and the time left: a bar on a terminal, a line every ten seconds in a file.

Both go to stderr, so that what a program prints stays as it is. Nothing is shown in the first two seconds,
nor on other ranks than 0, nor inside something else that shows its progress. This file imports nothing of
meshcast: `doctor` loads it alone.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

__all__ = ["Progress", "seconds_text", "tell", "track"]

T = TypeVar("T")

_AFTER = 2.0  # seconds; shorter operations show nothing
_EVERY = 10.0  # seconds from line to line
_TICK = 0.5  # seconds from one drawing of the bar to the next
_WIDTH = 20  # of the bar
_ERASE = "\r\x1b[2K"  # the line that the cursor is in

_shown: Progress | None = None  # one at a time


class Progress:
    """Shows how many of `total` things are done, while its block runs.

    Args:
        what: is done, in a word or two.
        total: how many; None for a single thing: then the time so far is shown, and the text that it gives to
            tell().
        stream: a text stream instead of stderr.
        clock: seconds, as of time.monotonic.
        ticks: a thread keeps the display up to date while one thing takes long. Without it, for processes
            that fork or are measured, that happens in done(), at() and look() alone.
        here: whether this process shows anything; None: where the variable RANK is 0 or not set.

    Example::

        from meshcast.base.progress import Progress

        with Progress("files", total=3) as progress:
            for _ in range(3):
                progress.done()
    """

    def __init__(
        self,
        what: str,
        total: int | None = None,
        *,
        stream: Any = None,
        clock: Callable[[], float] = time.monotonic,
        ticks: bool = True,
        here: bool | None = None,
    ) -> None:
        self._what, self._total, self._clock, self._ticks = what, total, clock, ticks
        self._stream = sys.stderr if stream is None else stream
        self._here = os.environ.get("RANK", "0") == "0" if here is None else here
        self._single = total is None
        self._count = 0
        self._begun = self._counted = self._due = 0.0  # the start, the last one done, the next line
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="meshcast-progress", daemon=True)
        self._bar = ""
        self._above: list[_Above] = []

    def __enter__(self) -> Progress:
        global _shown
        self._begun = self._counted = self._clock()
        self._due = self._begun + _AFTER
        self._here = self._here and _shown is None and self._stream is not None
        if self._here:
            _shown = self
            if self._ticks:
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        global _shown
        if not self._here:
            return
        self._ended.set()
        with self._lock:
            self._here = False
            self._write(_ERASE if self._bar else "")
            self._bar = ""
            for each in self._above:
                each.end()
        if self._ticks:
            self._thread.join()
        _shown = None

    def done(self, count: int = 1) -> None:
        """Counts so many more."""
        self.at(self._count + count)

    def at(self, count: int, total: int | None = None, what: str | None = None) -> None:
        """Sets how many are done in all, of a total and under a name that may be new."""
        with self._lock:
            if what is not None and what != self._what:  # something else has begun
                self._what, self._begun, self._counted = what, self._clock(), self._clock()
            if total is not None:
                self._total, self._single = total, False
            if count != self._count:
                self._count, self._counted = count, self._clock()
        self.look()

    def part(self, done: float) -> None:
        """Sets how much of a single thing is done, from 0 to 1, unless it is less than before. Does nothing
        where things are counted."""
        if self._single:
            self._total = 100
            self.at(max(self._count, int(100 * done)))

    def look(self) -> None:
        """Shows what is due to be shown."""
        with self._lock:
            now = self._clock()
            if not self._here or now < self._due:
                return
            if self._stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown"):
                self._due = now + _TICK
                self._draw()
            else:
                self._due = now + _EVERY
                self._write(f"{self._what}: {self.text()}\n")

    def text(self) -> str:
        """Such as "12 of 40, 31 s, about 72 s left"."""
        now = self._clock()
        spent = seconds_text(now - self._begun)
        if self._total is None:
            return spent if self._count == 0 else f"{self._count}, {spent}"
        count = f"{self._count} %" if self._single else f"{self._count} of {self._total}"
        if self._count <= 0:
            return f"{count}, {spent}"
        # The others take as long as those that are done. One that takes longer is taken to end now.
        each, others = (self._counted - self._begun) / self._count, self._total - self._count
        left = max(each * others - (now - self._counted), each * (others - 1), 0.0)
        return f"{count}, {spent}, about {seconds_text(left)} left"

    def _tick(self) -> None:
        while not self._ended.wait(_TICK):
            self.look()

    def _draw(self) -> None:
        if not self._bar:
            self._above = [_Above(name, self) for name in ("stdout", "stderr") if _on_terminal(name)]
        full = min(_WIDTH, _WIDTH * self._count // self._total) if self._total else 0
        columns = os.get_terminal_size(self._stream.fileno()).columns or 80
        self._bar = f"{self._what} [{'=' * full:{_WIDTH}}] {self.text()}"[: columns - 1]
        self._write(_ERASE + self._bar)

    def write_above(self, stream: Any, text: str) -> None:
        """Writes whole lines to a stream of the terminal that the bar is on."""
        with self._lock:
            self._write(_ERASE if self._bar else "")
            stream.write(text)
            stream.flush()
            self._write(self._bar)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class _Above:
    """Stands for stdout or stderr on the bar's own terminal: lines go above the bar, one without an end waits
    for it."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name, self._progress, self._rest = name, progress, ""
        self._stream = getattr(sys, name)
        self._lock = threading.RLock()
        self._stream.flush()
        setattr(sys, name, self)

    def write(self, text: str) -> int:
        with self._lock:
            lines, end, self._rest = (self._rest + text).rpartition("\n")
            if end:
                self._progress.write_above(self._stream, lines + end)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        """Puts the stream back in its place."""
        if getattr(sys, self._name) is self:
            setattr(sys, self._name, self._stream)
        with self._lock:
            self._stream.write(self._rest)
            self._stream.flush()
            self._rest = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _on_terminal(name: str) -> bool:
    stream = getattr(sys, name)
    return stream is not None and stream.isatty()


def track(items: Iterable[T], what: str, total: int | None = None, *, ticks: bool = True) -> Iterator[T]:
    """Yields the items, and shows how many of them are done; total: their number, where len() does not know
    it.

    Example::

        from meshcast.base.progress import track

        assert sum(track(range(4), "numbers")) == 6
    """
    known = len(items) if total is None and isinstance(items, Sized) else total
    with Progress(what, known, ticks=ticks) as progress:
        for item in items:
            yield item
            progress.done()


def tell(done: float) -> None:
    """Reports which part of something long is done, from 0 to 1. Costs next to nothing where it is not
    shown."""
    if _shown is not None:
        _shown.part(done)


def seconds_text(seconds: float) -> str:
    """Such as "70 s", "3 min 20 s", "2 h 5 min"."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"

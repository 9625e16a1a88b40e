"""What benchmarks have in common: command lines, the machine they ran on, results that are kept, the pages
and charts that are made of them."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import re
import select
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_LARGE = 64 << 10  # bytes: raw results above that are kept compressed

Found = dict[str, Any]


def parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks NAME`."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}",
        description=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def positive(kind: type[float]) -> Callable[[str], float]:
    """The type of an option: a number above zero."""

    def parse(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text}: must be positive")
        return value

    return parse


def names(known: Sequence[str], what: str, separator: str = ",") -> Callable[[str], list[str]]:
    """The type of an option: names that are known."""

    def parse(text: str) -> list[str]:
        chosen = text.split(separator)
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown {what} {name!r}; known are {', '.join(known)}")
        return chosen

    return parse


def machine(name: str) -> Found:
    """The command, the commit and the machine, for the head of a file of results: what a reader must know to
    take the figures for what they are."""
    import torch

    return {
        "command": f"python -m benchmarks {name} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
    }


_BEFORE = re.compile(r"^python -m benchmarks(?:\.(\w+))?(?= -|$)")  # how commands were spelled once


def command(head: Found) -> str:
    """The command of a run as it is typed now; results keep what was typed then."""

    def now(found: re.Match[str]) -> str:
        name = found[1] or "reshard"
        return f"python -m benchmarks {'calls' if name == 'transports' else name}"

    return _BEFORE.sub(now, head["command"])


def origin(head: Found) -> str:
    """The command of a run, and what it ran on."""
    return (
        f"`{command(head)}`: commit {head['commit']}, {head['cores']} cores, kernel {head['kernel']}, "
        f"torch {head['torch']}"
    )


def _commit() -> str:
    """The commit of the tree that this file is in; "unknown" without git, or outside a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


def load(path: Path) -> Any:
    """Raw results, compressed or not; None where there are none."""
    packed = path.with_name(path.name + ".gz")
    if path.exists():
        return json.loads(path.read_text())
    return json.loads(gzip.decompress(packed.read_bytes())) if packed.exists() else None


def save(path: Path, results: Any) -> None:
    """Writes all or nothing: a reader finds the old text or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text((results if isinstance(results, str) else json.dumps(results, indent=1)) + "\n")
    part.replace(path)


def pack(path: Path) -> None:
    """Compresses raw results that are large, to the same bytes each time."""
    if path.exists() and path.stat().st_size > _LARGE:
        packed = path.with_name(path.name + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()


def in_child(
    call: Callable[..., Found], *args: Any, name: str, look: Callable[[], None] = lambda: None
) -> Found:
    """What a call returns, made in a child: a peak of memory is that of a whole process, and a process that
    had a store has threads. This process must have no threads. look: is called now and then while it
    waits."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, json.dumps(call(*args)).encode())
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    while not select.select([reader], [], [], 0.5)[0]:
        look()
    with os.fdopen(reader) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"{name}: the process that measured it has ended with an error")
    return dict(json.loads(text))


@dataclass(frozen=True)
class Page:
    """Where the figures of a benchmark are kept, and what is made of them.

    name: as `python -m benchmarks` takes it. kept: the file of raw results. path: of the page, whose text
    between the marks is made of them. charts: by path, what draws it.
    """

    name: str
    kept: str
    path: str
    text: Callable[[Any], str]
    charts: Mapping[str, Callable[[Any, Path], None]] = field(default_factory=dict)

    def parser(self, text: str | None) -> argparse.ArgumentParser:
        """The parser of the benchmark, with the options of `finish`."""
        options = parser(self.name, text)
        options.add_argument(
            "--out", "--json", type=Path, metavar="FILE", help="keep the figures there and nowhere else"
        )
        options.add_argument("--no-publish", action="store_true", help="leave files as they are")
        return options

    def finish(self, args: argparse.Namespace, results: Any) -> None:
        """Keeps the figures as the options say."""
        if args.out is not None:
            save(args.out, results)
        elif not args.no_publish:
            self.publish(results)

    @property
    def results(self) -> Any:
        """The figures that are kept."""
        return load(RESULTS / self.kept)

    def publish(self, results: Any) -> None:
        """Keeps these figures, and makes the page and the charts of them."""
        save(RESULTS / self.kept, results)
        pack(RESULTS / self.kept)
        self.draw(results)

    def draw(self, results: Any) -> None:
        """The page and the charts alone."""
        replace(ROOT / self.path, self.name, self.text(results))
        for path, draw in self.charts.items():
            draw(results, ROOT / path)
        print(f"wrote {', '.join([self.path, *self.charts])}")


def replace(page: Path, name: str, text: str) -> None:
    """Puts the text of a benchmark between its marks in the page."""
    begin, end = (f"<!-- {word} of what python -m benchmarks {name} writes -->" for word in ("Begin", "End"))
    before, found, rest = page.read_text().partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise SystemExit(f"{page}: the marks `{begin}` and `{end}` are missing")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], align: str = "lr") -> str:
    """A table in Markdown. align: l or r for each column; the last one is that of all further columns."""
    sides = align.ljust(len(head), align[-1])
    rule = "|".join("---:" if side == "r" else "---" for side in sides)
    first, *lines = ("| " + " | ".join(row) + " |" for row in (head, *rows))
    return "\n".join([first, f"|{rule}|", *lines])


def new_figure(width: float, height: float, **options: Any) -> Figure:
    """A chart, in inches. Ranks, which import the same modules, load no matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), **options)


def save_chart(figure: Figure, path: Path, **options: Any) -> None:
    """The same picture for the same figures, without frames."""
    import matplotlib as mpl

    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    unsaid = "Date" if path.suffix == ".svg" else "Software"
    with mpl.rc_context({"svg.hashsalt": "meshcast"}):
        figure.savefig(path, metadata={unsaid: None}, **options)

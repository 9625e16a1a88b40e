"""The blocks of code in the documents, and what each of them is.

A block is run by a test, or its commands are looked up by one, unless a comment in the line before it says
what it is:

    <!-- output -->         what a program prints
    <!-- drawing -->        a picture made of letters
    <!-- sketch: why -->    commands or settings that do not run as they stand

Python that does not run as it stands says so to its reader, in its first line; a comment before it, which no
reader of the page sees, changes nothing:

    # Fragment: why
"""

from __future__ import annotations

import builtins
import re
import symtable
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"<!-- (output|drawing|sketch: \S.*) -->")
_FRAGMENT = re.compile(r"# (Fragment: \S.*)\n")
_SPAN = re.compile(r"`((?:make|python|PYTHONPATH=[^\s`]+|torchrun|examples/[^\s`]+\.sh) [^`]+)`")
_INDENTED = re.compile(r" {4}((?:make|python|pip|torchrun) .+)")


class Block(NamedTuple):
    """A block between fences. line: of its first line, from 1; mark: of the comment before it, or of the
    first line of a fragment, else empty."""

    page: str
    line: int
    language: str
    text: str
    mark: str


def pages() -> list[str]:
    """Those with blocks that somebody may copy, from the root of the tree."""
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    return [str(path.relative_to(ROOT)) for path in [*named, *sorted(found)]]


def blocks(page: str) -> list[Block]:
    """Between fences, in order."""
    found: list[Block] = []
    fence, language, begin, mark = "", "", 0, ""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip(fence[0]):
                text = "\n".join(lines[begin : number - 1]) + "\n"
                fragment = _FRAGMENT.match(text) if language == "python" else None
                mark = fragment[1] if fragment else mark
                found.append(Block(page, begin + 1, language, text, mark))
                fence = ""
        elif opening := re.match(r"(`{3,}|~{3,})(.*)", bare):
            fence, language, begin = opening[1], opening[2].strip(), number
            before = _MARK.fullmatch(lines[number - 2].strip()) if number > 1 else None
            mark = before[1] if before and language != "python" else ""
    return found


def programs(page: str) -> list[Block]:
    """The blocks of Python that a test runs."""
    return [block for block in blocks(page) if block.language == "python" and not block.mark]


def undefined(programs: Iterable[Block], *, together: bool) -> Iterator[tuple[Block, str]]:
    """Yields the names that programs use and do not define. together: they run one after the other, and later
    ones have the names of earlier ones."""
    known: set[str] = set()
    for program in programs:
        top = symtable.symtable(program.text, program.page, "exec")
        made = {each.get_name() for each in top.get_symbols() if each.is_assigned() or each.is_imported()}
        used = {name for table in _tables(top) for name in _global_names(table)}
        known = made | known if together else made
        for name in sorted(used - known - set(dir(builtins)) - {"__name__", "__file__"}):
            yield program, name


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for each in table.get_children():
        yield from _tables(each)


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    top = table.get_type() == "module"
    for each in table.get_symbols():
        if each.is_referenced() and (top or each.is_global()):
            yield each.get_name()


def commands(page: str) -> Iterator[tuple[int, str]]:
    """(line, command) of what a reader may type: lines of blocks without a language, words in backticks."""
    fenced: set[int] = set()
    for block in blocks(page):
        lines = block.text.splitlines()
        fenced |= set(range(block.line - 1, block.line + len(lines) + 1))
        if block.language in ("", "bash") and not block.mark:
            for number, line in enumerate(lines, start=block.line):
                command = re.sub(r"(^|\s)#.*", "", line).strip()
                if command:
                    yield number, command
    prose = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(prose, start=1):
        if number not in fenced:
            if indented := _INDENTED.fullmatch(line):
                yield number, re.sub(r"\s#.*", "", indented[1]).strip()
            for command in _SPAN.findall(line):
                yield number, command

"""The blocks of code in the documents, and what each of them is.

sybil and pytest-examples run a block in the process of pytest. These run on four ranks, or as torchrun starts
them: a block is run by a test, or its commands are looked up by one, unless a comment in the line before it
says what it is:

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

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
_MARK = re.compile(r"<!-- (output|drawing|sketch: \S.*) -->")
_FRAGMENT = re.compile(r"# (Fragment: \S.*)\n")
_COMMAND = re.compile(r"(?:[A-Z_]+=\S+|make|python|torchrun|(?:examples|tools)/\S+\.sh) \S")
_INDENTED = re.compile(rf"{_COMMAND.pattern}|pip \S")


class Block(NamedTuple):
    """A block between fences. line: of its first line, from 1; mark: of the comment before it, or of the
    first line of a fragment, else empty."""

    page: str
    line: int
    language: str
    text: str
    mark: str


def pages() -> list[str]:
    """Those with blocks that a reader may copy, from the root of the tree."""
    named = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*/README.md")]
    return [str(path.relative_to(ROOT)) for path in [*named, *sorted(found)]]


def _tokens(page: str) -> list[Token]:
    return MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8"))


def blocks(page: str) -> list[Block]:
    """Between fences, in order."""
    found: list[Block] = []
    mark, marked = "", -1  # of the last comment, and the line after it
    for token in _tokens(page):
        begin, end = token.map or (-1, -1)
        if token.type == "html_block":
            comment = _MARK.search(token.content)
            mark, marked = (comment[1] if comment else ""), end
        elif token.type == "fence":
            if token.info == "python":
                fragment = _FRAGMENT.match(token.content)
                own = fragment[1] if fragment else ""
            else:
                own = mark if marked == begin else ""
            found.append(Block(page, begin + 2, token.info, token.content, own))
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
    for block in blocks(page):
        if block.language in ("", "bash") and not block.mark:
            yield from _lines(block.text, block.line)
    for token in _tokens(page):
        line = (token.map or [0])[0] + 1
        if token.type == "code_block":
            yield from (each for each in _lines(token.content, line) if _INDENTED.match(each[1]))
        for each in token.children or []:
            line += each.type in ("softbreak", "hardbreak")
            if each.type == "code_inline" and _COMMAND.match(each.content):
                yield line, each.content


def _lines(text: str, first: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), start=first):
        if command := re.sub(r"(^|\s)#.*", "", line).strip():
            yield number, command

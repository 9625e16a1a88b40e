"""Refuses wide prose and words with plainer ones; codespell knows no phrases, Markdown linters no tables.

Wide lines are looked for in the documents, words of CONTRIBUTING.md's table also in the notebooks and in the
docstrings, comments and texts of the package, and docstrings that begin as an answer does in the package.

python tools/check_docs.py [width | words | docstrings]

Neither check reads code blocks or the output of programs between `<!-- Begin ... -->` and `<!-- End ... -->`.
Tables, and lines that are only a link or an image, may have any width. Words in backticks are names.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_COLUMNS = 120
_LINK = r"!?\[[^\]]*\]\([^)]*\)"
_ONLY_LINKS = re.compile(rf"[-*>\s]*(?:{_LINK}|<?https?://\S+)[.,;:]?\s*")

# (what to look for, what to write): the table "Words" of CONTRIBUTING.md. A test compares the two.
WORDS = {
    "gone": "exited, removed, lost",
    "alike, unlike, likewise": "the same, different, in the same way",
    "of then, of now": "previous, current",
    "any more, anew": "any longer, again",
    "but for": "except for, apart from",
    "none of its own, none of their own": "no ... of its own",
    "let go, lets go": "release, free",
    "on its way, on their way": "in flight",
    "go on, goes on, went on, going on": "continue",
    "is through, are through": "is complete",
    "tell, tells, told": "report, notify, show, distinguish",
    "hear, hears, heard": "receive, learn",
    "mend, mends, mended": "fix",
    "at hand, for want of": "available, without",
    "born, borne, orphan, orphans": "made, tolerated, left behind",
    "beside": "next to, with, compared with, in addition to",
    "stands still, stood still": "waits, is blocked",
    "its like, the like, their like": "similar functions",
    "in place of, in the place of": "instead of",
    "whoever, somebody, nobody": "the rank that, a rank, a user, no rank",
    "muster, guest, wish": "barrier, replica, request",
    "takes for, taken for": "assumed to be, counted as",
}
# A sentence that begins so puts a clause where its subject belongs; a question may.
BEGINNINGS = ("Who", "What", "Of", "Whether")
_PHRASES = "|".join(
    f"[{each[0]}{each[0].upper()}]{each[1:]}".replace(" ", r"\s+")
    for words in WORDS
    for each in words.split(", ")
)
_WORD = re.compile(rf"\b(?:{_PHRASES})\b(?! than|[:(])")  # before a colon or a parenthesis it is a name
_BEGINNING = re.compile(
    rf"(?:^|(?<=[.:!]\s))(?:{'|'.join(BEGINNINGS)}) "
    r"(?!these|those|the |all )(?=[a-z])[^.?|]*(?P<end>[.?|]|$)",
    re.MULTILINE,
)
_LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)\'')  # of C++
# A docstring begins with a noun phrase (a class, a module) or a verb (a function).
NO_DOCSTRING = {"Of", "That", "Those", "What", "Whether", "Who", "How", "Where", "Which"}
# Texts of the package that still have such words: {file: number of them}. A number may only fall.
LEFT = {"csrc/core/group/refusals.cpp": 1}  # no error text: a word between ranks


def documents(root: Path) -> list[Path]:
    named = [root / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*named, *sorted((root / "docs").rglob("*.md"))]


def written_by_hand(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines outside code blocks and the output of programs; numbers count from 1."""
    fence, written = "", False
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.strip()
        if fence:
            fence = "" if bare.startswith(fence) and not bare.strip(fence[0]) else fence
        elif opening := re.match(r"`{3,}|~{3,}", bare):
            fence = opening.group()
        elif bare.startswith("<!-- Begin"):
            written = True
        elif bare.startswith("<!-- End"):
            written = False
        elif not written:
            yield number, line


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines that the limit is for; numbers count from 1."""
    for number, line in written_by_hand(text):
        if not line.strip().startswith("|") and not _ONLY_LINKS.fullmatch(line):
            yield number, line


def wide_lines(text: str) -> list[tuple[int, int]]:
    """(number, columns) of the lines of prose above the limit."""
    return [(number, len(line)) for number, line in prose(text) if len(line) > MAX_COLUMNS]


def words(text: str) -> list[tuple[int, str]]:
    """(line, word) of the words that have plainer ones, in a text without code blocks; lines count from 1."""
    bare = re.sub(r"`[^`]*`|\]\([^)]*\)", lambda code: re.sub(r"\S", "x", code[0]), text)
    found = [(each.start(), each[0]) for each in _WORD.finditer(bare)]
    found += [(each.start(), each[0].split()[0]) for each in _BEGINNING.finditer(bare) if each["end"] != "?"]
    return sorted((bare.count("\n", 0, at) + 1, " ".join(word.split())) for at, word in found)


def words_of_document(text: str) -> list[tuple[int, str]]:
    """(line, word) of a document."""
    kept = dict(written_by_hand(text))
    lines = (kept.get(number, "") for number in range(1, text.count("\n") + 2))
    return words("\n".join(lines))


def words_of_module(text: str) -> tuple[list[tuple[int, str]], int]:
    """(line, word) of the docstrings of a module, and the number of such words in its other texts."""
    tree = ast.parse(text)
    docstrings = set()
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            if docstring is not None:
                docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
                found += [(node.body[0].lineno + line - 1, word) for line, word in words(docstring)]
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
    ]
    return found, sum(len(words(each)) for each in texts if " " in each)


def words_of_source(text: str) -> int:
    """The number of such words in the texts of a C++ or JavaScript file."""
    lines = (line.split("//")[0] for line in text.splitlines())
    texts = (each for line in lines for each in re.findall(r'"((?:[^"\\]|\\.)*)"', line))
    return sum(len(words(each)) for each in texts if " " in each)


def words_of_comments(text: str, python: bool) -> list[tuple[int, str]]:
    """(line, word) of the comments of a Python, C++ or JavaScript file; a phrase may be wrapped. The first
    words of a comment may be a clause: "// What a peer sent." names a member."""
    comments = dict.fromkeys(range(1, text.count("\n") + 2), "")
    if python:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT:
                comments[token.start[0]] = token.string[1:]
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            comments[number] = _LITERAL.sub("", line).partition("//")[2]
    return words("\n".join(comments.values()))


def answers(text: str) -> list[tuple[int, str]]:
    """(line, first word) of the docstrings in a module's text that begin with one of NO_DOCSTRING."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].rstrip(",.:") in NO_DOCSTRING:
            found.append((node.body[0].lineno, words[0]))
    return sorted(found)


def wide() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {columns} columns, the limit is {MAX_COLUMNS}"
        for path in documents(ROOT)
        for number, columns in wide_lines(path.read_text())
    ]


def unplain() -> list[str]:
    """Lines about words in documents, docstrings and comments, and about wrong numbers in LEFT."""
    found: dict[str, list[tuple[int, str]]] = {}
    counts: dict[str, int] = {}
    for path in documents(ROOT):
        if path.name != "CHANGELOG.md":  # history
            text, _, _ = path.read_text(encoding="utf-8").partition("\n## Words\n")  # the table itself
            found[str(path.relative_to(ROOT))] = words_of_document(text)
    for path in sorted((ROOT / "docs" / "tutorials").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        found[str(path.relative_to(ROOT))] = words_of_document(text)
    for path in sorted((ROOT / "python" / "meshcast").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        text = path.read_text(encoding="utf-8")
        found[name], counts[name] = words_of_module(text)
        found[name] += words_of_comments(text, python=True)
    for path in sorted([*(ROOT / "csrc").rglob("*.[hc]*"), *(ROOT / "python" / "meshcast").rglob("*.js")]):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        found[name], counts[name] = words_of_comments(text, python=False), words_of_source(text)
    lines = [
        f"{name}:{number}: {word!r} has a plainer word: the table in CONTRIBUTING.md"
        for name, its in found.items()
        for number, word in its
    ]
    for name, count in counts.items():
        if count != LEFT.get(name, 0):
            least = "lower the number" if count < LEFT.get(name, 0) else "use the words of CONTRIBUTING.md"
            lines.append(f"{name}: its texts have {count} such words, LEFT says {LEFT.get(name, 0)}: {least}")
    return lines


def answering() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line}: begins with {word!r}; begin with a noun or a verb"
        for path in sorted((ROOT / "python" / "meshcast").rglob("*.py"))
        for line, word in answers(path.read_text(encoding="utf-8"))
    ]


def main(arguments: list[str]) -> int:
    checks = {"width": wide, "words": unplain, "docstrings": answering}
    found = [line for name, check in checks.items() if name in (arguments or checks) for line in check()]
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

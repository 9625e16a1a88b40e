"""Refuses docstrings of the package that begin as an answer does, not as a sentence: "What ...", "Of ...".

A docstring begins with a noun phrase (a class, a module) or a verb (a function).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

WORDS = {"Of", "That", "Those", "What", "Whether", "Who", "How", "Where", "Which"}


def offenders(text: str) -> list[tuple[int, str]]:
    """(line, first word) of the docstrings in a module's text that begin with one of WORDS."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        words = (ast.get_docstring(node) or "").split()
        if words and words[0].rstrip(",.:") in WORDS:
            found.append((node.body[0].lineno, words[0]))
    return sorted(found)


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    status = 0
    for path in sorted((root / "python" / "meshcast").rglob("*.py")):
        if path.name == "_build_info.py":  # made by the build
            continue
        for line, word in offenders(path.read_text(encoding="utf-8")):
            status = 1
            print(f"{path.relative_to(root)}:{line}: begins with {word!r}; begin with a noun or a verb")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""tools/check_docs.py: which lines of a document count as prose."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import check_docs

WIDE = "word " * 25  # 125 columns


def test_prose_has_a_limit() -> None:
    assert check_docs.wide_lines("x" * 120) == []
    assert check_docs.wide_lines("x" * 121) == [(1, 121)]
    assert check_docs.wide_lines(f"one\n\n{WIDE}\n") == [(3, 125)]
    assert check_docs.wide_lines(f"see [a](b.md) {WIDE}") == [(1, 139)]


@pytest.mark.parametrize(
    "text",
    [
        f"```\n{WIDE}\n```",
        f"````\n```\n{WIDE}\n````",
        f"| {WIDE} |",
        f"![{WIDE}](picture.png)",
        f"- [{WIDE}](page.md)",
        f"<!-- Begin of what a program writes -->\n{WIDE}\n<!-- End of what a program writes -->",
    ],
)
def test_what_has_none(text: str) -> None:
    assert check_docs.wide_lines(text) == []
    number = text.count("\n") + 2
    assert check_docs.wide_lines(f"{text}\n{WIDE}") == [(number, 125)], "the exception ends with its text"

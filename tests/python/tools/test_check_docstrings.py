"""tools/check_docstrings.py finds docstrings that begin as an answer does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import check_docstrings


@pytest.mark.parametrize("word", sorted(check_docstrings.WORDS))
def test_each_word_is_found(word: str) -> None:
    text = f'"""A module."""\n\n\ndef f():\n    """{word} is given."""\n'
    assert check_docstrings.offenders(text) == [(5, word)]


def test_modules_and_classes_are_looked_at() -> None:
    text = (
        '"""What it is."""\n\n\nclass A:\n    """Of a thing."""\n\n    def f(self):\n        """Is it."""\n'
    )
    assert check_docstrings.offenders(text) == [(1, "What"), (5, "Of")]


def test_sentences_and_none_pass() -> None:
    assert check_docstrings.offenders('"""Ofen and whatever."""\n\n\ndef f():\n    pass\n') == []


def test_the_package_has_none() -> None:
    assert check_docstrings.main() == 0

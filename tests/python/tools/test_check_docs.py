"""tools/check_docs.py: which lines of a document count as prose, and which words have plainer ones."""

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


@pytest.mark.parametrize("phrase", [each for words in check_docs.WORDS for each in words.split(", ")])
def test_each_word_is_found(phrase: str) -> None:
    assert check_docs.words_of_document(f"One line.\nA rank {phrase} here.\n") == [(2, phrase)]
    first, _, rest = phrase.partition(" ")
    if rest:
        assert check_docs.words_of_document(f"A rank {first}\n{rest} here.\n") == [(1, phrase)], "wrapped"
    assert check_docs.words_of_document(f"A rank `{phrase}` here.\n```\n{phrase}\n```\n") == []


@pytest.mark.parametrize("word", check_docs.BEGINNINGS)
def test_clauses_for_subjects_are_found(word: str) -> None:
    assert check_docs.words(f"It ends. {word} it holds is freed.") == [(1, word)]
    assert check_docs.words(f"{word} it holds is freed.") == [(1, word)]
    assert check_docs.words(f"{word} does it hold? It says {word.lower()} it holds.") == []


def test_texts_of_the_package_are_read() -> None:
    module = '"""It goes on."""\n\n\ndef f():\n    raise ValueError("the call goes on, nobody waits")\n'
    assert check_docs.words_of_module(module) == ([(1, "goes on")], 2)
    assert check_docs.words_of_source('fail("the call goes on");  // it goes on\n') == 1


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("int a;\n// It is on\n// its way. `nobody`\n", False),
        ('char a = \'"\';\nint b; // on its way "\nf("http://nobody");\n', False),
        ("a = 1\n# It is on\n# its way. `nobody`\n", True),
        ("a = '# nobody'\nb = 2  # on its way\n", True),
    ],
)
def test_comments_are_read(text: str, python: bool) -> None:
    assert check_docs.words_of_comments(text, python) == [(2, "on its way")]


@pytest.mark.parametrize(("mark", "python"), [("//", False), ("#", True)])
def test_sentences_of_comments_begin_with_a_subject(mark: str, python: bool) -> None:
    text = f"{mark} What a peer sent. What it holds is freed.\n"
    assert check_docs.words_of_comments(text, python) == [(1, "What")]


def test_the_table_for_contributors_has_the_same_words() -> None:
    text = (check_docs.ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    for words, plainer in check_docs.WORDS.items():
        assert f"| {words} | {plainer} |" in text


def test_the_tree_has_none() -> None:
    assert check_docs.main([]) == 0


@pytest.mark.parametrize("word", sorted(check_docs.NO_DOCSTRING))
def test_each_beginning_is_found(word: str) -> None:
    text = f'"""A module."""\n\n\ndef f():\n    """{word} is given."""\n'
    assert check_docs.answers(text) == [(5, word)]


def test_modules_and_classes_are_looked_at() -> None:
    text = (
        '"""What it is."""\n\n\nclass A:\n    """Of a thing."""\n\n    def f(self):\n        """Is it."""\n'
    )
    assert check_docs.answers(text) == [(1, "What"), (5, "Of")]


def test_sentences_and_none_pass() -> None:
    assert check_docs.answers('"""Ofen and whatever."""\n\n\ndef f():\n    pass\n') == []


def test_the_package_has_none() -> None:
    assert check_docs.answering() == []

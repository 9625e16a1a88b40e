"""The blocks of the documents: each is run by a test, or its commands are looked up here, or it says what it
is."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import doc_blocks
import pytest
from doc_blocks import ROOT
from meshcast import cli

from benchmarks.__main__ import BENCHMARKS

# Which test runs the programs of a page: all of them, as doc_blocks.programs lists them.
RUN_BY = {
    "README.md": "tests/multiproc/test_start_pages.py",
    "docs/coming_from_torch.md": "tests/multiproc/cases_docs.py",
    "docs/elastic.md": "tests/multiproc/cases_docs.py",
    "docs/integrations.md": "tests/multiproc/cases_docs.py",
    "docs/observing.md": "tests/multiproc/cases_docs.py",
    "docs/pipelining.md": "tests/multiproc/cases_docs.py",
    "docs/resharding.md": "tests/multiproc/cases_docs.py",
    "docs/start.md": "tests/multiproc/test_start_pages.py",
}
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
VARIABLES = set(re.findall(r"\b([A-Z][A-Z_]+)\b", MAKEFILE))
CPP_TESTS = "".join(path.read_text() for path in (ROOT / "tests" / "cpp").rglob("*.cpp"))
# Names of files that the page has told the reader to make.
OWN_FILES = {"train.py", "quickstart.py", "one_tensor.py", "weights.py", "pipeline.py"}


@pytest.mark.parametrize("page", doc_blocks.pages())
def test_every_program_is_run(page: str) -> None:
    found = doc_blocks.programs(page)
    if found:
        assert page in RUN_BY, (
            f"{page}:{found[0].line}: no test runs this; name one, or begin with '# Fragment: why'"
        )
        path = ROOT / RUN_BY[page]
        assert "programs(" in path.read_text() and Path(page).stem in path.read_text()


@pytest.mark.parametrize("page", doc_blocks.pages())
def test_programs_define_what_they_use(page: str) -> None:
    together = RUN_BY.get(page) == "tests/multiproc/cases_docs.py"
    for block, name in doc_blocks.undefined(doc_blocks.programs(page), together=together):
        pytest.fail(f"{page}:{block.line}: {name} is not defined; define it, or begin with '# Fragment: why'")


def test_no_comment_hides_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader who copies it sees none."""
    monkeypatch.setattr(doc_blocks, "ROOT", tmp_path)
    text = "<!-- sketch: why -->\n```{}\nmake\n```\n"
    (tmp_path / "page.md").write_text(text.format("python") + text.format("bash"))
    python, bash = doc_blocks.blocks("page.md")
    assert (python.mark, bash.mark) == ("", "sketch: why")
    assert doc_blocks.programs("page.md") == [python]
    (tmp_path / "page.md").write_text("<!-- output -->\n\nProse.\n\n```\nmake\n```\n")
    assert [block.mark for block in doc_blocks.blocks("page.md")] == [""], (
        "the comment is not the line before"
    )


def test_a_name_from_nowhere_is_found() -> None:
    text = "import torch\n\n\ndef make():\n    return [torch.ones(size) for _ in range(count)]\n"
    block = doc_blocks.Block("page.md", 1, "python", text, "")
    assert [name for _, name in doc_blocks.undefined([block], together=True)] == ["count", "size"]
    before = doc_blocks.Block("page.md", 9, "python", "size = 1\ncount = 2\n", "")
    assert not list(doc_blocks.undefined([before, block], together=True))
    assert list(doc_blocks.undefined([before, block], together=False))


@pytest.mark.parametrize("page", doc_blocks.pages())
def test_every_block_is_of_a_kind(page: str) -> None:
    for block in doc_blocks.blocks(page):
        known = block.language in ("python", "", "bash") or block.language.startswith("{")
        assert known or block.mark, f"{page}:{block.line}: what is a block of {block.language}?"


@pytest.mark.parametrize("page", doc_blocks.pages())
def test_every_command_is_there(page: str) -> None:
    for line, command in doc_blocks.commands(page):
        wrong = obstacle(command)
        assert not wrong, f"{page}:{line}: {command}: {wrong}"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("make no-such-target", "make has no target no-such-target"),
        ("make test NO_SUCH=1", "make has no variable NO_SUCH"),
        ("python -m meshcast plan --no-such 1", "no-such"),
        ("PYTHONPATH=python python -m benchmarks.no_such", "no module benchmarks.no_such"),
        ("PYTHONPATH=python:. python -m benchmarks no_such", "no benchmark no_such"),
        ("torchrun --nproc-per-node 2 examples/no_such.py", "no file examples/no_such.py"),
        ("torchrun --nproc-per-node 2 examples/gpt/train.py --no-such", "no option --no-such"),
        ("pip install -r no_such.txt", "no file no_such.txt"),
        ("build/release/meshcast_tests '[no such]'", "no test"),
        ("VARIABLE=1 pytest tests/no_such.py", "no file tests/no_such.py"),
        ("no-such-program", "unknown program no-such-program"),
    ],
)
def test_what_is_not_there_is_found(command: str, wrong: str) -> None:
    assert wrong in obstacle(command)


def obstacle(command: str) -> str:
    """Why the command cannot work; empty where nothing is known against it."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    if not words:
        return ""
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        return _of_make(rest)
    if program in ("python", "python3", "pytest"):
        return _of_python(rest)
    if program == "torchrun":
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            rest = rest[1:] if rest[0] in ("--standalone",) or "=" in rest[0] else rest[2:]
        return _of_python(rest)
    if program == "pip":
        files = [rest[at + 1] for at, word in enumerate(rest) if word == "-r"]
        return next((f"no file {name}" for name in files if not (ROOT / name).is_file()), "")
    if program == "meshcast_tests":
        return "" if all(word in CPP_TESTS for word in rest) else f"no test {rest}"
    if (ROOT / words[0]).is_file() and "/" in words[0]:
        return _of_python(words)
    return f"unknown program {words[0]}"


def _of_make(words: list[str]) -> str:
    for word in words:
        name, given, _ = word.partition("=")
        if given and name not in VARIABLES:
            return f"make has no variable {name}"
        if not given and name not in TARGETS:
            return f"make has no target {name}"
    return ""


def _of_python(words: list[str]) -> str:
    if words[:1] == ["-m"]:
        if words[1] == "meshcast":
            return _of_command_line(words[2:])
        parts = words[1].split(".")
        if parts[0] not in ("benchmarks", "meshcast", "tests"):
            return ""
        base = ROOT / "python" if parts[0] == "meshcast" else ROOT
        path = base.joinpath(*parts)
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            return f"no module {words[1]}"
        if words[1] == "benchmarks" and words[2:]:
            if words[2] not in BENCHMARKS:
                return f"no benchmark {words[2]}"
            if words[2] == "cluster" and "--" in words:
                return obstacle(shlex.join(words[words.index("--") + 1 :]))
        return ""
    if not words or words[0].startswith("-") or words[0] in OWN_FILES:
        return ""
    path = ROOT / words[0]
    if not path.is_file():
        return f"no file {words[0]}"
    return _of_example(path, words[1:])


def _of_example(path: Path, words: list[str]) -> str:
    """Whether the program, or what it shares with others, has these options."""
    if "examples" not in path.parts:
        return ""
    sources = [*path.parent.glob("*.py"), *(ROOT / "examples" / "training").glob("*.py")]
    known = "".join(each.read_text() for each in sources)
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    for option in options:
        if f'"{option}"' not in known and option.removeprefix("--").replace("-", "_") not in known:
            return f"no option {option}"
    return ""


def _of_command_line(words: list[str]) -> str:
    if not words or words[0].startswith("-") or "|" in words[0] or words[0].isupper():
        return ""
    if words[0] not in cli.COMMANDS:
        return f"no command {words[0]}"
    parser = cli.parser_of(words[0])
    options = [each for each in words[1:] if each.startswith("--")]
    unknown = [each for each in options if each not in parser._option_string_actions]
    return f"no option {unknown[0]}" if unknown else ""

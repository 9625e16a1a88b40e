"""What the site needs besides Sphinx: help of the command line, docstrings as they are, a first page, the
gallery, and a check that no page needs a network."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import gallery
from docutils import nodes
from meshcast.cli import parser_of
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

_COLUMNS = 100
_TRAILING = re.compile(r"(?<![\w`.*])([A-Za-z][\w.]*_)(?![\w`{])")
_FETCHED = re.compile(
    r"""(<(script|img|iframe)[^>]* src|<link[^>]* href)="(https?:)?//[^"]*"|"""
    r"""(url\(|@import)[^;]{0,3}(https?:)?//[^;)]*"""
)
_FIRST_PAGE = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={page}">
<title>meshcast</title>
<a href="{page}">meshcast</a>
"""


class CommandHelp(SphinxDirective):
    """``{command-help} plan``: what ``python -m meshcast plan --help`` prints."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        command = self.arguments[0]
        parser = parser_of(command)
        parser.formatter_class = lambda prog: argparse.HelpFormatter(prog, width=_COLUMNS)
        text = parser.format_help()
        block = nodes.literal_block(text, text)
        block["language"] = "none"
        return [block]


def escape(_app: Sphinx, _what: str, _name: str, _obj: Any, _options: Any, lines: list[str]) -> None:
    """Names that end in an underscore are links to reStructuredText; in a docstring they are names."""
    literal: int | None = None  # how far the paragraph is indented that a literal block belongs to
    for index, line in enumerate(lines):
        depth = len(line) - len(line.lstrip())
        if literal is not None and line.strip() and depth <= literal:
            literal = None
        if literal is None:
            lines[index] = _TRAILING.sub(r"``\1``", line)
            if line.rstrip().endswith("::"):
                literal = depth


def one_signature(*_: Any) -> None:
    """Of a function with overloads the site shows the signature that has every argument."""
    analyze = ModuleAnalyzer.analyze

    def without_overloads(self: ModuleAnalyzer) -> None:
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = without_overloads  # type: ignore[method-assign]


def fetched(folder: Path) -> list[str]:
    """Everything that a page fetches from a network when it is opened."""
    files = [path for path in sorted(folder.rglob("*")) if path.suffix in (".html", ".css")]
    texts = ((path.relative_to(folder), path.read_text(encoding="utf-8")) for path in files)
    return [f"{name}: {found[0]}" for name, text in texts for found in _FETCHED.finditer(text)]


def finish(app: Sphinx, exception: Exception | None) -> None:
    """Write the gallery, and index.html next to the pages, which lie as their sources do in the tree."""
    if exception is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    gallery.write(folder / "gallery")
    page = f"{app.config.root_doc}.html"
    (folder / "index.html").write_text(_FIRST_PAGE.format(page=page), encoding="utf-8")
    if found := fetched(folder):
        lines = "\n".join(found)
        raise SphinxError(f"{lines}\nthe pages above fetch something from a network when they are opened")
    print(f"{len(list(folder.rglob('*.html')))} pages: {folder}/index.html")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", escape, priority=100)  # before napoleon
    app.connect("builder-inited", one_signature)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""What the site needs beside Sphinx: help of the command line, docstrings as they are, a first page."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from docutils import nodes
from meshcast.cli import parser_of
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

_COLUMNS = 100
_TRAILING = re.compile(r"(?<![\w`.*])([A-Za-z][\w.]*_)(?![\w`{])")
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


def first_page(app: Sphinx, exception: Exception | None) -> None:
    """index.html beside the pages, which lie as their sources do in the tree."""
    if exception is None and app.builder.format == "html":
        page = f"{app.config.root_doc}.html"
        (Path(app.outdir) / "index.html").write_text(_FIRST_PAGE.format(page=page), encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", escape, priority=100)  # before napoleon
    app.connect("builder-inited", one_signature)
    app.connect("build-finished", first_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""Puts a page together of the files that lie beside this one, and the data."""

from __future__ import annotations

import html
import json
from importlib import resources
from pathlib import Path
from typing import Any

from ..base import checks
from ..errors import LayoutError

__all__ = ["write_page"]

_SUFFIXES = (".html", ".htm")


def write_page(path: str | Path, title: str, script: str, data: dict[str, Any]) -> None:
    """Writes a page that shows `data` by the script of that name: "plan" or "timeline". Raises LayoutError
    for other suffixes than .html and .htm, and OSError where the file cannot be written."""
    path = Path(path)
    if path.suffix.lower() not in _SUFFIXES:
        raise LayoutError(f"path {checks.shown(str(path))}: allowed suffixes are {', '.join(_SUFFIXES)}")
    # In a script of HTML, "</" and "<!--" would end or change it.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = _file("page.html")
    parts = {"STYLE": _file("page.css"), "SCRIPT": _file("common.js") + _file(f"{script}.js"), "DATA": text}
    for name, part in parts.items():
        before, after = page.split(f"<!-- {name} -->")
        page = f"{before}{part}{after}"
    path.write_text(page.replace("<!-- TITLE -->", html.escape(title)), encoding="utf-8")


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")

"""docs/reference: every public name, command and variable is there, and nothing else is."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from meshcast import cli
from meshcast.base import settings

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "reference"
TEXT = "\n".join(path.read_text() for path in sorted(REFERENCE.glob("*.md")))
_DIRECTIVE = re.compile(r"^\.\. (?:auto(?:function|class|exception|data)|data):: (\S+)$", re.MULTILINE)
# Figures of each order stand with its function, which is no public name.
DOCUMENTED = [name for name in _DIRECTIVE.findall(TEXT) if not name.startswith("meshcast.pipelining.orders.")]
# Packages that a plug-in imports are not installed here: their names are read from the source.
PLUG_INS = sorted(
    path.stem
    for path in (ROOT / "python" / "meshcast" / "integrations").glob("*.py")
    if path.stem not in ("__init__", "meeting")
)


def public_names() -> set[str]:
    found = set()
    for module in ("meshcast", "meshcast.pipelining", "meshcast.elastic"):
        found |= {f"{module}.{name}" for name in importlib.import_module(module).__all__}
    for plug_in in PLUG_INS:
        source = (ROOT / "python" / "meshcast" / "integrations" / f"{plug_in}.py").read_text()
        (listed,) = re.findall(r"^__all__(?:: list\[str\])? = \[(.*?)\]$", source, re.MULTILINE | re.DOTALL)
        found |= {f"meshcast.integrations.{plug_in}.{name}" for name in re.findall(r'"(\w+)"', listed)}
    return found


def test_every_public_name_is_in_the_reference_once() -> None:
    assert sorted(DOCUMENTED) == sorted(public_names())


def test_every_plug_in_has_a_part() -> None:
    for plug_in in PLUG_INS:
        assert f"meshcast.integrations.{plug_in}" in TEXT, plug_in


def test_every_command_has_a_part() -> None:
    assert re.findall(r"^```\{command-help\} (\w+)$", TEXT, re.MULTILINE) == sorted(
        cli.COMMANDS, key=["plan", "simulate", "bench", "timeline", "dump", "explain", "doctor"].index
    )


def test_every_variable_has_a_row() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    assert all(f"| `{each.name}` |" in page for each in settings.ALL)


# Of plug-ins that import their package, the site's own build reads the docstrings.
IMPORTABLE = sorted(
    name
    for name in public_names() - {"meshcast.__version__"}
    if not name.startswith("meshcast.integrations.") or name.startswith("meshcast.integrations.dcp.")
)


@pytest.mark.parametrize("name", IMPORTABLE)
def test_every_public_name_explains_itself(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    documented = getattr(importlib.import_module(module), attribute)
    text = (documented.__doc__ or "").strip()
    assert len(text) > 20 and not text.startswith(f"{attribute}("), f"{name} has no docstring of its own"


def page_of(entry: Path) -> Path:
    """The file of an entry of a table of contents: a notebook if there is one by that name, else Markdown."""
    notebook = entry.with_suffix(".ipynb")
    return (notebook if notebook.is_file() else entry.with_suffix(".md")).resolve()


def test_every_page_is_in_the_site() -> None:
    """A page that no table of contents lists cannot be found; Sphinx says so too, where it is installed."""
    listed = set()
    for path in (ROOT / "docs" / "index.md", REFERENCE / "index.md"):
        for entries in re.findall(r"```\{toctree\}\n(.*?)```", path.read_text(), re.DOTALL):
            names = [line for line in entries.splitlines() if line and not line.startswith(":")]
            listed |= {page_of(path.parent / name) for name in names}
    pages = {path.resolve() for kind in ("*.md", "*.ipynb") for path in (ROOT / "docs").rglob(kind)}
    assert pages - listed == {(ROOT / "docs" / "index.md").resolve()}
    assert all(path.is_file() for path in listed)

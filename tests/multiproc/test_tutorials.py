"""The notebooks of docs/tutorials print what is in them, which is what the site shows."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import tutorials  # noqa: E402

NAMES = sorted(path.stem for path in tutorials.FOLDER.glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert "pipeline" in NAMES


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_what_it_has(name: str) -> None:
    assert list(tutorials.differences(tutorials.FOLDER / f"{name}.ipynb")) == []


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_has_been_run(name: str) -> None:
    cells = nbformat.read(tutorials.FOLDER / f"{name}.ipynb", as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_another_output_is_told_and_warnings_are_not_kept(tmp_path: Path) -> None:
    code = "import sys\nprint('one')\nprint('warned', file=sys.stderr)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    (told,) = tutorials.differences(path)
    assert told == "small.ipynb, cell 0: has\n\nand prints\none\n"
    nbformat.write(tutorials.executed(path), path)
    assert list(tutorials.differences(path)) == []
    assert "warned" not in path.read_text().replace("print('warned'", "")

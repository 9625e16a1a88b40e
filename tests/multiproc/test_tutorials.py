"""The notebooks of docs/tutorials print what is in them, which is what the site shows.

MESHCAST_UPDATE_TUTORIALS=1 writes what they print now into them: look at the difference before committing it.
nbclient runs them; nbmake would not compare what they print. Pictures are not compared: other versions
of matplotlib draw them with other bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
LIMIT = 100  # seconds for a cell


def executed(path: Path, folder: Path) -> Any:
    """The notebook with what its cells print now, and write into the folder. A cell that raises, raises here
    with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": folder}}
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources=resources, record_timing=False
    )
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    for cell in notebook.cells:
        if cell.cell_type == "code":  # torch warns of other things on each machine
            cell.outputs = [each for each in cell.outputs if each.get("name") != "stderr"]
    return notebook


def printed(cell: Any) -> str:
    """What a code cell printed, and what its last line was worth; a picture as the word for its type."""
    parts = []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            parts.append(output.text)
        else:
            images = [kind for kind in output.data if kind.startswith("image/")]
            parts.extend(images or [output.data.get("text/plain", "")])
    return "".join(parts)


def differences(path: Path, folder: Path) -> Iterator[str]:
    """A text for each cell that prints something else than the notebook has."""
    before, after = nbformat.read(path, as_version=4), executed(path, folder)
    if os.environ.get("MESHCAST_UPDATE_TUTORIALS"):
        nbformat.write(after, path)
        return
    for index, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if old.cell_type == "code" and printed(old) != printed(new):
            yield f"{path.name}, cell {index}: has\n{printed(old)}\nand prints\n{printed(new)}"


def test_there_are_notebooks() -> None:
    assert "pipeline" in [path.stem for path in NOTEBOOKS]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_has(path: Path, tmp_path: Path) -> None:
    assert list(differences(path, tmp_path)) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_has_been_run(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    counts = [cell.execution_count for cell in cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_another_output_is_told_and_warnings_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MESHCAST_UPDATE_TUTORIALS", raising=False)
    code = "import sys\nprint('one')\nprint('warned', file=sys.stderr)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    path = tmp_path / "small.ipynb"
    nbformat.write(notebook, path)
    (told,) = differences(path, tmp_path)
    assert told == "small.ipynb, cell 0: has\n\nand prints\none\n"
    monkeypatch.setenv("MESHCAST_UPDATE_TUTORIALS", "1")
    assert list(differences(path, tmp_path)) == []
    monkeypatch.delenv("MESHCAST_UPDATE_TUTORIALS")
    assert list(differences(path, tmp_path)) == []
    assert "warned" not in path.read_text().replace("print('warned'", "")

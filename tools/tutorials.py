"""Runs the notebooks of docs/tutorials and writes what they print into them; the site shows that.

python tools/tutorials.py [--check] [NOTEBOOK ...]

--check writes nothing and fails where a cell prints something else than the notebook has. Pictures are not
compared: other versions of matplotlib draw them with other bytes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "tutorials"
LIMIT = 100  # seconds for a cell


def executed(path: Path) -> Any:
    """The notebook with what its cells print now. A cell that raises, raises here with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:  # where a notebook writes its files
        client = NotebookClient(
            notebook, timeout=LIMIT, kernel_name="python3", resources={"metadata": {"path": folder}}
        )
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "TORCH_CPP_LOG_LEVEL": "ERROR"})
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day
        if cell.cell_type == "code":  # what torch warns of is another thing on each machine
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


def differences(path: Path) -> Iterator[str]:
    """A text for each cell that prints something else than the notebook has."""
    before, after = nbformat.read(path, as_version=4), executed(path)
    for index, (old, new) in enumerate(zip(before.cells, after.cells, strict=True)):
        if old.cell_type == "code" and printed(old) != printed(new):
            yield f"{path.name}, cell {index}: has\n{printed(old)}\nand prints\n{printed(new)}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="NOTEBOOK")
    options = parser.parse_args()
    wrong: list[str] = []
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        if options.check:
            wrong += differences(path)
        else:
            nbformat.write(executed(path), path)
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

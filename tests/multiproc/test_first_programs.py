"""The first programs of README.md and docs/start, as a newcomer runs them: nothing comes on stderr."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from multiproc.training_runs import ENVIRONMENT, ROOT, command, finished

sys.path.insert(0, str(ROOT / "tools"))

import doc_blocks

LIMIT = 200  # seconds for one; it takes about 10 on an idle machine
# Of torch, where a machine has no name for its own address.
TORCHS = re.compile(r"\[W.*\] \[c10d\] The hostname of the client socket cannot be retrieved")
PAGES = ("README.md", "docs/start/move_weights.md", "docs/start/train_a_pipeline.md")

pytestmark = pytest.mark.timeout(LIMIT + 60)


def first_programs() -> list[tuple[str, int, str, int]]:
    """Page, place on it, program, and the ranks of the command that follows it."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text().splitlines()
        for at, block in enumerate(doc_blocks.programs(page)):
            rest = "\n".join(text[block.line :])
            if ranks := re.search(r"^`?.*torchrun .*--nproc-per-node (\d+)", rest, re.MULTILINE):
                found.append((page, at, block.text, int(ranks[1])))
    return found


PROGRAMS = first_programs()


def test_there_are_some() -> None:
    assert {page for page, *_ in PROGRAMS} == set(PAGES)


@pytest.mark.parametrize("shm", ["1", "0"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{Path(program[0]).stem}-{program[1]}")
def test_says_nothing_on_stderr(tmp_path: Path, program: tuple[str, int, str, int], shm: str) -> None:
    """torchrun's paragraph on OMP_NUM_THREADS does not come where that is set."""
    _, _, text, ranks = program
    script = tmp_path / "program.py"
    script.write_text(text)
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("MESHCAST_")}
    done = finished(
        command(script, ranks=ranks),
        folder=tmp_path,
        environment={**environment, "MESHCAST_SHM": shm},
        limit=LIMIT,
    )
    errors = [line for line in done.stderr.splitlines() if not TORCHS.match(line)]
    assert (done.returncode, errors) == (0, [])
    assert done.stdout

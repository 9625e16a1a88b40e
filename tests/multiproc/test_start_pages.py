"""The programs of README.md and of docs/start.md run as they stand, print what the page says they print, and
nothing on stderr.

A page tells the reader to save a program under a name and to run it by torchrun: this does the same. A
program without such a command (docs/start.md, "Plan only") runs in one process. The first and the last
program of README.md are started as a reader starts them; agents and ranks of the others are forked
(fork_server.py).
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import doc_blocks
import pytest
from multiproc.fork_server import Forked
from multiproc.training_runs import ENVIRONMENT, ROOT, finished

# A line of torch, where a machine has no name for its own address.
TORCHS = re.compile(r"\[W.*\] \[c10d\] The hostname of the client socket cannot be retrieved")
LIMIT = 150  # seconds for a program; it takes about 5 on an idle machine
PAGE = "docs/start.md"
# The programs below this heading run in one process.
PLAN_ONLY = (ROOT / PAGE).read_text().splitlines().index("## Plan only")


def is_slow(program: doc_blocks.Block) -> bool:
    """Whether it is a longer form of what README.md shows."""
    return program.page == PAGE and program.line < PLAN_ONLY


PROGRAMS = [
    pytest.param(
        program,
        id=f"{program.page}:{program.line}",
        marks=pytest.mark.slow if is_slow(program) else (),
    )
    for page in ("README.md", PAGE)
    for program in doc_blocks.programs(page)
]

STARTED = {PROGRAMS[0].id, next(each.id for each in reversed(PROGRAMS) if each.id.startswith("README.md"))}

pytestmark = pytest.mark.timeout(LIMIT + 20)


def next_to(program: doc_blocks.Block) -> tuple[str, str]:
    """The command by which the page runs the program, and what it says that comes out; each may be empty."""
    found = doc_blocks.blocks(program.page)
    later = found[found.index(program) + 1 :]
    later = later[: next((at for at, each in enumerate(later) if each.language == "python"), len(later))]
    commands = (each.text for each in later if not each.language and not each.mark)
    command = next((text.strip() for text in commands if text.startswith("torchrun")), "")
    return command, next((each.text for each in later if each.mark == "output"), "")


@pytest.mark.parametrize("shm", ["1", pytest.param("0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program_prints_what_the_page_says(program: doc_blocks.Block, shm: str, tmp_path: Path) -> None:
    """torchrun's paragraph on OMP_NUM_THREADS does not come, since that is set."""
    command, output = next_to(program)
    assert command or (program.page == PAGE and program.line > PLAN_ONLY)
    words = shlex.split(command) or ["python", "program.py"]
    (tmp_path / words[-1]).write_text(program.text)
    launcher = ["-m", "torch.distributed.run"] if words[0] == "torchrun" else []
    environment = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("MESHCAST_")}
    environment["MESHCAST_SHM"] = shm
    arguments = [sys.executable, *launcher, *words[1:]]
    process = subprocess.Popen if f"{program.page}:{program.line}" in STARTED else Forked
    done = finished(arguments, folder=tmp_path, environment=environment, limit=LIMIT, process=process)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stderr.splitlines() if not TORCHS.match(line)] == []
    if output:
        assert sorted(done.stdout.splitlines()) == sorted(output.splitlines())


def test_the_first_program_of_the_readme_is_the_quickstart() -> None:
    first = doc_blocks.programs("README.md")[0]
    file = (ROOT / "examples" / "quickstart.py").read_text()
    assert file.endswith('"""\n\n' + first.text), "README.md and examples/quickstart.py differ"


def test_commands_of_plan_only_run() -> None:
    found = [text for _, text in doc_blocks.commands(PAGE)]
    commands = [text for text in found if text.startswith("python -m")]
    assert len(commands) == 2
    for command in commands:
        done = finished([sys.executable, *shlex.split(command)[1:]], limit=LIMIT)
        assert done.returncode == 0, done.stderr
        assert re.search(r"lower bound|Eager1F1B", done.stdout), done.stdout

"""Ask the processes of a running job on this host to write their flight records.

Only processes that listen get the signal: those that imported meshcast with MESHCAST_FLIGHT_RECORD set.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from ..base import checks, settings
from ..base.observe import LISTENER
from ..errors import LayoutError, MeshcastError

_PROC = Path("/proc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `dump`."""
    parser.add_argument(
        "processes", nargs="*", metavar="PID", help="ask these only (default: all that this user may signal)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Signals the processes and prints where each writes. Raises LayoutError for a process that does not
    listen, MeshcastError where none does."""
    listed = arguments.processes or [entry.name for entry in _PROC.iterdir() if entry.name.isdecimal()]
    asked = []
    for name in listed:
        if not (name.isascii() and name.isdecimal()):
            raise LayoutError(f"{checks.shown(name)}: expected the number of a process")
        if _listens(int(name)):
            os.kill(int(name), signal.SIGUSR1)
            asked.append(int(name))
        elif arguments.processes:
            raise LayoutError(
                f"process {name} does not listen: it has ended, is another user's, or was started without "
                f"{settings.FLIGHT_RECORD.name}"
            )
    if not asked:
        raise MeshcastError(
            f"no process of this host listens: start the ranks with {settings.FLIGHT_RECORD.name}=DIR/NAME, "
            "and they write their records to DIR"
        )
    for process in sorted(asked):
        print(f"asked process {process} to write {_record(process)}")
    return 0


def _listens(process: int) -> bool:
    """Returns True if a process has the thread that waits for the signal and may be signalled."""
    try:
        names = [(task / "comm").read_text().strip() for task in (_PROC / str(process) / "task").iterdir()]
        os.kill(process, 0)
    except OSError:  # it ended meanwhile, or belongs to another user
        return False
    return LISTENER in names


def _record(process: int) -> str:
    folder = _PROC / str(process)
    variables = dict(
        line.partition("=")[::2] for line in (folder / "environ").read_text(errors="replace").split("\0")
    )
    path = variables.get(settings.FLIGHT_RECORD.name, "?")  # "?": set by the program itself
    return f"{(folder / 'cwd').readlink() / path}.rank{variables.get('RANK', '0')}"

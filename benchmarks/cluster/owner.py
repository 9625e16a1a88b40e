"""Who owns a cluster: a process, by its id and start time, so that a later process with the same id is not
taken for it. Names of namespaces and folders begin with that, so that what a killed owner left behind can
be found."""

from __future__ import annotations

import os
import re
from pathlib import Path

PREFIX = "mc"
_OWNER = re.compile(rf"^{PREFIX}(\d+)-(\d+)-")


def owner_name(pid: int | None = None) -> str:
    """`mcPID-START-` of a process that runs (default: this one)."""
    pid = os.getpid() if pid is None else pid
    started = _started(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return f"{PREFIX}{pid}-{started}-"


def is_stale(name: str) -> bool:
    """Whether the name is one of ours and its owner has ended."""
    found = _OWNER.match(name)
    return found is not None and _started(int(found[1])) != int(found[2])


def _started(pid: int) -> int | None:
    """Clock ticks between the machine's start and the process's, or None where it has ended. A zombie has."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # the name before may hold anything
    return None if fields[0] in "ZX" else int(fields[19])

"""What a reader must know to take a figure for what it is."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine(program: str) -> dict[str, Any]:
    """The command, the commit and the machine, for the head of a file of results."""
    return {
        "command": f"python -m {program} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
    }


def _commit() -> str:
    """Of the tree that this file is in; "unknown" without git, or outside a repository."""
    git = shutil.which("git")
    if git is None:
        return "unknown"
    described = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"

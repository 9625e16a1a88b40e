"""What a reader must know to take a figure for what it is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def machine(program: str) -> dict[str, Any]:
    """The command, the commit and the machine, for the head of a file of results."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "command": " ".join([f"python -m {program}", *sys.argv[1:]]),
        "commit": commit,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
    }

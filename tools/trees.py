"""Interpreters and copies of the tree, for tools that build for several."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def interpreter(name: str) -> str:
    """Its path: of that name on PATH, or of pyenv."""
    if "/" in name:
        return name
    found = [
        shutil.which(f"python{name}"),
        *map(str, Path.home().glob(f".pyenv/versions/{name}*/bin/python")),
    ]
    for path in filter(None, found):
        # A shim of pyenv may name a version that is not chosen.
        if subprocess.run([path, "--version"], capture_output=True, check=False).returncode == 0:
            return path
    sys.exit(
        f"no Python {name} on PATH: install it, or give the path of its interpreter in place of the version"
    )


def copy_tree(target: Path) -> None:
    """What git tracks or would, as it is in the work tree."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)

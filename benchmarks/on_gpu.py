"""What benchmarks on GPUs have in common: how they begin, when they refuse to, and the machine they name."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
from meshcast.bench import kernels

__all__ = ["begin", "refuse", "write_figures"]


def begin(name: str, text: str | None) -> Path | None:
    """Reads the command line of benchmark `name`, whose help is `text`, and returns the file that its figures
    go to, if any. Ends the process where nothing can be measured."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    out: Path | None = parser.parse_args().out
    if not torch.cuda.is_available():
        refuse(name, "torch sees no CUDA device")
    if not kernels.available():
        refuse(name, "this build of meshcast has no CUDA code")
    return out


def refuse(name: str, reason: str) -> NoReturn:
    sys.exit(f"benchmarks.{name}: {reason}: nothing was measured")


def write_figures(out: Path | None, rows: list[dict[str, Any]], **facts: Any) -> None:
    """The rows, with the facts and what they were measured on."""
    if out is None:
        return
    machine = {"device": _clocks(), "torch": torch.__version__, "cuda": torch.version.cuda}
    out.write_text(json.dumps(facts | machine | {"rows": rows}, indent=1) + "\n")


def _clocks() -> str:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.sm,clocks.mem", "--format=csv,noheader"]
    try:
        return subprocess.run(query, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({error})"

"""The ways to keep a training going: how each is started, and why not where it cannot be."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..machine import ROOT

_TORCHFT = ROOT / ".nox/clients-torchft/bin/python"
_HERE = Path(__file__).parent


class Way(NamedTuple):
    """command: of options and the folders for metrics and for a checkpoint. why_not: or nothing."""

    name: str
    label: str
    colour: str
    command: Callable[[argparse.Namespace, Path, Path], list[str]]
    why_not: Callable[[], str]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        # Without it, ranks that torchrun of torch 2.13 has restarted find the addresses of the dead.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }


def training(options: argparse.Namespace, metrics: Path) -> list[str]:
    """Options of examples/elastic/train.py, alike in all ways."""
    return ["--model", options.model, "--steps", str(options.steps), "--metrics", str(metrics)]


def _meshcast(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:  # noqa: ARG001
    return [
        *(sys.executable, "-m", "meshcast.elastic.run", "--nproc-per-node", f"1:{options.ranks}"),
        *("--max-restarts", str(len(options.kill_at)), str(ROOT / "examples/elastic/train.py"), "--pipeline"),
        *training(options, metrics),
    ]


def _torchrun(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.ranks), "--max-restarts", str(len(options.kill_at))),
        *(str(_HERE / "restarted.py"), str(checkpoint), str(options.every), *training(options, metrics)),
    ]


def _torchft(options: argparse.Namespace, metrics: Path, checkpoint: Path) -> list[str]:  # noqa: ARG001
    restarts = str(len(options.kill_at))
    program = [str(_TORCHFT), str(_HERE / "replicas.py"), str(options.ranks), restarts]
    return [*program, *training(options, metrics)]


def _no_torchft() -> str:
    if _TORCHFT.exists():
        return ""
    return "it is not installed: make test-clients CLIENTS=torchft makes its environment"


WAYS = [
    Way("meshcast", "meshcast.elastic.run", "#1f5fa8", _meshcast, lambda: ""),
    Way("torchrun", "torchrun and checkpoints", "#e15759", _torchrun, lambda: ""),
    Way("torchft", "torchft, the whole model on each rank", "#f28e2b", _torchft, _no_torchft),
]

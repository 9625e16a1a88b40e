"""Launches of the training programs in examples/ by torchrun, for the tests of all of them.
Agents and ranks are forks: see fork_server.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multiproc.fork_server import Forked

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 400  # seconds for one launch; it takes about 10 on an idle machine
RANKS = 5
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}

Record = dict[str, Any]


def command(script: str | Path, *arguments: str | Path, ranks: int = RANKS, restarts: int = 0) -> list[str]:
    """By torchrun; a relative `script` is one of examples/."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    launch += ["--max-restarts", str(restarts)]
    return [*launch, str(ROOT / "examples" / script), *map(str, arguments)]


def launch(
    script: str,
    *arguments: str | Path,
    ranks: int = RANKS,
    environment: Mapping[str, str] = ENVIRONMENT,
    limit: float = LIMIT,
) -> subprocess.CompletedProcess[str]:
    """One launch to its end, stdout and stderr apart. limit: seconds."""
    return finished(command(script, *arguments, ranks=ranks), environment=environment, limit=limit)


def finished(
    arguments: list[str],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] = ENVIRONMENT,
    limit: float = LIMIT,
    process: type[subprocess.Popen[str]] = Forked,
) -> subprocess.CompletedProcess[str]:
    """Any command to its end, stdout and stderr apart. folder: that it runs in. limit: seconds. process:
    subprocess.Popen where nothing is to be forked."""
    with process(
        arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        output, errors = _output(running, limit)
    return subprocess.CompletedProcess(running.args, running.returncode, output, errors)


def start(arguments: list[str], environment: Mapping[str, str] = ENVIRONMENT) -> subprocess.Popen[str]:
    """stdout and stderr come as one."""
    return Forked(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait(process: subprocess.Popen[str]) -> str:
    """What it wrote until it ended."""
    with process:
        return _output(process, LIMIT)[0]


def _output(process: subprocess.Popen[str], limit: float) -> tuple[str, str]:
    """Of a process that is asked to end when it is too late: killed, torchrun would leave its ranks."""
    try:
        return process.communicate(timeout=limit)
    except BaseException:
        process.terminate()
        raise


def read_records(metrics: Path) -> list[Record]:
    """Everything that a run, and the runs that went on from it, wrote."""
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def step_records(metrics: Path) -> list[Record]:
    return [record for record in read_records(metrics) if record["event"] == "step"]


def train(
    script: str, folder: Path, *arguments: str | Path, ranks: int = RANKS, limit: float = LIMIT
) -> list[Record]:
    """The step records of one launch that must succeed."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    done = launch(script, *arguments, "--metrics", metrics, ranks=ranks, limit=limit)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return step_records(metrics)

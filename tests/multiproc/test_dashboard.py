"""examples/dashboard under torchrun: what TensorBoard reads is what moved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS, ROWS = 5, 6, 96


@pytest.mark.slow
def test_the_scalars_are_what_moved(tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"),
        *(str(ROOT / "examples/dashboard/run.py"), "--logdir", str(tmp_path)),
        *("--steps", str(STEPS), "--rows", str(ROWS)),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "python"),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    whole = ROWS * 1024 * 4  # bytes of the tensor
    received = sent = 0.0
    for rank in range(RANKS):
        events = EventAccumulator(str(tmp_path / f"rank{rank}"))
        events.Reload()
        for name in (
            "bytes_sent",
            "bytes_received",
            "milliseconds",
            "milliseconds_waited",
            "times_the_bound",
        ):
            scalars = events.Scalars(f"reshard/{name}")
            assert [each.step for each in scalars] == list(range(STEPS))
            assert len({each.value for each in scalars}) == 1 or not name.startswith("bytes")
        sent += events.Scalars("reshard/bytes_sent")[-1].value
        received += events.Scalars("reshard/bytes_received")[-1].value
        assert events.Scalars("reshard/calls")[-1].value == 1
        assert events.Scalars("reshard/milliseconds")[-1].value > 0
        for sender in (0, 1) if rank >= 2 else ():  # it gets a half of its columns from each
            pair = events.Scalars(f"pair_{sender}_to_{rank}/bytes")[-1].value
            assert abs(pair - whole / 2 / (RANKS - 2)) <= 4 * ROWS
    assert sent == received == whole

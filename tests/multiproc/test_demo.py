"""The programs of `make demo`: their table, their pictures, and a training that agrees with one process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from multiproc.training_runs import ENVIRONMENT, ROOT, finished

LIMIT = 300  # seconds; it takes half a minute on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 20)]


def test_demo_shows_a_table_pictures_and_a_training(tmp_path: Path) -> None:
    environment = {**ENVIRONMENT, "PYTHON": sys.executable, "OUT": str(tmp_path / "demo")}
    done = finished(["bash", str(ROOT / "examples" / "demo.sh")], environment=environment, limit=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = re.findall(
        r"^│ (\S.*?) +│ +(\d+) ms +([\d.]+)x │ +(\d+) ms +([\d.]+)x │$", done.stdout, re.MULTILINE
    )
    assert [row[0].split()[0] for row in rows] == ["meshcast.reshard", "isend", "full_tensor()"], done.stdout
    assert rows[0][2] == rows[0][4] == "1.0"
    assert "torch's own answer: Cross device mesh comm not supported yet!" in done.stdout
    assert re.search(r"^send_recv +[\d.]+ ms +5\.99\d$", done.stdout, re.MULTILINE), done.stdout
    assert "All differences are within 1e-05." in done.stdout
    for name in ("plan.png", "gpt.png"):
        assert (tmp_path / "demo" / name).read_bytes().startswith(b"\x89PNG"), name
        assert f"{tmp_path}/demo/{name}" in done.stdout

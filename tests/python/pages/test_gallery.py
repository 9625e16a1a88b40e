"""The recorded step of the gallery. The command that makes a new one: tests/multiproc/test_gallery.py."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "_ext"))

import gallery

STAGE_OF = {0: 0, 1: 0, 2: 1, 3: 1, 4: 1}
MICROBATCHES = 8


def test_the_recording_is_a_whole_step(tmp_path: Path) -> None:
    """Each rank computes each micro-batch forward and backward, in a bar of its own row."""
    gallery.write_recorded(tmp_path)
    page = (tmp_path / "recorded-gpt.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    (panel,) = json.loads(found[1])["panels"]
    assert panel["rows"] == [f"rank {rank}" for rank in STAGE_OF]
    bars = [(bar[0], bar[5].partition(":")[0]) for bar in panel["bars"] if bar[1] in ("F", "B")]
    assert sorted(bars) == sorted(
        (rank, f"{stage}{kind}{microbatch}")
        for rank, stage in STAGE_OF.items()
        for kind in "FB"
        for microbatch in range(MICROBATCHES)
    )
    assert {bar[1] for bar in panel["bars"]} == {"F", "B", "SEND_F", "SEND_B", "wait"}
    assert panel["critical"]


def test_the_recording_is_small() -> None:
    files = sorted(gallery.RECORDED.iterdir())
    assert [path.name for path in files] == [f"rank{rank}.json" for rank in STAGE_OF]
    assert sum(path.stat().st_size for path in files) < 200_000

"""The command of docs/observing.md that records a step of the GPT example: what it writes can be drawn."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
from meshcast.pipelining.trace import read_trace
from multiproc.training_runs import ROOT, launch

sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import doc_blocks
import gallery

LIMIT = 400  # seconds; it takes about 10 on an idle machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


def actions(recording: Path) -> Counter[tuple[int, str]]:
    """What each rank computes and sends. Waits are left out: whether there are any is a matter of time."""
    spans = [span for path in sorted(recording.glob("rank*.json")) for span in read_trace(path)]
    return Counter((span.rank, str(span.action)) for span in spans if not span.action.kind.is_recv)


def test_a_new_recording_is_read(tmp_path: Path) -> None:
    (command,) = [
        text for _, text in doc_blocks.commands("docs/observing.md") if text.startswith("torchrun ")
    ]
    words = shlex.split(command)
    script = words.index("examples/gpt/train.py")
    options = words[script + 1 :]
    assert options[-2:] == ["--profile", str(gallery.RECORDED.relative_to(ROOT))]
    assert words[:script] == ["torchrun", "--standalone", "--nproc-per-node", "5"]
    done = launch("gpt/train.py", *options[:-1], tmp_path / "step", ranks=5, limit=LIMIT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert actions(tmp_path / "step") == actions(gallery.RECORDED)
    gallery.write_recorded(tmp_path, tmp_path / "step")
    assert (tmp_path / "recorded-gpt.html").stat().st_size > 10_000

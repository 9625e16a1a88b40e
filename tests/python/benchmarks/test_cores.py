"""How the ranks of an emulated cluster share the cores."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from benchmarks.cluster import SLICE, cores_of  # noqa: E402

pytestmark = pytest.mark.timeout(60)

_SLICES = """
import subprocess
from benchmarks.cluster import short_slices
why = short_slices()
shown = subprocess.run(["cat", "/proc/self/sched"], capture_output=True, text=True).stdout
print(why or [line.split(":")[1].strip() for line in shown.splitlines() if line.startswith("se.slice")])
"""


@pytest.mark.parametrize(
    ("usable", "hosts", "expected"),
    [
        ({0, 1}, 3, ["0", "1", "0"]),
        ({2}, 2, ["2", "2"]),
        ({0, 1, 5}, 3, ["0", "1", "5"]),
        (set(range(8)), 3, ["0,3,6", "1,4,7", "2,5"]),
    ],
)
def test_hosts_take_the_cores_in_turn(
    usable: set[int], hosts: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: usable)
    assert [cores_of(host, hosts) for host in range(hosts)] == expected


def test_processes_started_from_then_on_have_short_slices() -> None:
    """Or the kernel says why not; one that keeps no slice of a process shows none."""
    found = subprocess.run(
        [sys.executable, "-c", _SLICES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    assert found == str([str(int(SLICE * 1e9))]) or found == "[]" or found.startswith("sched_setattr"), found

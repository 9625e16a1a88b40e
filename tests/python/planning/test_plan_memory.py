"""The memory of large plans: measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[3]
GIB = 1 << 30

# Prints how far the peak of resident memory is above what was resident before the first plan, in bytes.
SCRIPT = """
import resource
import meshcast
from meshcast import Layout, Topology

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

topology = Topology.uniform(ranks_per_host=8, nic_gbps=10)
meshcast.plan((8, 8), "bfloat16", Layout.parse("2:S0R"), Layout.parse("2@2:RR"), topology)
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
for src, dst in (
    ("512x8:RS1", "256x16@4096:RS1"),
    ("512x8:S0S1", "256x16@4096:S0S1"),
    ("1:RR", "4096@1:RR"),
):
    for strategy in ("auto", "multicast"):
        plan = meshcast.plan(
            (16384, 16384), "bfloat16", Layout.parse(src), Layout.parse(dst), topology, strategy=strategy
        )
        meshcast.plan_cache_clear()
        print(src, dst, strategy, len(plan.transfers), peak() - before)
"""


def test_plans_for_4096_ranks_take_less_than_a_gibibyte() -> None:
    made = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(REPO / "python")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    lines = made.stdout.splitlines()
    assert len(lines) == 6
    for line in lines:
        transfers, grown = map(int, line.split()[-2:])
        assert transfers >= 4096, line
        assert 0 < grown < GIB, line

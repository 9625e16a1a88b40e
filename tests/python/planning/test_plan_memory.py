"""The memory of large plans: measured in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[3]
GIB = 1 << 30

# Prints how far the peak of resident memory is above what was resident before the first plan, in bytes.
SCRIPT = """
import resource
import meshcast
from meshcast import Layout, Topology

def peak():  # not ru_maxrss, which is that of the process which started this one where that had more
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines["VmHWM"].split()[0]) * 1024

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

# The same of a batch. All tensors of a 70B Llama, bfloat16, from FSDP over 512 ranks to 64 replicas of tensor
# parallel 8: one by one they would make 97 million deliveries. Or all of a mixture of experts with a trillion
# parameters, from 1,024 ranks to 1,024: 2 million deliveries, where boxes that travel together count once.
BATCH = """
import resource
import sys
import torch
from meshcast.planning.plan import plan_many

sys.path.insert(0, sys.argv[1])
from benchmarks.planner import Fleet, llama, mixture
from meshcast import Topology

if sys.argv[2] == "llama":
    problems = next(batch for kind, batch in llama().items() if kind.startswith("all"))
else:
    problems = mixture(Fleet(1024, 1024))
with open("/proc/self/statm") as file:
    before = int(file.read().split()[1]) * resource.getpagesize()
plan = plan_many(problems, Topology.uniform(8, 400, nics_per_host=8))
print(len(problems), len(plan.tasks), plan.ratio)
lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(lines["VmHWM"].split()[0]) * 1024 - before)
print(plan.describe().splitlines()[-1])
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


@pytest.mark.parametrize(
    ("model", "counts", "most"), [("llama", (723, 943_628), 1.05), ("mixture", (1035, 1_767_744), 1.015)]
)
def test_all_tensors_of_a_model_take_less_than_a_gibibyte(
    model: str, counts: tuple[int, int], most: float
) -> None:
    made = subprocess.run(
        [sys.executable, "-c", BATCH, str(REPO), model],
        env={**os.environ, "PYTHONPATH": str(REPO / "python")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    first, grown, last = made.stdout.splitlines()
    tensors, tasks, ratio = first.split()
    assert (int(tensors), int(tasks)) == counts
    assert float(ratio) <= most
    assert 0 < int(grown) < GIB
    assert last == f"  ...  {counts[1]} tasks"

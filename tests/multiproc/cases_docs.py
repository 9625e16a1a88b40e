"""The programs of docs/resharding.md, pipelining.md, coming_from_torch.md, integrations.md, elastic.md and
observing.md, in their order, and the examples of the docstrings; on four ranks."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path

import doc_blocks
import meshcast
import torch
import torch.distributed as dist
from meshcast import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

_names: dict[str, dict] = {}  # of each page: what its programs have defined so far


def _for_pipelining(rank: int) -> dict:
    """A stage of one layer on each rank."""
    meshes = [DeviceMesh("cpu", [each]) for each in range(4)]
    torch.manual_seed(0)
    submodule = torch.nn.Linear(8, 8)
    return {
        "torch": torch,
        "submodule": submodule,
        "stage_index": rank,
        "num_stages": 4,
        "device": torch.device("cpu"),
        "mesh": meshes[rank],
        "loss_fn": torch.nn.functional.cross_entropy,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "optimizer": torch.optim.SGD(submodule.parameters(), lr=0.1),
        "topology": meshcast.Topology.uniform(ranks_per_host=4, nic_gbps=25),
        "x": torch.randn(32, 8),
        "y": torch.arange(32) % 8,
    }


PAGES = [
    f"docs/{name}.md"
    for name in ("resharding", "pipelining", "coming_from_torch", "integrations", "elastic", "observing")
]


def _running(program: doc_blocks.Block):
    def case(context) -> None:
        assert context.world == 4
        names = _names.setdefault(program.page, {})
        # Line numbers are those of the page.
        text = "\n" * (program.line - 1) + program.text
        exec(compile(text, program.page, "exec"), names)

    case.__name__ = f"{Path(program.page).stem}_line_{program.line}"
    return case


def weights_have_arrived(context) -> None:
    """By the program of docs/integrations.md."""
    if context.rank >= 2:
        assert bool((_names["docs/integrations.md"]["serving"]["w"].to_local() == 1).all())


def the_loss_is_a_pair(context) -> None:  # noqa: ARG001
    """As docs/pipelining.md says of its function."""
    names = _names["docs/pipelining.md"]
    labels = torch.tensor([[1, -100, 2]])
    total, weight = names["loss_fn"](torch.zeros(1, 3, 4), labels)
    assert weight == 2
    torch.testing.assert_close(total, 2 * torch.log(torch.tensor(4.0)))


def pipelines_have_trained(context) -> None:
    """By the programs of docs/pipelining.md."""
    names = _names["docs/pipelining.md"]
    assert len(names["losses"]) == (16 if context.rank == 3 else 0)
    assert names["norm"] > 0 and names["submodule"].weight.grad is not None


def outputs_of_different_sizes_have_trained(context) -> None:
    """As one process does, by the program of docs/pipelining.md."""
    names = _names["docs/pipelining.md"]
    modules = []
    for part, kind in enumerate((names["Encoder"], names["Decoder"])):
        torch.manual_seed(part)
        modules.append(kind())
    for rows in (slice(6), slice(6, 12)):
        output = modules[1](*modules[0](names["patches"][rows], names["counts"][rows]))
        (torch.nn.functional.mse_loss(output, torch.ones(6, 2)) / 2).backward()
    mine = names["ragged"].layer
    theirs = modules[context.rank == 3].layer
    torch.testing.assert_close(mine.weight.grad, theirs.weight.grad)
    torch.testing.assert_close(mine.bias.grad, theirs.bias.grad)


# Whose docstrings have no example, or none for these four ranks, each for a reason.
WITHOUT = {
    "meshcast.elastic": (
        # needs its launcher: examples/elastic, which test_going_on.py starts
        "Job Training "
        # what another returns
        "Rebalanced"
    ),
    "meshcast": (
        # raised
        "AbortedError DeadlineExceededError LayoutError MeshcastError PeerLostError PlanMismatchError "
        # what others return
        "CallCounters Counters PairCounters LocalCopy Plan PlanCacheInfo Problem ReshardedState Task "
        "TensorManifest WeightManifest "
        "Transfer TransferStats WeightProgress WeightStats "
        # in the examples of others
        "Host Nic TensorSpec __version__ plan_cache_clear"
    ),
    "meshcast.pipelining": (
        # raised, or what others return or take
        "ScheduleError Candidate Choice Partition PipelineActivationLiveness SimulationReport Times "
        "StageTimes Action ActionKind Edge Layer Value MultiScheduleOptions ScheduleOptions "
        "PipelineStageInfo "
        # all made alike, as the example of PipelineStage does
        "PipelineSchedule PipelineScheduleMulti PipelineScheduleSingle Schedule1F1B ScheduleDualPipeV "
        "ScheduleEager1F1B ScheduleGPipe ScheduleInterleaved1F1B ScheduleInterleavedZeroBubble "
        "ScheduleLoopedBFS ScheduleZBH1 ScheduleZBH2 ScheduleZBV ScheduleZBVZeroBubble "
        # in the examples of others
        "Pipe SplitPoint build_stage dump_csv load pipe_split validate"
    ),
}
MORE = {
    "meshcast": ["Layout.from_boxes"],
    "meshcast.pipelining": ["PipelineStage.register_forward_context", "PipelineSchedule.stage_times"],
    "meshcast.integrations.dcp": [],
    "meshcast.elastic": [],
}
IMPORTED = {
    "torch": torch,
    "dist": dist,
    "meshcast": meshcast,
    "pipelining": pipelining,
    "DeviceMesh": DeviceMesh,
    "Replicate": Replicate,
    "Shard": Shard,
    "distribute_tensor": distribute_tensor,
}


def _for_docstring(package: str, rank: int) -> dict:
    """What an example may use: what a script of its kind has imported, and the stage of one that trains."""
    if package != "meshcast.pipelining":
        return dict(IMPORTED)
    names = _for_pipelining(rank)
    stage = pipelining.PipelineStage(names["submodule"], rank, 4, names["device"], mesh=names["mesh"])
    schedule = pipelining.ScheduleGPipe(stage, 4, loss_fn=names["loss_fn"])
    theirs = {name: getattr(pipelining, name) for name in pipelining.__all__}
    return {**theirs, **IMPORTED, **names, "stage": stage, "schedule": schedule}


def _documented(package: str, name: str):
    text = inspect.getdoc(attrgetter(name)(importlib.import_module(package))) or ""
    (example,) = re.findall(r"^Example.*::\n\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)

    def case(context) -> None:
        names = _for_docstring(package, context.rank)
        exec(compile(textwrap.dedent(example), f"example of {package}.{name}", "exec"), names)

    case.__name__ = f"docstring_of_{name.replace('.', '_')}"
    return case


def documented(package: str) -> list[str]:
    public = importlib.import_module(package).__all__
    return [*(name for name in public if name not in WITHOUT.get(package, "").split()), *MORE[package]]


CASES = [
    *[_running(program) for page in PAGES for program in doc_blocks.programs(page)],
    weights_have_arrived,
    the_loss_is_a_pair,
    pipelines_have_trained,
    outputs_of_different_sizes_have_trained,
    *[_documented(package, name) for package in MORE for name in documented(package)],
]

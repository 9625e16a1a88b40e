"""The examples of docs/resharding.md and docs/elastic.md, in their order, and those of the docstrings; on
four ranks."""

from __future__ import annotations

import inspect
import re
import textwrap
from operator import attrgetter
from pathlib import Path

import meshcast
import torch
import torch.distributed as dist
from meshcast import elastic, pipelining
from meshcast.integrations import dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

DOCS = Path(__file__).resolve().parents[2] / "docs"


def _running(page: str) -> list:
    """A case for each block, which knows the names of those before."""
    names = dict(IMPORTED)

    def made(index: int, text: str):
        def case(context) -> None:
            assert context.world == 4
            exec(compile(text, f"{page}, block {index}", "exec"), names)

        case.__name__ = f"{page.removesuffix('.md')}_{index}"
        return case

    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [made(index, text) for index, text in enumerate(found)]


# Functions whose docstrings have an example. It may use what a script of this kind has imported anyhow.
DOCUMENTED = (
    "backward",
    "measure_topology",
    "plan",
    "plan_many",
    "prepare",
    "reshard",
    "reshard_",
    "reshard_local",
    "reshard_many",
    "reshard_state_dict",
    "StateResharder",
    "TensorMap",
    "WeightSync",
    "Layout.from_boxes",
)
PIPELINING = (
    "save",
    "choose",
    "ScheduleAuto",
    "analyze_pipeline_activation_liveness",
    "PipelineStage.register_forward_context",
)
DCP = ("MemoryStorage",)
ELASTIC = ("remesh",)
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


def _documented(name: str, package: object = meshcast):
    text = inspect.getdoc(attrgetter(name)(package)) or ""
    (example,) = re.findall(r"^Example.*::\n\n((?:    .*\n|\n)+)", text + "\n", re.MULTILINE)

    def case(context) -> None:  # noqa: ARG001
        exec(compile(textwrap.dedent(example), f"example of {name}", "exec"), dict(IMPORTED))

    case.__name__ = f"docstring_of_{name.replace('.', '_')}"
    return case


CASES = [
    *_running("resharding.md"),
    *_running("elastic.md"),
    *[_documented(name) for name in DOCUMENTED],
    *[_documented(name, pipelining) for name in PIPELINING],
    *[_documented(name, dcp) for name in DCP],
    *[_documented(name, elastic) for name in ELASTIC],
]

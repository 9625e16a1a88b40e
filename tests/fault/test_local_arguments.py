"""Arguments of public functions that need no other ranks: each in turn gets every value of bad_values.py, and
drawn pairs of them get one each. What comes out is a result or a typed error, and soon."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import meshcast
import pytest
import torch
from fault.bad_values import DTYPES, NUMBERS, PLACEMENTS, SHAPES, TIMEOUTS, WRONG
from meshcast import Layout, MeshcastError, TensorSpec, Topology, pipelining
from meshcast.pipelining import Edge, Layer, Value
from meshcast.topology import Host, Nic
from torch.distributed.tensor import Replicate, Shard

SOON = 20.0  # seconds
EVERYTHING = {"none": lambda: None, **WRONG, **NUMBERS, **TIMEOUTS, **DTYPES, **PLACEMENTS, **SHAPES}
ROWS, COPIES = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Replicate()])
ACTIONS = pipelining.lower({0: [pipelining.Action.parse("0F0"), pipelining.Action.parse("0B0")]})


def _layers() -> list[Layer]:
    return [Layer(1.0, 2.0, (Value((4, 4)),)), Layer(1.0, 2.0)]


# By name: the function and valid arguments.
FUNCTIONS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "plan": (
        meshcast.plan,
        {
            "shape": (4, 4),
            "dtype": torch.float32,
            "src": ROWS,
            "dst": COPIES,
            "topology": None,
            "strategy": "auto",
            "balance": "greedy",
            "chunk_bytes": None,
            "seed": 0,
        },
    ),
    "plan_many": (
        meshcast.plan_many,
        {
            "problems": [((4, 4), torch.float32, ROWS, COPIES)],
            "topology": None,
            "strategy": "auto",
            "seed": 0,
        },
    ),
    "Layout": (Layout, {"mesh": [0, 1], "placements": [Shard(0)]}),
    "Layout.parse": (Layout.parse, {"text": "1x2:S1R", "first_rank": 0}),
    "Layout.shards": (ROWS.shards, {"shape": (4, 4)}),
    "Layout.local_shapes": (ROWS.local_shapes, {"shape": (4, 4)}),
    "Topology": (Topology, {"hosts": [Host((0, 1), (Nic(1, 1),), 1)], "latency_us": 20.0}),
    "Topology.uniform": (
        Topology.uniform,
        {"ranks_per_host": 2, "nic_gbps": 1, "nics_per_host": 1, "local_gbps": 8, "latency_us": 1},
    ),
    "Topology.from_hosts": (
        Topology.from_hosts,
        {"hosts": {0: "a", 1: "b"}, "nic_gbps": 1, "nics_per_host": 1},
    ),
    "Topology.from_json": (Topology.from_json, {"source": Topology.uniform(2, 1).to_json()}),
    "Plan.from_json": (
        meshcast.Plan.from_json,
        {"source": meshcast.plan((4,), "int8", ROWS, COPIES).to_json()},
    ),
    "TensorSpec": (
        TensorSpec,
        {"shape": (4, 4), "dtype": torch.int8, "mesh": None, "placements": [Shard(0)], "device": None},
    ),
    "backward": (meshcast.backward, {"roots": None}),
    "simulate": (
        pipelining.simulate,
        {
            "schedule": "1F1B",
            "stages": 2,
            "microbatches": 4,
            "forward": 1.0,
            "backward": 2.0,
            "weight": None,
            "transfer": 0.0,
            "send_model": "buffered",
            "links": None,
            "ahead": 4,
            "buffers": None,
            "ranks": None,
            "warmup": None,
            "memory_budget": None,
        },
    ),
    "lower": (pipelining.lower, {"actions": {0: []}, "links": None, "ahead": 4}),
    "validate": (
        pipelining.validate,
        {"actions": ACTIONS, "stages": 1, "microbatches": 1, "links": None, "send_models": ("buffered",)},
    ),
    "partition": (
        pipelining.partition,
        {
            "model": _layers(),
            "example": 4,
            "ranks": 2,
            "topology": Topology.uniform(2, 1),
            "microbatches": 2,
            "stages": 2,
            "layers": None,
            "tensor": (),
            "tensor_plan": None,
            "schedule": "1F1B",
            "delay_weight_grad": False,
            "memory": None,
            "copies": 4.0,
        },
    ),
    "microbatch_seed": (pipelining.microbatch_seed, {"seed": 1, "step": 0, "stage": 0, "microbatch": 0}),
    "get_schedule_class": (pipelining.get_schedule_class, {"schedule_name": "1F1B"}),
    "choose": (
        pipelining.choose,
        {"stages": [], "loss_fn": None, "example": 1, "microbatches": 1, "memory_budget": 1.0},
    ),
    "ScheduleAuto": (pipelining.ScheduleAuto, {"stages": [], "n_microbatches": 2}),
    "analyze_pipeline_activation_liveness": (
        pipelining.analyze_pipeline_activation_liveness,
        {"schedule": None, "pp_rank": 0, "stage_indices": [0], "granularity": "microbatch"},
    ),
    "Action.parse": (pipelining.Action.parse, {"text": "0F0"}),
    "Action": (pipelining.Action, {"stage": 0, "kind": pipelining.ActionKind.F, "microbatch": 0, "peer": -1}),
    "grad_norm": (pipelining.grad_norm, {"stages": [], "norm_type": 2.0}),
    "clip_grad_norm_": (pipelining.clip_grad_norm_, {"stages": [], "max_norm": 1.0, "norm_type": 2.0}),
    "GradScaler": (pipelining.GradScaler, {"stages": []}),
    "Edge": (Edge, {"from_stage": 0, "output": 0, "to_stage": 1, "input": 0}),
    "prepare": (meshcast.prepare, {"meshes": [0], "timeout": None}),
    "reshard": (meshcast.reshard, {"x": None, "mesh": None, "placements": [Shard(0)]}),
    "enable_dtensor_redistribute": (meshcast.enable_dtensor_redistribute, {"enabled": False}),
}


def _typed(name: str, changed: dict[str, str]) -> str:
    """Calls with these values in place of the valid ones. Returns what was wrong about the answer."""
    function, valid = FUNCTIONS[name]
    given = valid | {argument: EVERYTHING[value]() for argument, value in changed.items()}
    begin = time.monotonic()
    try:
        function(**given)
    except MeshcastError:
        pass
    except Exception as error:
        if name != "backward" or not isinstance(error, TypeError):  # roots are positional
            return f"{name}({changed}): {type(error).__name__}: {error}"
    if time.monotonic() - begin > SOON:
        return f"{name}({changed}): took {time.monotonic() - begin:.1f} s"
    return ""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument(name: str) -> None:
    wrong = [
        found
        for argument in FUNCTIONS[name][1]
        for value in EVERYTHING
        if (found := _typed(name, {argument: value}))
    ]
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


def test_drawn_pairs() -> None:
    wrong = []
    for seed in range(1000):
        rng = random.Random(seed)
        name = rng.choice(list(FUNCTIONS))
        arguments = list(FUNCTIONS[name][1])
        chosen = rng.sample(arguments, min(2, len(arguments)))
        found = _typed(name, {argument: rng.choice(list(EVERYTHING)) for argument in chosen})
        if found:
            wrong.append(f"seed {seed}: {found}")
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("value", EVERYTHING)
def test_paths(value: str, tmp_path: Path) -> None:
    given = EVERYTHING[value]()
    for call in (
        lambda: meshcast.dump_flight_record(given),
        lambda: pipelining.load_csv(given),
        lambda: pipelining.dump_csv({0: []}, given),
    ):
        if isinstance(given, str | bytes | int):
            continue  # a name, or the number of an open file
        with pytest.raises(MeshcastError):
            call()
    with pytest.raises(OSError):
        meshcast.dump_flight_record(tmp_path / "no" / "folder")


def test_memory_is_not_filled() -> None:
    """A huge number of micro-batches is refused before anything is made for each."""
    for count in (2**31, 2**62):
        with pytest.raises(MeshcastError, match="can be scheduled"):
            pipelining.simulate("1F1B", 2, count)


def test_a_generator_of_placements() -> None:
    assert Layout([0, 1], (Shard(0) for _ in range(1))) == ROWS
    plan = meshcast.plan((size for size in (4, 4)), torch.float32, ROWS, COPIES)
    assert plan.problems[0].shape == (4, 4)

"""The plan of a large mixture of experts, from FSDP over 64 ranks to four replicas of tensor and expert
parallel 8, whose destinations are recorded on the meta device: 235 billion parameters in the slow test, which
prints its figures."""

from __future__ import annotations

import time

import pytest
import torch
from meshcast import Layout, TensorMap, Topology, plan_many
from meshcast.base.wire import pack, unpack
from meshcast.resharding.record_destinations import _read_names, _record
from meshcast.resharding.state_arguments import Given, checked_call
from meshcast.resharding.state_batches import grouped
from meshcast.resharding.state_entries import Held, StateSide
from meshcast.resharding.state_moves import agree
from multiproc.engines import Engine, Shape
from torch.distributed.tensor import Shard

TRAINERS, TP, REPLICAS = 64, 8, 4
QWEN3_235B = {"hidden": 4096, "heads": 64, "kv_heads": 4, "head": 128, "wide": 1536, "vocabulary": 151936}


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "each expert by itself"])
@pytest.mark.parametrize(
    "layers", [2, pytest.param(94, marks=[pytest.mark.slow, pytest.mark.timeout(300)])], ids=str
)
def test_a_mixture_of_experts_to_replicas(layers: int, fused: bool) -> None:
    shape = Shape(layers=layers, experts=128, **QWEN3_235B)
    names = _read_names({name: (size, torch.bfloat16) for name, size in shape.checkpoint().items()})
    recordings, begin = [], time.process_time()
    torch.set_default_dtype(torch.bfloat16)
    try:
        for rank in range(TP):
            with torch.device("meta"):
                engine = Engine(shape, rank, TP, pad_to=64)
            recordings.append(_record(engine, engine.load_weights, names, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    recorded = time.process_time() - begin
    assert not any(recording.left for recording in recordings)

    # The trainer has the experts of a layer in two tensors, as transformers has them.
    layout, dtype = Layout(list(range(TRAINERS)), [Shard(0)]), torch.bfloat16
    held = {
        n: Held(e.shape, dtype, layout, "cpu") for n, e in names.items() if not fused or ".experts." not in n
    }
    maps = []
    for layer in range(layers) if fused else ():
        prefix = f"model.layers.{layer}.mlp.experts."
        gate_up, down = f"{prefix}gate_up_proj", f"{prefix}down_proj"
        held[gate_up] = Held((128, 2 * shape.wide, shape.hidden), dtype, layout, "cpu")
        held[down] = Held((128, shape.hidden, shape.wide), dtype, layout, "cpu")
        pairs = [[f"{prefix}{at}.{part}_proj.weight" for part in ("gate", "up")] for at in range(128)]
        maps.append(TensorMap(gate_up, [TensorMap(pair) for pair in pairs], stack=True))
        maps.append(TensorMap(down, [f"{prefix}{at}.down_proj.weight" for at in range(128)], stack=True))
    empty = checked_call(0, Given({}, {}, maps=maps)).side
    sides = [
        empty._replace(
            recorded={name: each._replace(device_type="cpu") for name, each in recording.landings.items()}
        )
        for recording in recordings
    ]
    texts = [pack(side) for side in (empty._replace(held=held), *sides)]

    begin, known = time.process_time(), {}
    holder, *servers = (unpack(StateSide, text, known) for text in texts)
    given = dict.fromkeys(range(TRAINERS), holder)
    given |= {TRAINERS + at: servers[at % TP] for at in range(TP * REPLICAS)}
    targets = agree(given).targets.values()
    agreed = time.process_time() - begin
    topology = Topology.uniform(8, 400, nics_per_host=8)
    for strategy in ("auto", "broadcast"):
        begin, plans = time.process_time(), []
        for moves in grouped(targets, None):
            problems = [move.problem for move in moves]
            plans.append(plan_many(problems, topology=topology, strategy=strategy))
        planned = time.process_time() - begin
        sent = sum(plan.bytes_sent(rank) for plan in plans for rank in range(TRAINERS))
        received = sum(plan.bytes_received(TRAINERS + at) for plan in plans for at in range(TP * REPLICAS))
        # Whatever is planned together, a server takes in its part over a NIC of 400 Gbit/s.
        most = max(sum(plan.bytes_received(TRAINERS + at) for plan in plans) for at in range(TP * REPLICAS))
        ratio = sum(plan.makespan for plan in plans) / (most / 50e9)
        print(
            f"{layers} layers, {'fused' if fused else 'unfused'}, {strategy}: recorded in "
            f"{recorded / TP:.1f} s a rank, agreed in {agreed:.1f} s, {len(plans)} plans in {planned:.1f} s; "
            f"{ratio:.3f} of the bound, trainers send {sent / 1e9:.0f} GB of {received / 1e9:.0f} GB received"
        )
        assert len(plans) == (1 if fused or layers == 2 else 2)
        assert ratio <= 1.05 and all(plan.ratio <= 1.05 for plan in plans)
        if strategy == "broadcast":
            assert sent <= received / REPLICAS * 1.001

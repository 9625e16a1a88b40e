"""The benchmark of partition(): what it compares, its stages, its table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from meshcast.pipelining import Layer, Value
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark_pages import check_tables

from benchmarks.pipeline.partition import (
    SAMPLES,
    choices,
    emulated,
    equal_parameters,
    one_process,
    rows,
    scaled,
    text,
)
from benchmarks.pipeline.stages import Clock, LayersStage, loss_fn, parts_of

SKIPPED = Value((SAMPLES, 5), used_by=(1, 3))
LAYERS = [
    Layer(0.1, 0.2, (Value((SAMPLES, 3, 2)), SKIPPED), inputs=0.15, parameters=400),
    Layer(0.2, 0.4, (Value((SAMPLES, 7), torch.bfloat16),), parameters=40),
    Layer(0.1, 0.2, (Value((SAMPLES, 2)),), parameters=40),
    Layer(0.3, 0.6, parameters=4000),
]


def test_times_and_bytes_keep_their_proportion() -> None:
    job = emulated(LAYERS, 1.4, 250.0)
    assert job.stretch == pytest.approx(2.0)
    assert [layer.forward for layer in job.layers] == pytest.approx([0.2, 0.4, 0.2, 0.6])
    assert job.layers[0].inputs == pytest.approx(0.3)
    half = scaled(LAYERS, 1.0, 0.5)
    assert [layer.parameters for layer in half] == [200, 20, 20, 2000]
    assert [value.shape for layer in half for value in layer.values] == [(8, 3), (8, 2), (8, 2), (8, 1)]
    assert half[0].values[1].used_by == (1, 3)


def test_equal_parameters() -> None:
    assert equal_parameters(LAYERS, 2, 8).layers == (3, 1)
    assert equal_parameters(LAYERS, 3, 8).layers == (1, 2, 1)
    assert equal_parameters(LAYERS, 3, 8).ranks == (3, 3, 2)


def test_the_proposal_is_no_worse_than_what_it_is_compared_with() -> None:
    found = choices(emulated(LAYERS, 0.7, 100.0), 8, 4)
    assert len({each.name for each in found}) == len(found) == 4
    assert found[0].name == "partition"
    for each in found:
        assert (sum(each.layers), sum(each.ranks)) == (len(LAYERS), 8)
        assert found[0].simulated <= 1.01 * each.simulated


@pytest.mark.parametrize("counts", [(4,), (1, 3), (1, 1, 1, 1)])
def test_stages_hand_on_what_went_in(counts: tuple[int, ...]) -> None:
    """Whatever the cut: values that skip stages too."""
    layers = scaled(LAYERS, 1.0, 1.0)
    parts, edges = parts_of(layers, counts)
    assert sum(part.forward for part in parts) == pytest.approx(0.7)
    assert sum(part.parameters for part in parts) == 4480 // 4
    if len(counts) == 4:
        assert [part.inputs for part in parts] == [[1], [6, 5], [4], [5, 2]]
        assert [part.outputs for part in parts] == [[6, 5], [4], [2], [1]]
        assert [(edge.from_stage, edge.output, edge.to_stage, edge.input) for edge in edges] == [
            (0, 0, 1, 0), (0, 1, 1, 1), (0, 1, 3, 0), (1, 0, 2, 0), (2, 0, 3, 1),
        ]  # fmt: skip
    batch, target = torch.arange(1.0, 9.0)[:, None], torch.arange(8.0)
    gradients = one_process(parts, edges, batch, target)
    assert gradients[-1] == pytest.approx((batch[:, 0] * target).mean().item())
    assert len(gradients) == len(counts) and all(gradients)


def test_a_misplaced_element_shows() -> None:
    parts, _ = parts_of(scaled(LAYERS, 1.0, 1.0), (1, 3))
    module: nn.Module = LayersStage(parts[1], SAMPLES, Clock(0.0, 0.0, 0.0, scale=0.0))
    made = LayersStage(parts[0], SAMPLES, Clock(0.0, 0.0, 0.0, scale=0.0))(torch.ones(SAMPLES, 1))
    right = loss_fn(module(*made), torch.ones(SAMPLES))
    assert right.item() == pytest.approx(1.0)
    wrong = loss_fn(module(made[0].flip(1), made[1]), torch.ones(SAMPLES))
    assert abs(wrong.item() - 1.0) > 0.1


def test_table() -> None:
    def choice(name: str, layers: list[int], ranks: list[int], seconds: list[float]) -> dict:
        return {
            "name": name, "layers": layers, "ranks": ranks, "schedule": "Eager1F1B",
            "options": {"delay_weight_grad": True}, "simulated": 2.0, "seconds": seconds,
            "late": [0.001], "others": [0.1],
        }  # fmt: skip

    found = [choice("partition", [1, 3], [1, 7], [2.0, 2.1, 2.2]), choice("even", [4], [8], [4.2])]
    lines = rows("GPT", found)
    assert lines[0].startswith("| GPT | partition | 1 on 0; 3 on 1 to 7 | Eager1F1B, delayed | 2.10 (2.00) |")
    assert lines[1].endswith("| 4.20 (2.00) | 2.00 (1.00) |")
    head = {
        "command": "python -m benchmarks.partition", "hosts": 4, "host_ranks": 2, "microbatches": 8,
        "link_mbit": 100.0, "forward_seconds": 0.8, "emulated_gbit": 25.0, "repeats": 3, "cores": 2,
        "torch": "2.13", "commit": "abc",
    }  # fmt: skip
    written = text({"header": head, "models": {"GPT": found}})
    check_tables(written)
    assert "differ by 110.0% at most" in written

"""partition() of modules that it measures: layers, what goes between them, tensor parallelism, refusals."""

import sys
from pathlib import Path

import meshcast
import pytest
import torch
from meshcast.errors import LayoutError
from meshcast.pipelining import ScheduleError, Value, partition
from meshcast.tuning.partition import measured_layers
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from gpt.config import MODELS
from gpt.model import build_stage
from moe.config import sparse
from moe.model import build_stage as build_moe
from unet import model as unet
from unet.config import MODELS as UNET_MODELS

pytestmark = pytest.mark.timeout(120)

TOPOLOGY = meshcast.Topology.uniform(ranks_per_host=2, nic_gbps=10)
PLAN = {"layers.*.attention.qkv": ColwiseParallel(), "layers.*.attention.out": RowwiseParallel()}
PLAN |= {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
NANO = MODELS["nano"]
TOKENS = torch.zeros(4, NANO.seq_len, dtype=torch.long)


def test_a_gpt_is_cut_between_embedding_layers_and_head() -> None:
    model = build_stage(NANO, 0, 1, seed=0)
    layers = measured_layers(model, (TOKENS,), None, [], {})
    assert [layer.name for layer in layers] == ["embedding", "layers.0", "layers.1", "head"]
    hidden = (4, NANO.seq_len, NANO.width)
    assert [layer.values for layer in layers] == [(Value(hidden, used_by=(i + 1,)),) for i in range(3)] + [()]
    assert sum(layer.parameters for layer in layers) == 4 * NANO.parameters()
    for layer in layers:
        assert layer.forward > 0
        assert layer.inputs is not None
        assert 0 <= layer.inputs <= layer.backward
        assert layer.held > 0
    assert layers[0].inputs == 0.0  # tokens have no gradient


def test_skip_connections_go_to_the_layers_that_take_them() -> None:
    config = UNET_MODELS["nano"]
    model = unet.UNetStage(config, 0, 1, seed=0)
    example = torch.randn(2, 3, 16, 16), torch.zeros(2), torch.zeros(2, dtype=torch.long)
    layers = measured_layers(model, example, None, [], {})
    makers = {}
    expected: list[set[int]] = [set() for _ in layers]
    for index, ports in enumerate(unet.PORTS):
        for name in ports.takes:
            if name in makers:
                expected[makers[name]].add(index)
        makers |= dict.fromkeys(ports.makes, index)
    for layer, users in zip(layers, expected, strict=True):
        assert {user for value in layer.values for user in value.used_by} == users
    skips = [value for value in layers[1].values if value.used_by == (11,)]
    assert [value.shape for value in skips] == [(2, 8, 16, 16)]


def test_measuring_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 6))
    model[0].weight.grad = torch.full((8, 6), 3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = partition(model, torch.ones(4, 6), 2, TOPOLOGY, microbatches=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((8, 6), 3.0))
    assert model[3].weight.grad is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert [name for names in found.names for name in names] == ["0", "1", "2", "3"]


def test_what_the_model_computes_between_two_layers_belongs_to_the_first() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.relu(self.first(x))
            return self.third(self.second(y) * 2)

    layers = measured_layers(Model(), (torch.randn(3, 4),), None, [], {})
    assert [[value.shape for value in layer.values] for layer in layers] == [[(3, 5)], [(3, 6)], []]


def test_a_gpt_with_experts_sends_two_values_over_every_cut() -> None:
    """The second is made by the model itself, in front of the first of its layers with experts."""
    config = sparse(NANO, experts=3, active=2, balance=0.01)
    layers = measured_layers(build_moe(config, 0, 1, seed=0), (TOKENS,), None, [], {})
    for index, layer in enumerate(layers[:2]):
        shapes = [(value.shape, value.used_by) for value in layer.values]
        assert shapes == [((4, NANO.seq_len, NANO.width), (index + 1,)), ((4,), (index + 1,))]
    assert [value.shape for value in layers[2].values] == [(4, NANO.seq_len, NANO.width)]


def test_each_tensor_parallel_degree_is_measured_with_the_part_of_a_rank() -> None:
    model = build_stage(NANO, 0, 1, seed=0)
    layers = measured_layers(model, (TOKENS,), None, [2], PLAN)
    assert [sorted(layer.tensor) for layer in layers] == [[], [2], [2], []]
    whole, part = layers[1], layers[1].tensor[2]
    hidden = TOKENS.numel() * NANO.width * 4
    assert part.sums_forward == (hidden, hidden)  # of attention and MLP
    assert part.sums_backward == (hidden, hidden)
    # Matrices and biases of heads and inner width halve; two norms and two biases of outputs stay.
    kept = 6 * NANO.width * 4
    assert part.parameters == (whole.parameters - kept) // 2 + kept
    assert part.held < whole.held
    assert sum(each.numel() for each in model.parameters()) == NANO.parameters()


def test_a_measured_model_is_proposed_with_meshes_and_a_schedule() -> None:
    model = build_stage(NANO, 0, 1, seed=0)
    found = partition(
        model, TOKENS, 6, TOPOLOGY, stages=2, microbatches=4, tensor=[2], tensor_plan=PLAN, memory=1e9
    )
    assert [name for names in found.names for name in names] == ["embedding", "layers.0", "layers.1", "head"]
    assert [rank for mesh in found.meshes for row in mesh for rank in row] == list(range(6))
    assert found.schedule.microbatches == 4
    # Steps within one percent count as equally long.
    assert found.step_seconds <= 1.011 * min(found.alternatives.values())


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.body(x))) * self.scale


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": nn.Linear(4, 4)}, r"Linear has no submodules to cut between"),
        ({"model": Twice()}, r"the model calls layer body 2 times"),
        ({"model": Twice(), "layers": ["head"]}, r"parameter scale belongs to no layer"),
        ({"layers": ["0", "7"]}, r"the model has no submodule '7'"),
        ({"tensor": [2], "tensor_plan": {"up": ColwiseParallel()}}, r"'up', which no submodule of a layer"),
        ({"tensor": [2], "tensor_plan": {"1": ColwiseParallel()}}, r"names 1, a ReLU"),
        ({"tensor": [3], "tensor_plan": {"0": ColwiseParallel()}}, r"3 tensor-parallel ranks do not divide"),
        ({"tensor": [2], "tensor_plan": {"0": SequenceParallel()}}, r"has SequenceParallel for '0'"),
        ({"tensor": [2]}, r"need tensor_plan=", ),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_measured_are_refused(options: dict, message: str) -> None:
    model = options.pop("model", nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)))
    kind = ScheduleError if "need tensor_plan" in message else LayoutError
    with pytest.raises(kind, match=message):
        partition(model, torch.randn(4, 4), 2, TOPOLOGY, **options)


def test_a_layer_that_does_not_run_with_a_degree_is_named() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.into(x).view(-1, 8))

    model = nn.Sequential(Fixed(), nn.Linear(4, 4))
    plan = {"0.into": ColwiseParallel(), "0.out": RowwiseParallel()}
    with pytest.raises(LayoutError, match=r"layer 0 does not run as one of 2 tensor-parallel ranks has it"):
        partition(model, torch.randn(3, 4), 2, TOPOLOGY, tensor=[2], tensor_plan=plan)

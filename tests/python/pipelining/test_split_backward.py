"""Split backwards give the gradients of whole ones, to the last bit, and really compute weights later."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from meshcast import _C
from meshcast.pipelining._backward import SplitBackward, hooks_made
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint


class Tied(nn.Module):
    """One weight used three times: as embedding, twice in products; and a scale that everything meets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.scale = nn.Parameter(torch.randn(()))
        self.other = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, self.weight * self.scale).tanh()
        y = self.other(y) @ self.weight
        return nn.functional.linear(y, self.weight.t()) * self.scale


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.unsqueeze(0)).squeeze(0)


class Double(torch.autograd.Function):
    """A custom function with a parameter: it computes both gradients at once."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(Double.apply(x, self.weight))


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.outer = nn.Linear(6, 6)
        self.runs = 0

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(checkpoint(self.count, x, use_reentrant=self.reentrant))


class Residual(nn.Module):
    """The input itself is a part of the output; batch norm and weight norm have more than one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(self.norm(x))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)),
    "tied": Tied,
    "attention": Attention,
    "custom": Custom,
    "checkpoint": lambda: Checkpointed(False),
    "reentrant": lambda: Checkpointed(True),
    "residual": Residual,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3, padding=1), nn.Flatten(), nn.Linear(18, 6)
    ),
}


def two_microbatches(module: nn.Module, split: bool, x: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of the inputs of two micro-batches; those of the weights are left in the module. W of both
    follow I of both."""
    late, inputs = [], []
    for part in x.chunk(2):
        value = part.clone().requires_grad_()
        before = hooks_made()
        output = module(value)
        seed = torch.linspace(-1, 1, output.numel()).reshape(output.shape)
        inputs.append(value)
        backward = SplitBackward([output], [seed], [value], hooked=hooks_made() != before)
        if not split:
            torch.autograd.backward([output], [seed])
            continue
        backward.input_gradients()
        assert value.grad is not None
        late.append(backward)
    for backward in late:
        backward.weight_gradients()
    return [value.grad for value in inputs]


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_the_whole_backward(name: str) -> None:
    torch.manual_seed(3)
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    x = torch.randn(10, 6)
    expected, found = two_microbatches(module, False, x), two_microbatches(twin, True, x)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    for (parameter_name, a), b in zip(module.named_parameters(), twin.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), parameter_name
        assert a.grad is None or torch.equal(a.grad, b.grad), parameter_name


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return function(*args, **(kwargs or {}))


def test_nothing_is_computed_early_or_twice() -> None:
    """Three layers: three products for the inputs, three for the weights, no more."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 6))
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x])
    with Products() as first:
        backward.input_gradients()
    assert all(parameter.grad is None for parameter in module.parameters())
    with Products() as second:
        backward.weight_gradients()
    assert (first.count, second.count) == (3, 3)
    assert backward.whole is None


@pytest.mark.parametrize(
    ("name", "early"),
    [
        ("tied", {"weight", "scale"}),
        ("custom", {"weight"}),
        ("checkpoint", {"inner.0.weight", "inner.0.bias", "inner.2.weight", "inner.2.bias"}),
    ],
)
def test_what_cannot_run_twice_is_early_and_nothing_else(name: str, early: set[str]) -> None:
    module = MODULES[name]()
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x])
    backward.input_gradients()
    assert {key for key, parameter in module.named_parameters() if parameter.grad is not None} == early
    backward.weight_gradients()
    assert all(parameter.grad is not None for parameter in module.parameters())
    if name == "checkpoint":
        assert module.runs == 2  # the forward and one recomputation


def test_what_only_the_inputs_needed_is_let_go() -> None:
    """What lies behind the last weight: the output among it."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Tanh())
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    seed = torch.ones_like(output)
    held = [StorageWeakRef(value.untyped_storage()) for value in (output, seed)]
    backward = SplitBackward([output], [seed], [x])
    del output, seed
    backward.input_gradients()
    assert all(storage.expired() for storage in held)
    backward.weight_gradients()
    split = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(x.detach()).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(split, module.parameters(), strict=True))


def test_what_lies_between_two_weights_is_let_go() -> None:
    """The input of an activation; that of a product is needed for its weight."""
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6))
    between: dict[str, StorageWeakRef] = {}
    for name, child in module.named_children():
        child.register_forward_hook(
            lambda _, __, value, name=name: between.update({name: StorageWeakRef(value.untyped_storage())})
        )
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x])
    del output
    assert not any(between[name].expired() for name in "0123")
    backward.input_gradients()
    assert [between[name].expired() for name in "0123"] == [True, False, True, False]
    backward.weight_gradients()
    assert between["1"].expired() and between["3"].expired()


def test_a_second_part_starts_at_every_weight_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks at all nodes that it could reach from where it starts: from each weight those of the
    weights before it, unless they are cut off."""
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(20)))
    x = torch.randn(5, 6, requires_grad=True)
    backward = SplitBackward([module(x)], [torch.ones(5, 6)], [x])
    backward.input_gradients()
    reached = set()
    calls = []
    plain = torch.autograd.backward

    def seen(edges: list, *args: object, **named: object) -> None:
        calls.append(len(edges))
        for edge in edges:
            stack = [edge.node]
            while stack:
                node = stack.pop()
                reached.add((edge.node, node))
                stack += [child for child, _ in node.next_functions if child is not None]
        plain(edges, *args, **named)

    monkeypatch.setattr(torch.autograd, "backward", seen)
    backward.weight_gradients()
    assert calls == [20]
    assert len(reached) == 20 * 4  # the product, the transpose and two parameters


def test_nodes_of_python_have_no_edges_to_cut() -> None:
    node = Double.apply(torch.ones(2, requires_grad=True), torch.ones(2)).grad_fn
    with pytest.raises(ValueError, match="a node that C\\+\\+ has made"):
        _C.cut_edges(node, [0])


def test_hooks_fire_once() -> None:
    """On parameters they do not matter; on values they make the backward whole."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    fired = []
    module[0].weight.register_hook(lambda gradient: fired.append("weight") or 2 * gradient)
    module[2].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x])
    backward.input_gradients()
    assert fired == []
    backward.weight_gradients()
    assert sorted(fired) == ["accumulated", "weight"]
    split = module[0].weight.grad.clone()
    module.zero_grad()
    module(x.detach().requires_grad_()).sum().backward()
    assert torch.equal(split, module[0].weight.grad)


def test_hooks_on_values_make_it_whole() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    fired = []
    module[0].register_full_backward_hook(lambda *_: fired.append("module"))
    x = torch.randn(5, 6, requires_grad=True)
    before = hooks_made()
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x], hooked=hooks_made() != before)
    backward.input_gradients()
    backward.weight_gradients()
    assert fired == ["module"]
    assert "hooks" in backward.whole
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_compiled_part_makes_it_whole() -> None:
    inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    module = nn.Sequential(torch.compile(inner, backend="aot_eager"), nn.Linear(6, 6))
    x = torch.randn(5, 6, requires_grad=True)
    output = module(x)
    backward = SplitBackward([output], [torch.ones_like(output)], [x])
    backward.input_gradients()
    assert "compiled" in backward.whole
    found = [parameter.grad.clone() for parameter in module.parameters()]
    backward.weight_gradients()
    module.zero_grad()
    module[1](inner(x)).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(found, module.parameters(), strict=True))


def test_without_inputs_everything_is_late() -> None:
    module = nn.Linear(6, 6)
    output = module(torch.randn(5, 6))
    backward = SplitBackward([output], [torch.ones_like(output)], [])
    backward.input_gradients()
    assert module.weight.grad is None
    backward.weight_gradients()
    assert module.weight.grad is not None

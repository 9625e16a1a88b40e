"""The experts of examples/moe in five processes: over ranks 0 and 1, and over ranks 2 to 4."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from gpt.config import model_config
from moe.config import sparse
from moe.experts import Experts
from moe.model import MoEStage, build_stage, parallelize
from moe.serve import move

GROUP_TIMEOUT = 60.0
WIDTH, INNER = 6, 8
# Against one process: the order of sums differs, and in bfloat16 each rounds to 8 bits.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def meshes(small: list[list[int]], large: list[list[int]]) -> list[DeviceMesh]:
    """Made by all ranks in one order, since each has process groups."""
    return [DeviceMesh("cpu", ranks, mesh_dim_names=("data", "tensor")) for ranks in (small, large)]


def my_mesh(context, found: list[DeviceMesh]) -> DeviceMesh:
    return found[0] if context.rank < 2 else found[1]


def whole_experts(number: int, dtype: torch.dtype, seed: int) -> Experts:
    experts, chance = Experts(number, WIDTH, INNER), torch.Generator().manual_seed(seed)
    for parameter in experts.parameters():
        parameter.data.normal_(generator=chance)
    return experts.to(dtype)


def check_experts(
    context, found: list[DeviceMesh], number: int, sizes: list[int], dtype: torch.dtype
) -> None:
    """sizes: tokens of each data-parallel rank. Values, gradients of tokens and those of weights."""
    mesh = my_mesh(context, found)
    ranks = mesh.size(0)
    whole = whole_experts(number, dtype, seed=number)
    shared = copy.deepcopy(whole)
    shared.share(mesh)
    chance = torch.Generator().manual_seed(7)
    tokens = torch.randn(sum(sizes[:ranks]), WIDTH, generator=chance).to(dtype).requires_grad_()
    chosen = torch.randint(0, number, (len(tokens),), generator=chance)
    weights = torch.randn(len(tokens), WIDTH, generator=chance).to(dtype)
    expected = whole(tokens, chosen)
    (expected * weights).sum().backward()
    place = mesh["data"].get_local_rank()
    mine = [each.detach().split(sizes[:ranks])[place] for each in (tokens, chosen, weights, expected)]
    given = mine[0].clone().requires_grad_()
    made = shared(given, mine[1])
    (made * mine[2]).sum().backward()
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype]}
    torch.testing.assert_close(made.detach(), mine[3], **near)
    torch.testing.assert_close(given.grad, tokens.grad.split(sizes[:ranks])[place], **near)
    for name, parameter in shared.named_parameters():
        assert isinstance(parameter.data, DTensor)
        local = parameter.data.to_local()
        if parameter.grad is None:
            assert local.numel() == 0, "a rank without experts"
            parameter.grad = torch.zeros_like(parameter)
        gradient = parameter.grad.full_tensor()
        expected_gradient = getattr(whole, name).grad
        assert expected_gradient.abs().max() > 0.1
        scale = expected_gradient.abs().max().item()  # of sums over many tokens
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=TOLERANCE[dtype] * scale)


def experts_over_ranks(context) -> None:
    found = meshes([[0], [1]], [[2], [3], [4]])
    for number in (5, 2, 1):  # unequal shards; ranks without experts
        for dtype in TOLERANCE:
            check_experts(context, found, number, [11, 4, 9], dtype)
    mine = my_mesh(context, found)
    assert mine["data"].size() == (2 if context.rank < 2 else 3)


def ranks_without_tokens(context) -> None:
    found = meshes([[0], [1]], [[2], [3], [4]])
    for sizes in ([0, 7, 0], [5, 0, 3]):
        check_experts(context, found, 4, sizes, torch.float64)


def width_over_ranks(context) -> None:
    """Every expert on all ranks, a part of its width on each: 8 over 2, and over 3."""
    found = meshes([[0, 1]], [[2, 3, 4]])
    for dtype in TOLERANCE:
        check_experts(context, found, 5, [9], dtype)


def moved_between_expert_layouts(context) -> None:
    """A model over 2 ranks goes to 3, then from these to all 5; each rank gets the very bits of its part."""
    config = sparse(model_config("nano"), experts=5, active=2, balance=0.01)
    two, three = meshes([[0], [1]], [[2], [3], [4]])
    five = DeviceMesh("cpu", [[rank] for rank in range(5)], mesh_dim_names=("data", "tensor"))

    def built(seed: int, mesh: DeviceMesh, dtype: torch.dtype) -> MoEStage | None:
        stage = build_stage(config, 0, 1, seed).to(dtype)
        if context.rank not in mesh.mesh:
            return None
        parallelize(stage, mesh)
        return stage

    for dtype in (torch.float32, torch.bfloat16):
        held, received, everywhere = built(0, two, dtype), built(1, three, dtype), built(2, five, dtype)
        move(held, received, three, {})
        move(received, everywhere, five, {})
        expected = build_stage(config, 0, 1, 0).to(dtype)
        for module in (received, everywhere):
            for name, parameter in () if module is None else module.named_parameters():
                value = parameter.detach()
                got = value.full_tensor() if isinstance(value, DTensor) else value
                assert torch.equal(got, expected.get_parameter(name)), name
        assert everywhere is not None
        tokens = torch.arange(config.seq_len).expand(5, -1)[context.rank : context.rank + 1]
        with torch.no_grad():
            for one, other in zip(everywhere(tokens), expected(tokens), strict=True):
                torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert len(everywhere.layers["0"].mlp.experts.up.data.to_local()) == 1


CASES = [experts_over_ranks, ranks_without_tokens, width_over_ranks, moved_between_expert_layouts]

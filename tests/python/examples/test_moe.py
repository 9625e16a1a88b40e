"""The GPT with experts without process groups: sizes, routing, its loss, cut into stages, refusals."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from gpt.config import model_config
from moe import experts, model
from moe.config import MoEConfig, sparse
from moe.job import MoEJobType
from training import options
from training.layout import ConfigError

pytestmark = pytest.mark.timeout(120)
NANO = sparse(model_config("nano"), experts=5, active=2, balance=0.01)


def test_parameter_count_matches_the_formula() -> None:
    whole = model.build_stage(NANO, 0, 1, seed=0)
    assert sum(p.numel() for p in whole.parameters()) == NANO.parameters()


def test_stages_in_sequence_equal_the_whole_model() -> None:
    whole = model.build_stage(NANO, 0, 1, seed=3)
    stages = [model.build_stage(NANO, i, 2, seed=3) for i in range(2)]
    tokens = torch.randint(0, 256, (3, NANO.seq_len), generator=torch.Generator().manual_seed(1))
    found = stages[1](*stages[0](tokens))
    expected = whole(tokens)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    model.loss_fn(NANO, found, tokens).backward()
    model.loss_fn(NANO, expected, tokens).backward()
    parts = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    for name, parameter in whole.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0, name
        assert torch.equal(parts[name], parameter.grad), name


def test_a_sample_does_not_depend_on_the_others_of_its_batch() -> None:
    whole = model.build_stage(NANO, 0, 1, seed=3).double()
    tokens = torch.randint(0, 256, (4, NANO.seq_len), generator=torch.Generator().manual_seed(1))
    logits, imbalance = whole(tokens)
    for index in range(4):
        alone, its = whole(tokens[index : index + 1])
        torch.testing.assert_close(alone[0], logits[index], rtol=0, atol=1e-12)
        torch.testing.assert_close(its[0], imbalance[index], rtol=0, atol=1e-12)


def test_a_token_becomes_the_sum_of_its_experts_by_their_probabilities() -> None:
    chance = torch.Generator().manual_seed(2)
    layer = model.SparseMLP(NANO).double()
    for parameter in layer.parameters():
        parameter.data.normal_(generator=chance)
    x = torch.randn(2, 7, NANO.width, generator=chance, dtype=torch.float64)
    made, _ = layer(x)
    probabilities = torch.softmax(x @ layer.router.weight.T, -1)
    for sample in range(2):
        for token in range(7):
            given = probabilities[sample, token]
            best = given.argsort(descending=True)[:2]
            expected = sum(
                given[e]
                * torch.nn.functional.gelu(x[sample, token] @ layer.experts.up[e], approximate="tanh")
                @ layer.experts.down[e]
                for e in best
            )
            torch.testing.assert_close(made[sample, token], expected, rtol=1e-12, atol=1e-12)


def test_imbalance_is_1_where_experts_get_the_same_and_their_number_where_one_gets_all() -> None:
    even = torch.full((2, 4, 4), 0.25)
    turns = torch.arange(4).view(1, 4, 1).expand(2, 4, 1)
    assert model.imbalance(even, turns).tolist() == [1.0, 1.0]
    one = torch.zeros(1, 4, 4)
    one[..., 2] = 1.0
    assert model.imbalance(one, torch.full((1, 4, 1), 2)).tolist() == [4.0]


def test_the_loss_of_the_routers_is_their_mean_imbalance_by_its_weight() -> None:
    logits, targets = torch.randn(2, 3, 256), torch.zeros(2, 3, dtype=torch.long)
    without, of_it = (
        model.loss_fn(NANO, (logits, torch.tensor(each)), targets) for each in ([0.0, 0.0], [2.0, 4.0])
    )
    torch.testing.assert_close(of_it - without, torch.tensor(0.01 * 3.0 / 2), rtol=0, atol=1e-6)


def test_a_router_decides_in_float32_under_autocast() -> None:
    chance = torch.Generator().manual_seed(2)
    router = model.Router(NANO)
    router.weight.data.normal_(generator=chance)
    x = torch.randn(2, 7, NANO.width, generator=chance)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found, torch.nn.functional.linear(x, router.weight).softmax(-1))


def test_the_imbalance_of_all_layers_adds_up() -> None:
    whole = model.build_stage(NANO, 0, 1, seed=3)
    found: list[torch.Tensor] = []
    for block in whole.layers.values():
        block.mlp.register_forward_hook(lambda _module, _args, made: found.append(made[1]))
    tokens = torch.randint(0, 256, (3, NANO.seq_len), generator=torch.Generator().manual_seed(1))
    imbalance = whole(tokens)[1]
    assert len(found) == NANO.layers
    assert torch.equal(imbalance, sum(found, torch.zeros(3)))


def test_a_stage_accepts_an_empty_shard() -> None:
    stages = [model.build_stage(NANO, i, 2, seed=0) for i in range(2)]
    hidden, imbalance = stages[0](torch.zeros(0, NANO.seq_len, dtype=torch.long))
    assert hidden.shape == (0, NANO.seq_len, NANO.width)
    assert imbalance.shape == (0,)
    assert stages[1](hidden, imbalance)[0].shape == (0, NANO.seq_len, NANO.vocab)


@pytest.mark.parametrize(
    ("number", "ranks", "expected"), [(5, 2, [3, 2]), (5, 3, [2, 2, 1]), (4, 3, [2, 2, 0]), (1, 3, [1, 0, 0])]
)
def test_ranks_own_the_experts_of_their_shard(number: int, ranks: int, expected: list[int]) -> None:
    assert experts.owned_experts(number, ranks) == expected


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("--experts 0", r"--experts 0: must be at least 1"),
        ("--experts 3 --active 4", r"--active 4 of --experts 3; use --active 3"),
        ("--active 0", r"--active 0 of --experts 4; use --active 1"),
        ("--balance -1", r"--balance -1.0: must be at least 0, as in --balance 0.01"),
        ("--balance nan", r"--balance nan: must be at least 0"),
        ("--model nan", r"--model nan: unknown"),
    ],
)
def test_numbers_that_cannot_be_are_refused(command: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options.parse(MoEJobType(), ["--stages", "2,3", *command.split()], 5)


def test_a_checkpoint_of_other_experts_is_another_model() -> None:
    job = options.parse(MoEJobType(), ["--stages", "2,3", "--experts", "6"], 5).job
    assert job.about() | {"experts": 4, "layers": 2} != job.about()
    assert MoEConfig(**job.about()) == job.config

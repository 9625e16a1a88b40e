"""The GPT example without process groups: sizes and errors, data order, cut into stages, optimiser."""

import math
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from gpt import config, data, model
from gpt.job import GptJobType
from training import layout, optimizer, options, verify
from training.layout import ConfigError, RunLayout, StageShape

pytestmark = pytest.mark.timeout(120)
NANO = config.MODELS["nano"]


@pytest.mark.parametrize("name", ["nano", "tiny", "small"])
def test_parameter_count_matches_the_formula(name: str) -> None:
    whole = model.build_stage(config.MODELS[name], 0, 1, seed=0)
    assert sum(p.numel() for p in whole.parameters()) == config.MODELS[name].parameters()


@pytest.mark.parametrize(
    ("name", "billions"), [("125M", 0.0864), ("1.3B", 1.42), ("2.6B", 2.78), ("39B", 39.5)]
)
def test_named_sizes_have_the_parameters_of_their_name(name: str, billions: float) -> None:
    assert config.MODELS[name].parameters() / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4])
def test_stages_in_sequence_equal_the_whole_model(n_stages: int) -> None:
    tiny = config.MODELS["tiny"]
    whole = model.build_stage(tiny, 0, 1, seed=3)
    stages = [model.build_stage(tiny, i, n_stages, seed=3) for i in range(n_stages)]
    tokens = torch.randint(0, 256, (2, tiny.seq_len), generator=torch.Generator().manual_seed(1))
    logits = tokens
    for stage in stages:
        logits = stage(logits)
    torch.testing.assert_close(logits, whole(tokens), rtol=0, atol=0)
    model.loss_fn(logits, tokens).backward()
    model.loss_fn(whole(tokens), tokens).backward()
    parts = {name: p.grad for stage in stages for name, p in stage.named_parameters()}
    expected = {name: p.grad for name, p in whole.named_parameters()}
    assert parts.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(parts[name], grad, rtol=0, atol=0, msg=name)


def test_initial_values_depend_on_seed_and_name_and_have_the_stated_spread() -> None:
    first, again, other = (dict(model.build_stage(NANO, 0, 1, seed).named_parameters()) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    weight = "layers.1.up.weight"
    assert not torch.equal(first[weight], other[weight])
    assert not torch.equal(first[weight], first["layers.0.up.weight"])
    assert first[weight].std().item() == pytest.approx(0.02, rel=0.1)
    assert first["layers.0.down.weight"].std().item() == pytest.approx(
        0.02 / math.sqrt(2 * NANO.layers), rel=0.1
    )


def test_an_output_depends_on_no_later_token() -> None:
    whole = model.build_stage(NANO, 0, 1, seed=0)
    tokens = torch.zeros(1, NANO.seq_len, dtype=torch.long)
    changed = tokens.clone()
    changed[0, 10] = 7
    before, after = whole(tokens), whole(changed)
    assert torch.equal(before[0, :10], after[0, :10])
    assert not torch.allclose(before[0, 10:], after[0, 10:])


def test_a_stage_accepts_an_empty_shard() -> None:
    stages = [model.build_stage(NANO, i, 2, seed=0) for i in range(2)]
    hidden = stages[0](torch.zeros(0, NANO.seq_len, dtype=torch.long))
    assert hidden.shape == (0, NANO.seq_len, NANO.width)
    assert stages[1](hidden).shape == (0, NANO.seq_len, NANO.vocab)


def test_tied_embedding_is_one_parameter_and_is_counted_once() -> None:
    tied = config.model_config("nano", tied=True)
    whole = model.build_stage(tied, 0, 1, seed=0)
    assert whole.head is not None
    assert whole.embedding is not None
    assert whole.head.output.weight is whole.embedding.tokens.weight
    assert sum(p.numel() for p in whole.parameters()) == tied.parameters()


def test_samples_depend_on_seed_and_step_alone() -> None:
    text = torch.arange(4000).remainder(251).to(torch.uint8)
    samples = data.TextSamples(text, seq_len=16, seed=5)
    (inputs,), targets = samples.train(7, batch=6)
    samples.train(3, batch=9)
    (again,), _ = data.TextSamples(text, seq_len=16, seed=5).train(7, batch=6)
    assert inputs.shape == targets.shape == (6, 16)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for other in (
        samples.train(8, 6),
        data.TextSamples(text, 16, seed=6).train(7, 6),
        samples.held_out(7, 6),
    ):
        assert not torch.equal(inputs, other[0][0])


def test_held_out_text_is_never_trained_on() -> None:
    text = torch.zeros(2000, dtype=torch.uint8)
    text[-100:] = 1
    samples = data.TextSamples(text, seq_len=8, seed=0)
    for step in range(20):
        (inputs,), targets = samples.train(step, 64)
        assert not inputs.any()
        assert not targets.any()
    (inputs,), targets = samples.held_out(0, 64)
    assert inputs.all()
    assert targets.all()


def test_text_comes_from_the_standard_library_or_a_path(tmp_path: Path) -> None:
    assert len(data.read_text(None)) > 5_000_000
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.py").write_text("first")
    (tmp_path / "c.bin").write_text("never")
    assert bytes(data.read_text(str(tmp_path)).tolist()) == b"first\nsecond"
    assert bytes(data.read_text(str(tmp_path / "b.txt")).tolist()) == b"second"
    with pytest.raises(ConfigError, match="no such file"):
        data.read_text(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="at least"):
        data.TextSamples(data.read_text(str(tmp_path)), seq_len=16, seed=0)


@pytest.mark.parametrize(
    ("command", "ranks", "message"),
    [
        ("--stages 2,3", None, r"start it with torchrun, as in torchrun .*--stages 2,3"),
        ("--stages 2,3", 4, r"needs 5 ranks, but 4 started.*--nproc-per-node 5.*--stages 2,2"),
        ("--stages 2;3", 5, r"--stages 2;3: expected"),
        ("--stages 2,0", 2, r"--stages 2,0: expected"),
        ("--stages 1,1,1,1,1", 5, r"5 stages for 4 layers.*at most 4 stages"),
        ("--stages 2,3 --heads 5", 5, r"--width 96 is not divisible by --heads 5.*--heads 4, or --width 95"),
        ("--stages 2,3 --batch 20", 5, r"divide by 2 and 3 ranks; use a multiple of 24: --batch 24"),
        ("--stages 2,3 --batch 100 --microbatches 2", 5, r"multiple of 12: --batch 96"),
        ("--stages 2,3 --batch 24 --microbatches 0", 5, r"--microbatches 0: both must be at least 1"),
        ("--stages 2,3 --batch 24 --accumulate 2", 5, r"2 passes of 4 micro-batches that .*: --batch 48"),
        ("--stages 2,3 --accumulate 0", 5, r"--accumulate 0: must be at least 1"),
        ("--stages 1x3,2", 5, r"4 heads cannot be shared evenly by 3.*use 1x2, or --heads 3"),
        ("--stages 2x2,3 --batch 20", 7, r"divide by 2 and 3 ranks; use a multiple of 24: --batch 24"),
        ("--stages 2x,3", 5, r"--stages 2x,3: expected.*--stages 2x2,3"),
        ("--stages 2,3 --model giant", 5, r"--model giant: unknown.*tiny.*39B"),
        ("--stages 2,3 --layers 0", 5, r"--layers 0: must be at least 1"),
        ("--stages 2,3 --steps 0", 5, r"--steps 0: must be at least 1"),
        ("--stages 2,3 --batch 0", 5, r"--batch 0: must be a multiple of 24: --batch 24"),
        ("--stages 1x5,1", 6, r"4 heads cannot .* 5 tensor.*; use 1x4, or --heads 5 --width 95"),
        ("--stages 1x8,1", 9, r"4 heads cannot .* 8 tensor.*; use 1x4, or --heads 8$"),
        ("--model Tiny", 5, r"--model Tiny: unknown; .*; nearest: tiny"),
        ("--schedule 1f1b", 5, r"--schedule 1f1b: unknown; use 1F1B \(of GPipe, 1F1B"),
        ("--schedule Interleaved1F1B", 5, r"--schedule Interleaved1F1B: unknown; use Eager1F1B"),
        ("--precision fp16", 5, r"--precision fp16: unknown; use bf16 \(of float32, bf16\)"),
        ("--precision float16", 5, r"--precision float16: unknown; use float32"),
        ("--lr -1", 5, r"--lr -1.0: must be above 0, as in --lr 0.003"),
        ("--lr nan", 5, r"--lr nan: must be above 0"),
        ("--clip 0", 5, r"--clip 0.0: must be above 0; --clip inf clips nothing"),
        ("--warmup -1", 5, r"--warmup -1: must be at least 0, as in --warmup 0"),
        ("--weight-decay -0.1", 5, r"--weight-decay -0.1: must be at least 0"),
        ("--tolerance nan", 5, r"--tolerance nan: must be at least 0"),
        ("--batch some", 5, r"argument --batch: invalid int value: 'some'"),
        ("--stepz 3", 5, r"--stepz: no such option; use --steps, or see --help"),
        ("24", 5, r"24: belongs to no option"),
        ("--checkpoint /dev/null", 5, r"--checkpoint /dev/null: is no folder"),
        ("--metrics /dev/null/x", 5, r"--metrics /dev/null/x: cannot be written below /dev/null"),
        ("--metrics /", 5, r"--metrics /: is no file"),
        ("--stages 2,3 --resume", 5, r"--resume needs --checkpoint"),
        ("--stages 2,3 --resume --checkpoint x --verify", 5, r"--verify starts from the initial weights"),
    ],
)
def test_a_wrong_combination_is_refused_with_the_nearest_choice(
    command: str, ranks: int | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        options.parse(GptJobType(), command.split(), ranks)


def test_a_valid_command_line() -> None:
    command = "--model nano --seq-len 16 --batch 12 --microbatches 2 --steps 30 --verify"
    chosen = options.parse(GptJobType(), command.split(), 5)
    assert chosen.run == RunLayout((StageShape(3), StageShape(2)), batch=12, microbatches=2)
    assert [chosen.run.stage_of(rank) for rank in range(5)] == [0, 0, 0, 1, 1]
    assert chosen.run.stage_ranks(1) == [3, 4]
    assert (chosen.job.config.seq_len, chosen.job.config.layers, chosen.warmup) == (16, 2, 20)
    assert chosen.verify >= chosen.steps


@pytest.mark.parametrize(("layers", "n_stages"), [(4, 1), (4, 3), (7, 3), (5, 5)])
def test_layers_are_cut_evenly_and_completely(layers: int, n_stages: int) -> None:
    parts = layout.split_layers(layers, n_stages)
    assert [i for part in parts for i in part] == list(range(layers))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [optimizer.learning_rate(step, peak=1.0, warmup=4, steps=20) for step in range(21)]
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert rates[20] == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("loss", "gradients", "within"),
    [
        (2.0, [0.0, 1e-6], True),
        (2.0 + 1e-4, [0.0, 0.0], False),
        (2.0, [0.0, 1e-4], False),
        (math.nan, [0.0, 0.0], False),
    ],
)
def test_a_difference_is_accepted_only_where_every_part_is(
    loss: float, gradients: list[float], within: bool
) -> None:
    assert verify.Difference(1, loss, 2.0, gradients).within(1e-5) is within


def test_a_missing_or_undefined_gradient_is_the_largest_difference() -> None:
    expected = torch.tensor([1.0, 2.0, 3.0])
    assert verify.largest_difference(torch.tensor([1.0, 2.5, 2.75]), expected) == 0.5
    assert verify.largest_difference(torch.tensor([1.0, math.nan, 3.0]), expected) == math.inf
    assert verify.largest_difference(None, expected) == math.inf


def test_the_single_process_learns() -> None:
    command = "--model nano --stages 1 --batch 12 --microbatches 1 --steps 30 --warmup 5 --lr 0.01"
    chosen = options.parse(GptJobType(), command.split(), 1)
    text = torch.arange(4000).remainder(7).to(torch.uint8)
    samples = data.TextSamples(text, chosen.job.config.seq_len, chosen.seed)
    process = verify.SingleProcess(chosen, samples, torch.device("cpu"))
    losses = []
    for step in range(chosen.steps):
        losses.append(process.gradients(step)[0])
        process.update(step)
    assert losses[0] == pytest.approx(math.log(256), abs=0.1)  # nothing learnt: every byte is as likely
    assert losses[-1] < 2.5

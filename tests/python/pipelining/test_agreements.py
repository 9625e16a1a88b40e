"""What the ranks of a pipeline agree on before a step, and how batches and gradients are shared out."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from meshcast.base import forks
from meshcast.base.wire import pack, unpack
from meshcast.errors import LayoutError
from meshcast.layout import Layout
from meshcast.pipelining import Edge
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.inference import Probe, stand_ins
from meshcast.pipelining.microbatch import cut
from meshcast.pipelining.parallel import (
    Inferred,
    LocalValue,
    StageMesh,
    gradient_placements,
    numbered_dims,
    with_empty,
)
from meshcast.pipelining.table import (
    Claim,
    Dealt,
    GivenValues,
    OpaqueValue,
    RankReport,
    StageTable,
    StepAnswer,
    StepReport,
    agree_on_stages,
    agree_on_step,
    describe_stages,
)
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.pipelining.microbatch import _Replicate as Whole
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard


def infer_outputs(
    module: nn.Module, args: list, kwargs: dict, *, with_grad: bool, what: str, real: bool = False, **how: Any
) -> Inferred:
    return Probe(module, what, with_grad, real=real).outputs((args, kwargs), **how)


def said(**fields: Any) -> StepReport:
    return StepReport(**{"shapes": ["a", "b"], **fields})


def test_ranks_that_were_given_unlike_orders() -> None:
    (rank, text), *others = agree_on_step({2: said(order="a"), 5: said(order="b")}).refused
    assert (rank, others) == (2, [])
    assert "rank 2 has a, rank 5 has b" in text


def test_reports_and_answers_survive_the_wire() -> None:
    opaque = OpaqueValue(-1, 4, "argument 1", ".cache[0]", "Cache", "Declare it.")
    values = given(opaque=[opaque], digests={"args": ("a", "b")}, batch=None)
    report = said(samples=[2, 1], weight=0.5, weighted=True, given={0: values, 3: given()})
    found = unpack(StepReport, pack(report))
    assert (found.given, found.samples, found.weight) == (report.given, [2, 1], 0.5)
    answer = agree_on_step({0: said(samples=[2, 1]), 3: said(weight=1.5)})
    assert unpack(StepAnswer, pack(answer))._replace(keys=answer.keys, samples=answer.samples) == answer
    refused = agree_on_step({0: said(), 5: StepReport("no")})
    assert list(unpack(StepAnswer, pack(refused)).refused) == [(5, "no")]


def test_the_first_stage_tells_the_samples_and_anyone_the_rest() -> None:
    answer = agree_on_step({0: said(samples=[2, 1]), 3: said(alike=True), 4: said(weighted=True)})
    assert (answer.samples, answer.alike, answer.weighted) == ([2, 1], True, True)
    same = agree_on_step({0: said(samples=[2, 1]), 3: said(), 4: said()})
    other = agree_on_step({0: said(samples=[2, 1]), 3: said(shapes=["a", "c"]), 4: said()})
    assert answer.keys == same.keys
    assert same.keys[0] == other.keys[0] != same.keys[1] != other.keys[1]
    assert (same.alike, same.weighted) == (False, None)


def test_all_who_refuse_are_named_the_first_one_first() -> None:
    answer = agree_on_step({0: said(samples=[1]), 5: StepReport("no"), 2: StepReport("never")})
    assert answer.refused == [(2, "never"), (5, "no")]
    (rank, text), *others = agree_on_step({0: said(), 1: said(mode="eval")}).refused
    assert (rank, others) == (0, [])
    assert "rank 0 calls step, rank 1 calls eval" in text


def given(**fields: Any) -> GivenValues:
    claims = [Claim(-1, "args", 4, "argument 0", (4, 3), "Declare it.")]
    return GivenValues([2], 0, False, [2, 2], False, claims, [], {})._replace(**fields)


def of_ranks(*stages: dict[int, GivenValues], **fields: Any) -> dict[int, StepReport]:
    entries: dict[int, dict[int, GivenValues]] = {}
    for stage, ranks in enumerate(stages):
        for rank, each in ranks.items():
            entries.setdefault(rank, {})[stage] = each
    return {
        rank: said(given=each, samples=[2, 2] if 0 in each else None, **fields)
        for rank, each in entries.items()
    }


def claim(rows: int, name: str = "target", piece: int = -1) -> list[Claim]:
    kind = "target" if name == "target" else "args"
    return [Claim(piece, kind, rows, name, (rows, 3), "Share it.")]


def test_what_does_not_fit_the_batch_is_refused() -> None:
    first = {0: given(), 1: given(part=1)}
    answer = agree_on_step(of_ranks(first, {2: given(claims=claim(4)), 3: given(claims=claim(4), part=1)}))
    assert (answer.rows, answer.dealt) == ([2, 2], None)
    for rows, piece in ((3, -1), (8, -1), (3, 1)):
        last = {rank: given(claims=claim(rows, piece=piece)) for rank in (2, 3)}
        found = agree_on_step(of_ranks(first, last)).refused
        assert [rank for rank, _ in found] == [2, 3]
        assert (
            f"pipeline on rank 2: stage 1: target has {rows} samples (its shape is ({rows}, 3))"
            in found[0][1]
        )
        assert ("the batch has 4" if piece < 0 else "micro-batch 1 has 2") in found[0][1]
        assert "Share it." in found[0][1]
    # As torch takes it, several rows of a target may belong to a sample.
    last = {2: given(claims=claim(8))}
    assert agree_on_step(of_ranks(first, last, as_torch=True)).rows == [2, 2]
    assert agree_on_step(of_ranks(first, {2: given(claims=claim(6))}, as_torch=True)).refused
    # Arguments are cut by their own size there: micro-batches may have fewer lengths than samples.
    last = {2: given(claims=claim(2, "keyword argument 'lengths'"))}
    assert agree_on_step(of_ranks(first, last, as_torch=True)).rows == [2, 2]
    assert agree_on_step(of_ranks(first, last)).refused
    opaque = [OpaqueValue(-1, 4, "argument 1", ".cache[0]", "Cache", "Declare it.")]
    (_, text), *_ = agree_on_step(of_ranks({0: given(opaque=opaque)})).refused
    assert "argument 1 is of type Cache, whose .cache[0] has 4 samples" in text


def test_ranks_of_a_stage_that_were_given_different_values() -> None:
    def digests(plain: str, own: str = "") -> dict[str, Any]:
        return {"digests": {"args": (plain, own)}}

    first = {0: given(**digests("a")), 1: given(**digests("b"), part=1)}
    (rank, text), *others = agree_on_step(of_ranks(first)).refused
    assert (rank, others) == (1, [])
    assert "ranks 0 and 1 of stage 0 were given different arguments" in text
    assert "local_batch=True" in text
    sizes = {0: given(), 1: given(claims=claim(6, "argument 0"), batch=[3, 3], part=1)}
    assert (
        "ranks 0 and 1 of stage 0 were given different values" in agree_on_step(of_ranks(sizes)).refused[0][1]
    )


def test_ranks_that_give_their_own_samples() -> None:
    def own(part: int, rows: list[int], **fields: Any) -> GivenValues:
        return given(
            own=True, local=True, part=part, batch=rows, claims=claim(sum(rows), "argument 0"), **fields
        )

    first = {0: own(0, [2, 2]), 1: own(1, [2, 1])}
    answer = agree_on_step(of_ranks(first, {2: own(0, [2, 2]), 3: own(1, [2, 1])}))
    assert (answer.rows, answer.samples) == ([4, 3], [4, 3])
    assert answer.dealt == Dealt([[2, 2], [2, 1]], [2])
    assert answer.keys != agree_on_step(of_ranks({0: own(0, [2, 2]), 1: own(1, [2, 2])})).keys
    for wrong, words in (
        ({0: own(0, [2, 1]), 1: own(1, [2, 2])}, "3 samples of its own"),
        ({0: own(0, [0, 0]), 1: own(1, [0, 0])}, "no samples on any rank"),
        ({0: own(0, [2, 2]), 1: own(0, [2, 1])}, "ranks 0 and 1 of stage 0"),
        ({0: own(0, [2, 2]), 1: given(part=1)}, "ranks 0 and 1 of stage 0"),
    ):
        assert words in agree_on_step(of_ranks(wrong)).refused[0][1]
    other = {rank: own(rank - 2, [2, 2], grid=[3]) for rank in (2, 3, 4)}
    assert "over 3 ranks, stage 0 over 2 ranks" in agree_on_step(of_ranks(first, other)).refused[0][1]


def test_gradients_of_whole_values_are_pending_sums_over_data_dimensions() -> None:
    assert gradient_placements((Replicate(), Shard(0)), [0]) == (Partial(), Shard(0))
    assert gradient_placements((Replicate(), Replicate()), [1]) == (Replicate(), Partial())
    # A part of a sum has the gradient of the sum, wherever the parts are.
    assert gradient_placements((Partial(), Shard(1)), [0, 1]) == (Replicate(), Shard(1))


def test_mesh_dimensions_by_number_or_name() -> None:
    mesh = StageMesh(torch.arange(4).reshape(2, 2), 0, type("Mesh", (), {"mesh_dim_names": ("dp", "cp")}))
    assert numbered_dims("x", ["cp", 0], mesh, []) == [0, 1]
    assert numbered_dims("x", "cp", mesh, []) == [1]
    assert numbered_dims("x", [], mesh, [1]) == []
    assert numbered_dims("x", None, mesh, [1]) == [1]
    for wrong in (2, -1, "tp"):
        with pytest.raises(LayoutError, match=r"x: expected mesh dimensions 0\.\.1 or .*'dp', 'cp'.*found"):
            numbered_dims("x", [wrong], mesh, [])


CUTS = [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (3, [1, 1, 1, 0]), (1, [1, 0, 0, 0])]


@pytest.mark.parametrize(("rows", "sizes"), CUTS)
def test_a_batch_is_cut_as_tensor_split_does(rows: int, sizes: list[int]) -> None:
    x, tall = torch.arange(rows * 2).reshape(rows, 2), torch.arange(3 * rows).reshape(3, rows)
    specs = (TensorChunkSpec(0), TensorChunkSpec(1), Whole())
    pieces, named, samples = cut((x, tall, 5), {"whole": x}, 4, specs, {"whole": Whole()}, "here")
    assert samples == sizes
    for number, (first, second, third) in enumerate(pieces):
        assert torch.equal(first, x.tensor_split(4)[number])
        assert torch.equal(second, tall.tensor_split(4, 1)[number])
        assert third == 5
        assert torch.equal(named[number]["whole"], x)


def test_values_that_no_tensor_is_cut_from() -> None:
    assert cut((1,), {}, 3, None, None, "here") == ([(1,)] * 3, [{}] * 3, [1] * 3)
    with pytest.raises(LayoutError, match=r"here: a tensor of shape \(0, 2\) has no samples in dimension 0"):
        cut((torch.ones(0, 2),), {}, 3, None, None, "here")


def test_ranks_without_samples_have_the_shapes_that_others_tell() -> None:
    layout = Layout([[0, 1], [2, 3]], [Shard(0), Shard(1)])
    assert with_empty({0: (4, 3), 1: (4, 2)}, layout, [0]) == {0: (4, 3), 1: (4, 2), 2: [0, 3], 3: [0, 2]}
    whole = Layout([0, 1], [Replicate()])
    assert with_empty({0: (4, 3)}, whole, [0]) == {0: (4, 3), 1: (4, 3)}


class Heads(nn.Module):
    """Cannot run without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(x.shape[0], -1, 3).flatten(0, 1) * self.weight, self.weight.exp()


def test_a_rank_without_samples_stands_in() -> None:
    module, x = Heads(), torch.ones(0, 6)
    assert infer_outputs(module, [x], {}, with_grad=True, what="s") == Inferred(None, stand_in=True)
    # Nobody has samples: of one and of two samples follows what none would have.
    found = infer_outputs(module, [x], {}, with_grad=True, what="s", everywhere_empty=True)
    values = [LocalValue((0, 3), torch.float32, True), LocalValue((3,), torch.float32, True)]
    assert found == Inferred(values, stand_in=True)
    filled, same = stand_ins((x, torch.ones(2)), 1)
    assert (filled.shape, same.shape) == ((1, 6), (2,))


class Chooses(nn.Module):
    """Its experts see as many rows as the data says; its buffer counts them, it draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len((x[:, 0] > 0).nonzero())
        return x.index_add(0, (x[:, 0] > 0).nonzero()[:, 0], torch.rand_like(x[x[:, 0] > 0]))


def test_a_module_that_fakes_cannot_run_runs_on_zeros_and_ones_and_is_left_alone() -> None:
    module, state = Chooses(), torch.get_rng_state()
    found = infer_outputs(module, [torch.ones(4, 2)], {}, with_grad=True, what="s")
    assert found.outputs == [LocalValue((4, 2), torch.float32, False)]
    assert float(module.seen) == 0.0
    assert torch.equal(torch.get_rng_state(), state)


class Split(nn.Module):
    """Reads its second argument on the host, and writes on its first."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[list[float]] = []

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        first, second = x.split(sizes.tolist())
        self.runs.append(x.flatten().tolist())
        x += 1
        return torch.cat([first, second])[:: int(sizes[0])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_the_micro_batch_are_read_on_the_host(dtype: torch.dtype) -> None:
    module, x = Split(), torch.tensor([2.0, 4.0, 6.0], dtype=dtype)
    sizes = {"sizes": torch.tensor([1, 2])}
    # Those that other stages send are zeros and ones; those that are here are the batch's, and stay.
    expected = [LocalValue((3,), dtype, False)]
    assert infer_outputs(module, [x], sizes, with_grad=False, what="s").outputs == expected
    assert module.runs == [[0.0] * 3, [1.0] * 3]
    module.runs.clear()
    again = [x * 2], {"sizes": torch.tensor([1, 2])}
    found = infer_outputs(module, [x], sizes, with_grad=False, what="s", real=True, again=again)
    assert (found.outputs, found.copies) == (expected, True)
    assert module.runs == [[2.0, 4.0, 6.0], [4.0, 8.0, 12.0]]
    assert x.tolist() == [2.0, 4.0, 6.0]
    other = [x], {"sizes": torch.tensor([2, 1])}
    with pytest.raises(LayoutError, match=r"\[\(3,\)\] of one micro-batch, \[\(2,\)\] of another"):
        infer_outputs(module, [x], sizes, with_grad=False, what="s", real=True, again=other)
    with pytest.raises(LayoutError, match="on its micro-batch RuntimeError: split_with_sizes"):
        infer_outputs(module, [x], {"sizes": torch.tensor([1, 3])}, with_grad=False, what="s", real=True)


class Together(nn.Module):
    """Needs data, and communicates, by torch or by meshcast; or it is broken."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.sum()) >= 0
        if self.way == "torch":
            torch.distributed.all_reduce(x)
        elif self.way == "meshcast":
            forks.check(forks.count, "reshard")
        elif self.way == "swallowed":
            with suppress(Exception):
                torch.distributed.all_reduce(x)
        elif self.way == "broken":
            raise ValueError("broken")
        return x


def test_a_rank_alone_runs_a_module_until_it_communicates() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        for way in ("torch", "meshcast", "swallowed"):
            found = infer_outputs(Together(way), [torch.ones(2)], {}, with_grad=False, what="s", data="alone")
            assert found == Inferred(None, needs_data=True)
            found = infer_outputs(
                Together(way), [torch.ones(2)], {}, with_grad=False, what="s", data="always"
            )
            assert found.outputs == [LocalValue((2,), torch.float32, False)]
        found = infer_outputs(Together("none"), [torch.ones(2)], {}, with_grad=False, what="s", data="alone")
        assert not found.needs_data
        with pytest.raises(LayoutError, match="ValueError: broken"):
            infer_outputs(Together("broken"), [torch.ones(2)], {}, with_grad=False, what="s", data="alone")
    finally:
        torch.distributed.destroy_process_group()


def test_a_module_that_writes_on_its_input_gets_copies() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert infer_outputs(nn.ReLU(inplace=True), [leaf], {}, with_grad=True, what="s").copies
    assert infer_outputs(nn.ReLU(inplace=True), [torch.ones(2)], {}, with_grad=True, what="s").copies
    assert not infer_outputs(nn.ReLU(), [leaf], {}, with_grad=True, what="s").copies


def test_shapes_that_depend_on_data_are_refused_with_both_causes() -> None:
    class Greedy(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[: int(x.sum().item())]

    with pytest.raises(
        LayoutError, match=r"depend on its data: \[\(0,\)\] of zeros, \[\(3,\)\] of ones.*output_args="
    ):
        infer_outputs(Greedy(), [torch.ones(3)], {}, with_grad=False, what="s")

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError(f"not with {x.shape}")

    with pytest.raises(
        LayoutError,
        match=r"could not be inferred \(ValueError: not with .*, at .*test_agreements.py:\d+; on zeros Value",
    ):
        infer_outputs(Broken(), [torch.ones(3)], {}, with_grad=False, what="s")


def test_a_wrong_width_is_one_sentence(caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    """Neither torch's log of fake tensors nor their traceback comes before it."""
    with pytest.raises(LayoutError, match="could not be inferred") as caught:
        infer_outputs(nn.Sequential(nn.Linear(9, 8)), [torch.ones(2, 8)], {}, with_grad=False, what="s")
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert not caplog.records and "Traceback" not in capfd.readouterr().err


def described(stage: int, shared: dict[str, torch.Tensor], **fields: Any) -> RankReport:
    """The report of a rank that has one stage, of its own number, as another rank reads it."""
    known: dict[str, Any] = {
        "stage_index": stage,
        "num_stages": 2,
        "device": torch.device("cpu"),
        "edges": (Edge(0, 0, 1, 0),),
        "mesh": SimpleNamespace(ranks=[stage], layout=lambda each: Layout([stage], each)),
        "input_placements": SimpleNamespace(listed=lambda: [[Replicate()]]),
        "data_dims": [0],
        "summed_dims": [],
        "shared": shared,
        "alone": True,
    }
    report = describe_stages([SimpleNamespace(**{**known, **fields})], "1F1B", 4, trains=stage == 1)
    return unpack(RankReport, pack(report))


def table_of(*reports: RankReport) -> StageTable:
    board = mock.Mock(spec=PipelineBoard)
    board.ranks = list(range(len(reports)))
    board.collect.return_value = dict(enumerate(reports))
    return agree_on_stages(board)


def test_the_table_of_stages_is_what_the_ranks_report() -> None:
    tied = torch.ones(3, 2)
    table = table_of(described(0, {"tied": tied}), described(1, {"tied": tied}))
    assert (table.ranks, table.rows, table.trains, table.as_torch) == ([[0], [1]], [[0], [1]], True, True)
    assert (table.shared, table.edges) == ({"tied": [0, 1]}, (Edge(0, 0, 1, 0),))
    assert table.input_layout(1, 5) == Layout([1], [Replicate()])
    for reports, words in (
        ((described(0, {}), described(1, {"tied": tied})), "'tied': only stage 1 names it"),
        (
            (described(0, {"tied": tied}), described(1, {"tied": tied.T})),
            r"stage 0 has torch.float32 \(3, 2\), stage 1 has torch.float32 \(2, 3\)",
        ),
        (
            (described(0, {}), described(1, {}, edges=None)),
            "on edges: rank 0 has .* rank 1 has None",
        ),
        ((described(0, {}), described(0, {})), "on a mesh of ranks"),
        ((described(0, {}),), "stage 1 is on no rank"),
    ):
        with pytest.raises(LayoutError, match=words):
            table_of(*reports)

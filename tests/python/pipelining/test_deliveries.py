"""Which values travel together, and that every consumer gets what its own layout says."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from meshcast import Layout
from meshcast.pipelining import Edge, lower
from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.edge import bundles, returns
from meshcast.pipelining.orders import build, delay_weights
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Partial, _StridedShard

WHOLE, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
SHAPE = (7, 6)


def bundle_texts(
    edges: list[Edge], layouts: dict[int, Layout], rows: dict[int, int] | None = None
) -> list[str]:
    rows = rows or {stage: stage for stage in range(8)}
    return [
        f"{bundle.source}->{','.join(map(str, bundle.consumers))}: "
        + " ".join(f"{each.output}@{len(each.layout.ranks)}" for each in bundle.deliveries)
        for bundle in bundles(sorted(edges), lambda stage, _: layouts[stage], rows)
    ]


def test_consumers_that_are_laid_out_alike_get_a_value_together() -> None:
    layouts = {stage: Layout([2 * stage, 2 * stage + 1], [ROWS]) for stage in (1, 2, 3)}
    edges = [Edge(0, 0, 1, 0), Edge(0, 0, 2, 1), Edge(0, 0, 3, 1), Edge(1, 0, 2, 0), Edge(2, 0, 3, 0)]
    assert bundle_texts(edges, layouts) == ["0->1,2,3: 0@6", "1->2: 0@2", "2->3: 0@2"]


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (Layout([1], [ROWS]), Layout([2], [ROWS]), True),  # on one rank a value is whole
        (Layout([1], [ROWS]), Layout([2, 3], [WHOLE]), True),
        (Layout([[1, 2]], [ROWS, WHOLE]), Layout([3, 4, 5], [WHOLE]), True),
        (Layout([1, 2], [ROWS]), Layout([3, 4], [ROWS]), True),
        (Layout([1, 2], [ROWS]), Layout([3, 4], [COLUMNS]), False),
        (Layout([1, 2], [ROWS]), Layout([3, 4, 5], [ROWS]), False),
        (Layout([1, 2], [ROWS]), Layout([3], [ROWS]), False),
        (Layout([[1, 2], [3, 4]], [ROWS, COLUMNS]), Layout([[5, 6], [7, 8]], [ROWS, COLUMNS]), True),
        (Layout([[1, 2], [3, 4]], [ROWS, COLUMNS]), Layout([[5, 6], [7, 8]], [COLUMNS, ROWS]), False),
        (Layout([1, 2], [Partial()]), Layout([3, 4], [Partial()]), False),
        (
            Layout([[1, 2], [3, 4]], [_StridedShard(0, split_factor=2), ROWS]),
            Layout([[5, 6], [7, 8]], [_StridedShard(0, split_factor=2), ROWS]),
            True,
        ),
    ],
)
def test_which_layouts_join(first: Layout, second: Layout, together: bool) -> None:
    edges = [Edge(0, 0, 1, 0), Edge(0, 0, 2, 1), Edge(1, 0, 2, 0)]
    found = bundle_texts(edges, {1: first, 2: second})
    size = len(first.ranks) + len(second.ranks)
    assert (f"0->1,2: 0@{size}" in found) == together, found


def test_stages_of_one_row_or_of_the_producers_do_not_join() -> None:
    layouts = {stage: Layout([stage % 2], [ROWS]) for stage in range(4)}
    edges = [Edge(0, 0, stage, 1) for stage in (1, 2, 3)] + [Edge(s, 1, s + 1, 0) for s in range(3)]
    found = bundle_texts(edges, layouts, {0: 0, 1: 1, 2: 0, 3: 1})
    assert [text for text in found if text[0] == "0"] == ["0->1: 0@1 1@1", "0->2: 0@1", "0->3: 0@1"]


def test_inputs_of_one_stage_share_what_arrives() -> None:
    layouts = {1: Layout([1], [ROWS]), 2: Layout([2], [ROWS])}
    edges = [Edge(0, 0, 1, 0), Edge(0, 0, 1, 1), Edge(0, 0, 2, 1), Edge(0, 0, 2, 2), Edge(1, 0, 2, 0)]
    (shared, _) = bundles(sorted(edges), lambda stage, _: layouts[stage], {0: 0, 1: 1, 2: 2})
    (delivery,) = shared.deliveries
    assert delivery.inputs == {1: [0, 1], 2: [1, 2]}
    (back,) = returns([shared], 0, 2, lambda stage, _: layouts[stage])
    assert back.inputs == {2: [1, 2]}
    assert back.layout == layouts[2]


def test_random_pipelines_deliver_every_edge_once_in_its_own_layout() -> None:
    for seed in range(150):
        draw = random.Random(seed)
        count = draw.randint(2, 6)
        rows = {stage: draw.randrange(3) if draw.random() < 0.3 else 3 + stage for stage in range(count)}
        first_rank = {row: 10 * row for row in range(3 + count)}
        layouts: dict[tuple[int, int], Layout] = {}
        edges = []
        for target in range(1, count):
            for index in range(draw.randint(1, 3)):
                edges.append(Edge(draw.randrange(target), draw.randrange(2), target, index))
        size = {row: draw.choice((1, 2, 4)) for row in first_rank}
        for edge in edges:
            row = rows[edge.to_stage]
            ranks = torch.arange(first_rank[row], first_rank[row] + size[row])
            shape = draw.choice([s for s in ((1,), (2,), (4,), (2, 2)) if torch.Size(s).numel() == size[row]])
            placed = [draw.choice((WHOLE, ROWS, COLUMNS)) for _ in shape]
            layouts[edge.to_stage, edge.input] = Layout(ranks.reshape(shape), placed)
        found = bundles(sorted(edges), lambda stage, index, known=layouts: known[stage, index], rows)
        delivered = []
        for bundle in found:
            assert list(bundle.consumers) == sorted(bundle.consumers)
            for each in bundle.deliveries:
                assert tuple(sorted(each.inputs)) == bundle.consumers, seed
                members = [rows[stage] for stage in each.inputs]
                assert len(set(members)) == len(members), seed
                shards = each.layout.shards(SHAPE)
                for stage, indices in each.inputs.items():
                    for index in indices:
                        delivered.append(Edge(bundle.source, each.output, stage, index))
                        own = layouts[stage, index].shards(SHAPE)
                        assert all(shards[rank] == boxes for rank, boxes in own.items()), seed
        assert sorted(delivered) == sorted(edges), seed
        keys = [(bundle.source, bundle.consumers) for bundle in found]
        assert len(set(keys)) == len(keys), seed
        for source, consumer in itertools.product(range(count), repeat=2):
            given = returns(found, source, consumer, lambda stage, index, known=layouts: known[stage, index])
            inputs = sorted(index for each in given for index in each.inputs[consumer])
            assert inputs == sorted(
                edge.input for edge in edges if (edge.from_stage, edge.to_stage) == (source, consumer)
            ), seed


def runs_to_the_end(actions: Actions, blocking: bool) -> bool:
    """Whether the ranks come through if each value of a stage reaches a consumer only once all its consumers
    have posted their receive, as a multicast may pass them in any order. blocking: senders wait for that."""
    steps = dict.fromkeys(actions, 0)
    posted: set[Action] = set()
    sent: set[Action] = set()  # RECVs whose value is on its way
    needs: dict[Action, list[Action]] = {}
    consumers: dict[tuple[int, int], set[Action]] = {}  # of the activations of (stage, micro-batch): RECVs
    for action in (action for row in actions.values() for action in row):
        if action.kind is ActionKind.RECV_F:
            needs.setdefault(Action(action.stage, ActionKind.F, action.microbatch), []).append(action)
            consumers.setdefault((action.peer, action.microbatch), set()).add(action)
        elif action.kind is ActionKind.RECV_B:
            for kind in (ActionKind.B, ActionKind.I):
                needs.setdefault(Action(action.stage, kind, action.microbatch), []).append(action)

    def together(receive: Action) -> set[Action]:
        if receive.kind is ActionKind.RECV_B:
            return {receive}
        return consumers[receive.peer, receive.microbatch]

    def goes_on(action: Action) -> bool:
        if action.kind.is_compute:
            return all(need in sent and together(need) <= posted for need in needs.get(action, []))
        if action.kind.is_recv:
            posted.add(action)
            return True
        sent.add(action.matching())
        return not blocking or together(action.matching()) <= posted

    moved = True
    while moved:
        moved = False
        for rank, row in actions.items():
            while steps[rank] < len(row) and goes_on(row[steps[rank]]):
                steps[rank] += 1
                moved = True
    return all(steps[rank] == len(row) for rank, row in actions.items())


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "Eager1F1B", "ZBH1", "ZBH2", "ZBV", "Interleaved1F1B"])
def test_no_schedule_deadlocks_however_a_multicast_passes_its_consumers(name: str, blocking: bool) -> None:
    for stages, microbatches in itertools.product((2, 3, 4, 6), (1, 3, 7)):
        if stages % 2 and name in ("ZBV", "Interleaved1F1B"):
            continue
        every = list(itertools.combinations(range(stages), 2))
        chain = [(stage, stage + 1) for stage in range(stages - 1)]
        for links in (every, sorted({*chain, *((0, stage) for stage in range(1, stages))})):
            built = build(name, stages, microbatches)
            for actions in (built, delay_weights(built)):
                assert runs_to_the_end(lower(actions, links), blocking), (stages, microbatches, links)


def test_a_receive_that_is_posted_late_is_seen_to_deadlock() -> None:
    """The check above can fail: rank 1 gets its value only if rank 2 has posted, which waits for rank 1."""
    actions = lower(build("GPipe", 3, 1), [(0, 1), (0, 2), (1, 2)])
    assert runs_to_the_end(actions, True)
    late = Action(2, ActionKind.RECV_F, 0, 0)
    actions[2].remove(late)
    actions[2].insert(actions[2].index(Action(2, ActionKind.F, 0)) + 1, late)
    assert not runs_to_the_end(actions, False)

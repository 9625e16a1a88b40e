"""Who sends how many bytes from where when the weights of a large model go from trainers to servers: on
layouts that others have published figures for, meshcast's plan next to the methods of others. Nothing is sent
and no clock is read, so the figures are the same on every machine, and other work may run beside it. Half a
minute of one core. Writes benchmarks/results/peer_weights.json and a part of docs/end_to_end.md.

The methods of others are counted message for message, for every port of every rank; tensors of one shape and
layout are planned once and counted as often as the model has them, which is exact. Their time is that of the
busiest port, which no order of these messages can beat. meshcast's is the makespan that the planner predicts,
with latencies and filling.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from meshcast import Layout
from meshcast.base.progress import Progress
from meshcast.bench.methods import (
    CaseMove,
    Message,
    cuts,
    elements,
    leader_ring,
    planned_stripes,
    planned_unicasts,
)
from meshcast.planning.plan import Options, Plan, Problem
from torch.distributed.tensor import Replicate

from ..harness import Found, Page, in_child, machine, origin, table
from .published import NIC_GBPS, Hosts, Model, Pair, Side, pairs

GB = 1e9
METHODS = {
    "auto": "meshcast, `auto`",
    "ring": "leader ring: NCCL M2N",
    "engine": "the same, fused tensors whole: vLLM's `nccl_m2n`",
    "stripes": "stripes, then all-gather: NeMo-RL",
    "unicasts": "a copy for each receiver: Megatron Core, Perplexity",
    "pulls": "the same from one holder: ModelExpress",
    "broadcast": "gather, then broadcast: vLLM's `nccl`, verl, checkpoint-engine",
}


class Kind(NamedTuple):
    """Tensors that differ in their names and layers alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout
    projection: bool
    resolved: bool


def kinds(model: Model, trainers: Side, servers: Side) -> Counter[Kind]:
    """In the order of the model, with how many tensors of the model are of each."""
    found: Counter[Kind] = Counter()
    for each in model.tensors:
        src, dst = trainers.layout(each, model), servers.layout(each, model)
        found[Kind(each.shape, each.dtype, src, dst, each.projection, each.resolved)] += 1
    return found


@dataclass
class Traffic:
    """Bytes through the ports of ranks, and between sides. A hop between hosts takes the NIC of either rank,
    one inside a host the local ports of both."""

    hosts: Hosts
    trainers: frozenset[int]
    nic_out: Counter[int] = field(default_factory=Counter)
    nic_in: Counter[int] = field(default_factory=Counter)
    local_out: Counter[int] = field(default_factory=Counter)
    local_in: Counter[int] = field(default_factory=Counter)
    sides: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # over NICs; True: a trainer

    def host(self, rank: int) -> int:
        return rank // self.hosts.per_host

    def hop(self, sender: int, receiver: int, nbytes: int) -> None:
        if self.host(sender) == self.host(receiver):
            self.local_out[sender] += nbytes
            self.local_in[receiver] += nbytes
        else:
            self.nic_out[sender] += nbytes
            self.nic_in[receiver] += nbytes
            self.sides[sender in self.trainers, receiver in self.trainers] += nbytes

    @property
    def seconds(self) -> float:
        """Of the busiest port: no order of the hops takes less."""
        nic, local = NIC_GBPS / 8 * GB, self.hosts.local_gbps / 8 * GB
        ports = ((self.nic_out, nic), (self.nic_in, nic), (self.local_out, local), (self.local_in, local))
        return max(max(counts.values(), default=0) / rate for counts, rate in ports)

    def row(self, servers: Iterable[int]) -> Found:
        return {
            "to_servers": self.sides[True, False],
            "busiest_trainer_nic": max((self.nic_out[rank] for rank in self.trainers), default=0),
            "between_trainers": self.sides[True, True],
            "between_servers": self.sides[False, False],
            "server_takes_in": max(self.nic_in[rank] + self.local_in[rank] for rank in servers),
            "port_seconds": self.seconds,
        }


def hops(
    sender: int, receivers: Sequence[int], place: int, places: int, per_host: int
) -> Iterator[tuple[int, int]]:
    """The way of a message: round the hosts from leader to leader, and inside each host from rank to rank.

    Ranks of a host take turns as its leader, as NCCL M2N shares sources out over the replicas of a host
    (reshard_prepare.cc): this is message `place` of `places` that go to the same ranks."""
    by_host: dict[int, list[int]] = {}
    for rank in receivers:
        by_host.setdefault(rank // per_host, []).append(rank)
    home = sender // per_host
    yield from pairwise([sender, *by_host.pop(home, ())])
    last = sender
    for host in sorted(by_host, key=lambda host: (host < home, host)):
        ranks = by_host[host]
        first = place * len(ranks) // places
        yield last, ranks[first]
        yield from pairwise(ranks[first:] + ranks[:first])
        last = ranks[first]


def turned(message: Message, move: CaseMove, turn: int) -> Message:
    """The same from the next holder, so that holders take turns from tensor to tensor, too. A rank that has
    received its stripe remains the sender."""
    if message.placed or message.sender in move.needed:
        return message
    holders = move.tiles[move.held[message.sender]]
    at = holders.index(message.sender)
    return message._replace(sender=holders[(at + turn) % len(holders)])


def send(
    traffic: Traffic, phases: list[list[Message]], move: CaseMove, times: int, turns: bool = True
) -> None:
    """Counts the messages of so many tensors of one kind."""
    for messages in phases:
        keys = [_key(each, move) for each in messages]
        places, seen = Counter(keys), Counter[tuple[int, ...]]()
        for message, key in zip(messages, keys, strict=True):
            place = seen[key]
            seen[key] += 1
            if message.receivers == [message.sender]:
                continue  # a copy inside the rank
            nbytes = elements(message.box) * move.dtype.itemsize
            cycle = len(move.tiles[move.held[message.sender]]) if turns and message.sender in move.held else 1
            for turn in range(min(cycle, times)):
                each = turned(message, move, turn)
                count = times // cycle + (turn < times % cycle)
                for a, b in hops(each.sender, each.receivers, place, places[key], traffic.hosts.per_host):
                    traffic.hop(a, b, nbytes * count)


def _key(message: Message, move: CaseMove) -> tuple[int, ...]:
    """Equal for messages that go to the same ranks."""
    if len(message.receivers) == 1:
        return tuple(message.receivers)
    return tuple(sorted({*message.receivers, message.sender} & move.needed.keys()))


def move_of(kind: Kind, dst: Layout | None = None) -> CaseMove:
    return CaseMove(kind.shape, kind.src, kind.dst if dst is None else dst, dtype=kind.dtype)


def everywhere(ranks: Iterable[int]) -> Layout:
    return Layout(list(ranks), [Replicate()])


def from_first(_: int, move: CaseMove) -> list[list[Message]]:
    """ModelExpress: every receiver reads from the first rank that offers a box."""
    (messages,) = planned_unicasts(0, move)
    first = {rank: holders[0] for holders in move.tiles.values() for rank in holders}
    return [
        [
            each if each.receivers == [each.sender] else each._replace(sender=first[each.sender])
            for each in messages
        ]
    ]


def gathered(traffic: Traffic, kind: Kind, times: int, pair: Pair, senders: int = 1) -> None:
    """Every trainer gathers the tensor, and the first ones send it to all servers, a part each. Where the
    same ranks have both, each sends what it has to all."""
    if pair.together:
        move = move_of(kind, everywhere(pair.servers.ranks))
        send(traffic, leader_ring(0, move), move, times)
        return
    move = move_of(kind, everywhere(pair.trainers.ranks))
    send(traffic, leader_ring(0, move), move, times)
    whole = CaseMove(
        kind.shape, everywhere(pair.trainers.ranks), everywhere(pair.servers.ranks), dtype=kind.dtype
    )
    parts = cuts(tuple((0, length) for length in kind.shape), senders)
    messages = [
        Message(0, part, sender, list(pair.servers.ranks))
        for part, sender in zip(parts, pair.trainers.ranks, strict=False)
    ]
    send(traffic, [messages], whole, times, turns=False)


def ring(traffic: Traffic, kind: Kind, times: int, _: Pair) -> None:
    move = move_of(kind)
    send(traffic, leader_ring(0, move), move, times)


def engine(traffic: Traffic, kind: Kind, times: int, pair: Pair) -> None:
    """vLLM's m2n_layout.py: a tensor goes to its shards where the engine has a parameter of its name, and
    whole to every rank where it is part of a fused one, or the model is quantized."""
    move = move_of(
        kind, None if kind.resolved and not quantized(pair.model) else everywhere(pair.servers.ranks)
    )
    send(traffic, leader_ring(0, move), move, times)


def quantized(model: Model) -> bool:
    return any(each.dtype.itemsize == 1 for each in model.tensors)


def stripes(traffic: Traffic, kind: Kind, times: int, pair: Pair) -> None:
    """A broadcast by a group of all trainers leaves the first host over all of its NICs."""
    if not kind.projection:
        gathered(traffic, kind, times, pair, min(pair.hosts.per_host, len(pair.trainers.ranks)))
        return
    move = move_of(kind)
    send(traffic, planned_stripes(0, move), move, times)


def unicasts(traffic: Traffic, kind: Kind, times: int, _: Pair) -> None:
    move = move_of(kind)
    send(traffic, planned_unicasts(0, move), move, times)


def pulls(traffic: Traffic, kind: Kind, times: int, _: Pair) -> None:
    move = move_of(kind)
    send(traffic, from_first(0, move), move, times, turns=False)


_OTHERS: Mapping[str, Callable[[Traffic, Kind, int, Pair], None]] = {
    "ring": ring, "engine": engine, "stripes": stripes, "unicasts": unicasts, "pulls": pulls,
    "broadcast": gathered,
}  # fmt: skip


def traffic_of(pair: Pair) -> Traffic:
    return Traffic(pair.hosts, frozenset() if pair.together else frozenset(pair.trainers.ranks))


def count(pair: Pair, method: str) -> Traffic:
    """What a method of others sends."""
    traffic = traffic_of(pair)
    for kind, times in kinds(pair.model, pair.trainers, pair.servers).items():
        _OTHERS[method](traffic, kind, times, pair)
    return traffic


def planned(pair: Pair) -> tuple[Plan, Traffic]:
    """What meshcast sends: all tensors as one plan."""
    problems = [
        Problem(kind.shape, kind.dtype, kind.src, kind.dst)
        for kind, times in kinds(pair.model, pair.trainers, pair.servers).items()
        for _ in range(times)
    ]
    plan = Plan(problems, pair.hosts.topology, Options())
    traffic = traffic_of(pair)
    src, dst, chunk, nbytes = (  # transfers of boxes are a hundred times as many
        memoryview(plan._core.column(name)) for name in ("hop_src", "hop_dst", "hop_chunk", "chunk_nbytes")
    )
    for sender, receiver, index in zip(src, dst, chunk, strict=True):
        traffic.hop(sender, receiver, nbytes[index])
    return plan, traffic


def measure(pair: Pair) -> Found:
    plan, traffic = planned(pair)
    ranks = pair.servers.ranks
    rows = [{"method": "auto", "seconds": plan.makespan, **traffic.row(ranks)}]
    for method in pair.methods or METHODS:
        if method != "auto":
            other = count(pair, method)
            rows.append({"method": method, "seconds": other.seconds, **other.row(ranks)})
    return {
        "name": pair.name, "what": pair.what, "tensors": len(pair.model.tensors),
        "nbytes": sum(each.dtype.itemsize * prod(each.shape) for each in pair.model.tensors),
        "strategy": plan.strategy, "bound": plan.lower_bound, "rows": rows, "together": pair.together,
        "published": pair.published,
    }  # fmt: skip


def gigabytes(nbytes: int) -> str:
    value = nbytes / GB
    return "0" if not nbytes else f"{value:.0f}" if value >= 100 else f"{value:.3g}"


_COLUMNS = (
    "weights|method|trainers to servers, GB|busiest NIC of a trainer, GB|between trainers, GB|"
    "between servers, GB|a server takes in, GB|modelled, s|/ bound|published by the authors"
)


def text(results: Found) -> str:
    lines, details = [], []
    for pair in results["pairs"]:
        head = f"**{pair['name']}**: {gigabytes(pair['nbytes'])} GB, bound {pair['bound']:.3f} s"
        details.append(f"- **{pair['name']}**: {pair['what']}. {pair['tensors']} tensors.")
        for row in pair["rows"]:
            sides = ("to_servers", "busiest_trainer_nic", "between_trainers")
            lines.append(
                [
                    head, METHODS[row["method"]],
                    *("" if pair["together"] else gigabytes(row[name]) for name in sides),
                    gigabytes(row["between_servers"]), gigabytes(row["server_takes_in"]),
                    f"{row['seconds']:.3f}", f"{row['seconds'] / pair['bound']:.2f}",
                    pair["published"].get(row["method"], ""),
                ]
            )  # fmt: skip
            head = ""
    return "\n\n".join(
        [f"{origin(results)}.", table(_COLUMNS.split("|"), lines, "llrrrrrrrl"), "\n".join(details)]
    )


PAGE = Page("peer_weights", "peer_weights.json", "docs/end_to_end.md", text)
PAGES = [PAGE]


def main() -> int:
    args = PAGE.parser(__doc__).parse_args()
    results: Found = {**machine("peer_weights"), "pairs": []}
    found = pairs()
    with Progress("pairs", len(found), ticks=False) as shown:
        for pair in found:
            results["pairs"].append(in_child(measure, pair, name=pair.name, look=shown.look))
            print(f"{pair.name}: bound {results['pairs'][-1]['bound']:.3f} s", file=sys.stderr)
            shown.done()
    print(text(results))
    PAGE.finish(args, results)
    return 0

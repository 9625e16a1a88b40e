"""Plans: what travels between which ranks, in which order, how long it should take, and how much longer than
the least possible.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch

from .. import _C
from ..base import checks
from ..base.checks import Reader, read_json, typed_arguments
from ..errors import LayoutError
from ..layout import Box, Layout
from ..topology import DEFAULT, Host, Nic, Topology

__all__ = [
    "LocalCopy",
    "Plan",
    "PlanCacheInfo",
    "Problem",
    "Task",
    "Transfer",
    "plan",
    "plan_cache_clear",
    "plan_cache_info",
    "plan_many",
]


T = TypeVar("T")


class Task(NamedTuple):
    """The unit of communication (paper, section 3): one box, the ranks that hold it, and those that need it
    and do not hold it."""

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]
    nbytes: int
    tensor: int = 0
    """Position of the tensor in `plan_many`."""
    reduce: str | None = None
    """With a Partial source: how the values of the holders combine. The receivers are then all ranks that
    need the box."""
    contribution: tuple[int, ...] = ()
    """With a Partial source: which partial value each holder has; replicas of one value share a number."""


class LocalCopy(NamedTuple):
    """A box that a rank both holds and needs: copied inside the rank, never sent."""

    rank: int
    box: Box
    tensor: int = 0


class Transfer(NamedTuple):
    """One hop: `box` travels from rank `src` to rank `dst` once all transfers in `after` are done.

    With `reduce`, dst combines what arrives with the value it carries, which starts as its own partial value;
    after the transfer marked `last_reduce` that value is complete ("avg" divides it there). `task` is the
    position in `plan.tasks`, `start` and `finish` are seconds of the simulated timeline. Transfers of one
    message share them.
    """

    id: int
    src: int
    dst: int
    box: Box
    nbytes: int
    after: tuple[int, ...]
    reduce: str | None
    last_reduce: bool
    tensor: int
    task: int
    start: float
    finish: float


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose items are made when they are asked for."""

    __slots__ = ("_item", "_length")

    def __init__(self, length: int, item: Callable[[int], T]) -> None:
        self._length = length
        self._item = item

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            picked = range(self._length)[index]
            return LazySequence(len(picked), lambda i: self._item(picked[i]))
        try:
            position = range(self._length)[index]
        except IndexError:
            raise IndexError(f"index {index} of a sequence of {self._length}") from None
        return self._item(position)

    def __repr__(self) -> str:
        head = ", ".join(map(repr, self[:3]))
        return f"[{head}]" if self._length <= 3 else f"[{head}, ... {self._length} items]"


def transfers(core: _C.Plan) -> Sequence[Transfer]:
    """The hops of a plan, one transfer per box.

    A message of several boxes (small ones with the same holders and receivers travel together) becomes as
    many transfers in a row; along a chain the pieces of a message keep their order, so piece k waits for
    piece k of the message before.
    """
    first = memoryview(core.column("chunk_begin"))
    end = memoryview(core.column("chunk_end"))
    if core.num_pieces == core.num_chunks:  # the usual case: every message is one box
        return LazySequence(core.num_hops, lambda index: _transfer(core, index, index, 0, lambda hop: hop))
    starts = [0, *accumulate(end[chunk] - first[chunk] for chunk in memoryview(core.column("hop_chunk")))]

    def transfer(index: int) -> Transfer:
        hop = bisect_right(starts, index) - 1
        return _transfer(core, index, hop, index - starts[hop], starts.__getitem__)

    return LazySequence(starts[-1], transfer)


def _transfer(core: _C.Plan, index: int, hop: int, piece: int, start_of: Callable[[int], int]) -> Transfer:
    src, dst, first, after, reduce, last_reduce, start_ns, finish_ns = core.hop(hop)
    tensor, task, box, nbytes = core.piece(first + piece)
    waits = () if after < 0 else (start_of(after) + piece,)
    times = start_ns / 1e9, finish_ns / 1e9
    return Transfer(index, src, dst, box, nbytes, waits, reduce, last_reduce, tensor, task, *times)


MAX_PLANS = 512
MAX_HOPS = 4_000_000  # of all cached plans together; a hop takes about 36 bytes


class PlanCacheInfo(NamedTuple):
    """Counts since the start or the last `plan_cache_clear`, as `functools.lru_cache` names them, and the
    cached hops."""

    hits: int
    misses: int
    maxsize: int
    currsize: int
    hops: int


_lock = threading.Lock()
_plans: OrderedDict[Hashable, Any] = OrderedDict()
_hits = 0
_misses = 0
_hops = 0


def lookup(key: Hashable) -> Any:
    """The plan made for `key`; None if it is not cached any longer."""
    global _hits, _misses
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            _misses += 1
        else:
            _hits += 1
            _plans.move_to_end(key)
        return plan


def insert(key: Hashable, plan: Any) -> Any:
    """Caches `plan`. Where two threads planned the same, both get the one that came first."""
    global _hops
    dropped: list[Any] = []  # freed after the lock is released
    with _lock:
        plan = _plans.setdefault(key, plan)
        _plans.move_to_end(key)
        _hops = sum(len(p) for p in _plans.values())
        while len(_plans) > 1 and (len(_plans) > MAX_PLANS or _hops > MAX_HOPS):
            _, oldest = _plans.popitem(last=False)
            _hops -= len(oldest)
            dropped.append(oldest)
    return plan


def plan_cache_info() -> PlanCacheInfo:
    """Hits, misses and size of the plan cache of this process.

    Example::

        meshcast.plan_cache_clear()
        rows, columns = meshcast.Layout([0, 1], [Shard(0)]), meshcast.Layout([2, 3], [Shard(1)])
        first, again = (meshcast.plan((8, 8), "float32", rows, columns) for _ in range(2))
        assert first is again and meshcast.plan_cache_info()[:2] == (1, 1)  # hits, misses
    """
    with _lock:
        return PlanCacheInfo(_hits, _misses, MAX_PLANS, len(_plans), _hops)


def plan_cache_clear() -> None:
    """Empties the plan cache and sets its counts to zero. Plans in use stay valid."""
    global _hits, _misses, _hops
    with _lock:
        _plans.clear()
        _hits = _misses = _hops = 0


STRATEGIES, BALANCES = _C.STRATEGIES, _C.BALANCES


class Problem(NamedTuple):
    """One tensor to move: its global shape, its dtype, and the layouts before and after."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    src: Layout
    dst: Layout


class Options(NamedTuple):
    """Options of planning; the parameters of `plan` of the same names."""

    strategy: str = "auto"
    balance: str = "greedy"
    chunk_bytes: int | None = None
    seed: int = 0


def _each_once(function: Callable[[int, Any], T], items: Sequence[Any]) -> list[T]:
    """Returns function(index, item) of all items, called once for an object that is there several times:
    tensors of a model have few kinds of problems."""
    made: dict[int, T] = {}
    for index, item in enumerate(items):
        if id(item) not in made:
            made[id(item)] = function(index, item)
    return [made[id(item)] for item in items]


class Plan:
    """An ordered multicast plan with its predicted time and a lower bound. Made by `plan`, `plan_many` or
    `Plan.from_json`."""

    def __init__(self, problems: Sequence[Problem], topology: Topology, options: Options) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.topology = topology
        self.options = options
        max_rank = max(max(p.src._max_rank, p.dst._max_rank) for p in self.problems)
        self._core: _C.Plan = _C.Plan(
            _each_once(
                lambda _, p: (list(p.shape), p.dtype.itemsize, p.src._core(p.shape), p.dst._core(p.shape)),
                self.problems,
            ),
            topology._core(max_rank),
            options.strategy,
            options.balance,
            options.chunk_bytes or 0,
            options.seed,
        )

    @property
    def strategy(self) -> str:
        """The strategy chosen: never "auto"."""
        return self._core.strategy

    @property
    def makespan(self) -> float:
        """Predicted seconds from start to the last arrival, simulated under the topology."""
        return self._core.makespan_ns / 1e9

    @property
    def lower_bound(self) -> float:
        """Seconds that no plan can beat in which only holders and receivers of a box carry it.

        An idle third party can sometimes help: with tasks A -> {B, C}, B -> D, C -> E and an idle X, relaying
        through X lowers the time from 4/3 to 8/7 of a unit. Such plans are not counted.
        """
        return self._core.lower_bound_ns / 1e9

    @cached_property
    def filling_bound(self) -> float:
        """Seconds that no plan can beat whose chunks are as large as those of this one; at least
        `lower_bound`.

        A host passes a chunk on only once it has it, so the last of many hosts begins late to take anything
        in. The difference to `lower_bound` is the cost of filling (docs/planner.md, "Filling").

        Example::

            one, others = meshcast.Layout.parse("1:R"), meshcast.Layout.parse("7@1:R")
            plan = meshcast.plan((16384,), "int32", one, others, meshcast.Topology.uniform(1, 10))
            assert plan.lower_bound < plan.filling_bound <= plan.makespan
        """
        return self._core.filling_bound_ns() / 1e9

    @property
    def ratio(self) -> float:
        """`makespan / lower_bound`, the certificate; 1 where nothing travels."""
        return self._core.makespan_ns / self._core.lower_bound_ns if self._core.lower_bound_ns else 1.0

    @property
    def hash(self) -> str:
        """32 hexadecimal digits over all that ranks must agree on; equal on all ranks."""
        return self._core.hash

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks of both meshes of all problems, ascending."""
        return tuple(self._core.ranks)

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """The unit communication tasks."""

        def task(index: int) -> Task:
            tensor, box, nbytes, holders, receivers, reduce, contribution = self._core.task(index)
            return Task(box, holders, receivers, nbytes, tensor, reduce, contribution)

        return LazySequence(self._core.num_tasks, task)

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The hops in schedule order, made on access.

        Executed in any order that respects `after`, over exact copies of the source shards, they and the
        local copies fill every destination shard and write every element once (reducing transfers aside).
        """
        return transfers(self._core)

    @cached_property
    def local_copies(self) -> Sequence[LocalCopy]:
        """Boxes that a rank both holds and needs."""

        def local_copy(index: int) -> LocalCopy:
            rank, tensor, box = self._core.local_copy(index)
            return LocalCopy(rank, box, tensor)

        return LazySequence(self._core.num_local_copies, local_copy)

    def __len__(self) -> int:
        """Number of messages."""
        return self._core.num_hops

    def __bool__(self) -> bool:
        return True

    @cached_property
    def _rank_traffic(self) -> dict[int, tuple[int, int]]:
        return dict(zip(self.ranks, self._core.rank_traffic(), strict=True))

    @cached_property
    def _staging(self) -> dict[int, int]:
        return dict(zip(self.ranks, self._core.peak_staging(), strict=True))

    @cached_property
    def _nic_traffic(self) -> list[tuple[int, int]]:
        return self._core.nic_traffic()

    @cached_property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the topology, as far as the ranks of this plan reach; `nic_bytes` counts by their
        position."""
        return tuple(
            Host(tuple(ranks), tuple(Nic(*nic) for nic in nics), local_rate)
            for ranks, nics, local_rate in self._core.topology.hosts
        )

    def bytes_sent(self, rank: int) -> int:
        """Bytes that `rank` sends to other ranks, forwarding included; 0 for a rank that takes no part."""
        return self._rank_traffic.get(rank, (0, 0))[0]

    def bytes_received(self, rank: int) -> int:
        """Bytes that `rank` receives from other ranks; 0 for a rank that takes no part."""
        return self._rank_traffic.get(rank, (0, 0))[1]

    def nic_bytes(self, host: int) -> tuple[int, int]:
        """Bytes (out, in) through all NICs of a host, by its position in the topology."""
        index = checks.integer("host", host, 0, len(self._nic_traffic) - 1)
        return self._nic_traffic[index]

    def peak_staging_bytes(self, rank: int) -> int:
        """Most bytes of buffers for packed messages that `rank` has at a time, in addition to both of its
        tensors (contiguous ones): for every peer and direction a window of four messages, and one more to
        unpack. This is what gloo takes; UCX and shared memory stage only partial values."""
        return self._staging.get(checks.integer("rank", rank, 0, (1 << 31) - 1), 0)

    def describe(self) -> str:
        """The plan in a screen of text: what moves, how, how fast, and what each host's NICs carry."""
        from .show import describe

        return describe(self)

    def draw(self, path: str | Path) -> None:
        """Draws the timeline of every NIC to a PNG, SVG or PDF file (needs matplotlib): one colour per task,
        the bound as a line."""
        from .show import draw

        draw(self, path)

    def to_json(self) -> str:
        """JSON text with all that went in and all that came out; `from_json` reads it back."""
        return json.dumps(_to_dict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, source: str | Path) -> Plan:
        """Read what `to_json` wrote: a path, or the JSON text itself.

        The plan is made again from what went in and compared with the file, so that a damaged or altered file
        is refused.
        """
        return _from_json(source)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self.hash == other.hash and self.problems == other.problems and self.topology == other.topology

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        return (
            f"Plan({self.strategy}: {len(self.problems)} tensor{'s' * (len(self.problems) != 1)}, "
            f"{len(self.tasks)} tasks, {len(self)} hops, "
            f"makespan {self.makespan:.6g} s, {self.ratio:.3f}x the lower bound)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan, (self.problems, self.topology, self.options)


@typed_arguments()
def plan(
    shape: Sequence[int],
    dtype: torch.dtype | str,
    src: Layout,
    dst: Layout,
    topology: Topology | None = None,
    strategy: str = "auto",
    balance: str = "greedy",
    chunk_bytes: int | None = None,
    seed: int = 0,
) -> Plan:
    """Plan how a tensor moves from one layout to another. Needs no process group; the same arguments give the
    same plan anywhere.

    Args:
        shape: of the global tensor.
        dtype: torch dtype or its name.
        src, dst: layouts on any two meshes: disjoint, overlapping or equal.
        topology: hosts, NICs and rates; None means 8 ranks per host and 10 Gbit/s.
        strategy: "auto" simulates the others and takes the best; "multicast", "broadcast", "send_recv",
            "local_all_gather", "global_all_gather".
        balance: sender choice of "broadcast" (paper, section 3.2): "none", "size", "greedy", "search".
        chunk_bytes: pipelining grain; None lets the cost model choose.
        seed: of the random rounds of "greedy".

    Raises:
        LayoutError: naming the argument and what is allowed.

    Example::

        from torch.distributed.tensor import Replicate, Shard

        rows, copies = meshcast.Layout([0, 1], [Shard(0)]), meshcast.Layout([2, 3, 4, 5], [Replicate()])
        hosts = meshcast.Topology.uniform(ranks_per_host=4, nic_gbps=25)
        plan = meshcast.plan((1024, 1024), torch.float32, rows, copies, hosts)
        print(plan.describe())
        assert plan.lower_bound <= plan.makespan  # seconds
    """
    problem = (shape if isinstance(shape, tuple) else checks.listed("shape", shape), dtype, src, dst)
    return _planned([problem], topology, strategy, balance, chunk_bytes, seed)


@typed_arguments()
def plan_many(
    problems: Iterable[tuple[Sequence[int], torch.dtype | str, Layout, Layout]],
    topology: Topology | None = None,
    strategy: str = "auto",
    balance: str = "greedy",
    chunk_bytes: int | None = None,
    seed: int = 0,
) -> Plan:
    """Plan many tensors as one.

    Args:
        problems: (shape, dtype, src, dst) of each tensor, as `plan` takes them.
        topology, strategy, balance, chunk_bytes, seed: as for `plan`.

    Raises:
        LayoutError: naming the argument and what is allowed; also for no tensor at all.

    Example::

        from torch.distributed.tensor import Replicate, Shard

        rows, copies = meshcast.Layout([0, 1], [Shard(0)]), meshcast.Layout([2, 3, 4, 5], [Replicate()])
        problems = [((1024, 1024), torch.bfloat16, rows, copies), ((1024,), "float32", copies, rows)]
        plan = meshcast.plan_many(problems)
        assert len(plan.problems) == 2
    """
    listed = _each_once(
        lambda _, each: (
            (checks.listed("shape", each[0]), *each[1:]) if isinstance(each, tuple) and each else each
        ),
        checks.listed("problems", problems),
    )
    if not listed:
        raise LayoutError("plan_many: an empty list; give at least one (shape, dtype, src, dst)")
    return _planned(listed, topology, strategy, balance, chunk_bytes, seed)


def _planned(problems: Sequence[Any], topology: Topology | None, *options: Any) -> Plan:
    """options: those of `Options`, as they were given."""
    topology = DEFAULT if topology is None else topology
    try:
        keys = tuple(_each_once(_key_of, problems))
        found = lookup((keys, topology, Options(*options)))
    except (TypeError, ValueError):  # it cannot be hashed or read, hence is not allowed: the checks say what
        found = None
    if found is not None:
        return found
    checked = tuple(_each_once(_checked_problem, problems))
    if not isinstance(topology, Topology):
        raise LayoutError(f"topology {checks.shown(topology)}: expected a meshcast.Topology or None")
    valid = checked_options("", *options)
    return insert((checked, topology, valid), Plan(checked, topology, valid))


def checked_options(where: str, strategy: Any, balance: Any, chunk_bytes: Any, seed: Any) -> Options:
    """where: the start of the options' names in errors."""
    most = checks.MAX_INT64
    return Options(
        checks.choice(f"{where}strategy", strategy, STRATEGIES),
        checks.choice(f"{where}balance", balance, BALANCES),
        None if chunk_bytes is None else checks.integer(f"{where}chunk_bytes", chunk_bytes, 1, most),
        checks.integer(f"{where}seed", seed, 0, (1 << 64) - 1),
    )


def _key_of(_: int, problem: Any) -> Hashable:
    shape, dtype, src, dst = problem
    return shape, checks.dtype(dtype), src, dst


def _checked_problem(index: int, problem: Any) -> Problem:
    if not isinstance(problem, tuple | list) or len(problem) != 4:
        raise LayoutError(f"problem {index}, {checks.shown(problem)}: expected (shape, dtype, src, dst)")
    shape, dtype, src, dst = problem
    for name, layout in (("src", src), ("dst", dst)):
        if not isinstance(layout, Layout):
            raise LayoutError(f"{name} {checks.shown(layout)}: expected a meshcast.Layout")
    return Problem(checks.shape(shape), checks.dtype(dtype), src, dst)


# Plans as JSON: all that went in, and all that came out in compact arrays.
#
#   {"format": "meshcast.plan/1",
#    "problems": [{"shape": [...], "dtype": "int32", "src": LAYOUT, "dst": LAYOUT}, ...],
#    "topology": {...}, "options": {"strategy", "balance", "chunk_bytes", "seed"},
#    "result": {"strategy", "makespan_ns", "lower_bound_ns", "hash",
#               "peak_staging": [bytes of each rank, ascending],
#               "tasks": [[tensor, box, holders, receivers], ...], "local_copies": [[rank, tensor, box], ...],
#               "pieces": [[tensor, task, box], ...], "chunks": [[first piece, end piece, nbytes], ...],
#               "hops": {"src": [...], "dst": [...], "chunk": [...], "after": [...], "reduce": [...],
#                        "last_reduce": [...], "start_ns": [...], "finish_ns": [...]}}}
#
# LAYOUT is Layout.to_wire(). A box is [[lo, hi], ...]. A hop sends its chunk, the pieces [first, end),
# after the hop `after` (-1: at once).
_FORMAT = "meshcast.plan/1"
_HOP_COLUMNS = ("src", "dst", "chunk", "after", "reduce", "last_reduce", "start_ns", "finish_ns")


def _from_json(source: str | Path) -> Plan:
    """Returns the plan that `to_json` wrote, made again and compared."""
    parsed = read_json(source, "plan")
    reader = Reader(parsed, "plan")
    reader.expect_format(_FORMAT)
    problems = [_read_problem(problem) for problem in reader.children("problems")]
    if not problems:
        raise LayoutError("plan.problems is empty: a plan moves at least one tensor")
    topology = Topology._read(reader.child("topology"))
    given = reader.child("options")
    options = checked_options("plan.options.", *(given.value(name) for name in Options._fields))
    given.finish()
    result = reader.value("result")
    reader.finish()
    plan = Plan(problems, topology, options)
    made = json.loads(json.dumps(_result(plan)))
    if result != made:
        differing = [name for name in made if not isinstance(result, dict) or result.get(name) != made[name]]
        raise LayoutError(
            f"plan.result.{differing[0] if differing else '?'} is not what this version plans from the same "
            "input: the file was altered, or written by another version; make the plan again"
        )
    return plan


def _to_dict(plan: Plan) -> dict[str, Any]:
    return {
        "format": _FORMAT,
        "problems": [
            {
                "shape": list(p.shape),
                "dtype": checks.dtype_name(p.dtype),
                "src": p.src.to_wire(),
                "dst": p.dst.to_wire(),
            }
            for p in plan.problems
        ],
        "topology": plan.topology._to_dict(),
        "options": plan.options._asdict(),
        "result": _result(plan),
    }


def _result(plan: Plan) -> dict[str, Any]:
    core = plan._core
    hops = {
        name: memoryview(core.column(name if name.endswith("_ns") else f"hop_{name}")).tolist()
        for name in _HOP_COLUMNS
    }
    chunks = [memoryview(core.column(f"chunk_{name}")).tolist() for name in ("begin", "end", "nbytes")]
    return {
        "strategy": plan.strategy,
        "makespan_ns": core.makespan_ns,
        "lower_bound_ns": core.lower_bound_ns,
        "hash": plan.hash,
        "peak_staging": core.peak_staging(),
        "tasks": [[t.tensor, t.box, t.holders, t.receivers] for t in plan.tasks],
        "local_copies": [[c.rank, c.tensor, c.box] for c in plan.local_copies],
        "pieces": [core.piece(i)[:3] for i in range(core.num_pieces)],
        "chunks": [list(chunk) for chunk in zip(*chunks, strict=True)],
        "hops": hops,
    }


def _read_problem(reader: Reader) -> Problem:
    problem = Problem(
        checks.shape(reader.items("shape")),
        checks.dtype(reader.text("dtype")),
        Layout.from_wire(reader.child("src")),
        Layout.from_wire(reader.child("dst")),
    )
    reader.finish()
    return problem

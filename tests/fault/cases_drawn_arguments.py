"""Drawn invalid calls: every public function that has other ranks, with one argument spoiled on one rank, on
some or on all, between valid calls whose values are checked. Each draw has a process group of its own.

MESHCAST_TEST_SEED: of the first draw; MESHCAST_TEST_DRAWS: how many."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from fault.bad_values import PLACEMENTS, SHAPES, SHARDS, TIMEOUTS, WRONG, spoiled
from meshcast import Layout, MeshcastError, PlanMismatchError
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from multiproc.oracle import cut, unique_fill
from patience import patient
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 20.0  # seconds: what a rank would wait that hears of no refusal
CASE_LIMIT = 7200.0
SOON = patient(5.0)  # seconds after the last rank refused, or came to the call, by which all have raised

SEED = int(os.environ.get("MESHCAST_TEST_SEED", "0"))
DRAWS = int(os.environ.get("MESHCAST_TEST_DRAWS", "60"))

_HOSTILE = WRONG["a hostile object"]
_OTHER: dict[str, Callable[[], Any]] = {name: make for name, make in WRONG.items() if name != "a mapping"}
_LIMITS = {n: v for n, v in TIMEOUTS.items() if n not in ("infinite", "huge", "1e300", "truth")}
_KINDS = {
    "text": lambda: "float33",
    "type": lambda: float,
    "number": lambda: 6,
    "hostile": _HOSTILE,
}
_STRATEGIES = {
    "unknown": lambda: "fastest",
    "number": lambda: 3,
    "list": lambda: ["auto"],
    "hostile": _HOSTILE,
}
_TOPOLOGIES = {"text": lambda: "text", "number": lambda: 3, "object": object, "hostile": _HOSTILE}
_GROUPS = {"text": lambda: "world", "number": lambda: 3, "object": object, "hostile": _HOSTILE}
_LAYOUTS = {
    **{name: _OTHER[name] for name in ("a number", "text", "an object", "a hostile object", "nan")},
}
_SHAPES = {n: v for n, v in SHAPES.items() if n != "other"}
_PLACEMENTS = {n: v for n, v in PLACEMENTS.items() if n not in ("none", "generator that raises", "numbers")}
_SHARDS = {f"shard: {name}": name for name in SHARDS}
# Of a DTensor, whose local tensor of another type is cast.
_SPOILED = {name: how for name, how in _SHARDS.items() if how != "another type"}


@dataclass
class Draw:
    seed: int
    members: list[int]
    sources: list[int]
    targets: list[int]
    placements: tuple[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, int]
    function: str
    argument: str
    value: str
    refusing: list[int]
    before: int

    @property
    def ranks(self) -> list[int]:
        """Of the call."""
        everybody = self.function == "reshard_state_dict"
        return self.members if everybody else sorted({*self.sources, *self.targets})


def draw(seed: int, world: int) -> Draw:
    rng = random.Random(seed)
    members = sorted(rng.sample(range(world), rng.choice([3, world])))
    count = rng.randint(1, len(members) - 1)
    sources = sorted(rng.sample(members, count))
    targets = sorted(
        {*(rank for rank in members if rank not in sources), *rng.sample(sources, rng.randint(0, 1))}
    )
    function = rng.choice(list(FUNCTIONS))
    argument = rng.choice(list(FUNCTIONS[function].spoils))
    value = rng.choice(list(FUNCTIONS[function].spoils[argument]))
    found = Draw(
        seed,
        members,
        sources,
        targets,
        (Shard(0), rng.choice([Shard(1), Replicate()])),
        torch.float32 if "quantized" in value else rng.choice([torch.float32, torch.bfloat16]),
        (rng.choice([8, 11, 12]), rng.choice([8, 11, 256])),
        function,
        argument,
        value,
        [],
        rng.choice([0, 0, 1, 2]) if function != "prepare" else 0,
    )
    # Who has what is spoiled: a shard of the source, or of the destination.
    able = found.ranks
    if argument in ("x", "xs", "src", "state_dict") and value in _SHARDS:
        able = [rank for rank in sources if _local(found, rank, "source").numel() > 1]
    if argument in ("out", "dst") and value in _SHARDS:
        able = [rank for rank in targets if _local(found, rank, "destination").numel() > 1]
    if argument == "out" and function in ("Resharder.run", "Resharder.start", "reshard_state_dict"):
        able = [rank for rank in targets if rank in able]
    if argument == "shape":
        able = [rank for rank in able if rank in sources]
    if not able:
        return draw(seed + 1_000_000, world)
    how = rng.random()
    number = 1 if how < 0.6 else len(able) if how > 0.85 else rng.randint(1, len(able))
    found.refusing = sorted(rng.sample(able, number))
    return found


def _local(case: Draw, rank: int, side: str) -> torch.Tensor:
    ranks, placement = (
        (case.sources, case.placements[0]) if side == "source" else (case.targets, case.placements[1])
    )
    return cut(full_of(case), (len(ranks),), (ranks.index(rank),), [placement])


def full_of(case: Draw, number: int = 0) -> torch.Tensor:
    return unique_fill(case.shape, case.dtype, case.seed % 1000 + number)


@dataclass
class Function:
    """arguments(case, rank, group, number): valid ones of the number-th call. call(**arguments): the local
    tensors of the results, None where this rank has none."""

    arguments: Callable[..., dict[str, Any]]
    call: Callable[..., list[torch.Tensor | None]]
    spoils: dict[str, dict[str, Any]]


def _tensor(case: Draw, rank: int, number: int) -> DTensor:
    return sharded(full_of(case, number), quiet_mesh(case.sources), [case.placements[0]], rank)


def _target(case: Draw, rank: int) -> DTensor:
    return sharded(
        torch.zeros(case.shape, dtype=case.dtype), quiet_mesh(case.targets), [case.placements[1]], rank
    )


def _reshard(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    return {
        "x": _tensor(case, rank, number),
        "mesh": quiet_mesh(case.targets),
        "placements": [case.placements[1]],
        "group": group,
    }


def _reshard_many(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    return {
        "xs": [_tensor(case, rank, number), _tensor(case, rank, number)],
        "mesh": quiet_mesh(case.targets),
        "placements": [[case.placements[1]], [case.placements[1]]],
        "group": group,
    }


def _reshard_into(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    return {"out": _target(case, rank), "x": _tensor(case, rank, number), "group": group}


def _local_arguments(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    given = {
        "src": None,
        "src_layout": Layout(case.sources, [case.placements[0]]),
        "dst": None,
        "dst_layout": Layout(case.targets, [case.placements[1]]),
        "shape": case.shape,
        "dtype": case.dtype,
        "group": group,
    }
    if rank in case.sources:
        given["src"] = cut(
            full_of(case, number), (len(case.sources),), (case.sources.index(rank),), [case.placements[0]]
        ).clone()
    if rank in case.targets and case.seed % 2:
        given["dst"] = torch.zeros_like(_local(case, rank, "destination"))
    return given


def _state(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    mesh = quiet_mesh(case.targets)
    return {
        "state_dict": {"w": _tensor(case, rank, number)} if rank in case.sources else None,
        "destinations": {"w": (mesh, [case.placements[1]])},
        "out": {"w": _target(case, rank)} if case.seed % 2 and rank in case.targets else None,
        "group": group,
    }


def _run(case: Draw, rank: int, group: Any, number: int) -> dict[str, Any]:
    return {
        "resharder": group,
        "x": _tensor(case, rank, number) if rank in case.sources else None,
        "out": _target(case, rank) if rank in case.targets else None,
    }


def _locals(*results: Any) -> list[torch.Tensor | None]:
    return [result._local_tensor if isinstance(result, DTensor) else result for result in results]


def _construct(x: Any, **given: Any) -> list[torch.Tensor | None]:
    return _locals(meshcast.Resharder(x, **given).run(x))


def _started(resharder: Any, **given: Any) -> list[torch.Tensor | None]:
    return _locals(resharder.start(**given).wait())


_OPTIONS = {"strategy": _STRATEGIES, "topology": _TOPOLOGIES, "timeout": _LIMITS, "group": _GROUPS}
_SPECS = {
    name: _OTHER[name] for name in ("a number", "text", "an object", "a hostile object", "a plain tensor")
}

FUNCTIONS = {
    "reshard": Function(
        _reshard,
        lambda **given: _locals(meshcast.reshard(**given)),
        {"x": {**_OTHER, **_SPOILED}, "mesh": _OTHER, "placements": _PLACEMENTS, "dtype": _KINDS, **_OPTIONS},
    ),
    "reshard_many": Function(
        _reshard_many,
        lambda **given: _locals(*meshcast.reshard_many(**given)),
        {
            "xs": {**_OTHER, **_SPOILED},
            "mesh": _OTHER,
            "placements": _PLACEMENTS,
            "dtype": _KINDS,
            **_OPTIONS,
        },
    ),
    "reshard_": Function(
        _reshard_into,
        lambda **given: _locals(meshcast.reshard_(**given)),
        {"out": {**_SPECS, **_SHARDS}, "x": {**_SPECS, **_SPOILED}, **_OPTIONS},
    ),
    "reshard_local": Function(
        _local_arguments,
        lambda **given: _locals(meshcast.reshard_local(**given)),
        {
            "src": {**_SHARDS},
            "dst": {**_SHARDS},
            "src_layout": _LAYOUTS,
            "dst_layout": {**_LAYOUTS, "partial": lambda: None},
            "shape": _SHAPES,
            "dtype": _KINDS,
            "device": {"text": lambda: "tpu", "number": lambda: 3, "hostile": _HOSTILE},
            **_OPTIONS,
        },
    ),
    "reshard_state_dict": Function(
        _state,
        lambda **given: _locals(*meshcast.reshard_state_dict(**given).values()),
        {
            "state_dict": {**_SPECS, **_SPOILED},
            "destinations": {**_SPECS, "no mesh": lambda: {"w": (3, [Shard(0)])}},
            "out": _SPECS,
            "dtype": _KINDS,
            "max_bytes_in_flight": {"zero": lambda: 0, "half": lambda: 0.5, "huge": lambda: 2**70},
            "version": {"negative": lambda: -1, "text": lambda: "7", "huge": lambda: 2**70},
            **_OPTIONS,
        },
    ),
    "Resharder": Function(
        _reshard,
        _construct,
        {"x": _SPECS, "mesh": _OTHER, "placements": _PLACEMENTS, "dtype": _KINDS, **_OPTIONS},
    ),
    "Resharder.run": Function(
        _run,
        lambda resharder, **given: _locals(resharder.run(**given)),
        {"x": {**_SPECS, **_SPOILED}, "out": {**_SPECS, **_SHARDS}},
    ),
    "Resharder.start": Function(_run, _started, {"x": {**_SPECS, **_SPOILED}, "out": {**_SPECS, **_SHARDS}}),
    "prepare": Function(
        lambda case, rank, group, number: {"meshes": case.ranks, "group": group},  # noqa: ARG005
        lambda **given: [meshcast.prepare(**given)],
        {"meshes": _SPECS, "timeout": _LIMITS},
    ),
}


def _spoil(case: Draw, given: dict[str, Any]) -> None:
    value = FUNCTIONS[case.function].spoils[case.argument][case.value]
    if case.value not in _SHARDS:
        given[case.argument] = value()
        if case.value == "partial" and case.argument.endswith("_layout"):  # of the right ranks
            given[case.argument] = Layout(case.targets, [Partial()])
        return
    valid = given[case.argument]
    if isinstance(valid, torch.Tensor) and not isinstance(valid, DTensor):
        given[case.argument] = SHARDS[value](valid.clone())
    elif isinstance(valid, DTensor):
        given[case.argument] = spoiled(valid, value)
    elif isinstance(valid, list):
        given[case.argument] = [valid[0], spoiled(valid[1], value)]
    elif isinstance(valid, dict):
        given[case.argument] = {name: spoiled(x, value) for name, x in valid.items()}
    else:  # this rank would leave it to the call
        given[case.argument] = SHARDS[value](torch.zeros_like(_local(case, dist.get_rank(), "destination")))


def _valid(case: Draw, rank: int, group: Any, number: int, name: str) -> None:
    """A valid call, whose values are as they should be."""
    function = FUNCTIONS[name]
    results = function.call(**function.arguments(case, rank, group, number))
    if name == "prepare" or rank not in case.targets:
        return
    full = full_of(case, number)
    expected = cut(full, (len(case.targets),), (case.targets.index(rank),), [case.placements[1]])
    for result in results:
        assert result is not None
        assert torch.equal(result, expected), f"{name}, call {number}: wrong values"


def run(context, seed: int) -> tuple[str, float]:
    """What was wrong on this rank about one draw, and how late it was."""
    rank = context.rank
    case = draw(seed, context.world)
    group = dist.new_group(case.members, timeout=timedelta(seconds=GROUP_TIMEOUT))
    wrong, late = "", 0.0
    try:
        if rank in case.ranks:
            late = _run_draw(context, case, rank, group)
    except Exception as error:
        wrong = f"seed {seed}, rank {rank}: {case}: {type(error).__name__}: {error}"
        wrong += f"\n  {error.__cause__!r}" if error.__cause__ is not None else ""
    context.wait_for_all(f"{seed} over", limit=6 * GROUP_TIMEOUT)
    if rank in case.members:
        dist.destroy_process_group(group)
    return wrong, late


def _run_draw(context, case: Draw, rank: int, group: Any) -> float:
    owner = group
    name = case.function
    if name.startswith("Resharder."):
        owner = resharder_between(_tensor(case, rank, 0), _target(case, rank), group)
    if case.argument == "group" and not case.before:
        _valid(
            case, rank, group, 0, "reshard_local"
        )  # a process group that meshcast does not know is not told
    for number in range(case.before):
        _valid(case, rank, owner, number, name)
    given = FUNCTIONS[name].arguments(case, rank, owner, 5)
    if rank in case.refusing:
        _spoil(case, given)
    context.wait_for_all(f"{case.seed} call", case.ranks, limit=3 * GROUP_TIMEOUT)
    context.store.set(f"{case.seed} came {rank}", str(time.monotonic()))
    raised: Exception | None = None
    results: list[Any] = []
    try:
        results = FUNCTIONS[name].call(**given)
    except Exception as error:
        raised = error
    ended = time.monotonic()
    context.store.set(f"{case.seed} ended {rank}", str(ended))
    context.wait_for_all(f"{case.seed} raised", case.ranks, limit=3 * GROUP_TIMEOUT)
    came = [float(context.store.get(f"{case.seed} came {other}")) for other in case.ranks]
    refused = [float(context.store.get(f"{case.seed} ended {other}")) for other in case.refusing]
    _check_raised(case, rank, raised, results)
    late = ended - max(*came, *(min(time_, max(came) + 0.4) for time_ in refused), 0)
    assert late < SOON, f"raised {late:.2f} s after the refusal: {raised}"
    for number, again in ((6, name), (7, "reshard_local" if name != "prepare" else "reshard"), (8, name)):
        try:
            _valid(case, rank, owner if again == name else group, number, again)
        except Exception as error:
            raise AssertionError(f"call {number} after {raised!r}: {error!r}") from error
    return late


def _check_raised(case: Draw, rank: int, raised: Exception | None, results: list[Any]) -> None:
    if rank in case.refusing:
        assert isinstance(raised, MeshcastError), f"refused with {raised!r}"
        return
    if raised is None:
        # It may have had all that it needs from others; then it has it all. Some shards are looked at only
        # once the ranks have agreed.
        known = case.before or (case.argument == "group" and case.function == "reshard_local")
        assert known or case.value in _SHARDS, "a new call went through"
        if rank in case.targets:
            expected = cut(
                full_of(case, 5), (len(case.targets),), (case.targets.index(rank),), [case.placements[1]]
            )
            assert all(torch.equal(result, expected) for result in results), "wrong values, and no error"
        return
    assert isinstance(raised, PlanMismatchError), f"heard of a refusal by {raised!r}"
    assert any(f"rank {other}" in str(raised) for other in case.refusing), f"names another rank: {raised}"


def drawn(context) -> dict[str, float]:
    print(f"MESHCAST_TEST_SEED={SEED} MESHCAST_TEST_DRAWS={DRAWS}", file=sys.stderr)
    wrong, latest = [], 0.0
    for seed in range(SEED, SEED + DRAWS):
        found, late = run(context, seed)
        latest = max(latest, late)
        if found:
            print(found, file=sys.stderr, flush=True)
            wrong.append(found)
    assert not wrong, f"{len(wrong)} of {DRAWS}:\n" + "\n".join(wrong)
    return {"latest": latest}


CASES = [drawn]

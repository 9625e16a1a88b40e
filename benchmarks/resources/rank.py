"""One rank. Rank 0 writes what was found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor.placement_types import Placement

from ..steps import steps
from .clocks import Figure
from .large import ALL_GATHER, MIB, ROWS_TO_COLUMNS, cpu, digests, in_host, memory
from .small import calls

_BYTES = 256 * MIB


def network(nbytes: int, repeats: int) -> dict[str, Figure]:
    return _all(
        "figures over loopback",
        lambda: {"memory, loopback": memory(nbytes)},
        lambda: {"CPU, in one piece": cpu(_BYTES, 0, repeats)},
        lambda: {"CPU, strided": cpu(_BYTES, 1, repeats)},
        lambda: {"CPU, packed": cpu(_BYTES, 1, repeats, packs=True)},
        lambda: _digests("loopback", repeats),
        lambda: calls(repeats),
    )


def shared(nbytes: int, repeats: int) -> dict[str, Figure]:
    return _all(
        "figures in shared memory",
        lambda: {"memory, shared": memory(nbytes)},
        lambda: _digests("shared", repeats),
        lambda: _in_host("rows to columns", ROWS_TO_COLUMNS, repeats),
        lambda: _in_host("all-gather", ALL_GATHER, repeats),
    )


def _all(what: str, *measures: Callable[[], dict[str, Figure]]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for measure in steps(measures, what):
        found |= measure()
    return found


def _in_host(name: str, placement: Placement, repeats: int) -> dict[str, Figure]:
    figures = in_host(_BYTES, placement, repeats)
    return {f"in host, {name}, {cores}": figure for cores, figure in figures.items()}


def _digests(where: str, repeats: int) -> dict[str, Figure]:
    return {f"digest, {what}, {where}": figure for what, figure in digests(_BYTES, repeats).items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=("network", "shared"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    measure = {"network": network, "shared": shared}[args.world]
    found = measure(args.mib * MIB, args.repeats)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

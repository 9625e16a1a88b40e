"""One rank of torchft: a checkpoint from rank 0 to all that join, by its own transports and by meshcast's.
Values are checked bit by bit."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from meshcast.integrations.torchft import MeshcastTransport
from torchft import ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.checkpointing.pg_transport import PGTransport

from ..harness import Found
from ..ranks import Report
from .clients import in_turns

LIMIT = timedelta(seconds=100)
TENSORS, ROWS, COLUMNS = 24, 512, 1024  # float32: 2 MiB each


def rank(job: Found, report: Report) -> None:
    here, world, sender = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    base = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    held = {f"{index}": base + index for index in range(TENSORS)}
    got: dict[str, Any] = {}
    served = dist.TCPStore(sender, 0, is_master=True, wait_for_workers=False) if here == 0 else None
    port: list[Any] = [served and served.port]
    dist.broadcast_object_list(port, 0)
    store = served or dist.TCPStore(sender, port[0], timeout=LIMIT)
    group = ProcessGroupGloo(timeout=LIMIT)
    group.configure(f"{sender}:{port[0]}/transport", f"replica_{here}", here, world)
    transports = {
        "torchft's `HTTPTransport`, what `Manager` takes": HTTPTransport(LIMIT, num_chunks=0),
        "torchft's `PGTransport` over gloo": PGTransport(group, LIMIT, torch.device("cpu")),
        "`MeshcastTransport`": MeshcastTransport(hostname=sender),
    }
    told: list[Any] = [[_reached_at(each.metadata(), sender) for each in transports.values()]]
    dist.broadcast_object_list(told, 0)

    def way(transport: Any, where: str) -> Callable[[int], None]:
        def run(step: int) -> None:
            if here == 0:
                transport.send_checkpoint(list(range(1, world)), step, held, LIMIT)
                # What is open to be fetched stays so until all have it, as in torchft's step.
                store.wait([f"{step}/{other}" for other in range(1, world)], LIMIT)
                transport.disallow_checkpoint()
            else:
                got.update(transport.recv_checkpoint(0, where, step, LIMIT))
                store.set(f"{step}/{here}", "")

        return run

    def seen() -> int:
        wrong = 0
        for name in held if here else ():
            same = torch.equal(got.get(name, torch.empty(0)), held[name])
            wrong += 0 if same else held[name].nbytes
        got.clear()
        for tensor in held.values():
            tensor.add_(1)
        return wrong

    nbytes = sum(tensor.nbytes for tensor in held.values())
    ways = {name: way(each, where) for (name, each), where in zip(transports.items(), told[0], strict=True)}
    found = {"nbytes": nbytes, "bound": nbytes * 8 / (job["mbit"] * 1e6)}
    report("found", found | {"ways": in_turns(ways, job["rounds"], seen)})
    dist.barrier()
    for transport in transports.values():
        transport.shutdown(wait=False)


def _reached_at(metadata: str, address: str) -> str:
    """A host of the emulated cluster has no name that others know."""
    if not metadata.startswith("http://"):
        return metadata
    return f"http://{address}:{metadata.rpartition(':')[2]}"

"""Rows on two Ray actors become columns on three others.

pip install ray numpy
PYTHONPATH=python python examples/launching/ray_actors.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from datetime import timedelta

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

ACTORS = 5


class Member:
    """A rank. The driver calls `found` on the first one, then `join` on all."""

    store: dist.TCPStore | None = None

    def found(self) -> tuple[str, int]:
        """Where all ranks meet: a store in this process, at a port that the system has chosen."""
        import ray

        address = ray.util.get_node_ip_address()
        self.store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        return address, self.store.port

    def join(self, address: str, port: int, rank: int, limit: float) -> None:
        """On all ranks at once. limit: seconds, to meet and of every call of the group."""
        wait = timedelta(seconds=limit)
        store = self.store or dist.TCPStore(address, port, is_master=False, timeout=wait)
        dist.init_process_group("meshcast", store=store, rank=rank, world_size=ACTORS, timeout=wait)

    def reshard(self) -> tuple[list[list[int]], list[list[int]]]:
        """The rows and the columns of a 4 x 6 tensor that this rank has."""
        two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])
        x = distribute_tensor(torch.arange(24).view(4, 6), two, [Shard(0)], src_data_rank=None)
        y = meshcast.reshard(x, three, [Shard(1)])
        return x.to_local().tolist(), y.to_local().tolist()

    def leave(self) -> None:
        """On all ranks, once none needs another. An actor that ends without it is lost to the others."""
        dist.destroy_process_group()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="local", help="of your Ray, auto on its nodes (one of its own)")
    parser.add_argument("--nic", help="the interface of the actors' connections (the one of the host's name)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that ranks wait (%(default)s)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        parser.error("Ray is not installed: pip install ray numpy")
    import ray

    # Actors find what this process finds, and use this NIC.
    variables = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if args.nic:
        variables["GLOO_SOCKET_IFNAME"] = args.nic
    # The object store may be small: tensors do not go there. 80 MiB is Ray's least.
    own = {"num_cpus": ACTORS, "object_store_memory": 80 << 20, "include_dashboard": False}
    ray.init(
        args.address,
        runtime_env={"env_vars": variables},
        log_to_driver=False,
        logging_level="warning",
        **(own if args.address == "local" else {}),
    )
    try:
        kind = ray.remote(Member).options(num_cpus=1, scheduling_strategy="SPREAD")
        actors = [kind.remote() for _ in range(ACTORS)]
        # Ray waits longer than the ranks do: actors have to start as well.
        address, port = ray.get(actors[0].found.remote(), timeout=3 * args.limit)
        # One `get` for all: none returns before all have come.
        joined = [actor.join.remote(address, port, rank, args.limit) for rank, actor in enumerate(actors)]
        ray.get(joined, timeout=3 * args.limit)
        moved = ray.get([actor.reshard.remote() for actor in actors], timeout=3 * args.limit)
        for rank, (x, y) in enumerate(moved):
            print(f"rank {rank}: x {x}  y {y}")
        ray.get([actor.leave.remote() for actor in actors], timeout=args.limit)
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

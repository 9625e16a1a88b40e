"""The process groups of one case: made by every rank of the job in one order, destroyed with the case."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshcast.layout import Layout


class Groups:
    """Every call is collective over the whole job, also on ranks outside the group."""

    def __init__(self) -> None:
        self._made: list[dist.ProcessGroup] = []

    def new(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        group = dist.new_group(sorted(ranks), backend=backend)
        if dist.get_rank() in ranks:
            self._made.append(group)
        return group

    def mesh(self, ranks: Any) -> DeviceMesh:
        """A mesh of these ranks (a nested list), usable on ranks outside it as well."""
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        if mesh.get_coordinate() is not None:
            self._made += [mesh.get_group(dim) for dim in range(mesh.ndim)]
        return mesh

    def mesh_of(self, layout: Layout) -> DeviceMesh:
        return self.mesh(torch.tensor(layout.ranks).view(layout.mesh_shape).tolist())

    def close(self) -> None:
        """Each of the groups; not the job's own, which a mesh of all ranks may have taken."""
        for group in dict.fromkeys(self._made):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        self._made.clear()
        # DTensor remembers how it redistributed, and with it meshes and their groups, whose threads look for
        # messages 100 times a second: after some cases they would take the cores from those that follow.
        redistribution = sys.modules.get("torch.distributed.tensor._redistribute")
        if redistribution is not None:
            redistribution._gen_transform_infos.cache_clear()
            redistribution.clear_redistribute_planner_cache()

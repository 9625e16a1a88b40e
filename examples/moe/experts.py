"""Experts, whole in one process or shared over the ranks of a stage, with an all-to-all to them and back.

Every token reaches its experts, however many others do: none is dropped, as a limit of tokens for an expert
would do. So what a token becomes does not depend on the tokens beside it, nor on how a batch is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

# Of a mesh of (data, tensor) ranks: whole experts over the first, their inner width over the second.
PLACEMENTS = {"up": [Shard(0), Shard(2)], "down": [Shard(0), Shard(1)]}


class Experts(nn.Module):
    """MLPs side by side: up (experts, width, inner), GELU, down (experts, inner, width), without biases."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, inner))
        self.down = nn.Parameter(torch.empty(experts, inner, width))
        self.mesh: DeviceMesh | None = None

    def share(self, mesh: DeviceMesh) -> None:
        """Each rank keeps its part of the weights, which are equal on all of them: over dimension "data" some
        of the experts, as torch.chunk cuts them (a rank may get none), over "tensor" some of their width."""
        for name, placements in PLACEMENTS.items():
            whole = getattr(self, name).detach()
            cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            self.register_parameter(name, nn.Parameter(cut))
        self.mesh = mesh

    def forward(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Of each of (n, width) tokens what its expert makes of it. chosen: (n,) numbers of experts."""
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=self.up.shape[0])
        made = (self._here if self.mesh is None else self._there)(tokens[order], counts)
        return made[order.argsort()]

    def _here(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """tokens: ordered by expert; counts: of each expert that this rank has."""
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        parts = tokens.split(counts.tolist())
        # Without experts there is nothing but the empty first part, through which backwards go on all ranks.
        return torch.cat(
            [
                tokens[:0],
                *(F.gelu(x @ u, approximate="tanh") @ d for x, u, d in zip(parts, up, down, strict=True)),
            ]
        )

    def _there(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """The same where other ranks have some of the experts, and this rank some for all of them."""
        assert self.mesh is not None
        data, group = self.mesh["data"], self.mesh.get_group("data")
        owned = owned_experts(len(counts), data.size())
        mine = owned[data.get_local_rank()]
        received = counts.new_empty(data.size() * mine)
        dist.all_to_all_single(received, counts, [mine] * data.size(), owned, group=group)
        leave = [int(part.sum()) for part in counts.split(owned)]
        arrive = received.view(data.size(), mine).sum(1).tolist()
        arrived = _Exchange.apply(tokens, leave, arrive, group)
        # From each rank they come ordered by expert.
        expert = torch.arange(mine, device=counts.device).repeat(data.size()).repeat_interleave(received)
        order = expert.argsort(stable=True)
        made = self._whole_width(arrived[order], torch.bincount(expert, minlength=mine))
        return _Exchange.apply(made[order.argsort()], arrive, leave, group)

    def _whole_width(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Sums over the ranks that share the width of an expert: what it makes, and on the way back the
        gradients of its tokens."""
        assert self.mesh is not None
        mesh = self.mesh["tensor"]
        if mesh.size() == 1:
            return self._here(tokens, counts)
        tokens = DTensor.from_local(tokens, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        made = DTensor.from_local(self._here(tokens, counts), mesh, [Partial()])
        return made.redistribute(placements=[Replicate()]).to_local()


def owned_experts(experts: int, ranks: int) -> list[int]:
    """How many each rank has, by Shard(0): as many as the first one, as long as there are any."""
    sizes = [len(part) for part in torch.arange(experts).chunk(ranks)]
    return sizes + [0] * (ranks - len(sizes))


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: the first leave[0] go to rank 0 of the group, ...; backwards gradients return."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, leave: Sequence[int], arrive: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.way_back = arrive, leave, group
        return _exchanged(rows, leave, arrive, group)

    @staticmethod
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients, *ctx.way_back), None, None, None


def _exchanged(rows: Tensor, leave: Sequence[int], arrive: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(arrive), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), list(arrive), list(leave), group=group)
    return found

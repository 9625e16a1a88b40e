"""A training job whose ranks change: FSDP2 and AdamW, and the same job in one process."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BATCH = 60  # divides by 3, 4 and 5 ranks
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
LR, WARMER = 0.02, 0.01


def model() -> nn.Sequential:
    """Sizes that no number of ranks divides: uneven shards, and an empty one with 4 and with 5 ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(
            nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Tanh(), nn.Linear(3, 2)
        )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(BATCH, 6, generator=generator), torch.randn(BATCH, 2, generator=generator)


def optimizer_of(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.1, foreach=False)


@dataclass
class Reference:
    """One process. before: the state before each step, by names; losses: of each step."""

    steps: int
    before: list[dict[str, torch.Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        module = model()
        optimizer = optimizer_of(module)
        for step in range(self.steps + 1):
            self.before.append(self._state(module, optimizer))
            x, y = batch(step)
            optimizer.param_groups[0]["lr"] = rate(step)
            optimizer.zero_grad()
            loss = (module(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            self.losses.append(loss.item())

    @staticmethod
    def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        state = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state[parameter].items():
                state[f"state.{name}.{key}"] = value.clone()
        return state


def rate(step: int) -> float:
    return LR if step < 2 else WARMER


class Job:
    """The job on the ranks of a mesh, of which this process is one. group: of the same ranks."""

    def __init__(
        self,
        mesh: DeviceMesh,
        group: dist.ProcessGroup | None,
        position: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.dtype = dtype
        self.module = model().to(dtype)
        with torch.no_grad():  # what a rank that joins begins with must not matter
            for parameter in self.module.parameters():
                parameter.fill_(float("nan"))
        fully_shard(self.module[0], mesh=mesh)
        fully_shard(self.module, mesh=mesh)
        self.optimizer = optimizer_of(self.module)
        self.group, self.position = group, position

    def begin(self) -> None:
        """From the first step."""
        full = model().state_dict()
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                fill(parameter, full[name])

    def train(self, steps: int) -> list[float]:
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        losses = []
        for step in range(self.position, self.position + steps):
            x, y = (each.to(self.dtype).chunk(ranks)[rank] for each in batch(step))
            self.optimizer.param_groups[0]["lr"] = rate(step)
            self.optimizer.zero_grad()
            loss = (self.module(x) - y).square().mean()
            loss.backward()
            self.optimizer.step()
            mean = loss.detach().float() / ranks
            dist.all_reduce(mean, group=self.group)
            losses.append(float(mean))
        self.position += steps
        return losses

    def tensors(self) -> dict[str, object]:
        """Of model and optimizer, and hyperparameters, by names that say nothing of ranks."""
        weights, optimizer = get_state_dict(self.module, self.optimizer, options=FLAT)
        return {**weights, **optimizer}

    def state(self) -> dict[str, object]:
        rng = torch.Generator().manual_seed(1000 + dist.get_rank()).get_state()
        return {**self.tensors(), "rng": rng, "position": self.position}

    def take(self, state: dict[str, object]) -> None:
        """What remesh returned."""
        weights = {name: state[name] for name in self.module.state_dict()}
        optimizer = {n: x for n, x in state.items() if n.startswith(("state.", "param_groups."))}
        set_state_dict(
            self.module, self.optimizer, model_state_dict=weights, optim_state_dict=optimizer, options=FLAT
        )
        self.position = state["position"]

    def load(self, state: dict[str, torch.Tensor], position: int) -> None:
        """Begins here from the state of one process."""
        held = self.tensors()
        with torch.no_grad():
            for name, value in state.items():
                fill(held[name], value)
        self.take({**held, "position": position})

    def check(self, reference: Reference, losses: list[float]) -> None:
        """Parameters, moments and step counts, and the losses of the last steps, within 1e-5."""
        expected = reference.losses[self.position - len(losses) : self.position]
        assert len(expected) == len(losses)
        assert all(abs(a - b) < 1e-5 for a, b in zip(losses, expected, strict=True)), (losses, expected)
        held = self.tensors()
        for name, value in reference.before[self.position].items():
            found = held[name]
            full = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.allclose(full, value, rtol=0, atol=1e-5), name
        assert sum(name.endswith(".step") for name in held) == 5


def fill(tensor: torch.Tensor, full: torch.Tensor) -> None:
    """This rank's part of a whole tensor, by torch.chunk."""
    if not isinstance(tensor, DTensor):
        tensor.copy_(full)
        return
    part = full
    for dim, placement in enumerate(tensor.placements):
        if placement.is_shard():
            parts = part.chunk(tensor.device_mesh.size(dim), placement.dim)
            at = tensor.device_mesh.get_local_rank(dim)
            part = parts[at] if at < len(parts) else part[:0]
    tensor.to_local().copy_(part)

"""Loaders that are drawn: chains of views, copies and writes into views of parameters. One draws the same
steps from the shapes alone, so that it does the same with recording tensors and with real ones."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping

import torch

SIZES = (1, 2, 3, 4, 6, 8)
Drawn = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


class DrawnLoader:
    """load_weights of a seed. parameters: its memory; shapes: of the checkpoint."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.seed = seed
        rng = random.Random(seed)
        self.checkpoint = {}
        for number in range(rng.randint(1, 4)):
            shape = [rng.choice(SIZES) for _ in range(rng.randint(0, 3))]
            count = torch.Size(shape).numel()
            self.checkpoint[f"t{number}"] = (torch.arange(count).reshape(shape) + 100.0 * number + 1).to(
                dtype
            )
        self.parameters = {
            f"p{number}": self._parameter(rng, rng.choice((dtype, dtype, torch.float32)))
            for number in range(rng.randint(1, 3))
        }

    @staticmethod
    def _parameter(rng: random.Random, dtype: torch.dtype) -> torch.Tensor:
        shape = [rng.choice(SIZES[1:]) * rng.choice((1, 2)) for _ in range(rng.randint(1, 3))]
        made = torch.full([*shape[:-1], shape[-1] + 2], -1.0, dtype=dtype)
        x = made[..., 1:-1] if rng.random() < 0.3 else torch.full(shape, -1.0, dtype=dtype)
        return x.transpose(0, -1) if rng.random() < 0.3 else x

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        rng = random.Random(self.seed + 1)
        pool = dict(weights)
        for _ in range(rng.randint(2, 8)):
            values = list(pool.values())
            x = self._made(rng, values)
            pool[f"made {len(pool)}"] = x
            if rng.random() < 0.8:
                self._write(rng, x)
        for x in list(pool.values())[-2:]:
            self._write(rng, x)

    def _made(self, rng: random.Random, values: list[torch.Tensor]) -> torch.Tensor:
        x = rng.choice(values)
        for _ in range(rng.randint(0, 4)):
            x = self._changed(rng, x, values)
        return x

    @staticmethod
    def _changed(rng: random.Random, x: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        dim = rng.randrange(x.ndim) if x.ndim else 0
        size = x.shape[dim] if x.ndim else 1
        kind = rng.randrange(18)
        if not x.ndim:
            return x.reshape(1) if kind < 9 else x.clone()
        if kind == 0:
            low = rng.randrange(size)
            return x.narrow(dim, low, rng.randint(1, size - low))
        if kind == 1:
            return x.select(dim, rng.randrange(size)) if x.ndim > 1 else x[rng.randrange(size)]
        if kind == 2:
            return rng.choice(x.chunk(rng.randint(1, 3), dim))
        if kind == 3:
            return x.permute(rng.sample(range(x.ndim), x.ndim))
        if kind == 4:
            return x.unsqueeze(rng.randint(0, x.ndim)) if x.ndim < 5 else x.squeeze()
        if kind == 5:
            return x.reshape(-1)
        if kind == 6:
            divisors = [d for d in range(1, size + 1) if size % d == 0]
            inner = rng.choice(divisors)
            return x.unflatten(dim, (size // inner, inner)) if x.ndim < 5 else x
        if kind == 7 and x.ndim > 1:
            low = rng.randrange(x.ndim - 1)
            return x.flatten(low, low + 1)
        if kind == 8:
            return torch.cat([x, x.narrow(dim, 0, rng.randint(1, size))], dim)
        if kind == 9 and x.ndim < 5:
            return torch.stack([x, x], rng.randint(0, x.ndim))
        if kind == 10:
            return x.contiguous() if rng.random() < 0.5 else x.clone()
        if kind == 11:
            return x.to(rng.choice((torch.float32, torch.bfloat16, torch.float64)))
        if kind == 12:
            return x[
                tuple(
                    slice(None, None, rng.randint(1, 2)) if d == dim else slice(None) for d in range(x.ndim)
                )
            ]
        if kind == 13:
            return x.index_select(dim, torch.tensor([rng.randrange(size) for _ in range(rng.randint(1, 4))]))
        if kind == 14:
            return torch.nn.functional.pad(x, (rng.randint(0, 2), rng.randint(0, 2)))
        if kind == 15:
            return x.expand(2, *x.shape) if x.ndim < 5 else x
        if kind == 16:
            other = [y for y in values if y.shape == x.shape and y.dtype == x.dtype]
            return torch.cat([x, rng.choice(other)], dim) if other else x
        made = torch.zeros([n + 1 for n in x.shape], dtype=x.dtype)
        made[tuple(slice(0, n) for n in x.shape)].copy_(x)
        return made

    def _write(self, rng: random.Random, x: torch.Tensor) -> None:
        """Into a view of a parameter that is at most as large."""
        into = rng.choice(list(self.parameters.values())).data
        if rng.random() < 0.2:
            into[: rng.randint(1, into.shape[0])].fill_(rng.choice((0, 0.5)))
        if rng.random() < 0.3:
            into = into.permute(rng.sample(range(into.ndim), into.ndim))
        while x.ndim > into.ndim:
            x = x.select(0, 0) if rng.random() < 0.3 else x.flatten(0, 1)
        while into.ndim > x.ndim:
            into = into[rng.randrange(into.shape[0])]
        for dim in range(x.ndim):
            count = min(x.shape[dim], into.shape[dim])
            low = rng.randint(0, into.shape[dim] - count)
            into, x = into.narrow(dim, low, count), x.narrow(dim, 0, count)
        into.copy_(x)


def loaded(seed: int, dtype: torch.dtype, checkpoint: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The parameters of the loader of that seed, after it has run on a checkpoint."""
    real = DrawnLoader(seed, dtype)
    real.load_weights(checkpoint.items())
    return real.parameters

"""Weights of models that go from their trainer to replicas of inference, tensor by tensor, in published
shapes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from meshcast import Layout
from meshcast.planning.plan import Problem
from torch.distributed.tensor import Replicate, Shard

__all__ = ["PER_HOST", "Fleet", "llama", "mixture"]

PER_HOST = 8


def llama(layers: int = 80) -> dict[str, list[Problem]]:
    """Tensors of a Llama of 70 billion parameters, and all of them, from FSDP over 512 ranks to 64 replicas
    of tensor parallel 8."""
    src = Layout(list(range(512)), [Shard(0)])
    hosts = [list(range(first, first + PER_HOST)) for first in range(512, 1024, PER_HOST)]
    rows, columns, whole = (Layout(hosts, [Replicate(), each]) for each in (Shard(0), Shard(1), Replicate()))

    def tensor(*shape: int, dst: Layout) -> Problem:
        return Problem(shape, torch.bfloat16, src, dst)

    query, key, gate = (tensor(n, 8192, dst=rows) for n in (8192, 1024, 28672))
    out, down = (tensor(8192, n, dst=columns) for n in (8192, 28672))
    norm, embedding = tensor(8192, dst=whole), tensor(128256, 8192, dst=rows)
    layer = [query, key, key, out, gate, gate, down, norm, norm]
    batch = layers * layer + [embedding, embedding, norm]
    return {
        "8192 x 8192 to Shard(0)": [query], "8192 x 8192 to Shard(1)": [out],
        "8192 x 28672 to Shard(1)": [down], "8192, replicated": [norm],
        "128256 x 8192 to Shard(0)": [embedding],
        f"all {len(batch)} tensors, one plan": batch,
    }  # fmt: skip


class Fleet(NamedTuple):
    """Where a mixture of experts is trained and where it is served. Experts are shared out over `experts`
    ranks on either side."""

    trainer: int  # ranks; each expert is cut by FSDP over trainer / experts of them, all else over all
    inference: int  # ranks; experts are replicated inference / experts times
    experts: int = 32
    tensor_parallel: int = 8  # attention and shared experts at inference


def mixture(fleet: Fleet, layers: int = 61) -> list[Problem]:
    """All tensors of Kimi K2, a mixture of 384 experts with a trillion parameters, trained in bfloat16 and
    cast to fp8 before they travel. Routed experts of a layer are one tensor, as trainers keep them.

    Shapes are those of its config.json: hidden 7168, 61 layers of which the first is dense, 64 heads, ranks
    1536 and 512 of the query and the key and value projections."""
    hidden, inner, dense, heads, vocabulary, experts = 7168, 2048, 18432, 64, 163840, 384
    query_rank, key_rank, nope, rope, value = 1536, 512, 128, 64, 128
    trainer = list(range(fleet.trainer))
    ranks = list(range(fleet.trainer, fleet.trainer + fleet.inference))

    def rows_of(all_ranks: list[int], length: int) -> list[list[int]]:
        return [all_ranks[first : first + length] for first in range(0, len(all_ranks), length)]

    sharded = Layout(trainer, [Shard(0)])
    parallel = rows_of(ranks, fleet.tensor_parallel)
    rows, columns = (Layout(parallel, [Replicate(), Shard(d)]) for d in (0, 1))
    whole = Layout(ranks, [Replicate()])
    cut = Layout(rows_of(trainer, fleet.experts), [Shard(1), Shard(0)])
    served = Layout(rows_of(ranks, fleet.experts), [Replicate(), Shard(0)])

    def tensor(*shape: int, dst: Layout, src: Layout = sharded) -> Problem:
        return Problem(shape, torch.float8_e4m3fn if len(shape) > 1 else torch.bfloat16, src, dst)

    def mlp(n: int) -> list[Problem]:
        up = tensor(n, hidden, dst=rows)
        return [up, up, tensor(hidden, n, dst=columns)]

    norm = tensor(hidden, dst=whole)
    attention = [
        tensor(query_rank, hidden, dst=whole),
        tensor(query_rank, dst=whole),
        tensor(heads * (nope + rope), query_rank, dst=rows),
        tensor(key_rank + rope, hidden, dst=whole),
        tensor(key_rank, dst=whole),
        tensor(heads * (nope + value), key_rank, dst=rows),
        tensor(hidden, heads * value, dst=columns),
        norm,
        norm,
    ]
    up = tensor(experts, inner, hidden, src=cut, dst=served)
    down = tensor(experts, hidden, inner, src=cut, dst=served)
    router = [tensor(experts, hidden, dst=whole), tensor(experts, dst=whole)]
    embedding = tensor(vocabulary, hidden, dst=rows)
    layer = attention + router + mlp(inner) + [up, up, down]
    return [embedding, *attention, *mlp(dense), *((layers - 1) * layer), norm, embedding]

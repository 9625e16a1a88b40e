"""quantize= of tensors on GPUs against whole tensors in one process. DEVICE=cpu runs the same cases where
there is no GPU, which checks the cases."""

from __future__ import annotations

import meshcast
import torch
from meshcast import TensorMap
from multiproc.cases_quantize import SCHEMES, names_of, values
from multiproc.cases_quantize_own import TYPES
from multiproc.devices import GPU, given, mesh_on, use_a_gpu
from multiproc.oracle import coordinates, cut
from quantize_formula import quantized, same
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 120.0


def check(result, made, names, mesh, rank) -> None:
    """made: values and scales of the whole tensor."""
    place = coordinates(mesh.mesh).get(rank)
    for name, expected in zip(names, made, strict=True):
        got = result[name]
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), (name, got.shape, got.dtype)
        if place is not None:
            local = got.to_local()
            assert local.device.type == mesh.device_type, (name, local.device)
            assert same(local.cpu(), cut(expected, mesh.mesh.shape, place, got.placements)), name


def all_types(context) -> None:
    """Blocks that are on several ranks, odd rows, all sources; to GPUs and to the host, with digests."""
    use_a_gpu(context.rank)
    ranks = list(range(context.world))
    src = mesh_on(GPU, ranks, context.rank)
    for device in dict.fromkeys((GPU, "cpu")):
        dst = mesh_on(device, ranks[::-1][: max(1, context.world - 1)], context.rank)
        for number, scheme in enumerate(SCHEMES):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                full = values((201, 96), number, dtype)
                for way in ([Shard(0)], [Shard(1)]):
                    state = {"w": given(full, src, way, context.rank)}
                    moved = meshcast.reshard_state_dict(
                        state, {"w": (dst, [Replicate()])}, quantize={"w": scheme}, digest=number % 2 == 0
                    )
                    check(moved, quantized(full, scheme), names_of("w", scheme), dst, context.rank)


def joined_and_turned(context) -> None:
    use_a_gpu(context.rank)
    ranks = list(range(context.world))
    src, dst = mesh_on(GPU, ranks, context.rank), mesh_on(GPU, ranks[::-1], context.rank)
    a, b = values((33, 64), 1, torch.bfloat16), values((20, 64), 2, torch.bfloat16)
    for scheme in SCHEMES:
        state = {name: given(x, src, [Shard(1)], context.rank) for name, x in (("a", a), ("b", b))}
        moved = meshcast.reshard_state_dict(
            state, {"ab": (dst, [Shard(0)])}, maps=[TensorMap(["a", "b"], "ab")], quantize=scheme
        )
        check(moved, quantized(torch.cat([a, b]), scheme), names_of("ab", scheme), dst, context.rank)
        square = values((96, 64), 3)
        moved = meshcast.reshard_state_dict(
            {"a": given(square, src, [Shard(0)], context.rank)},
            {"t": (dst, [Shard(0)])},
            maps=[TensorMap("a", "t", permute=(1, 0))],
            quantize=scheme,
        )
        check(moved, quantized(square.t(), scheme), names_of("t", scheme), dst, context.rank)


def functions_of_the_user(context) -> None:
    """Each gets its part where the tensor is, and the bits are those of that device: torch divides by a
    number in another way on a GPU."""
    use_a_gpu(context.rank)
    ranks = list(range(context.world))
    src, dst = mesh_on(GPU, ranks, context.rank), mesh_on(GPU, ranks[::-1], context.rank)
    places = []

    def seen(part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places.append(part.device.type)
        return TYPES["int8"].quantize(part)

    kind = meshcast.BlockScaled(seen, block=(1, 64), dtype=torch.int8)
    full = values((53, 192), 4, torch.bfloat16)
    for way in ([Shard(0)], [Shard(1)]):
        state = {"w": given(full, src, way, context.rank)}
        moved = meshcast.reshard_state_dict(state, {"w": (dst, [Shard(0)])}, quantize={"w": kind})
        made = [x.cpu() for x in TYPES["int8"].quantize(full.to(GPU))]
        check(moved, made, ["w", "w_scale"], dst, context.rank)
    assert set(places) <= {GPU}, places


def versions(context) -> None:
    """Values that the stream is still writing when the call begins."""
    use_a_gpu(context.rank)
    ranks = list(range(context.world))
    src, dst = mesh_on(GPU, ranks, context.rank), mesh_on(GPU, ranks[::-1], context.rank)
    full = values((130, 256), 5)
    x = given(full, src, [Shard(0)], context.rank)
    send = meshcast.StateResharder({"w": (dst, [Shard(1)])}, reuse_output=True, quantize={"w": "nvfp4"})
    for step in (1, 2, 3):
        if GPU == "cuda":
            torch.cuda._sleep(20_000_000)
        x._local_tensor.mul_(2.0)
        moved = send.run({"w": x}, version=step)
        check(moved, quantized(full * 2**step, "nvfp4"), names_of("w", "nvfp4"), dst, context.rank)


CASES = [all_types, joined_and_turned, functions_of_the_user, versions]

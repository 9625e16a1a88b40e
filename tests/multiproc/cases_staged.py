"""reshard between meshes on CPUs and on GPUs: the real transfer between seven processes, with a fake GPU
behind the staging of each (fake_gpu.py)."""

from __future__ import annotations

import random
import time
from unittest import mock

import meshcast
import torch
import torch.distributed as dist
from meshcast.errors import MeshcastError
from meshcast.resharding.compile_op import new_token, register_call
from multiproc.cases_quantize import SCHEMES, values
from multiproc.cases_quantize_own import TYPES
from multiproc.fake_gpu import FakeGpu, check, fake_gpu, held, mesh_on
from multiproc.meshes import resharder_between, spread
from multiproc.oracle import unique_fill
from multiproc.random_layouts import draw
from quantize_formula import quantized
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

GROUP_TIMEOUT = 60.0
CASE_LIMIT = 150.0
SEEDS = range(9000, 9036)
WAYS = [("cuda", "cpu"), ("cpu", "cuda")]


def positive(placements, ndim: int) -> list:
    return [Shard(p.dim % ndim) if type(p) is Shard else p for p in placements]


def random_layouts(context) -> None:
    """In worlds of three, five and seven ranks: uneven and empty shards, all dtypes, strided sources."""
    for index, seed in enumerate(SEEDS):
        world = (3, 5, 7)[index % 3]
        if context.rank >= world:
            continue
        problem, way = draw(seed, world), WAYS[index // 3 % 2]
        ndim = len(problem.shape)
        full = unique_fill(problem.shape, problem.dtype, problem.seed)
        src, dst = mesh_on(way[0], problem.src_mesh), mesh_on(way[1], problem.dst_mesh)
        src_placements = positive(problem.src_placements, ndim)
        dst_placements = positive(problem.dst_placements, ndim)
        with fake_gpu(seed) as gpu:
            x = held(full, src, src_placements, context.rank)
            if problem.strided and x._local_tensor.numel():
                x = DTensor(spread(x._local_tensor), x._spec, requires_grad=False)
            try:
                handle = meshcast.reshard(
                    x, dst, dst_placements, strategy=problem.strategy, async_op=bool(index % 2)
                )
                y = handle.wait() if index % 2 else handle
                check(gpu, y, full, dst, dst_placements)
                side = x if way[0] == "cuda" else y
                assert gpu.ways == ([("out", "in")[way[0] == "cpu"]] if side._local_tensor.numel() else [])
            except Exception as error:
                raise AssertionError(f"seed {seed}, {way}: {problem}") from error


def calls_in_flight_end_out_of_order(context) -> None:
    """Both ways at once, waited for in another order on every rank, some by polling, some by their future."""
    here, there = mesh_on("cpu", [0, 1, 2, 3]), mesh_on("cuda", [2, 3, 4, 5, 6])
    rng = random.Random(context.rank)
    with fake_gpu(context.rank) as gpu:
        pending = []
        for number in range(30):
            full = unique_fill((5 + number % 4, 7), torch.float32, number)
            src, dst = (here, there) if number % 2 else (there, here)
            source = held(full, src, [Shard(0)], context.rank)
            handle = meshcast.reshard(source, dst, [Shard(1)], async_op=True)
            pending.append((handle, full, dst, source))
            if number % 10 == 9:
                rng.shuffle(pending)
                for handle, full, dst, source in pending:
                    how = rng.randrange(3)
                    if how == 0:
                        while not handle.is_completed():
                            time.sleep(0.0005)
                        # On the GPU as well: nothing in the current stream has to wait for it any more.
                        expected = held(full, dst, [Shard(1)], context.rank)._local_tensor
                        assert torch.equal(handle._result._local_tensor, expected)
                    result = handle.get_future().wait() if how == 1 else handle.wait()
                    check(gpu, result, full, dst, [Shard(1)])
                    source._local_tensor.fill_(-1)  # it is ours again
                    assert handle.stats.seconds >= 0
                pending.clear()


def behind_what_the_stream_holds(context) -> None:
    """The source may still be in the making, and a result that is overwritten still be read."""
    here, there = mesh_on("cpu", [0, 1]), mesh_on("cuda", [1, 2, 3, 4])
    full = unique_fill((9, 4), torch.int64, 3)
    for async_op in (False, True):
        with fake_gpu(7) as gpu:
            x = held(full, there, [Shard(0)], context.rank)
            values = x._local_tensor.clone()
            x._local_tensor.fill_(-7)
            gpu.enqueue(lambda x=x, values=values: x._local_tensor.data.copy_(values))
            y = meshcast.reshard(x, here, [Replicate()], async_op=async_op)
            check(gpu, y.wait() if async_op else y, full, here, [Replicate()])

            out = held(full + 1000, there, [Shard(0)], context.rank)
            before = out._local_tensor.clone()
            seen: list[torch.Tensor] = []
            gpu.enqueue(lambda out=out, seen=seen: seen.append(out._local_tensor.clone()))
            source = held(full, here, [Shard(1)], context.rank)
            handle = meshcast.reshard_(out, source, async_op=async_op)
            check(gpu, handle.wait() if async_op else handle, full, there, [Shard(0)])
            gpu.read(before)
            assert torch.equal(seen[0], before), "the result was overwritten while the stream still read it"


def an_asynchronous_call_does_not_wait_for_the_gpu(context) -> None:
    """Neither the first, which the ranks agree on, nor later ones, which could start at once."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [3, 4])
    for seed in range(3):
        full = unique_fill((6, 4), torch.float32, 11 + seed)
        with fake_gpu(seed) as gpu:
            gpu.stalled = context.rank == 3
            handle = meshcast.reshard(
                held(full, there, [Shard(0)], context.rank), here, [Shard(1)], async_op=True
            )
            if context.rank == 3:
                assert not handle.is_completed()
                gpu.stalled = False
            check(gpu, handle.wait(), full, here, [Shard(1)])


def memory_is_pinned_once(context) -> None:
    """By a Resharder, by calls of one kind, and by others that need as much."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [0, 3, 4, 5, 6])
    group = dist.new_group()
    with fake_gpu(2) as gpu:  # the shard of rank 6 is empty
        for way, (src, dst) in enumerate(((here, there), (there, here))):
            spec = [meshcast.TensorSpec((11, 300), torch.float32, mesh, [Shard(0)]) for mesh in (src, dst)]
            call = resharder_between(*spec, group, reuse_output=True)
            pinned = 0
            for step in range(12):
                full = unique_fill((11, 300), torch.float32, step)
                x = held(full, src, [Shard(0)], context.rank)
                y = call.run(x) if way else call.start(x).wait()
                check(gpu, y, full, dst, [Shard(0)])
                if step == 1:
                    pinned = len(gpu.pinned_bytes)
            assert bool(pinned) == (context.rank in (0, 3, 4, 5))
            for columns in (300, 299, 290):
                full = unique_fill((11, columns), torch.float32, columns)
                x = held(full, src, [Shard(0)], context.rank)
                check(gpu, meshcast.reshard(x, dst, [Shard(0)], group=group), full, dst, [Shard(0)])
            assert len(gpu.pinned_bytes) == pinned, gpu.pinned_bytes
        assert bool(gpu.ways) == (context.rank in (0, 3, 4, 5))


def gradients_come_back(context) -> None:
    """Against one process, both ways, also where the value becomes narrower and the source is a sum."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [2, 3, 4, 5, 6])
    full = unique_fill((10, 5), torch.float32, 0) - 25  # small integers: every sum is exact
    weight = unique_fill((10, 5), torch.float32, 0) % 4
    for way in range(2):
        src, dst = ((here, there), (there, here))[way]
        for dtype in (None, torch.bfloat16):
            for placement in (Shard(0), Partial("sum")):
                with fake_gpu(way) as gpu:
                    single = full.clone().requires_grad_()
                    summands = len(src.mesh) if placement == Partial("sum") else 1
                    value = single * summands
                    value = value if dtype is None else value.to(dtype)
                    (value.float() * weight).pow(2).sum().backward()
                    x = held(full, src, [placement], context.rank).detach().requires_grad_()
                    y = meshcast.reshard(x, dst, [Shard(1)], dtype=dtype)
                    check(gpu, y.detach(), value.detach(), dst, [Shard(1)])
                    factor = held(weight, dst, [Shard(1)], context.rank)
                    inside = context.rank in dst.mesh
                    meshcast.backward((y.float() * factor).pow(2).sum() if inside else None)
                    if context.rank in src.mesh:
                        expected = single.grad / summands
                        back = [Replicate()] if placement == Partial("sum") else [Shard(0)]
                        check(gpu, x.grad, expected, src, back)
                    forth_and_back = ["out", "in"] if src is there else ["in", "out"]
                    assert gpu.ways == (forth_and_back if context.rank in there.mesh else [])
                with torch.no_grad(), fake_gpu(way) as gpu:
                    assert not meshcast.reshard(x, dst, [Shard(1)]).requires_grad


def no_second_derivative(context) -> None:
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [0, 1, 2])
    if context.rank > 2:
        return
    full = unique_fill((6, 4), torch.float32, 8)
    with fake_gpu(3) as gpu:
        x = held(full, there, [Shard(0)], context.rank).requires_grad_()
        y = meshcast.reshard(x, here, [Shard(1)])
        loss = y.pow(2).sum()
        for _ in range(2):
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
            check(gpu, grad, 2 * full, there, [Shard(0)])
        try:
            torch.autograd.grad(loss, x, create_graph=True)
        except MeshcastError as error:
            assert "no second derivative" in str(error)
        else:
            raise AssertionError("a second derivative was promised")


def a_changed_source_is_noticed(context) -> None:
    here, there = mesh_on("cpu", [0, 1]), mesh_on("cuda", [2, 3, 4])
    with fake_gpu(5):
        x = held(unique_fill((9, 2), torch.float32, 5), there, [Shard(0)], context.rank)
        handle = meshcast.reshard(x, here, [Shard(0)], async_op=True)
        changes = context.rank == 3
        if changes:
            x._local_tensor.add_(1)
        try:
            handle.wait()
        except MeshcastError as error:
            assert changes and "changed in place" in str(error), error
        else:
            assert not changes


def many_and_plain_tensors(context) -> None:
    here, there = mesh_on("cpu", [0, 1, 2, 3, 4]), mesh_on("cuda", [4, 5, 6])
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64]
    for src, dst in ((here, there), (there, here)):
        with fake_gpu(6) as gpu:
            fulls = [unique_fill((3 + i, 6), dtype, i) for i, dtype in enumerate(dtypes)]
            xs = [held(full, src, [Shard(0)], context.rank) for full in fulls]
            ys = meshcast.reshard_many(xs, dst, [[Shard(1)]] * 4)
            for y, full in zip(ys, fulls, strict=True):
                check(gpu, y, full, dst, [Shard(1)])
            layouts = [meshcast.Layout(mesh, [Shard(0)]) for mesh in (src, dst)]
            x = xs[0]._local_tensor if context.rank in src.mesh else None
            sides = (src.device_type, dst.device_type)
            y = held(torch.zeros(3, 6), dst, [Shard(0)], context.rank)
            out = y._local_tensor if context.rank in dst.mesh else None
            meshcast.reshard_local(
                x, layouts[0], out, layouts[1], shape=(3, 6), dtype=torch.float32, device=sides
            )
            check(gpu, y, fulls[0], dst, [Shard(0)])


def state_dicts(context) -> None:
    """Weights on the CPU and on GPUs, to either; ranks that hold nothing learn where they are."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [3, 4, 5, 6])
    fulls = {name: unique_fill((5 + i, 4), torch.float32, i) for i, name in enumerate("abc")}
    homes = {"a": here, "b": there, "c": here}
    where = {"a": (there, [Shard(1)]), "b": (here, [Shard(0)]), "c": (here, [Replicate()])}
    with fake_gpu(8) as gpu:
        for version in (1, 2, 3):
            state = {
                name: held(full + version, homes[name], [Shard(0)], context.rank)
                for name, full in fulls.items()
                if context.rank in homes[name].mesh
            }
            moved = meshcast.reshard_state_dict(
                state, where, version=version if state else None, digest=version == 2, dtype=torch.float64
            )
            for name, (mesh, placements) in where.items():
                check(gpu, moved[name], fulls[name].double() + version, mesh, placements)


def block_scaled_types(context) -> None:
    """Made where the tensors are, to either; blocks on several ranks; a type of the user's own."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [3, 4, 5, 6])
    full = values((70, 96), 1)
    for number, (name, kind) in enumerate([*((each, each) for each in SCHEMES), *TYPES.items()]):
        if name == "int8":
            continue  # takes multiples of 64
        made = quantized(full, kind) if isinstance(kind, str) else kind.quantize(full)
        for home, away in ((there, here), (here, there)):
            with fake_gpu(number) as gpu:
                inside = context.rank in home.mesh
                state = {"w": held(full, home, [Shard(number % 2)], context.rank)} if inside else None
                where = {"w": (away, [Replicate()])}
                moved = meshcast.reshard_state_dict(state, where, quantize={"w": kind}, digest=True)
                for each, expected in zip(moved.values(), made, strict=True):
                    assert each.device_mesh.device_type == away.device_type
                    raw = expected.reshape(-1).view(torch.uint8) if expected.ndim else expected
                    local = each._local_tensor
                    if context.rank in away.mesh:
                        seen = gpu.read(local) if away is there else local
                        seen = seen.reshape(-1).view(torch.uint8) if expected.ndim else seen
                        assert torch.equal(seen, raw), (name, each.dtype)


def weights_are_on_the_gpu_when_the_call_returns(context) -> None:
    """Not only behind the current stream: what fails there must be known before any rank returns them."""
    here, there = mesh_on("cpu", [0, 1, 2]), mesh_on("cuda", [2, 3, 4, 5, 6])
    with fake_gpu(11) as gpu, mock.patch.object(gpu, "follow"):
        for step in range(4):
            full = unique_fill((9, 12), torch.float32, step)
            state = {"w": held(full, here, [Shard(0)], context.rank)} if context.rank < 3 else None
            moved = meshcast.reshard_state_dict(state, {"w": (there, [Shard(1)])})
            expected = held(full, there, [Shard(1)], context.rank)._local_tensor
            assert torch.equal(moved["w"]._local_tensor, expected)


def the_operator_moves_between_devices(context) -> None:
    """torch.ops.meshcast.reshard, as compiled functions call it."""
    if context.rank > 4:
        return
    here, there = mesh_on("cpu", [0, 1, 2, 3, 4]), mesh_on("cuda", [4, 3, 2, 1, 0])
    full = unique_fill((7, 3), torch.float32, 9)
    with fake_gpu(9) as gpu:
        for src, dst in ((here, there), (there, here)):
            specs = [
                meshcast.TensorSpec((7, 3), torch.float32, mesh, [Shard(0)], True) for mesh in (src, dst)
            ]
            compiled = resharder_between(*specs)._compiled
            x = held(full, src, [Shard(0)], context.rank)._local_tensor.requires_grad_()
            y = torch.ops.meshcast.reshard(x, new_token(), register_call(compiled, 30.0))
            check(
                gpu, DTensor(y.detach(), compiled.moves[0].spec, requires_grad=False), full, dst, [Shard(0)]
            )
            (grad,) = torch.autograd.grad((gpu.read(y) * 0 + y).sum() * 3, x)
            assert torch.equal(gpu.read(grad), torch.full_like(x, 3))


def on_the_host(gpu: FakeGpu, rank: int) -> None:
    """Calls between CPUs use none of it."""
    mesh = mesh_on("cpu", list(range(dist.get_world_size())))
    full = unique_fill((8, 3), torch.float32, 1)
    check(gpu, meshcast.reshard(held(full, mesh, [Shard(0)], rank), mesh, [Shard(1)]), full, mesh, [Shard(1)])


def calls_between_cpus_pin_nothing(context) -> None:
    with fake_gpu(0) as gpu:
        on_the_host(gpu, context.rank)
        assert not gpu.pinned_bytes and not gpu.ways


CASES = [
    random_layouts,
    calls_in_flight_end_out_of_order,
    behind_what_the_stream_holds,
    an_asynchronous_call_does_not_wait_for_the_gpu,
    memory_is_pinned_once,
    gradients_come_back,
    no_second_derivative,
    a_changed_source_is_noticed,
    many_and_plain_tensors,
    state_dicts,
    block_scaled_types,
    weights_are_on_the_gpu_when_the_call_returns,
    the_operator_moves_between_devices,
    calls_between_cpus_pin_nothing,
]

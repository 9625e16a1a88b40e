"""reshard_state_dict of what FSDP2 beside tensor parallelism makes: ranks 0 to 3 train as ("dp", "tp"), ranks
4 and 5 serve."""

from __future__ import annotations

import meshcast
import torch
from multiproc import llama
from multiproc.meshes import quiet_mesh
from multiproc.oracle import coordinates, cut
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 30.0
TRAINERS, SERVERS = [0, 1, 2, 3], [4, 5]
_made: dict[str, object] = {}


def training_mesh() -> DeviceMesh:
    """Made by all ranks at once: it has process groups."""
    if "mesh" not in _made:
        _made["mesh"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    return _made["mesh"]


def trained(context) -> tuple[llama.Llama | None, dict[str, torch.Tensor]]:
    """The sharded module on trainers, and what it holds."""
    if "module" not in _made:
        mesh = training_mesh()
        module, fulls = llama.filled()
        _made["fulls"] = fulls
        _made["module"] = llama.sharded_module(module, mesh) if context.rank in TRAINERS else None
    return _made["module"], _made["fulls"]


def serving(fulls) -> dict:
    mesh = quiet_mesh(SERVERS)
    return {name: (mesh, [Shard(0) if full.ndim > 1 else Replicate()]) for name, full in fulls.items()}


def check(result, fulls, destinations, rank: int, dtype=None) -> None:
    assert list(result) == list(destinations)
    for name, (mesh, placements) in destinations.items():
        place = coordinates(mesh.mesh).get(rank)
        if place is not None:
            expected = cut(fulls[name], mesh.mesh.shape, place, placements)
            expected = expected if dtype is None else expected.to(dtype)
            found = result[name].to_local()
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected), name


def weights_of_fsdp_and_tp(context) -> None:
    """Norms and embeddings are on mesh["dp"], another one on each column; inv_freq is a plain buffer."""
    module, fulls = trained(context)
    state = None if module is None else module.state_dict()
    if state is not None:
        assert state["norm.weight"].device_mesh.ndim == 1
        assert state["blocks.0.attention.q.weight"].device_mesh.ndim == 2
        assert not isinstance(state["blocks.0.attention.inv_freq"], DTensor)
    for dtype in (None, torch.bfloat16):
        where = serving(fulls)
        result = meshcast.reshard_state_dict(state, where, dtype=dtype, digest=True)
        check(result, fulls, where, context.rank, dtype)


def state_of_adamw(context) -> None:
    """exp_avg lies as its parameter does, step is a plain tensor, the hyperparameters are no tensors."""
    module, fulls = trained(context)
    held, where = None, {}
    mesh = quiet_mesh(SERVERS)
    for name, full in fulls.items():
        if "inv_freq" not in name:
            where[f"{name}.step"] = (mesh, [Replicate()])
            where[f"{name}.exp_avg"] = (mesh, [Shard(full.ndim - 1)])
    if module is not None:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.0, foreach=False)  # the weights stay
        with torch.random.fork_rng():
            torch.manual_seed(3)
            tokens = torch.randint(llama.VOCABULARY, (2, 5))
        module(tokens).square().sum().backward()
        optimizer.step()
        held = {}
        for name, parameter in module.named_parameters():
            state = optimizer.state[parameter]
            held[f"{name}.step"], held[f"{name}.exp_avg"] = state["step"], state["exp_avg"]
            _made[name] = state["exp_avg"]
        groups = optimizer.state_dict()["param_groups"][0]
        held |= {f"group.{key}": value for key, value in groups.items() if key != "params"}
    result = meshcast.reshard_state_dict(held, where, digest=True)
    assert list(result)[: len(where)] == list(where)
    assert result["group.lr"] == 0.0
    assert result["group.betas"] == (0.9, 0.999)
    assert result["group.foreach"] is False
    assert result["group.fused"] is None
    # Back to the trainers, each on its own sub-mesh, who compare with what they sent.
    back = {}
    if module is not None:
        for name, parameter in module.named_parameters():
            back[f"{name}.exp_avg"] = (parameter.device_mesh, parameter.placements)
    sent = {n: x for n, x in result.items() if n.endswith("exp_avg")} if context.rank in SERVERS else None
    returned = meshcast.reshard_state_dict(sent, back)
    assert list(returned) == list(back)
    for name, x in returned.items():
        original = _made[name.removesuffix(".exp_avg")]
        assert x.device_mesh == original.device_mesh
        assert torch.equal(x.to_local(), original.to_local()), name
        assert original.to_local().numel() == 0 or original.to_local().abs().sum() > 0
    if context.rank in SERVERS:
        assert all(x.to_local() == 1.0 for n, x in result.items() if n.endswith(".step"))


def sub_mesh_in_reshard(context) -> None:
    """One parameter of mesh["dp"] to other ranks: the trainers all call, each with its own."""
    module, fulls = trained(context)
    whole = quiet_mesh([[0, 1], [2, 3]])
    for name, dtype in (("norm.weight", torch.float32), ("embed.weight", torch.bfloat16)):
        full = fulls[name]
        spec = meshcast.TensorSpec(full.shape, full.dtype, whole, [Shard(0), Replicate()])
        x = spec if module is None else module.state_dict()[name]
        where = {name: (quiet_mesh(SERVERS), [Shard(0)])}
        y = meshcast.reshard(x, *where[name], dtype=dtype)
        check({name: y}, fulls, where, context.rank, dtype)
        everywhere = {name: (training_mesh(), [Replicate(), Shard(0)])}
        if module is not None:
            check({name: meshcast.reshard(x, *everywhere[name])}, fulls, everywhere, context.rank)
    if module is not None:
        parameter = dict(module.named_parameters())["norm.weight"]
        parameter.grad = None
        y = meshcast.reshard(parameter, training_mesh(), [Replicate(), Replicate()])
        meshcast.backward((y.to_local() * torch.arange(llama.HIDDEN)).sum())
        gradient, parameter.grad = parameter.grad, None
        expected = cut(torch.arange(float(llama.HIDDEN)), (2,), (context.rank // 2,), [Shard(0)])
        assert gradient.device_mesh == parameter.device_mesh
        assert torch.equal(gradient.to_local(), expected)


def slices_that_are_no_copies(context) -> None:
    """Slices over "pp" hold different tensors, and a column may move its own."""
    stages = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("pp", "tp"))
    if context.rank in TRAINERS:
        stage = stages["tp"]
        own = torch.arange(8.0) + 100 * (context.rank // 2)
        x = DTensor.from_local(own.chunk(2)[context.rank % 2], stage, [Shard(0)], run_check=False)
        y = meshcast.reshard(x, stage, [Replicate()])
        assert torch.equal(y.to_local(), own)
    parts = quiet_mesh([0, 1])
    if context.rank in (0, 1, 4):
        spec = meshcast.TensorSpec((8,), torch.float32, parts, [Shard(0)])
        y = meshcast.reshard(x if context.rank < 2 else spec, quiet_mesh([4]), [Replicate()])
        assert context.rank < 2 or torch.equal(y.to_local(), torch.arange(8.0))


def stages_of_one_mesh(context) -> None:
    """Slices along "tp" are copies; those along "pp" have to hold equal values under one name."""
    mesh = DeviceMesh("cpu", [[[0, 1]], [[2, 3]]], mesh_dim_names=("pp", "dp", "tp"))
    where = {"w": (quiet_mesh(SERVERS), [Shard(0)])}
    stages = {rank: mesh["dp"] for rank in TRAINERS if rank == context.rank}
    for holders, change in (([0, 1], 1.0), (TRAINERS, 0.0), (TRAINERS, 1.0)):
        state = None
        if context.rank in holders:
            local = torch.arange(4.0) + change * (context.rank // 2)
            state = {"w": DTensor.from_local(local, stages[context.rank], [Shard(0)], run_check=False)}
        try:
            check(meshcast.reshard_state_dict(state, where), {"w": torch.arange(4.0)}, where, context.rank)
        except meshcast.PlanMismatchError:
            assert holders == TRAINERS and change
        else:
            assert holders == [0, 1] or not change
    if context.rank in (0, 1, 4, 5):
        spec = meshcast.TensorSpec((4,), torch.float32, quiet_mesh([[0, 1]]), [Shard(0), Replicate()])
        x = spec
        if context.rank < 2:
            x = DTensor.from_local(torch.arange(4.0), stages[context.rank], [Shard(0)], run_check=False)
        y = meshcast.reshard(x, *where["w"])
        check({"w": y}, {"w": torch.arange(4.0)}, where, context.rank)


def unlike_meshes(context) -> None:
    """Two meshes that are no slices of one, with other values; equal ones are in cases_state_tied.py."""
    mesh = quiet_mesh([0, 1] if context.rank < 2 else [2, 3])
    state = None
    if context.rank in TRAINERS:
        local = torch.full((2,), 1.0 + context.rank // 2)
        state = {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}
    try:
        meshcast.reshard_state_dict(state, {"w": (quiet_mesh(SERVERS), [Replicate()])})
    except meshcast.PlanMismatchError as error:
        assert "'w'" in str(error)
    else:
        raise AssertionError("no PlanMismatchError")


CASES = [
    weights_of_fsdp_and_tp,
    state_of_adamw,
    sub_mesh_in_reshard,
    slices_that_are_no_copies,
    stages_of_one_mesh,
    unlike_meshes,
]

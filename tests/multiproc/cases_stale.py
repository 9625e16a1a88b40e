"""States whose tensors get other memory, or change, between calls and during them. Ranks 0 and 1 hold, rank 2
receives."""

from __future__ import annotations

import collections
import itertools

import meshcast
import torch
import torch.distributed as dist
from meshcast import elastic
from multiproc.meshes import quiet_mesh, sharded
from multiproc.oracle import unique_fill
from multiproc.weight_job import raises
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 40.0
HOLDERS, RECEIVER = [0, 1], 2
SHAPES = {"up.weight": (7, 5), "up.bias": (7,), "down.weight": (3, 7), "scale": (4,)}
_made: dict[str, DeviceMesh] = {}


class Model(torch.nn.Module):
    """No size is a multiple of the number of ranks; `scale` is a buffer, in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(5, 7)
        self.down = torch.nn.Linear(7, 3, bias=False)
        self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16))


def values(version: int) -> dict[str, torch.Tensor]:
    """The whole state of a version."""
    full = {name: unique_fill(shape, torch.float32, version) for name, shape in SHAPES.items()}
    return full | {"scale": full["scale"].remainder(97).to(torch.bfloat16)}


def model_on(context, shards: bool = True) -> Model | None:
    """On the ranks that hold: over both by FSDP2, or a copy on each."""
    if "mesh" not in _made:
        _made["mesh"] = DeviceMesh("cpu", HOLDERS)  # has a process group: all ranks make it
    if context.rank not in HOLDERS:
        return None
    model = Model()
    return fully_shard(model, mesh=_made["mesh"]) if shards else model


@torch.no_grad()
def become(model: Model, version: int) -> None:
    """A step of the optimiser: the parameters that the module has now change in place."""
    for name, full in values(version).items():
        mine = model.get_parameter(name) if "." in name else model.get_buffer(name)
        if isinstance(mine, DTensor):
            mine.to_local().copy_(full.chunk(2)[dist.get_rank()])
        else:
            mine.copy_(full)


def where(names=SHAPES) -> dict:
    mesh = quiet_mesh([RECEIVER])
    return {name: (mesh, [Replicate()]) for name in names}


def check(state, version: int, dtype: torch.dtype | None = None) -> None:
    """The receiver has exactly that version."""
    for name, full in values(version).items():
        found = state[name].to_local()
        assert found.dtype == (dtype or full.dtype), (name, found.dtype)
        assert torch.equal(found, full.to(found.dtype)), (name, version)


def reload(model: Model) -> None:
    """What offloading and loading again does: other memory, the same values."""
    model._apply(lambda tensor: tensor.detach().clone())


def assign(model: Model) -> None:
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


class Pushes:
    """A WeightSync from the ranks that hold, each version checked at the receiver."""

    number = itertools.count()

    def __init__(self, context, state, **options) -> None:
        self.context, self.sync = context, meshcast.WeightSync(state, where(), **options)
        self.name = f"pushes {next(self.number)}"

    def turn(self, version: int, dtype: torch.dtype | None = None, **options) -> None:
        if self.context.rank in HOLDERS:
            self.sync.push(version, **options)
        else:
            assert self.sync.pull(version) == version
            check(self.sync.state, version, dtype)
        self.context.wait_for_all(f"{self.name} {version}")

    def close(self) -> None:
        self.context.wait_for_all(f"{self.name} close")
        self.sync.close()


def state_of(model: Model | None, form: str):
    """What a rank gives as state."""
    if model is None:
        return None
    if form == "state_dict":
        return model.state_dict()
    if form == "parameters":
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return model if form == "module" else model.state_dict


FORMS = ("state_dict", "parameters", "module", "function")


def weights_that_moved(context) -> None:
    """Each push sends what the module has then, wherever that lies by now."""
    for form, shards in itertools.product(FORMS, (True, False)):
        model = model_on(context, shards)
        pushes = Pushes(context, state_of(model, form))
        steps = (None, None, reload, None, assign, reload, None)
        for version, step in enumerate(steps, 1):
            if model is not None:
                if step is not None:
                    step(model)
                become(model, version)
            pushes.turn(version)
        pushes.close()


def weights_unsharded_meanwhile(context) -> None:
    """FSDP2 has whole weights in the place of the shards after a forward; the shards are what is sent."""
    model = model_on(context)
    state = state_of(model, "state_dict")
    pushes = Pushes(context, state)
    for version in (1, 2, 3):
        if model is not None:
            if version == 2:
                reload(model)
            become(model, version)
            if version > 1:
                model.unshard()
                assert not isinstance(model.up.weight, DTensor)
        pushes.turn(version)
        if model is not None:
            model.reshard()
    pushes.close()


def weights_of_another_dtype(context) -> None:
    """Tensors of another dtype are agreed on by all ranks; where ranks differ, all raise, and go on."""
    for form in FORMS:
        model = model_on(context)
        pushes = Pushes(context, state_of(model, form))
        for version in (1, 2):
            if model is not None:
                become(model, version)
            pushes.turn(version)
        if model is not None:
            model.to(torch.float64)
            become(model, 3)
        pushes.turn(3, torch.float64)
        if model is not None and context.rank == 0:
            model.to(torch.bfloat16)
        call = pushes.sync.push if model is not None else pushes.sync.pull
        raises(meshcast.PlanMismatchError, "float64", lambda call=call: call(4))
        context.wait_for_all(f"{pushes.name} differ")
        if model is not None:
            model.to(torch.float64)
            become(model, 5)
        pushes.turn(5, torch.float64)
        pushes.close()


def another_state(context) -> None:
    """push(version, state) sends that one, from then on."""
    models = [model_on(context) for _ in range(3)]
    pushes = Pushes(context, state_of(models[0], "state_dict"))
    given = (0, None), (1, "state_dict"), (1, None), (2, "module"), (2, None), (0, "function"), (0, None)
    for version, (index, form) in enumerate(given, 1):
        options = {}
        if models[index] is not None:
            become(models[index], version)
            if version % 2:
                reload(models[index])
            options = {} if form is None else {"state": state_of(models[index], form)}
        pushes.turn(version, **options)
    if context.rank == RECEIVER:
        raises(meshcast.LayoutError, "gave no state", lambda: pushes.sync.push(9, {}))
    pushes.close()


def a_state_that_cannot_be_had(context) -> None:
    """A function that raises, or returns something else, is refused on all ranks; the next push succeeds."""
    model, fails = model_on(context), []

    def state():
        if fails:
            found = fails.pop()
            if isinstance(found, Exception):
                raise found
            return found
        return model.state_dict()

    pushes = Pushes(context, None if model is None else state)
    for version, wrong in ((1, None), (2, KeyError("no such thing")), (3, None), (4, [1]), (5, None)):
        if model is not None:
            become(model, version)
            if wrong is not None and context.rank == 0:
                fails.append(wrong)
        if wrong is None:
            pushes.turn(version)
            continue
        text = "no such thing" if isinstance(wrong, Exception) else "returns a mapping"
        kind = meshcast.LayoutError if context.rank == 0 else meshcast.PlanMismatchError
        call = pushes.sync.push if model is not None else pushes.sync.pull
        error = raises(kind, text, lambda call=call, version=version: call(version))
        assert str(error).startswith("WeightSync."), error
        context.wait_for_all(f"{pushes.name} {version}")
    for wrong in (3, "abc", [model]):
        if model is not None:
            raises(meshcast.LayoutError, "state", lambda wrong=wrong: meshcast.WeightSync(wrong, where()))
        else:
            sync = meshcast.WeightSync(None, where())
            raises(meshcast.MeshcastError, "state", lambda sync=sync: sync.pull(1))
            sync.close()
    pushes.close()


def a_server_that_moved(context) -> None:
    """The outputs of a module that serves are those that it has when a version arrives."""
    for form in FORMS:
        model = model_on(context, False)
        serving = Model() if context.rank == RECEIVER else None
        pushes = Pushes(context, model, buffers=1, out=state_of(serving, form))
        for version in range(1, 6):
            if model is not None:
                become(model, version)
                pushes.sync.push(version)
            else:
                if version in (2, 4):
                    reload(serving)
                assert pushes.sync.pull() == version
                for name, full in values(version).items():
                    assert torch.equal(serving.state_dict()[name], full), (form, name, version)
            context.wait_for_all(f"{pushes.name} {version}")
        pushes.close()


def replicas_of_what_moved(context) -> None:
    """Replicas copy what the module has at each refresh."""
    for form in FORMS:
        model = Model()
        replicas = elastic.Replicas(state_of(model, form), every=1)
        for version in (1, 2, 3):
            if version > 1:
                reload(model)
            become(model, version)
            replicas.step(version)
        replicas.wait()
        now = quiet_mesh([0, 1, 2])
        found = elastic.remesh(None, None, lambda _, now=now: (now, [Replicate()]), replicas=replicas)
        check(found, 3)
        context.wait_for_all(f"{form} copied")
        replicas.close()


def replicas_of_values_that_change(context) -> None:
    """What is no tensor is copied as well: the copy of a step has what it was then."""
    here, counts = quiet_mesh([0, 1, 2]), collections.Counter([2, 2])
    state = {"w": torch.ones(2), "counts": counts, "mine": [context.rank]}
    replicas = elastic.Replicas(state, every=1, own=["mine"])
    replicas.step(1)
    replicas.wait()
    counts[7] = 1
    state["mine"].append("later")
    found = elastic.remesh(None, None, {"w": (here, [Replicate()])}, replicas=replicas)
    assert found["counts"] == collections.Counter([2, 2]), found["counts"]
    assert found["mine"] == [0], found["mine"]
    replicas.close()


def results_that_moved(context) -> None:
    """A Resharder that reuses its result writes where that lies by now."""
    there, full = quiet_mesh([RECEIVER]), unique_fill((6, 5), torch.float32, 0)
    specs = [
        meshcast.TensorSpec((6, 5), torch.float32, mesh, [Shard(0)]) for mesh in (quiet_mesh(HOLDERS), there)
    ]
    call = meshcast.Resharder(*specs, reuse_output=True)
    for step in range(6):
        x = sharded(full + step, quiet_mesh(HOLDERS), [Shard(0)], context.rank)
        y = call.run(x if context.rank in HOLDERS else None)
        if context.rank == RECEIVER:
            assert torch.equal(y.to_local(), full + step), step
            if step == 2:  # as swap_tensors does, when a module is converted
                y._local_tensor = torch.zeros(6, 5)
            if step == 3:
                y._local_tensor.data = torch.zeros(5, 6).t()


CASES = [
    weights_that_moved,
    weights_unsharded_meanwhile,
    weights_of_another_dtype,
    another_state,
    a_state_that_cannot_be_had,
    a_server_that_moved,
    replicas_of_what_moved,
    replicas_of_values_that_change,
    results_that_moved,
]

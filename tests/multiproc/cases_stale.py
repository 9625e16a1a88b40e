"""States whose tensors get other memory, or change, between calls and during them. Ranks 0 and 1 hold, rank 2
receives."""

from __future__ import annotations

import collections
import itertools
from contextlib import contextmanager, suppress
from functools import partial

import meshcast
import torch
import torch.distributed as dist
from meshcast import elastic
from meshcast.resharding.state_run import Conversation
from multiproc.meshes import quiet_mesh, resharder_between, sharded
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
def become(model: Model, version: int, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """A step of the optimiser: the parameters that the module has now, or `tensors`, change in place."""
    for name, full in values(version).items():
        if tensors is not None:
            mine = tensors[name]
        else:
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
    """FSDP2 has whole weights in the place of the shards after a forward; the shards are what is sent, also
    where they have changed since."""
    model = model_on(context)
    state = state_of(model, "state_dict")
    pushes = Pushes(context, state)
    for version in (1, 2, 3, 4):
        if model is not None:
            if version == 2:
                reload(model)
            shards = state_of(model, "parameters")
            if version == 4:
                model.unshard()
            become(model, version, shards)
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
    call = resharder_between(*specs, reuse_output=True)
    for step in range(6):
        x = sharded(full + step, quiet_mesh(HOLDERS), [Shard(0)], context.rank)
        y = call.run(x if context.rank in HOLDERS else None)
        if context.rank == RECEIVER:
            assert torch.equal(y.to_local(), full + step), step
            if step == 2:  # as swap_tensors does, when a module is converted
                y._local_tensor = torch.zeros(6, 5)
            if step == 3:
                y._local_tensor.data = torch.zeros(5, 6).t()


def columns(context, full: torch.Tensor) -> DTensor:
    """Over ranks 0 and 1 by rows."""
    return sharded(full, quiet_mesh(HOLDERS), [Shard(0)], context.rank)


def arrived(context, y: DTensor, full: torch.Tensor) -> bool:
    """Whether this rank, of 1 and 2, has exactly its columns."""
    if context.rank == 0:
        return True
    return torch.equal(y.to_local(), full.chunk(2, 1)[context.rank - 1])


def changed_in_flight(context) -> None:
    """The holder's wait raises, and so does every other rank's: that of the call, or else its next one. Each
    raises once, no rank takes torn values for whole ones, and the ranks go on."""
    there, in_call = quiet_mesh([1, RECEIVER]), 0
    for number, (shape, dtype) in enumerate(
        (((2001, 1003), torch.float32), ((3, 5), torch.bfloat16), ((4001, 501), torch.bfloat16)) * 2
    ):
        full = unique_fill(shape, dtype, number)
        changes = number % 2
        x = columns(context, full)
        start = lambda x: meshcast.reshard(x, there, [Shard(1)], async_op=True)  # noqa: E731
        if number > 2:  # the kind is known
            assert arrived(context, start(x).wait(), full)
        handle, raised = start(x), []

        def wait(handle, full, raised=raised) -> None:
            try:
                y = handle.wait()
            except meshcast.MeshcastError as error:
                assert "was changed in place before wait()" in str(error), error
                assert type(error) is meshcast.MeshcastError, type(error)
                raised.append(error)
            else:
                if not raised and full is not None:
                    assert arrived(context, y, full)

        if context.rank == changes:
            x.to_local().mul_(2)
        in_call += shape[0] > 1000 and context.rank != changes
        wait(handle, None)
        assert raised or context.rank != changes
        context.wait_for_all(f"changed {number}")
        again = unique_fill(shape, dtype, 50 + number)
        handles = [start(columns(context, again)) for _ in range(2)]
        for each in handles:
            wait(each, again)
        assert len(raised) == 1, raised
        assert context.rank == changes or raised[0].peer == changes
        y = meshcast.reshard(columns(context, again), there, [Shard(1)])
        assert arrived(context, y, again)
    for kind in ("local", "resharder"):
        full = unique_fill((3, 6), torch.float32, 9)
        x = columns(context, full)
        if kind == "local":
            src, dst = meshcast.Layout(HOLDERS, [Shard(0)]), meshcast.Layout([1, RECEIVER], [Shard(1)])
            mine = x.to_local() if context.rank in HOLDERS else None

            def begin(mine=mine, src=src, dst=dst):
                return meshcast.reshard_local(
                    mine, src, None, dst, shape=(3, 6), dtype=torch.float32, async_op=True
                )

            run = lambda begin=begin: begin().wait()  # noqa: E731
        else:
            specs = [
                meshcast.TensorSpec((3, 6), torch.float32, mesh, [Shard(dim)])
                for dim, mesh in enumerate((quiet_mesh(HOLDERS), there))
            ]
            call = resharder_between(*specs, reuse_output=True)
            begin = lambda x=x, call=call: call.start(x if context.rank in HOLDERS else None)  # noqa: E731
            run = lambda x=x, call=call: call.run(x if context.rank in HOLDERS else None)  # noqa: E731
            run()
            run()
        handle, raised = begin(), 0
        if context.rank == 0:
            x.to_local().mul_(2)
        for each in (handle.wait, partial(context.wait_for_all, kind), run, run):
            try:
                each()
            except meshcast.MeshcastError as error:
                assert "was changed in place" in str(error), error
                raised += 1
        assert raised == 1, (kind, raised)


@contextmanager
def changing(x: DTensor | None, how: str):
    """x is changed between a call that runs beside its caller and what it does there."""
    original = Conversation.run

    def run(*arguments, **options):
        if x is not None:
            local = x.to_local()
            (local if how == "in place" else local.data).mul_(3)
        return original(*arguments, **options)

    Conversation.run = run
    try:
        yield
    finally:
        Conversation.run = original


def handle_ended(handle) -> None:
    with suppress(meshcast.MeshcastError):
        handle.wait()


def changed_and_digested(context) -> None:
    """With digests all ranks of the call raise in it, also for a change through .data; the next is right."""
    there = quiet_mesh([1, RECEIVER])
    for number, (change, shape) in enumerate((("in place", (7, 6)), ("data", (3001, 901)))):
        dtype = torch.bfloat16 if number % 2 else torch.float32
        full = unique_fill(shape, dtype, number).remainder(97)
        x, y = columns(context, full), columns(context, full + 1)
        out = sharded(torch.zeros(shape, dtype=dtype), there, [Shard(1)], context.rank)
        for kind in ("reshard", "reshard_many", "reshard_"):

            def begin(x=x, y=y, out=out, kind=kind, **options):
                if kind == "reshard":
                    return meshcast.reshard(x, there, [Shard(1)], digest=True, **options)
                if kind == "reshard_":
                    return meshcast.reshard_(out, x, digest=True, **options)
                return meshcast.reshard_many([x, y], there, [[Shard(1)]] * 2, digest=True, **options)

            first = lambda found: found[0] if isinstance(found, list) else found  # noqa: E731
            assert arrived(context, first(begin()), full)
            handle = begin(async_op=True)
            assert arrived(context, first(handle.wait()), full)
            assert handle.stats.seconds > 0
            before = x.to_local().clone()
            with changing(x if context.rank == 1 else None, change):
                handle = begin(async_op=True)
                handle_ended(handle)
            error = raises(meshcast.MeshcastError, "changed 'x", handle.wait)
            assert str(error).startswith(f"{kind} on rank "), error
            assert error.op == kind, error.op
            x.to_local().copy_(before)
            context.wait_for_all(f"restored {number} {kind}")
            assert arrived(context, first(begin(async_op=True).wait()), full)
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            raises(
                meshcast.LayoutError,
                "no gradient",
                lambda z=z: meshcast.reshard(z, there, [Shard(1)], digest=True),
            )
    kind_of_error = meshcast.LayoutError if context.rank == 0 else meshcast.PlanMismatchError
    wrong = [Shard(5)] if context.rank == 0 else [Shard(1)]
    for async_op in (False, True):

        def refused(wrong=wrong, async_op=async_op, x=x):
            made = meshcast.reshard(x, there, wrong, digest=True, async_op=async_op)
            return made.wait() if async_op else made

        raises(kind_of_error, "Shard(5)", refused)
    held = {"w": columns(context, full)} if context.rank in HOLDERS else None
    with changing(held["w"] if context.rank == 0 else None, "data"):
        handle = meshcast.reshard_state_dict(held, {"w": (there, [Shard(1)])}, async_op=True, digest=True)
        handle_ended(handle)
    raises(meshcast.MeshcastError, "changed 'w'", handle.wait)


def refilled_at_once(context) -> None:
    """copy=True: what was there at the call arrives, however soon the source is filled again."""
    there, layouts = quiet_mesh([1, RECEIVER]), [meshcast.Layout(HOLDERS, [Shard(0)])]
    layouts.append(meshcast.Layout([1, RECEIVER], [Shard(1)]))
    shape, options = (3001, 902), {"async_op": True, "copy": True}
    specs = [
        meshcast.TensorSpec(shape, torch.float32, mesh, [Shard(dim)])
        for dim, mesh in enumerate((quiet_mesh(HOLDERS), there))
    ]
    resharder, states = resharder_between(*specs), meshcast.StateResharder({"x": (there, [Shard(1)])})
    inside = context.rank in HOLDERS
    for number, digest in enumerate((False, True)):
        full = unique_fill(shape, torch.float32, number)

        def out() -> DTensor:
            return sharded(torch.zeros(shape), there, [Shard(1)], context.rank)

        more = {**options, "digest": digest}
        ways = {
            "reshard": lambda x, more=more: meshcast.reshard(x, there, [Shard(1)], **more),
            "many": lambda x, more=more: meshcast.reshard_many([x], there, [[Shard(1)]], **more),
            "into": lambda x, more=more: meshcast.reshard_(out(), x, **more),
            "local": lambda x: meshcast.reshard_local(
                x.to_local() if inside else None,
                layouts[0],
                None,
                layouts[1],
                shape=shape,
                dtype=x.dtype,
                **options,
            ),
            "resharder": lambda x: resharder.start(x if inside else None, copy=True),
            "state": lambda x, more=more: meshcast.reshard_state_dict(
                {"x": x} if inside else None, {"x": (there, [Shard(1)])}, **more
            ),
            "states": lambda x: states.start({"x": x} if inside else None, copy=True),
        }
        for name, way in ways.items():
            x = columns(context, full)
            handle = way(x)
            x.to_local().zero_()
            y = handle.wait()
            y = y["x"] if isinstance(y, dict) else y[0] if isinstance(y, list) else y
            if context.rank:
                y = y if name == "local" else y.to_local()
                assert torch.equal(y, full.chunk(2, 1)[context.rank - 1]), name
    x = columns(context, full).requires_grad_()
    handle = meshcast.reshard(x, there, [Shard(1)], **options)
    with torch.no_grad():
        x.to_local().zero_()
    loss = (handle.wait().to_local() * 3).sum()
    meshcast.backward(loss)
    assert not inside or bool((x.grad.to_local() == 3).all())


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
    changed_in_flight,
    changed_and_digested,
    refilled_at_once,
]

"""The gradients of a stage's parameters: its data-parallel wrappers, DistributedDataParallel and FSDP2, the
scale of gradients in a step, and their sums over ranks.

The ranks that a wrapper reduces gradients over show which of two uses it has.

- The ranks that the stage splits its samples over (``mesh=``). The pipeline scales each rank's loss by its
  share of the samples and *sums* gradients, once per step. Both wrappers would average, and after every
  backward: DDP is bypassed (the pipeline does its work), FSDP2 is set to sum, and to reduce in the
  last backward of a step only.
- Ranks of other pipelines, one for each data-parallel *column*, as in torch (``group=``): gradients are the
  mean over the columns. FSDP2 takes it in the last backward, the pipeline for DDP when the step ends.

A step's gradients are those of the sum, over ranks r and micro-batches m, of s(r, m) L(r, m): the mean loss
of a rank, times its share. What the modules of a stage add to gradients by themselves (the auxiliary losses
of routers) is one more term of L(r, m), with the same share, so a backward has to run in units of the rank's
own L(r, m), not in those of the step. `GradientScale` has the factors, and where they apply.

The gradient of the global mean is the *sum* over ranks, not the average: with averages, stages of different
data-parallel degree would scale the gradients that cross between them by the ratio of their degrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _take_tensors
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ..errors import LayoutError
from .parallel import Placements, StageMesh, as_dtensor, gradient_placements, local_values

__all__ = [
    "GradientScale",
    "Wrappers",
    "average_gradients",
    "fsdp_groups",
    "fsdp_parts",
    "hooks_at_the_end",
    "input_gradient",
    "kept_apart",
    "least_ratio",
    "placed_gradient",
    "seeded",
    "shared_parameters_of",
    "sum_gradients",
]


class Wrappers:
    """The data-parallel wrappers of a stage's module, DistributedDataParallel and FSDP2. FSDP2 is set to sum
    where it reduces inside the stage, and which backward of a step is the last.

    Args:
        module: of the user.
        group: of the whole pipeline.
        what: names the stage in errors.
        before: those that were found earlier, when `module` was below them.

    Attributes:
        module: the one that computes.
        parts: those of it that FSDP2 manages.
        columns: the group that gradients are averaged over, where DDP joins pipelines; else None.
        joined: the groups whose ranks, taken together, are all that the stage is joined with in other
            pipelines.

    Raises:
        LayoutError: a wrapper reduces over other ranks than those that the stage splits its samples over, and
            these are not of other pipelines.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: StageMesh,
        data_dims: Sequence[int],
        group: dist.ProcessGroup | None,
        what: str,
        before: Wrappers | None = None,
    ) -> None:
        pipeline = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        self.columns: dist.ProcessGroup | None = None if before is None else before.columns
        if isinstance(module, DistributedDataParallel):
            ranks = dist.get_process_group_ranks(module.process_group)
            if not _is_inside(ranks, mesh, data_dims, pipeline, f"{what}: DistributedDataParallel"):
                self.columns = module.process_group
            module = module.module
        self.module = module
        self.parts = list(fsdp_parts(module))
        managed = [each for part in self.parts for each in fsdp_groups(part)]
        for each in managed:
            ranks = each.mesh_info.mesh.mesh.flatten().tolist()
            if _is_inside(ranks, mesh, data_dims, pipeline, f"{what}: FSDP2"):
                each.gradient_divide_factor = 1.0
                # Else the factor would be multiplied inside the reduction, which gloo cannot.
                each.force_sum_reduction_for_comms = True
        meshes = [each.mesh_info.mesh for each in managed]
        self.joined = [self.columns] if self.columns is not None else _joined(module, meshes, set(pipeline))
        self._left = 0

    def begin_step(self, microbatches: int, *, finalize: bool = True) -> None:
        """finalize: its last backward is the last; else a later step's is."""
        self._left = microbatches if finalize else microbatches + 1
        self.reshard()  # a forward outside may have left parameters gathered

    def reshard(self) -> None:
        """Makes the module hold its own shards again. A forward without a backward leaves some gathered, and
        gradients are those of the shards."""
        for part in self.parts:
            part.reshard()

    def before_backward(self) -> None:
        """Once per micro-batch."""
        self._left -= 1
        last = self._left == 0
        for part in self.parts:
            part.set_is_last_backward(last)
            part.set_requires_gradient_sync(last, recurse=False)
            # Gathered parameters stay between the micro-batches of a step.
            part.set_reshard_after_backward(last, recurse=False)


def _joined(module: torch.nn.Module, meshes: Sequence[DeviceMesh], own: set[int]) -> list[dist.ProcessGroup]:
    for part in module.modules():
        if isinstance(part, DistributedDataParallel) and not own.issuperset(
            dist.get_process_group_ranks(part.process_group)
        ):
            return [part.process_group]
    outside = [mesh for mesh in meshes if not own.issuperset(mesh.mesh.flatten().tolist())]
    if not outside:
        return []
    widest = max(outside, key=lambda mesh: mesh.size())  # the first one of several
    return [widest.get_group(dim) for dim in range(widest.ndim) if widest.size(dim) > 1]


def fsdp_parts(module: torch.nn.Module) -> Iterator[FSDPModule]:
    """The modules that fully_shard was applied to."""
    return (part for part in module.modules() if isinstance(part, FSDPModule))


def fsdp_groups(part: FSDPModule) -> list[Any]:
    """FSDP2's groups of parameters; releases of torch differ in how many a module has."""
    state: Any = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _trained_leaves(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """The tensors in which autograd adds up gradients: parameters, and what FSDP2 gathers them into."""
    leaves = {id(each): each for each in module.parameters()}
    for part in fsdp_parts(module):
        for group in fsdp_groups(part):
            gathered = (getattr(each, "_unsharded_param", None) for each in group.fsdp_params)
            leaves |= {id(each): each for each in gathered if each is not None}
    yield from leaves.values()


def _is_inside(
    ranks: Sequence[int], mesh: StageMesh, data_dims: Sequence[int], pipeline: Sequence[int], what: str
) -> bool:
    """Returns whether these are the ranks that the stage splits its samples over; False: they are of other
    pipelines."""
    expected = mesh.along(data_dims)
    if sorted(ranks) == sorted(expected):
        return True
    if len(set(ranks) & set(pipeline)) == 1 and len(ranks) > 1:
        return False
    raise LayoutError(
        f"{what} reduces gradients over ranks {sorted(ranks)}, but the stage splits its samples over "
        f"ranks {sorted(expected)}: give the stage the same mesh= and input_placements= (or data_dims=), or, "
        "for one pipeline in each data-parallel column, a group= without the other ranks; this one has ranks "
        f"{list(pipeline)}"
    )


def shared_parameters_of(
    stage: int, named: Mapping[str, str], module: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """The parameters by key. Raises LayoutError naming the one that is missing or laid out over ranks."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    # torch.compile(module) puts "_orig_mod." before its parameters' names, which its user does not write.
    parameters |= {name.replace("_orig_mod.", ""): each for name, each in parameters.items()}
    for key, name in named.items():
        if name not in parameters:
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: the module has no parameter {name!r}"
            )
        if isinstance(parameters[name].data, DTensor):
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: {name!r} is a DTensor; a shared parameter must be "
                "whole on every rank of its stages"
            )
    return {key: parameters[name] for key, name in named.items()}


_ONE = Fraction(1)
_BUCKET_BYTES = 32 << 20  # gradients travel together up to this size: fewer messages, bounded extra memory


@dataclass(slots=True)
class GradientScale:
    """The factors of gradients in one step of a stage, on one rank.

    Let s be the share of a micro-batch on this rank: ``parts`` (its part of the samples) times ``weights``
    (of the micro-batch in the step). Between stages gradients are ``unit`` times those of the step, where
    unit is the number of micro-batches that have samples. Before a backward, gradients of outputs are
    divided by ``ratio`` = s unit. After it, gradients of inputs are multiplied by it, and gradients of
    parameters by `late`, which is 1 where all ranks and micro-batches have equal shares. When the step ends,
    those are multiplied by `end`, a constant of the step on all ranks of the stage. So stages of one rank
    with equal micro-batches do what torch's do.

    Attributes:
        parts: for each micro-batch, the part of its samples that this rank has, exact.
        weights: what each micro-batch counts in the step; their sum is 1. Or each is 1:
            ``scale_grads=False``.
        degree: over how many ranks the stage splits samples.
        unit: see above; 1 with ``scale_grads=False``.
        end: see above. None: the step's gradients are scaled as torch does it (`Gradients`).
        column: by what the step counts more than on average among the pipelines that DDP or FSDP2 joins with
            this one. sums: the same for losses that are sums, which `Gradients` divides by the mean weight.
    """

    parts: Sequence[Fraction] = ()
    weights: Sequence[Fraction] = ()
    degree: int = 1
    unit: int = 1
    end: Fraction | None = None
    column: Fraction = _ONE
    sums: Fraction = _ONE

    @property
    def counts(self) -> int:
        """Returns how many micro-batches have samples."""
        return sum(weight > 0 for weight in self.weights)

    def is_uneven(self, microbatch: int) -> bool:
        """Returns whether ranks of the stage have different shares of a micro-batch, as far as this rank's
        share shows."""
        return bool(self.parts) and self.parts[microbatch] * self.degree != 1

    def ratio(self, microbatch: int, *, together: bool) -> Fraction:
        """The share, in units of an equal one. together: the ranks exchange values inside the backward, whose
        gradients must have one scale on all of them: each rank then has an equal share."""
        if not self.parts:
            return _ONE
        part = Fraction(1, self.degree) if together else self.parts[microbatch]
        return part * self.weights[microbatch] * self.unit

    def late(self, ratio: Fraction) -> Fraction:
        """Returns what multiplies the gradients of parameters right behind a backward."""
        return ratio if self.end is None else ratio * self.column / (self.unit * self.end)

    def whole(self, ratio: Fraction) -> Fraction:
        """Returns what multiplies all other gradients that autograd adds up: of arguments of the step, of
        parameters of the loss function. torch leaves these as they are."""
        return _ONE if self.end is None else ratio * self.column / self.unit

    @contextmanager
    def applied(
        self, ratio: Fraction, module: torch.nn.Module, others: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Inside, what autograd adds to gradients has the scale of the step, that of the module's parameters
        except for what is multiplied at its end. others: tensors outside the module that get gradients."""
        late, whole = float(self.late(ratio)), float(self.whole(ratio))
        with _multiplied(_trained_leaves(module), late), _multiplied(others, whole):
            yield

    def run_scaled(self, ratio: Fraction, module: torch.nn.Module, run: Callable[[], Any]) -> None:
        """Calls run(), which adds gradients of the module's parameters by itself, so that they have the scale
        of the step."""
        factor = self.late(ratio)
        if factor == 1:
            run()
            return
        with kept_apart([module]):
            run()
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(float(factor))


@contextmanager
def _multiplied(tensors: Iterable[torch.Tensor], factor: float) -> Iterator[None]:
    """Inside, autograd multiplies what it adds to gradients of these tensors by `factor`."""
    if factor == 1:
        yield
        return

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        # A gradient that counts nothing may be infinite: a mean over no samples.
        return gradient * factor if factor else torch.zeros_like(gradient)

    handles = [each.register_hook(hook) for each in tensors if each.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def hooks_at_the_end(
    modules: Iterable[torch.nn.Module],
) -> Iterator[Callable[[Iterable[torch.nn.Parameter]], None]]:
    """Inside, the users' ``register_post_accumulate_grad_hook`` hooks of the modules' parameters do not run.

    The block gets a function that runs those of some parameters, once, for it to call where their gradients
    are final. FSDP2 and autograd would call them for each micro-batch.
    """
    held: dict[int, tuple[dict[int, Any], dict[int, Any]]] = {}
    for module in modules:
        for parameter in module.parameters():
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if hooks and id(parameter) not in held:
                held[id(parameter)] = hooks, dict(hooks)
                # In place: handles of the user can still remove them, and autograd has this very object.
                hooks.update(dict.fromkeys(hooks, _no_hook))

    def restore(identity: int) -> Mapping[int, Any]:
        hooks, given = held.pop(identity, ({}, {}))
        hooks.update({number: hook for number, hook in given.items() if number in hooks})
        return {number: hook for number, hook in given.items() if number in hooks}

    def run(parameters: Iterable[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            hooks = restore(id(parameter))
            for hook in hooks.values() if parameter.grad is not None else ():
                hook(parameter)

    try:
        yield run
    finally:
        for identity in list(held):
            restore(identity)


def _no_hook(_: torch.Tensor) -> None:
    pass


def sum_gradients(parameters: Sequence[torch.nn.Parameter], mesh: StageMesh, dims: Sequence[int]) -> None:
    """All-reduces each ``grad`` over the given dimensions of the stage's mesh, called by all its ranks.

    A parameter that has a gradient on some ranks only gets it on all; one that has none anywhere keeps None.
    A DTensor parameter is reduced over those of the dimensions that its own mesh does not span, and a pending
    reduction inside its mesh is carried out.
    """
    groups = {dim: mesh.device_mesh.get_group(dim) for dim in dims if mesh.shape[dim] > 1}
    _reduce(parameters, groups, lambda parameter: _not_spanned(parameter, mesh, tuple(groups)))


def average_gradients(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
    """Each ``grad`` becomes the mean over a group whose ranks hold the same parameters."""
    _reduce(parameters, {0: group}, lambda _: (0,))
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.div_(group.size())


@contextmanager
def kept_apart(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradients of earlier steps; afterwards these are added again."""
    earlier = {
        id(parameter): (parameter, parameter.grad)
        for module in modules
        for parameter in module.parameters()
        if parameter.grad is not None
    }
    for parameter, _ in earlier.values():
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in earlier.values():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


def _reduce(
    parameters: Sequence[torch.nn.Parameter], groups: dict[int, dist.ProcessGroup], dims_of: Any
) -> None:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained or not groups:
        return
    _complete(trained, list(groups.values()))
    by_dims: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for parameter in trained:
        if parameter.grad is None:
            continue
        parameter.grad = placed_gradient(parameter)
        local, over = local_values(parameter.grad), dims_of(parameter)
        if over and local.numel():
            by_dims.setdefault(over, []).append(local)
    for over, gradients in by_dims.items():
        for bucket in _take_tensors(gradients, _BUCKET_BYTES):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            for dim in over:
                dist.all_reduce(flat, group=groups[dim])
            parts = flat.split([gradient.numel() for gradient in bucket])
            for gradient, part in zip(bucket, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))


def _complete(parameters: Sequence[torch.nn.Parameter], groups: Sequence[dist.ProcessGroup]) -> None:
    """Gives zeros to a parameter that only other ranks have a gradient of, so that all ranks reduce the same
    tensors."""
    have = torch.tensor(
        [parameter.grad is not None for parameter in parameters],
        dtype=torch.int32,
        device=parameters[0].device,
    )
    for group in groups:
        dist.all_reduce(have, op=dist.ReduceOp.MAX, group=group)
    for parameter, anywhere in zip(parameters, have.tolist(), strict=True):
        if anywhere and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def placed_gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter that has one, laid out as the parameter is: a pending sum inside its mesh
    is carried out, by all ranks of that."""
    gradient: Any = parameter.grad
    placed: Any = parameter.data
    if not isinstance(gradient, DTensor) or gradient.placements == placed.placements:
        return gradient
    return gradient.redistribute(placements=placed.placements)


def _not_spanned(parameter: torch.nn.Parameter, mesh: StageMesh, dims: tuple[int, ...]) -> tuple[int, ...]:
    """The given dimensions that the parameter's own mesh does not span. Meshes are compared by their ranks:
    names are the user's, and need not be there."""
    if not isinstance(parameter.data, DTensor):
        return dims
    own = set(parameter.data.device_mesh.mesh.flatten().tolist())
    return tuple(dim for dim in dims if not own.issuperset(mesh.along([dim])))


def seeded(
    outputs: Sequence[Any],
    gradients: Sequence[torch.Tensor | None],
    ratio: Fraction,
    copies: Callable[[int], int],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs from which a backward starts, and their gradients, in units of what the rank itself
    computes.

    ratio: of the micro-batch, see `GradientScale`. copies: how many data-parallel ranks each have all of an
    output.
    """
    roots, seeds = [], []
    for index, (root, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if gradient is None or not root.requires_grad:
            continue
        divisor = ratio or _ONE
        if not isinstance(root, DTensor):
            # All data-parallel ranks made this value, and what is behind it is summed over them.
            divisor *= copies(index)
        if divisor != 1:
            gradient = gradient * float(1 / divisor)
        if isinstance(root, DTensor) and not isinstance(gradient, DTensor):
            placements = gradient_placements(tuple(root.placements))
            gradient = as_dtensor(gradient, root.device_mesh, placements, root.shape)
        roots.append(root)
        seeds.append(gradient)
    return roots, seeds


def least_ratio(gradients: Sequence[torch.Tensor | None], counts: bool) -> Fraction:
    """The ratio of a rank without samples: 0. Where it nevertheless has outputs, such as those that are made
    of parameters alone, their gradients count, and what its module adds is made too small to be seen.
    counts: the micro-batch has samples on other ranks."""
    present = [each for each in gradients if each is not None and each.numel()] if counts else []
    if not present:
        return Fraction(0)
    # float16 has no room for such factors.
    return Fraction(1, 1 << (24 if all(each.dtype != torch.float16 for each in present) else 4))


def input_gradient(value: Any, ratio: Fraction, placements: Placements | None) -> torch.Tensor | None:
    """Takes the gradient of an input out of it, local, in units of the step. None: it takes none.

    placements: of the input; None: those that it has as a DTensor.
    """
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return None
    gradient = value.grad
    value.grad = None
    if gradient is None:  # the module did not use it
        return torch.zeros_like(local_values(value))
    if isinstance(gradient, DTensor):
        given: Any = value
        own = tuple(given.placements) if placements is None else placements
        gradient = gradient.redistribute(placements=gradient_placements(own))
    # Not in place: it may be that of an output too, or of another input.
    found = local_values(gradient)
    if ratio == 1:
        return found
    return found * float(ratio) if ratio else torch.zeros_like(found)

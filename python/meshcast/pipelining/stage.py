"""PipelineStage: a module, its place in the pipeline and the mesh it runs on. Stages that torch traces (its
Pipe) run here over the edges that the tracer found.

Other names of torch.distributed.pipelining.stage are found here, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining._IR import _modify_graph_op_device
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten

from ..base import checks
from ..base.checks import shown
from ..errors import LayoutError
from ..planning.plan import STRATEGIES
from ..topology import Topology
from ..transfers.gpu import own_obstacle
from ._utils import names_of_torch
from .board import refusals_told
from .compat import PipelineStageInfo, init_stage
from .edge import Edge, check_edges
from .gradients import (
    average_gradients,
    fsdp_groups,
    fsdp_parts,
    look_through,
    shared_parameters_of,
    sum_gradients,
)
from .inference import describe_values, infer_outputs, is_empty, needs_stand_in, outputs_on_fakes
from .orders import check_size
from .parallel import (
    DataUse,
    Inferred,
    LocalValue,
    Placements,
    ValuePlacements,
    as_tuple,
    local_values,
    numbered_dims,
    rows_of,
    stage_mesh,
)
from .parallel import data_dims as split_dims
from .stage_compute import StageCompute

__all__ = [
    "Pipe",
    "PipelineStage",
    "PipelineStageInfo",
    "_PipelineStage",
    "build_stage",
    "check_kinds",
    "checked",
    "current",
    "group_of",
    "pipeline",
    "reduce_once",
    "stage_device",
]


def stage_device(what: str, device: Any, mesh: DeviceMesh | None) -> torch.device:
    """The device of a stage; of "cuda" without a number the current one. what: names the stage in errors.
    mesh: of the user, if any. Raises LayoutError where this process cannot use it, or the mesh is on
    another."""
    found = torch.device(device)
    if found.type == "cuda":
        reason = own_obstacle(copies_only=False)
        if reason:
            raise LayoutError(f"{what}: device is {device}, but {reason}")
        count = torch.cuda.device_count()
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        elif found.index >= count:
            raise LayoutError(f"{what}: device is {device}, but this process sees {count} GPUs, cuda:0 first")
    if mesh is not None and mesh.device_type != found.type and "cuda" in (mesh.device_type, found.type):
        raise LayoutError(
            f"{what}: device is {found}, but mesh= is on {mesh.device_type}: make both the same"
        )
    return found


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: what a transfer finds where a rank has no shard that names it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Tensors = torch.Tensor | tuple[torch.Tensor, ...]
_T = TypeVar("_T")


class PipelineStage(StageCompute):
    """One stage of a pipeline, as this rank runs it.

    It is a stage of torch.distributed.pipelining, with its attributes and methods. What differs is where
    values come from: over edges that reshard them, to any later stage.

    Args:
        submodule: the stage's module, also inside DistributedDataParallel or FSDP2 over the ranks that its
            samples are split over: gradients are summed once per step. Its positional inputs are the values
            of the edges that lead here (stage 0: the arguments of ``step``), its outputs the values that
            leave: a tensor or a tuple of tensors; the last stage may return anything ``loss_fn`` takes. It
            sees this rank's local shards, whose batch dimension may be of size 0.
        stage_index, num_stages: its place.
        device: where it computes and receives: the CPU, or a GPU, where all stages must be on GPUs. Batches
            and targets are given there; ``mesh`` is on the same kind of device.
        input_args: examples of one micro-batch's local inputs; checked against what the producers send.
        output_args: examples (device "meta" will do) of one micro-batch's local outputs, for modules whose
            shapes cannot be inferred. Of micro-batches with other numbers of samples dimension 0 follows.
        output_grads, input_grads: examples of gradients, as torch takes them; here layouts follow from the
            values. torch 2.11 has ``group`` and ``dw_builder`` in their places, which is understood.
        group: the ranks of the whole pipeline, all stages together; default: the default group.
        dw_builder: as in torch: called behind the backward of a micro-batch, it returns the function that
            computes the gradients of the weights. Without it a backward is split without help of the module.
        get_mesh: as in torch: the mesh, on ranks of this pipeline and of others beside it, of DTensors that
            the stage before this one returns. Each rank gets the part of its own pipeline.
        mesh: the ranks of this stage, any shape. None: one rank, as in torch: number ``stage_index`` of
            ``group``, or the calling rank where the group has fewer ranks than there are stages. Stages that
            share a rank share all their ranks.
        input_placements, output_placements: one list of placements for all values, or one list for each.
            Default: Shard(0) over the first mesh dimension, Replicate() over the others.
        data_dims: numbers or names of the mesh dimensions over whose ranks samples or tokens are split, so
            that each computes a part of the loss. Gradients of parameters are summed over them, as are those
            of inputs that are whole there; those of outputs that are whole there are shared out. Default: the
            dimensions on which an input is Shard(0). Name them for context parallelism, and where samples are
            split inside the module.
        loss_dims: of the last stage, the mesh dimensions over which ranks have losses of different samples or
            tokens. Default: data_dims. Give more for tensor-parallel modules whose loss is that of a shard of
            the sequence.
        edges: all edges of the pipeline, the same on every rank. Default: output j of each stage is input j
            of the next.
        use_dtensor: the module gets DTensors on ``mesh`` instead of local shards. Outputs may be either in
            both cases.
        shared_parameters: {key: name of a parameter of the module}. Stages that name the same key share that
            parameter (tied embeddings): each has a copy, equal at the start, and after a step each copy gets
            the sum of the gradients of all.
        strategy, topology: of the transfers between stages, as `meshcast.plan` takes them; the same on every
            rank. Without a topology rates are assumed. How long a transfer may take says ``timeout`` of the
            schedule.

    Raises:
        LayoutError: naming the argument that is wrong.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        from meshcast.pipelining import PipelineStage, ScheduleEager1F1B

        meshes = [DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3])]  # of both stages, on every rank
        index = 0 if dist.get_rank() < 3 else 1
        torch.manual_seed(index)
        layer = torch.nn.Linear(8, 8)
        stage = PipelineStage(layer, index, 2, torch.device("cpu"), mesh=meshes[index])
        schedule = ScheduleEager1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss, timeout=60)
        losses = []
        schedule.step(torch.randn(24, 8), target=torch.randn(24, 8), losses=losses)
        assert layer.weight.grad is not None and len(losses) == (4 if stage.is_last else 0)
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensors | None = None,
        output_args: Tensors | None = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        input_placements: Sequence[Any] | None = None,
        output_placements: Sequence[Any] | None = None,
        data_dims: Sequence[int | str] | None = None,
        loss_dims: Sequence[int | str] | None = None,
        edges: Sequence[Edge] | None = None,
        use_dtensor: bool = False,
        shared_parameters: Mapping[str, str] | None = None,
        strategy: str = "auto",
        topology: Topology | None = None,
    ) -> None:
        if isinstance(output_grads, dist.ProcessGroup):
            # torch 2.11 has group and dw_builder in these places, and nothing of DTensors.
            group, dw_builder, output_grads, input_grads = output_grads, input_grads, None, None
        with refusals_told(group, stage_index):
            if not 0 <= stage_index < num_stages:
                raise LayoutError(f"stage_index must be in 0..{num_stages - 1}, found {stage_index}")
            where = f"stage {stage_index}"
            if mesh is not None and get_mesh is not None:
                raise LayoutError(
                    f"{where}: get_mesh is not used here: with mesh= the placements say what arrives"
                )
            self.input_examples = None if input_args is None else as_tuple(input_args, f"{where}, input_args")
            self.output_examples = (
                None if output_args is None else as_tuple(output_args, f"{where}, output_args")
            )
            device = stage_device(where, device, mesh)
            self.mesh = stage_mesh(stage_index, num_stages, group, mesh, dist.get_rank())
            init_stage(
                self,
                submodule,
                stage_index,
                num_stages=num_stages,
                mesh=mesh,
                device=device,
                input_args=self.input_examples,
                output_args=self.output_examples,
                output_grads=output_grads,
                input_grads=input_grads,
                group=group,
                dw_builder=dw_builder,
                get_mesh=get_mesh,
            )
            self.rank = dist.get_rank()
            self.input_placements = ValuePlacements(
                f"stage {stage_index}, input_placements", input_placements, self.mesh
            )
            self.output_placements = ValuePlacements(
                f"stage {stage_index}, output_placements", output_placements, self.mesh
            )
            self.edges = None if edges is None else check_edges(edges, num_stages)
            if use_dtensor and mesh is None:
                raise LayoutError(f"stage {stage_index}: use_dtensor needs mesh=")
            self.use_dtensor = use_dtensor
            self.strategy = checks.choice(f"stage {stage_index}: strategy", strategy, STRATEGIES)
            self.topology = topology
            self.data_dims_given, self.loss_dims_given = data_dims is not None, loss_dims is not None
            self.data_dims = (
                split_dims(self.input_placements)
                if data_dims is None
                else numbered_dims(f"stage {stage_index}, data_dims", data_dims, self.mesh)
            )
            self.loss_dims = (
                self.data_dims
                if loss_dims is None
                else numbered_dims(f"stage {stage_index}, loss_dims", loss_dims, self.mesh)
            )
            # A DTensor says by its own placements what is still to be summed.
            self.summed_dims = [] if use_dtensor else self.data_dims
            self._columns: dist.ProcessGroup | None = None
            self.learn_wrappers()
            self.reduced_elsewhere: set[int] = set()  # ids of parameters that an earlier stage here has too
            self._example_rows: int | None = None
            self._shared_names = dict(shared_parameters or {})
            shared_parameters_of(stage_index, self._shared_names, self.submod)  # checks them
            # The stages of each shared parameter, ascending; the schedule tells once the ranks agreed.
            self.sharing: Mapping[str, Sequence[int]] | None = None
            self._begin_compute()

    def learn_wrappers(self) -> None:
        """Looks for DDP and FSDP2, which may be put around the module, or into it, after the stage was made
        and before its schedule is."""
        pipeline = dist.get_process_group_ranks(dist.group.WORLD if self.group is None else self.group)
        where = f"stage {self.stage_index}"
        wrapped = look_through(self.submod, self.mesh, self.data_dims, pipeline, where)
        self.submod, self._columns = wrapped.module, wrapped.columns or self._columns
        self._joining = self._joining_groups()
        self._learn_module()

    def learn_loss(self, loss_fn: Any) -> None:
        """A loss function may be a module with parameters, some of them those of the stage."""
        given = list(loss_fn.parameters()) if isinstance(loss_fn, torch.nn.Module) else []
        own = {id(each) for each in self.submod.parameters()} if given else set()
        self.loss_parameters = [each for each in given if id(each) not in own]

    def __repr__(self) -> str:
        return f"<PipelineStage {self.stage_index} of {self.num_stages}, a {type(self.submod).__name__}>"

    def scale_grads(self, grad_scale_factor: float | torch.Tensor) -> None:
        """Divides all that is in ``grad``, as torch does; what several stages of a rank hold, only once. A
        factor that is a tensor has no dimensions."""
        if isinstance(grad_scale_factor, torch.Tensor) or grad_scale_factor != 1:
            for each in self.own_parameters():
                if each.grad is not None:
                    local_values(each.grad).div_(grad_scale_factor)

    def over_columns(self, *values: float) -> torch.Tensor:
        """The means of the values over the pipelines that DDP or FSDP2 joins with this one (`columns`), in
        float64, on the device of the stage; without such the values. Called by all ranks that are joined."""
        device = self.device if self._joining else torch.device("cpu")
        means = torch.tensor(values, dtype=torch.float64, device=device)
        for group in self._joining:
            dist.all_reduce(means, group=group)
            means /= group.size()
        return means

    def _joining_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose ranks, taken together, are all that this stage is joined with in other
        pipelines."""
        if self._columns is not None:
            return [self._columns]
        own = set(dist.get_process_group_ranks(dist.group.WORLD if self.group is None else self.group))
        for part in self.submod.modules():
            if isinstance(part, DistributedDataParallel) and not own.issuperset(
                dist.get_process_group_ranks(part.process_group)
            ):
                return [part.process_group]
        meshes = [group.mesh_info.mesh for part in fsdp_parts(self.submod) for group in fsdp_groups(part)]
        outside = [mesh for mesh in meshes if not own.issuperset(mesh.mesh.flatten().tolist())]
        if not outside:
            return []
        widest = max(outside, key=lambda mesh: mesh.size())  # the first one of several
        return [widest.get_group(dim) for dim in range(widest.ndim) if widest.size(dim) > 1]

    @property
    def shared(self) -> dict[str, torch.nn.Parameter]:
        """The shared parameters by key, as the module has them now."""
        if not self._shared_names:
            return {}
        return shared_parameters_of(self.stage_index, self._shared_names, self.submod)

    def own_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that no earlier stage of this rank has too."""
        return [each for each in self.submod.parameters() if id(each) not in self.reduced_elsewhere]

    @property
    def batch_parts(self) -> int:
        """The number of parts into which the samples of a micro-batch are split: the data-parallel degree."""
        parts = 1
        for dim in self.data_dims:
            parts *= self.mesh.shape[dim]
        return parts

    @property
    def batch_part(self) -> int:
        """The index of the part that this rank has, from 0 to ``batch_parts`` - 1."""
        part = 0
        for dim in self.data_dims:
            part = part * self.mesh.shape[dim] + self.mesh.coordinate[dim]
        return part

    @property
    def reduces(self) -> bool:
        """``True`` where `sync_gradients` has something to do."""
        return self.batch_parts > 1 or self._columns is not None

    @property
    def joins_pipelines(self) -> bool:
        """``True`` where DDP or FSDP2 joins the stage with ranks of other pipelines."""
        return bool(self._joining)

    def sync_gradients(self) -> None:
        """Sums the gradients of the parameters over the data-parallel ranks of the stage; inside
        DistributedDataParallel over other pipelines (``group=``) it takes their mean over these. Called by
        all of these ranks, once per step. What several stages of a rank hold is left to the first of them.

        ``step`` does it unless the schedule was made with ``sync_gradients=False``. Hooks that
        ``register_post_accumulate_grad_hook`` has put on the parameters run behind it.
        """
        self.reduce_gradients()
        for parameter in self.own_parameters():
            hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
            for hook in list(hooks.values()) if hooks and parameter.grad is not None else ():
                hook(parameter)

    def reduce_gradients(self) -> None:
        """`sync_gradients` without hooks."""
        own = self.own_parameters()
        if self.batch_parts > 1:
            sum_gradients(own, self.mesh, self.data_dims)
        if self._columns is not None:
            average_gradients(own, self._columns)

    def output_layout(self, index: int, local: LocalValue) -> Placements:
        """Placements of output `index`: those given, else those of the DTensor, else the default."""
        if local.placements is None or self.output_placements.given or self.alone:
            return self.output_placements[index]
        return local.placements

    def infer(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        with_grad: bool,
        empty: bool,
        data: DataUse,
        again: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> Inferred:
        """Local shapes of the outputs of one micro-batch, and how to run the module for it. empty, data,
        again: everywhere_empty, data, again of `infer_outputs`."""
        rows, what = rows_of(args), f"rank {self.rank}, stage {self.stage_index}"
        peers = self.mesh.along([dim for dim in range(len(self.mesh.shape)) if dim not in self.data_dims])
        if self._example_rows is None:
            self._example_rows = rows_of(self.input_examples) if self.input_examples else rows
        known = self.output_examples is not None and rows == self._example_rows
        found = None
        if not self.is_last and not (known and data != "always"):
            try:
                found = self._probed(
                    infer_outputs,
                    args,
                    kwargs,
                    with_grad=with_grad,
                    what=what,
                    everywhere_empty=empty,
                    peers=peers,
                    data=data,
                    real=self.is_first,
                    again=again,
                )
            except LayoutError:
                if self.output_examples is None:
                    raise
            if found is not None and (self.output_examples is None or not found.needs_data):
                self._writes_on_inputs = self._writes_on_inputs or found.copies
                return found
        stand_in = is_empty((args, kwargs)) and self._probed(
            needs_stand_in,
            args,
            kwargs,
            with_grad=with_grad,
            peers=peers,
            what=what,
            real=self.is_first,
        )
        if self.is_last:  # its outputs matter to the loss function alone
            outputs = None
            if self._may_split_loss():
                outputs = self._probed(outputs_on_fakes, args, kwargs, with_grad=with_grad)
            tensors = [each for each in tree_flatten(outputs)[0] if isinstance(each, torch.Tensor)]
            return Inferred(describe_values(tensors, with_grad), stand_in)
        try:
            examples = self._examples(rows)
        except LayoutError:
            if found is None:
                raise
            return found  # which needs data
        for index, value in enumerate(examples):
            examples[index] = value.detach().requires_grad_(with_grad and value.is_floating_point())
        return Inferred(describe_values(examples, with_grad), stand_in)

    def _probed(self, look: Callable[..., _T], *args: Any, **named: Any) -> _T:
        """Returns what look(module, ...) finds when it runs the module to learn about shapes."""
        return self.in_context(0, lambda: look(self.submod, *args, **named), inferring=True)

    def _may_split_loss(self) -> bool:
        """Returns whether the last stage must look at its outputs to know which samples or tokens its loss
        is taken of (wiring.py)."""
        return not self.loss_dims_given and any(
            size > 1 and dim not in self.loss_dims for dim, size in enumerate(self.mesh.shape)
        )

    def _examples(self, rows: int | None) -> list[torch.Tensor]:
        """output_args as of a micro-batch with so many samples on this rank. Raises LayoutError where they do
        not tell."""
        examples, known = self.output_examples or (), self._example_rows
        if rows == known:
            return list(examples)
        found = []
        for value in examples:
            if not known or rows is None or value.dim() == 0 or value.shape[0] % known:
                raise LayoutError(
                    f"rank {self.rank}, stage {self.stage_index}: output_args is of {known} samples, which "
                    f"does not tell the shapes of {rows}: dimension 0 of {tuple(value.shape)} is no multiple"
                )
            size = value.shape[0] // known * rows
            found.append(torch.empty((size, *value.shape[1:]), dtype=value.dtype, device="meta"))
        return found


def group_of(stages: object) -> Any:
    """The process group of the pipeline that a stage, or several, are of, whatever was given for them."""
    first = stages[0] if isinstance(stages, Sequence) and stages else stages
    return getattr(first, "group", None)


def check_kinds(stages: object) -> None:
    """Raises LayoutError for what are no stages, or torch's own. Other subclasses of torch's base may be
    looked at, but not run."""
    if not isinstance(stages, Sequence) or not stages:
        raise LayoutError(f"a schedule needs at least one stage on this rank, found {stages!r}")
    for stage in stages:
        if type(stage) in (torch_stage.PipelineStage, torch_stage._PipelineStage) or not isinstance(
            stage, torch_stage._PipelineStageBase
        ):
            raise LayoutError(
                f"stage must be a meshcast.pipelining.PipelineStage, found {type(stage).__name__} of "
                f"{type(stage).__module__}: import it, pipeline and build_stage from meshcast.pipelining"
            )


def checked(stages: Sequence[PipelineStage], microbatches: int) -> dict[int, PipelineStage]:
    """The stages by number, ascending. Raises LayoutError unless they can be one rank's."""
    if isinstance(microbatches, bool) or not isinstance(microbatches, int):
        raise LayoutError(f"n_microbatches must be an integer, found {shown(microbatches)}")
    check_size(stages[0].num_stages, microbatches)
    if microbatches < 1:
        raise LayoutError(f"n_microbatches must be at least 1, found {microbatches}")
    first = stages[0]
    for stage in stages[1:]:
        for what, mine, theirs in (
            ("num_stages", first.num_stages, stage.num_stages),
            ("edges", first.edges, stage.edges),
            ("group", first.group, stage.group),
            ("mesh", sorted(first.mesh.ranks), sorted(stage.mesh.ranks)),
            ("device", first.device, stage.device),
        ):
            if mine != theirs:
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {first.rank} have different "
                    f"{what}: {mine} and {theirs}"
                )
    for stage in stages:
        stage.learn_wrappers()
    by_index = {stage.stage_index: stage for stage in stages}
    if len(by_index) != len(stages):
        raise LayoutError(f"rank {first.rank} makes a stage twice: {[s.stage_index for s in stages]}")
    return dict(sorted(by_index.items()))


def reduce_once(stages: Iterable[PipelineStage]) -> None:
    """A parameter that several stages of this rank hold is left to the first. Raises LayoutError where they
    would reduce its gradient over different ranks."""
    owners: dict[int, PipelineStage] = {}
    for stage in stages:
        stage.reduced_elsewhere.clear()
        for name, parameter in stage.submod.named_parameters():
            first = owners.setdefault(id(parameter), stage)
            if first is stage:
                continue
            mine, other = (each.mesh.along(each.data_dims) for each in (stage, first))
            if sorted(mine) != sorted(other):
                raise LayoutError(
                    f"stages {first.stage_index} and {stage.stage_index} of rank {stage.rank} hold one "
                    f"parameter, {name!r} of the latter, but split their samples over different ranks, "
                    f"{other} and {mine}: give them the same mesh= and data_dims=, or copies and "
                    "shared_parameters="
                )
            stage.reduced_elsewhere.add(id(parameter))


class _PipelineStage(PipelineStage):
    """A stage of a `Pipe`. Values travel to any later stage that uses them, and their gradients back.

    pipe_info: of ``pipe.info()``. Other arguments as those of `PipelineStage`.
    """

    get_stage_index_of_submod = torch_stage._PipelineStage.get_stage_index_of_submod
    find_dst_rank = torch_stage._PipelineStage.find_dst_rank
    _get_output_node = torch_stage._PipelineStage._get_output_node
    _move_submod_to_device = torch_stage._PipelineStage._move_submod_to_device

    def __init__(
        self,
        stage_module: torch.nn.Module,
        stage_index: int,
        pipe_info: Any,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pipe_info = pipe_info
        nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        if not any(each.is_meta for each in stage_module.parameters()):
            stage_module.to(device)
        super().__init__(
            stage_module, stage_index, pipe_info.num_stages, device, group=group, edges=_edges_between(nodes)
        )
        self.node = nodes[stage_index]
        self.name = self.node.name
        self.submod_to_stage_index = {node.name: index for index, node in enumerate(nodes)}


def _edges_between(nodes: list[Any]) -> list[Edge]:
    """Arguments of a stage that are the model's own are given to it by name; the others are its inputs."""
    number = {node: index for index, node in enumerate(nodes)}
    edges = []
    for stage, node in enumerate(nodes):
        inputs = 0
        for argument in node.args:
            output, source = 0, argument
            while source.target is operator.getitem:
                source, output = source.args
            if source in number:
                edges.append(Edge(number[source], output, stage, inputs))
                inputs += 1
    return edges


def build_stage(
    stage_module: torch.nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Makes the stage of a module of a `Pipe`, as torch's ``build_stage`` does. `pipeline` has an example.

    Args:
        stage_module: of ``pipe.get_stage_module(stage_index)``.
        stage_index: its place.
        pipe_info: of ``pipe.info()``.
        device: where it computes.
        group: the ranks of the whole pipeline; default: the default group.
    """
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)


class Pipe(torch_pipelining.Pipe):
    """torch's, whose stages run here. `pipeline` makes it, and ``build_stage`` is a stage of it."""

    def build_stage(  # type: ignore[override]
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> _PipelineStage:
        module = self.get_stage_module(stage_index)
        if isinstance(module, torch.fx.GraphModule):
            _modify_graph_op_device(module, device)
        return _PipelineStage(module, stage_index, self.info(), device, group)


def pipeline(*args: Any, **kwargs: Any) -> Pipe:
    """torch.distributed.pipelining.pipeline, with its arguments: traces a module and cuts it.

    Example, on every rank::

        from meshcast.pipelining import ScheduleGPipe, SplitPoint, pipeline

        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(ranks)])
        cuts = {str(layer): SplitPoint.BEGINNING for layer in range(1, ranks)}
        pipe = pipeline(model, mb_args=(torch.randn(4, 8),), split_spec=cuts)
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
        schedule.step(torch.randn(16, 8), target=torch.randn(16, 8))
    """
    pipe: Any = torch_pipelining.pipeline(*args, **kwargs)
    pipe.__class__ = Pipe  # torch has no way to name the class that it makes
    return pipe


__getattr__, __dir__ = names_of_torch("stage", globals())

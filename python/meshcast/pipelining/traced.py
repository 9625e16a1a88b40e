"""Stages that torch traces: its Pipe, whose stages run here over the edges that the tracer found."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining._IR import _modify_graph_op_device

from meshcast.pipelining.edge import Edge
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = ["Pipe", "_PipelineStage", "build_stage", "pipeline"]


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

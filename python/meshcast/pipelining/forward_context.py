"""A context of the user's around the forwards of a stage, as torch.distributed.pipelining 2.15 takes one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TypeVar

from torch.distributed.pipelining import stage as torch_stage
from torch.utils.hooks import RemovableHandle

from meshcast.base.checks import shown
from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining.compat import PipelineStageInfo

__all__ = ["ForwardContext"]

_T = TypeVar("_T")


class ForwardContext(torch_stage.PipelineStage):
    """The part of `PipelineStage` that enters a context of the user's around every run of its module."""

    _forward_contexts: OrderedDict[int, Callable[[PipelineStageInfo], AbstractContextManager[None]]]

    def _begin_contexts(self) -> None:
        self._forward_contexts = OrderedDict()

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], AbstractContextManager[None]]
    ) -> RemovableHandle:
        """Registers a context for forwards, as in torch 2.15, under every release: ``context_factory(info)``
        makes the context in which the module runs for a micro-batch. It is not entered for functions that
        `register_custom_function` took, unless these call ``forward_one_chunk``.

        Before the first step, where shapes are found, the module runs on fake tensors or zeros: `info` then
        says ``is_metadata_inference`` and names micro-batch 0.

        Returns:
            A handle: ``handle.remove()`` ends it. One context at a time.

        Raises:
            LayoutError: it is no function.
            MeshcastError: there is one already.

        Example, on every rank::

            from contextlib import contextmanager
            from meshcast.pipelining import PipelineStage, ScheduleGPipe

            rank, ranks = dist.get_rank(), dist.get_world_size()
            stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
            ran = []

            @contextmanager
            def noted(info):
                yield
                if not info.is_metadata_inference:
                    ran.append(info.microbatch_index)

            handle = stage.register_forward_context(noted)
            schedule = ScheduleGPipe(stage, 4)
            schedule.step(*([torch.randn(8, 8)] if stage.is_first else []))
            assert ran == [0, 1, 2, 3]
            handle.remove()
        """
        if not callable(context_factory):
            raise LayoutError(
                f"stage {self.stage_index}: context_factory must be a function that makes a context manager, "
                f"found {shown(context_factory)}"
            )
        if self._forward_contexts:
            raise MeshcastError(
                f"stage {self.stage_index} has a forward context already: remove() its handle first",
                op="pipeline",
            )
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    def in_context(self, microbatch: int, run: Callable[[], _T], *, inferring: bool = False) -> _T:
        """Returns what run() returns, inside the context, where there is one. Raises MeshcastError for a
        context that swallows an error: there is no result then."""
        if not self._forward_contexts:
            return run()
        (make,) = self._forward_contexts.values()
        info = PipelineStageInfo(
            stage_index=self.stage_index, microbatch_index=microbatch, is_metadata_inference=inferring
        )
        with make(info):
            return run()
        raise MeshcastError(
            f"the forward context of stage {self.stage_index} swallowed an error of its module in "
            f"micro-batch {microbatch}, so there is no output: let it pass",
            op="pipeline",
        )

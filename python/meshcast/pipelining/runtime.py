"""Runtime: runs the actions of this rank's stage.

Receives are posted where the schedule says, sends leave right after what made their value, and neither is
waited for: this thread waits only in a forward or backward, for the data that it needs now. Sends are waited
for when the step ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from meshcast.errors import LayoutError, MeshcastError
from meshcast.handle import Handle
from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.shapes import as_tuple
from meshcast.pipelining.stage import PipelineStage, local_values
from meshcast.pipelining.trace import Trace
from meshcast.pipelining.wiring import Lane, Value, Wiring

__all__ = ["Feed", "Runtime"]

_NAMES = {ActionKind.F: "forward", ActionKind.B: "backward"}


class Feed(Protocol):
    """What a step gives the runtime and takes from it."""

    def arguments(self, microbatch: int) -> list[Any]:
        """Local arguments of the first stage."""

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        """Local keyword arguments of any stage."""

    def output(self, microbatch: int, output: Any) -> torch.Tensor | None:
        """Takes the last stage's output; returns the local loss that its backward starts from."""

    def seed(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the step's loss with respect to this local loss."""


class Runtime:
    """Runs lowered schedules, one after the other, over the lanes of one rank."""

    def __init__(self, stage: PipelineStage, wiring: Wiring, timeout: float) -> None:
        self._stage = stage
        self._wiring = wiring
        self._timeout = timeout
        self._arriving: dict[Action, tuple[Handle[Any], list[torch.Tensor]]] = {}
        self._outputs: dict[int, list[torch.Tensor]] = {}
        self._losses: dict[int, torch.Tensor] = {}
        self._gradients: dict[int, list[torch.Tensor | None]] = {}
        self._sends: list[tuple[Action, float, Handle[Any]]] = []
        self._run: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive,
        }
        self._feed: Feed
        self._train = False
        self.trace = Trace()
        self.bytes_sent = 0  # of all steps

    def run(self, actions: Sequence[Action], feed: Feed, *, train: bool) -> None:
        """Runs one step. Errors of the module become MeshcastError naming rank, stage and micro-batch; errors
        of transfers keep their type. After an error the runtime is of no more use."""
        self._feed, self._train = feed, train
        self.trace = Trace()
        for action in actions:
            begin = time.perf_counter()
            try:
                self._run[action.kind](action)
            except Exception as cause:
                raise self._named(action, cause) from cause
            if action.kind.is_compute:
                self.trace.add(str(action), "compute", begin, time.perf_counter())
        self._settle_sends(wait=True)

    def abort(self, reason: str) -> None:
        """Makes all ranks that share a lane with this one fail with this reason."""
        for transfer in self._wiring.transfers():
            transfer.abort(reason)

    @property
    def inputs(self) -> Mapping[int, Value]:
        """Inputs of this rank's stage that other stages feed."""
        return self._wiring.inputs

    def close(self) -> None:
        for transfer in self._wiring.transfers():
            transfer.close()

    def clear(self) -> None:
        """Drops what a failed step left."""
        for kept in (self._arriving, self._outputs, self._losses, self._gradients, self._sends):
            kept.clear()
        self._stage.clear()

    def _named(self, action: Action, cause: Exception) -> Exception:
        what = _NAMES.get(action.kind, str(action))
        where = f"rank {self._stage.rank}: stage {action.stage}, {what} of micro-batch {action.microbatch}"
        if isinstance(cause, LayoutError):
            return LayoutError(f"{where}: {cause}", rank=self._stage.rank, op="pipeline")
        if isinstance(cause, MeshcastError):
            return cause
        return MeshcastError(
            f"{where} raised {type(cause).__name__}: {cause}", rank=self._stage.rank, op="pipeline"
        )

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stage, action.microbatch
        inputs = self._feed.arguments(microbatch) if stage.is_first else self._arrived_inputs(action)
        output = stage.forward(microbatch, inputs, self._feed.keywords(microbatch), self._train)
        if stage.is_last:
            loss = self._feed.output(microbatch, output)
            if self._train and loss is not None:
                stage.keep_loss(microbatch, loss)
                self._losses[microbatch] = loss
            return
        locals_ = [
            local_values(value.detach())
            for value in as_tuple(output, f"rank {stage.rank}, stage {stage.stage_index}")
        ]
        expected = len(self._wiring.values[stage.stage_index])
        if len(locals_) != expected:
            raise LayoutError(f"the module returned {len(locals_)} values, {expected} were agreed on")
        self._outputs[microbatch] = locals_

    def _arrived_inputs(self, action: Action) -> list[Any]:
        stage = self._stage
        inputs: list[Any] = [None] * len(self._wiring.inputs)
        for link, lane in self._wiring.forward.items():
            if link[1] != stage.stage_index:
                continue
            buffers = self._wait(Action(action.stage, ActionKind.RECV_F, action.microbatch, link[0]))
            for edge, buffer in zip(lane.edges, buffers, strict=True):
                value = self._wiring.inputs[edge.input]
                tensor = (
                    stage.wrap(buffer, stage.input_placements[edge.input], value.shape)
                    if stage.use_dtensor
                    else buffer
                )
                inputs[edge.input] = tensor.requires_grad_(self._train and value.requires_grad)
        return inputs

    def _wait(self, receive: Action) -> list[torch.Tensor]:
        handle, buffers = self._arriving.pop(receive)
        if not handle.is_completed():
            begin = time.perf_counter()
            handle.wait()
            self.trace.add(f"wait {receive}", "wait", begin, time.perf_counter())
        else:
            handle.wait()  # raises its error, if it ended with one
        return buffers

    def _receive(self, action: Action) -> None:
        lane = self._lane(action)
        if lane is not None:
            self._arriving[action] = lane.receive(self._timeout)

    def _send_forward(self, action: Action) -> None:
        lane = self._lane(action)
        assert lane is not None
        outputs = self._outputs[action.microbatch]
        self._send(action, lane, [outputs[edge.output] for edge in lane.edges])
        if action.peer == max(target for source, target in self._wiring.links if source == action.stage):
            del self._outputs[
                action.microbatch
            ]  # lower() sends to consumers in ascending order; transfers hold what they need

    def _backward(self, action: Action) -> None:
        stage, microbatch = self._stage, action.microbatch
        if stage.is_last:
            seeds: list[torch.Tensor | None] = [self._feed.seed(self._losses.pop(microbatch))]
        else:
            seeds = self._arrived_gradients(action)
        gradients = stage.backward(microbatch, seeds)
        if not stage.is_first:
            self._gradients[microbatch] = gradients

    def _arrived_gradients(self, action: Action) -> list[torch.Tensor | None]:
        """One per output: the sum over its consumers, nearest stage first."""
        summed: list[torch.Tensor | None] = [None] * len(self._wiring.values[self._stage.stage_index])
        for link, lane in self._wiring.backward.items():
            if link[0] != action.stage:
                continue
            for edge, buffer in zip(
                lane.edges,
                self._wait(Action(action.stage, ActionKind.RECV_B, action.microbatch, link[1])),
                strict=True,
            ):
                before = summed[edge.output]
                summed[edge.output] = buffer if before is None else before.add_(buffer)
        return summed

    def _send_backward(self, action: Action) -> None:
        lane = self._lane(action)
        if lane is not None:
            gradients = self._gradients[action.microbatch]
            self._send(action, lane, [_given(gradients[edge.input]) for edge in lane.edges])
        if action.peer == max(source for source, target in self._wiring.links if target == action.stage):
            del self._gradients[action.microbatch]

    def _send(self, action: Action, lane: Lane, tensors: Sequence[torch.Tensor]) -> None:
        self._settle_sends(wait=False)
        begin = time.perf_counter()
        self._sends.append((action, begin, lane.send(tensors, self._timeout)))

    def _settle_sends(self, *, wait: bool) -> None:
        """Lets go of values that have been sent, so that a step holds no more of them than are in flight."""
        flying = []
        for action, begin, handle in self._sends:
            if not wait and not handle.is_completed():
                flying.append((action, begin, handle))
                continue
            handle.wait()
            self.trace.add(str(action), "transfer", begin, begin + handle.stats.seconds)
            self.bytes_sent += handle.stats.bytes_sent
        self._sends = flying

    def _lane(self, action: Action) -> Lane | None:
        """None for gradients of a link whose values need none."""
        if action.kind is ActionKind.SEND_F:
            return self._wiring.forward[action.stage, action.peer]
        if action.kind is ActionKind.RECV_F:
            return self._wiring.forward[action.peer, action.stage]
        link = (
            (action.peer, action.stage) if action.kind is ActionKind.SEND_B else (action.stage, action.peer)
        )
        return self._wiring.backward.get(link)


def _given(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None  # backward lanes carry only values that need a gradient
    return gradient

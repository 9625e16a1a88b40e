"""Runtime: runs the actions of this rank's stages.

Receives are posted where the schedule says, sends leave right after what made their value, and neither is
waited for: this thread waits only in a forward or backward, for the data that it needs now. Sends are waited
for when the step ends; without overlap, each at once. Between two stages of one rank values are handed over.

On GPUs the same calls enqueue the work of a step: a transfer comes behind what the compute stream held when
it was started, runs on a stream of its own, and waiting for it makes the compute stream wait, not this
thread. So nothing here may ask what a transfer did before it is known to be over.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import torch

from ..base.checks import typed_arguments
from ..errors import LayoutError, MeshcastError
from ..transfers.handle import Handle
from .action import Action, ActionKind, Link
from .compat import windows
from .parallel import Way, as_tuple, local_values
from .stage import PipelineStage
from .step import Arriving, Functions
from .trace import GpuClock, Mark, Trace
from .wiring import Arrival, EdgeTransfers, StageValue, Wiring

__all__ = ["Feed", "Runtime", "microbatch_seed", "random_state"]


@typed_arguments()
def microbatch_seed(seed: int, step: int, stage: int, microbatch: int, part: int = 0) -> int:
    """The seed that `torch.manual_seed` gets before the forward of a micro-batch, to draw the same elsewhere.

    Args:
        seed: of the schedule.
        step: how many calls of ``step`` and ``eval`` the schedule has completed.
        part: which part of the samples the rank has, 0 where they are not split: ranks with other samples
            draw other numbers, those that share samples (tensor parallelism) the same.
        stage, microbatch: of the forward.

    Example::

        from meshcast.pipelining import microbatch_seed

        torch.manual_seed(microbatch_seed(7, step=0, stage=1, microbatch=3))  # of a schedule with seed=7
    """
    text = f"{seed} {step} {stage} {microbatch} {part}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def random_state(seed: tuple[int, int], stage: PipelineStage, microbatch: int) -> Iterator[None]:
    """Sets the random state of one forward; afterwards the process has its previous one again. For a stage
    on a GPU, this includes the random state of the GPU.

    seed: of the schedule, and the step.
    """
    generators = [torch.default_generator]
    if stage.device.type == "cuda":
        generators.append(torch.cuda.default_generators[stage.device.index])
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(microbatch_seed(*seed, stage.stage_index, microbatch, stage.batch_part))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


_NAMES = {
    ActionKind.F: "forward",
    ActionKind.B: "backward",
    ActionKind.I: "backward (inputs)",
    ActionKind.W: "backward (weights)",
}
_Key = tuple[int, int]  # stage, micro-batch


class Feed(Protocol):
    """The interface between a step and the runtime."""

    def arguments(self, microbatch: int) -> list[Any]:
        """Local arguments of the first stage."""

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        """Local keyword arguments of any stage."""

    keep_outputs: bool


class Owner(Protocol):
    """The schedule, as torch's runtime and functions of the user call it."""

    def _maybe_compute_loss(
        self, stage: Any, output: Any, target_mbs: Any, mb_index: int, loss_kwargs: Any = None
    ) -> None: ...

    def _maybe_get_loss(self, stage: Any, mb_index: int) -> Any: ...


class Runtime:
    """Runs lowered schedules, one after the other, over the edges of one rank.

    owner: computes and keeps the losses.
    wiring: that of any micro-batch: all join the same stages.
    outstanding: how many sends may be on their way at once; None: any number.
    max_active_stages: how many stages FSDP2 may hold gathered at once.
    """

    def __init__(
        self,
        owner: Owner,
        stages: Mapping[int, PipelineStage],
        wiring: Wiring,
        timeout: float,
        *,
        overlap: bool = True,
        outstanding: int | None = None,
        max_active_stages: int = 3,
    ) -> None:
        self._owner = owner
        self._stages = stages
        self._rank = next(iter(stages.values())).rank
        self._local = {link for link in wiring.links if wiring.is_local(link)}
        self._timeout = timeout
        self._outstanding = outstanding if overlap else 0
        self._max_active_stages = max_active_stages
        self._to_free: dict[Action, list[int]] = {}  # stages to free before an action of the row
        self._consumers = {stage: [link for link in wiring.links if link[0] == stage] for stage in stages}
        self._producers = {stage: [link for link in wiring.links if link[1] == stage] for stage in stages}
        # The stage whose transfer comes last: lower() lists them in ascending order.
        self._last_consumer = {stage: self._farthest(links, 1) for stage, links in self._consumers.items()}
        self._last_producer = {stage: self._farthest(links, 0) for stage, links in self._producers.items()}
        self._row: Sequence[Action] = ()
        self._names: dict[Action, str] = {}  # of the actions of that row
        self._arriving: dict[Action, list[Arrival]] = {}
        self._outputs: dict[_Key, list[torch.Tensor]] = {}
        self._gradients: dict[_Key, Sequence[torch.Tensor | None]] = {}
        self._functions = Functions()
        self._sends: list[tuple[Action, float, EdgeTransfers, Handle[Any]]] = []
        self._run: dict[ActionKind, Callable[[Action], None]] = {
            ActionKind.F: self._forward,
            ActionKind.B: self._backward,
            ActionKind.I: self._backward,
            ActionKind.W: self._backward_weights,
            ActionKind.SEND_F: self._send_forward,
            ActionKind.RECV_F: self._receive,
            ActionKind.SEND_B: self._send_backward,
            ActionKind.RECV_B: self._receive,
        }
        self._feeds: Mapping[int, Feed]
        self._wirings: Sequence[Wiring]  # of each micro-batch of the step
        self._train = False
        self._seed: tuple[int, int] | None = None
        self._trace = Trace()
        device = next(iter(stages.values())).device
        self._gpu = GpuClock(device) if device.type == "cuda" else None
        self._resumed: Mark | None = None  # on a GPU, behind the last value that compute waited for
        self.bytes_sent = 0  # of all steps
        self._waited_until = 0.0  # when this thread last had to wait for a value
        self._raised: BaseException | None = None  # by a handler of a signal, in a wait

    @property
    def trace(self) -> Trace:
        """The trace of the last step. On a GPU, reading it blocks until the step is complete there."""
        if self._gpu is not None:
            self._gpu.read_into(self._trace)
        return self._trace

    def _farthest(self, links: Sequence[Link], end: int) -> int | None:
        return max((link[end] for link in links if link not in self._local), default=None)

    def run(
        self,
        actions: Sequence[Action],
        feeds: Mapping[int, Feed],
        wirings: Sequence[Wiring],
        *,
        train: bool,
        seed: tuple[int, int] | None = None,
    ) -> None:
        """Runs one step.

        Errors of a module become MeshcastError naming rank, stage and micro-batch; errors of transfers keep
        their type. After an error the runtime is of no more use.

        Args:
            feeds: by stage.
            wirings: by micro-batch.
            seed: see `random_state`; None leaves the random state alone.
        """
        self._feeds, self._wirings, self._train, self._seed = feeds, wirings, train, seed
        for index, stage in self._stages.items():
            stage.ways = [wiring.ways[index] for wiring in wirings]
        self._trace = Trace()
        if self._gpu is not None:
            self._gpu.begin_step()
        if actions is not self._row:
            self._row, self._names = actions, {action: str(action) for action in actions}
            self._to_free = self._stages_to_free(actions)
        sent_before = self.bytes_sent
        for action in actions:
            for index in self._to_free.get(action, ()) if self._to_free else ():
                self._stages[index].free_parameters()
            computes = action.kind in _NAMES
            begin = time.perf_counter()
            mark = self._gpu.mark() if computes and self._gpu is not None else None
            try:
                if self._functions:
                    self._run_custom(action)
                else:
                    self._run[action.kind](action)
            except Exception as cause:
                if cause is self._raised:
                    raise
                raise self._named(action, cause) from cause
            if computes:
                self._add_compute(action, begin, mark)
                if train:
                    self._trace.count(action.kind)
        self._call_gathering(None)
        self._settle_sends(keep=0)
        self._trace.finish(self.bytes_sent - sent_before)

    def _stages_to_free(self, actions: Sequence[Action]) -> dict[Action, list[int]]:
        """So that FSDP2 holds no more stages gathered than it may."""
        sharded = [index for index, stage in self._stages.items() if stage.accumulates]
        if len(sharded) <= self._max_active_stages:
            return {}
        computing = [[action.stage] if action.kind in _NAMES else [] for action in actions]
        window = windows(computing, self._max_active_stages, self._max_active_stages)
        return {action: freed for action, (freed, _) in zip(actions, window, strict=True) if freed}

    def use(self, functions: Functions) -> None:
        """In the steps from now on."""
        self._functions = functions

    def _run_custom(self, action: Action) -> None:
        """Runs an action, by a function of the user where there is one."""
        functions = self._functions
        self._call_gathering(action)
        if action in functions.fused:
            run, parts = functions.fused[action]
            for part in parts:
                self._settle_for(part)
            run()
            for part in parts:
                self._computed(part)
        elif action.kind in functions.by_kind:
            self._settle_for(action)
            functions.by_kind[action.kind](action)
            self._computed(action)
        elif action not in functions.inside:
            self._run[action.kind](action)

    def _call_gathering(self, before: Action | None) -> None:
        """Functions of the user for UNSHARD and RESHARD. FSDP2 gathers and frees in its own hooks."""
        for action, run in self._functions.gathering.get(before, ()):
            try:
                run()
            except Exception as cause:
                raise MeshcastError(
                    f"rank {self._rank}: the function for {action} raised {type(cause).__name__}: {cause}",
                    rank=self._rank,
                    op="pipeline",
                ) from cause

    def _settle_for(self, action: Action) -> None:
        """A function of the user waits for what comes from other ranks, and passes on by itself what stays on
        this one."""
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        if action.kind is ActionKind.F and not stage.is_first:
            if all(link in self._local for link in self._producers[action.stage]):
                self._take_inputs(stage, action)
            else:
                wait = Arriving(lambda: self._take_inputs(stage, action))
                self._functions.forward_arriving[key] = [wait]
        elif action.kind in (ActionKind.B, ActionKind.I) and not stage.is_last:
            if all(link in self._local for link in self._consumers[action.stage]):
                self._take_gradients(stage, action)
            else:
                wait = Arriving(lambda: self._take_gradients(stage, action))
                self._functions.backward_arriving[key] = [wait]

    def _computed(self, action: Action) -> None:
        """Behind a function of the user."""
        stage, key = self._stages[action.stage], (action.stage, action.microbatch)
        if action.kind is ActionKind.F:
            if not stage.is_last and self._last_consumer[action.stage] is not None:
                outputs, _ = stage.fwd_cache[action.microbatch]
                self._outputs[key] = [local_values(value.detach()) for value in outputs]
            if not self._train:
                del stage.fwd_cache[action.microbatch]
        elif action.kind in (ActionKind.B, ActionKind.I) and self._last_producer[action.stage] is not None:
            self._gradients[key] = stage.bwd_cache.pop(action.microbatch)

    def _add_compute(self, action: Action, begin: float, mark: Mark | None) -> None:
        """To the trace, without the wait for what it needed, which has an event of its own."""
        if self._gpu is None or mark is None:
            end = time.perf_counter()
            self._trace.add(self._names[action], "compute", max(begin, self._waited_until), end)
        else:
            self._gpu.add(self._names[action], "compute", self._resumed or mark, self._gpu.mark())
            self._resumed = None

    def clear(self) -> None:
        """Drops what a failed step left."""
        for kept in (self._arriving, self._outputs, self._gradients, self._sends):
            kept.clear()
        for stage in self._stages.values():
            stage.clear_runtime_states()

    def _named(self, action: Action, cause: Exception) -> Exception:
        what = _NAMES.get(action.kind, str(action))
        where = f"rank {self._rank}: stage {action.stage}, {what} of micro-batch {action.microbatch}"
        if isinstance(cause, LayoutError):
            return LayoutError(f"{where}: {cause}", rank=self._rank, op="pipeline")
        if isinstance(cause, MeshcastError):
            return cause
        return MeshcastError(
            f"{where} raised {type(cause).__name__}: {cause}", rank=self._rank, op="pipeline"
        )

    def _forward(self, action: Action) -> None:
        stage, microbatch = self._stages[action.stage], action.microbatch
        feed, wiring = self._feeds[action.stage], self._wirings[microbatch]
        way = wiring.ways[action.stage]
        if not stage.is_first:
            self._take_inputs(stage, action)
        with nullcontext() if self._seed is None else random_state(self._seed, stage, microbatch):
            output = stage.forward_one_chunk(
                microbatch, feed.arguments(microbatch), feed.keywords(microbatch), feed.keep_outputs
            )
        if not self._train:
            del stage.fwd_cache[microbatch]
        if stage.is_last:
            self._owner._maybe_compute_loss(stage, output, None, microbatch)
            return
        values = [
            local_values(value.detach())
            for value in as_tuple(output, f"rank {self._rank}, stage {action.stage}")
        ]
        _check_outputs(values, way)
        for link in self._consumers[action.stage]:
            if link in self._local:
                arrival = Action(link[1], ActionKind.RECV_F, microbatch, link[0])
                self._arriving[arrival] = [
                    transfers.hand_over([values[each.output] for each in transfers.deliveries], self._timeout)
                    for transfers in wiring.forward[link]
                ]
        if self._last_consumer[action.stage] is not None:
            self._outputs[action.stage, microbatch] = values

    def _take_inputs(self, stage: PipelineStage, action: Action) -> None:
        if not stage.has_inputs(action.microbatch):  # else a function of the user has passed them on
            stage.receive(action.microbatch, self._arrived_inputs(stage, action))

    def _arrived_inputs(self, stage: PipelineStage, action: Action) -> list[Any]:
        wiring = self._wirings[action.microbatch]
        values = wiring.inputs[action.stage]
        inputs: list[Any] = [None] * len(values)
        for link in self._producers[action.stage]:
            arrived = self._wait(Action(action.stage, ActionKind.RECV_F, action.microbatch, link[0]))
            for transfers, buffers in zip(wiring.forward[link], arrived, strict=True):
                for delivery, buffer in zip(transfers.deliveries, buffers, strict=True):
                    for index in delivery.inputs[action.stage]:
                        inputs[index] = self._input(stage, index, buffer, values[index])
        return inputs

    def _input(
        self, stage: PipelineStage, index: int, buffer: torch.Tensor, value: StageValue
    ) -> torch.Tensor:
        # Several inputs may have come as one tensor: each has its own gradient.
        tensor = buffer.detach()
        if stage.use_dtensor:
            tensor = stage.wrap(tensor, stage.input_placements[index], value.shape)
        elif value.sent is not None:
            tensor = stage.as_before(tensor, value.sent)
        return tensor.requires_grad_(self._train and value.requires_grad)

    def _wait(self, receive: Action) -> list[list[torch.Tensor]]:
        """The tensors of each edge."""
        arrived = []
        for transfers, (handle, buffers) in zip(
            self._transfers_of(receive), self._arriving.pop(receive), strict=True
        ):
            arrived.append(buffers)
            if handle is None:
                continue
            if handle.is_completed():
                self._until_ended(handle)  # raises its error, if it ended with one
            elif self._gpu is not None:
                before = self._gpu.mark()
                self._until_ended(handle)
                self._resumed = self._gpu.mark()
                self._gpu.add(f"wait {receive}", "wait", before, self._resumed)
            else:
                begin = time.perf_counter()
                self._until_ended(handle)
                self._waited_until = time.perf_counter()
                self._trace.add(f"wait {receive}", "wait", begin, self._waited_until)
            if transfers.relays:  # what this rank passed on to other receivers
                self.bytes_sent += transfers.bytes_sent(handle)
        return arrived

    def _until_ended(self, handle: Handle[Any]) -> None:
        try:
            handle.wait()
        except BaseException as raised:
            if not isinstance(raised, MeshcastError):
                self._raised = raised
            raise

    def _receive(self, action: Action) -> None:
        found = self._transfers_of(action)
        if found:
            self._arriving[action] = [transfers.receive(self._timeout) for transfers in found]

    def _send_forward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        outputs = self._outputs[key]
        for transfers in self._transfers_of(action):
            if (
                transfers.consumers[0] == action.peer
            ):  # what others get as well has left with the first of them
                self._send(action, transfers, [outputs[each.output] for each in transfers.deliveries])
        if action.peer == self._last_consumer[action.stage]:
            del self._outputs[key]  # transfers hold what they need

    def _backward(self, action: Action) -> None:
        """B, or I."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        loss = None
        if stage.is_last:
            loss = self._owner._maybe_get_loss(stage, microbatch)
        else:
            self._take_gradients(stage, action)
        stage.backward_one_chunk(microbatch, loss=loss, full_backward=action.kind is ActionKind.B)
        gradients = stage.bwd_cache.pop(microbatch)
        for link in self._producers[action.stage]:
            transfers = self._wirings[microbatch].backward.get(link)
            if transfers is not None and link in self._local:
                arrival = Action(link[0], ActionKind.RECV_B, microbatch, link[1])
                self._arriving[arrival] = [transfers.hand_over(_given(transfers, gradients), self._timeout)]
        if self._last_producer[action.stage] is not None:
            self._gradients[action.stage, microbatch] = gradients

    def _backward_weights(self, action: Action) -> None:
        self._stages[action.stage].backward_weight_one_chunk(action.microbatch)

    def _take_gradients(self, stage: PipelineStage, action: Action) -> None:
        if not stage.has_gradients(action.microbatch):
            stage.receive_gradients(action.microbatch, self._arrived_gradients(action))

    def _arrived_gradients(self, action: Action) -> list[torch.Tensor | None]:
        """One per output: the sum over its consumers, nearest stage first."""
        wiring = self._wirings[action.microbatch]
        summed: list[torch.Tensor | None] = [None] * len(wiring.values[action.stage])
        for link in self._consumers[action.stage]:
            transfers = wiring.backward.get(link)
            if transfers is None:
                continue
            (buffers,) = self._wait(Action(action.stage, ActionKind.RECV_B, action.microbatch, link[1]))
            for delivery, buffer in zip(transfers.deliveries, buffers, strict=True):
                before = summed[delivery.output]
                # Not in place: a gradient that was handed over may still serve another W.
                summed[delivery.output] = buffer if before is None else before + buffer
        return summed

    def _send_backward(self, action: Action) -> None:
        key = action.stage, action.microbatch
        for transfers in self._transfers_of(action):
            self._send(action, transfers, _given(transfers, self._gradients[key]))
        if action.peer == self._last_producer[action.stage]:
            del self._gradients[key]

    def _send(self, action: Action, transfers: EdgeTransfers, tensors: Sequence[torch.Tensor]) -> None:
        self._settle_sends(keep=self._outstanding and self._outstanding - 1)
        begin = time.perf_counter()
        self._sends.append((action, begin, transfers, transfers.send(tensors, self._timeout)))
        if self._outstanding == 0:
            self._settle_sends(keep=0)

    def _settle_sends(self, *, keep: int | None) -> None:
        """Lets go of values that have been sent, so that a step holds no more of them than are in flight, and
        waits until so many are; None: for none."""
        flying = []
        late = 0 if keep is None else len(self._sends) - keep
        for number, send in enumerate(self._sends):
            action, begin, transfers, handle = send
            if number >= late and not handle.is_completed():
                flying.append(send)
                continue
            self._until_ended(handle)
            if self._gpu is not None:
                self._gpu.add_transfer(self._names[action], begin, handle)
                self.bytes_sent += transfers.bytes_sent(handle)
                continue
            figures = handle.figures()
            self._trace.add(self._names[action], "transfer", begin, begin + figures["seconds"])
            self.bytes_sent += figures["bytes_sent"]
        self._sends = flying

    def _transfers_of(self, action: Action) -> list[EdgeTransfers]:
        """None for gradients of a link whose values need none."""
        wiring = self._wirings[action.microbatch]
        if action.kind is ActionKind.SEND_F:
            return wiring.forward[action.stage, action.peer]
        if action.kind is ActionKind.RECV_F:
            return wiring.forward[action.peer, action.stage]
        link = (
            (action.peer, action.stage) if action.kind is ActionKind.SEND_B else (action.stage, action.peer)
        )
        return [wiring.backward[link]] if link in wiring.backward else []


def _check_outputs(values: Sequence[torch.Tensor], way: Way) -> None:
    assert way.outputs is not None
    found = [(tuple(value.shape), value.dtype) for value in values]
    if found != way.outputs:
        raise LayoutError(
            f"the module returned {len(found)} values, {found}, but the ranks agreed on {len(way.outputs)}, "
            f"{way.outputs}: what leaves a stage has one shape for all micro-batches of a size; pad it and "
            'send the counts as another output (docs/pipelining.md, "Outputs of different sizes"), or '
            "correct output_args=, if given"
        )


def _given(transfers: EdgeTransfers, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """For each value of the edge the gradient, summed over the inputs it went to."""
    (consumer,) = transfers.consumers
    given = []
    for delivery in transfers.deliveries:
        first, *others = (gradients[index] for index in delivery.inputs[consumer])
        assert first is not None  # an input that needs a gradient has one, zeros where it was not used
        for other in others:
            assert other is not None
            first = first + other
        given.append(first)
    return given

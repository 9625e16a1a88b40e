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
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.pipelining import schedules as torch_schedules

from ..base.checks import typed_arguments
from ..errors import LayoutError, MeshcastError
from ..transfers.handle import Handle
from .action import Action, ActionKind, Link
from .compat import Gathering, parts_of, torch_action, windows, with_gathering
from .edge import RankStage
from .parallel import Way, as_tuple, local_values
from .recipe import GivenOrder
from .trace import GpuClock, Trace
from .wiring import Arrival, EdgeTransfers, Wiring, as_input

__all__ = ["Feed", "Functions", "Runtime", "functions_for", "functions_of", "microbatch_seed", "random_state"]


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
def random_state(seed: tuple[int, int], stage: RankStage, microbatch: int) -> Iterator[None]:
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

    @property
    def targets(self) -> Sequence[Any] | None:
        """Local targets of the last stage, by micro-batch; None without any."""


class Arriving:
    """The values that a function of the user waits for first; torch has works of torch.distributed there."""

    def __init__(self, settle: Callable[[], None]) -> None:
        self.wait = settle


@dataclass(slots=True)
class Functions:
    """The functions of a step.

    fused: of the first of the actions that run as one: the function, and all of them. inside: all of those.
    forward_arriving, backward_arriving: by stage and micro-batch. gathering: by the action before which they
    are called, those for UNSHARD and RESHARD, with torch's action; under None those behind the last action.
    """

    by_kind: dict[ActionKind, Callable[[Action], None]] = field(default_factory=dict)
    fused: dict[Action, tuple[Callable[[], None], list[Action]]] = field(default_factory=dict)
    inside: frozenset[Action] = frozenset()
    forward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)
    backward_arriving: dict[tuple[int, int], list[Arriving]] = field(default_factory=dict)

    gathering: dict[Action | None, list[tuple[Any, Callable[[], None]]]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.by_kind or self.fused or self.gathering)


class HostClock:
    """The spans of one step on the CPU, until they are read, by the interface of `GpuClock`."""

    def __init__(self) -> None:
        self._spans: list[tuple[Action, float, float]] = []

    def begin_step(self) -> None:
        self._spans.clear()

    def mark(self) -> float:
        return time.perf_counter()

    def add(self, action: Action, begin: float, end: float) -> None:
        self._spans.append((action, begin, end))

    def add_transfer(self, send: Action, begin: float, handle: Handle[Any]) -> None:
        """Adds a send that has completed."""
        self.add(send, begin, begin + handle.figures()["seconds"])

    def read_into(self, trace: Trace) -> None:
        trace.events += self._spans
        self._spans.clear()


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
    outstanding: how many sends may be in flight at once; None: any number.
    max_active_stages: how many stages FSDP2 may hold gathered at once.
    """

    def __init__(
        self,
        owner: Owner,
        stages: Mapping[int, RankStage],
        wiring: Wiring,
        timeout: float,
        *,
        overlap: bool = True,
        outstanding: int | None = None,
        max_active_stages: int = 3,
    ) -> None:
        self._owner = owner
        self._stages = stages
        self._local = {link for link in wiring.links if stages.keys() >= set(link)}
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
        self._clock = GpuClock(device) if device.type == "cuda" else HostClock()
        self._mark: Callable[[], Any] = self._clock.mark
        self._resumed: Any = None  # a mark behind the last value that the current action waited for
        self.bytes_sent = 0  # of all steps
        self._raised: BaseException | None = None  # by a handler of a signal, in a wait

    @property
    def trace(self) -> Trace:
        """The trace of the last step. On a GPU, reading it blocks until the step is complete there."""
        self._clock.read_into(self._trace)
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
        their type. After an error the runtime cannot be used again.

        Args:
            feeds: by stage.
            wirings: by micro-batch.
            seed: see `random_state`; None leaves the random state alone.
        """
        self._feeds, self._wirings, self._train, self._seed = feeds, wirings, train, seed
        for index, stage in self._stages.items():
            stage.ways = [wiring.ways[index] for wiring in wirings]
        self._trace = Trace()
        self._clock.begin_step()
        if actions is not self._row:
            self._row = actions
            self._to_free = self._stages_to_free(actions)
        sent_before = self.bytes_sent
        for action in actions:
            for index in self._to_free.get(action, ()) if self._to_free else ():
                self._stages[index].free_parameters()
            computes = action.kind in _NAMES
            begin: Any = self._mark() if computes else None
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
                # Without the wait for its inputs, which has an event of its own.
                begin, end = self._resumed or begin, self._mark()
                self._clock.add(action, begin, end)
                self._resumed = None
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
                    f"the function for {action} raised {type(cause).__name__}: {cause}"
                ) from cause

    def _settle_for(self, action: Action) -> None:
        """A function of the user waits for what comes from other ranks, and passes on by itself what stays on
        this one."""
        stage = self._stages[action.stage]
        if action.kind is ActionKind.F and not stage.is_first:
            take, links = self._take_inputs, self._producers[action.stage]
            arriving = self._functions.forward_arriving
        elif action.kind in (ActionKind.B, ActionKind.I) and not stage.is_last:
            take, links = self._take_gradients, self._consumers[action.stage]
            arriving = self._functions.backward_arriving
        else:
            return
        if self._local.issuperset(links):
            take(stage, action)
        else:
            arriving[action.stage, action.microbatch] = [Arriving(lambda: take(stage, action))]

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

    def clear(self) -> None:
        """Drops what a failed step left."""
        for kept in (self._arriving, self._outputs, self._gradients, self._sends):
            kept.clear()
        for stage in self._stages.values():
            stage.clear_runtime_states()

    def _named(self, action: Action, cause: Exception) -> Exception:
        what = _NAMES.get(action.kind, str(action))
        where = f"stage {action.stage}, {what} of micro-batch {action.microbatch}"
        if isinstance(cause, LayoutError):
            return LayoutError(f"{where}: {cause}")
        if isinstance(cause, MeshcastError):
            return cause
        return MeshcastError(f"{where} raised {type(cause).__name__}: {cause}")

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
        values = [local_values(value.detach()) for value in as_tuple(output, f"stage {action.stage}")]
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

    def _take_inputs(self, stage: RankStage, action: Action) -> None:
        if not stage.has_inputs(action.microbatch):  # else a function of the user has passed them on
            stage.receive(action.microbatch, self._arrived_inputs(stage, action))

    def _arrived_inputs(self, stage: RankStage, action: Action) -> list[Any]:
        wiring = self._wirings[action.microbatch]
        values = wiring.inputs[action.stage]
        inputs: list[Any] = [None] * len(values)
        for link in self._producers[action.stage]:
            arrived = self._wait(Action(action.stage, ActionKind.RECV_F, action.microbatch, link[0]))
            for transfers, buffers in zip(wiring.forward[link], arrived, strict=True):
                for delivery, buffer in zip(transfers.deliveries, buffers, strict=True):
                    for index in delivery.inputs[action.stage]:
                        # Several inputs may have come as one tensor: each has its own gradient.
                        tensor = as_input(stage, index, buffer.detach(), values[index])
                        inputs[index] = tensor.requires_grad_(self._train and values[index].requires_grad)
        return inputs

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
            else:
                before = self._mark()
                self._until_ended(handle)
                self._resumed = self._mark()
                self._clock.add(receive, before, self._resumed)
            if transfers.relays:  # values that this rank passed on to other receivers
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
            ):  # a value with several receivers has left with the first
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

    def _take_gradients(self, stage: RankStage, action: Action) -> None:
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
        """Frees values that have been sent, so that a step holds no more of them than are in flight, and
        waits until so many are; None: for none."""
        flying = []
        late = 0 if keep is None else len(self._sends) - keep
        for number, send in enumerate(self._sends):
            action, begin, transfers, handle = send
            if number >= late and not handle.is_completed():
                flying.append(send)
                continue
            self._until_ended(handle)
            self._clock.add_transfer(action, begin, handle)
            self.bytes_sent += transfers.bytes_sent(handle)
        self._sends = flying

    def _transfers_of(self, action: Action) -> list[EdgeTransfers]:
        """None for gradients of a link whose values need none."""
        wiring = self._wirings[action.microbatch]
        downstream = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
        link = (action.stage, action.peer) if downstream else (action.peer, action.stage)
        if action.kind in (ActionKind.SEND_F, ActionKind.RECV_F):
            return wiring.forward[link]
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


def functions_of(schedule: Any) -> Mapping[Any, Callable[..., None]]:
    """By torch's kind of action."""
    return getattr(schedule, "_comp_type_to_function_map", {})


def functions_for(
    schedule: Any,
    given: GivenOrder | None,
    feeds: Mapping[int, Feed],
    row: Sequence[Action],
    place: tuple[int, int],
    *,
    train: bool,
) -> Functions:
    """Functions of one step; the schedule gets what torch's functions look at.

    row: what this rank runs. place: number of the row, and how many there are.
    """
    found, registered = Functions(), functions_of(schedule)
    if not registered:
        return found
    first = next(iter(feeds.values()))
    targets = [feed.targets for feed in feeds.values() if feed.targets is not None]
    numbers = range(schedule._n_microbatches)
    context = torch_schedules._PipelineContext(
        schedule,
        [tuple(feeds[0].arguments(number)) if 0 in feeds else () for number in numbers],
        [dict(first.keywords(number)) for number in numbers],
        list(targets[0]) if targets else None,
    )
    schedule.fwd_recv_ops, schedule.bwd_recv_ops = found.forward_arriving, found.backward_arriving
    schedule.backward_counter.clear()
    both = registered.get(torch_schedules.OVERLAP_F_B)
    if both is not None and given is not None and train:
        for start, (whole, parts) in given.pairs.items():
            found.fused[start] = partial(both, whole, context), parts
        found.inside = frozenset(part for _, parts in given.pairs.values() for part in parts)
    for kind, run in registered.items():
        if kind.value in ActionKind.__members__:
            found.by_kind[ActionKind[kind.value]] = partial(_run_as_torch, run, context)
    for before, action in _gathering(schedule._gathering, given, row, place):
        if action.computation_type in registered:
            run = partial(registered[action.computation_type], action, context)
            found.gathering.setdefault(before, []).append((action, run))
    return found


def _gathering(
    options: Gathering, given: GivenOrder | None, row: Sequence[Action], place: tuple[int, int]
) -> list[tuple[Action | None, Any]]:
    """torch's UNSHARD and RESHARD in their order, each with the action of the row that it comes before: where
    a given order with transfers has them, else where torch would put them."""
    order: list[Any] = [torch_action(each) for each in row if each.kind.is_compute]
    if given is not None:
        order = given.row_of({each.stage for each in row})
    if given is None or not given.lowered:
        order = with_gathering(order, options, *place)
    runs = frozenset(row)
    before: Action | None = None
    found: list[tuple[Action | None, Any]] = []
    for each in reversed(order):
        if each is None:
            continue
        if each.computation_type in (torch_schedules.UNSHARD, torch_schedules.RESHARD):
            found.append((before, each))
        else:
            before = next((part for part in parts_of(each) if part in runs), before)
    return found[::-1]


def _run_as_torch(run: Callable[..., None], context: Any, action: Action) -> None:
    run(torch_action(action), context)

"""record_destinations: the layout of an engine's weights, learnt by a run of its own loader."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ..base import checks
from ..base.boxes import Box, Piece, common, without
from ..base.checks import dtype_name
from ..base.wire import once, pack, text_digest, unpack
from ..errors import Caller, LayoutError, MeshcastError
from ..groups.parent import parent_group, raise_refused, seconds
from ..spec import TensorSpec
from .recorded import (
    Again,
    Constant,
    Landing,
    LandingSource,
    Left,
    Load,
    Located,
    RecordedDestinations,
    Recording,
    bytes_of,
    call_load,
    load_of,
    memory_of,
    strides_of,
    tensors_of,
)
from .recorder import Entry, Fill, Literal, Recorder, RecordingTensor, Storage, Unknown, Unrecordable
from .rows import Rounds
from .state_entries import OP, mismatch
from .state_run import conversation
from .strided import IrregularError, Link, boxes_of

__all__ = ["record_destinations"]

_OP = "record_destinations"
_FINE = 0  # first in a row: the rank has not failed
_BITS = 62  # of a number in a row
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_WIDER = {  # dtypes that hold all values of another
    torch.float16: (torch.float32, torch.float64),
    torch.bfloat16: (torch.float32, torch.float64),
    torch.float32: (torch.float64,),
    torch.float8_e4m3fn: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    torch.float8_e5m2: (torch.float16, torch.bfloat16, torch.float32, torch.float64),
}


def record_destinations(
    model: Any,
    load: Load | None = None,
    names_and_shapes: Any = None,
    *,
    strict: bool = True,
    after: Callable[[], object] | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> RecordedDestinations:
    """Learns where the tensors of a checkpoint go in the memory of a model, by a run of the model's own
    loader that moves no values. The result is given as the destinations of reshard_state_dict, StateResharder
    or WeightSync: values then arrive in the model's parameters, and no layout is written down.

    The loader gets recording tensors. Views of any kind, cat, stack, copies, casts, lists of rows and writes
    into views of parameters are followed, and so are constants, such as zeros of a padding, which are written
    to the model once, by this call. What the loader calculates with values cannot be recorded: see `left` of
    the result. Parameters keep their values otherwise.

    A collective of all ranks of `group`; without a process group, a call of this process alone.

    Args:
        model: a module, or {name: tensor}, whose memory the loader fills on this rank. It may be on the meta
            device where nothing is to arrive. None on ranks that receive nothing, such as those that train.
        load: called with pairs of name and tensor, as an engine's ``load_weights``; a load_state_dict gets a
            mapping. None for `model.load_weights`, or else `model.load_state_dict`. Its memory is that of
            `model`: what it writes elsewhere is not found.
        names_and_shapes: of the whole checkpoint: {name: tensor}, as a state dict of DTensors, or
            {name: (shape, dtype)}. The same on all ranks that give some; None on ranks that learn it.
        strict: refuse parameters that the loader leaves as they are; buffers may stay.
        after: called on this rank each time that values have arrived, as an engine's
            ``process_weights_after_loading``. It may change parameters in place, from what arrives alone;
            `processed` of the result then names them. Parameters that it replaces by tensors of another shape
            or dtype cannot be received again: the next call raises, naming the line. Without `only=`.
        group: whose ranks all call; None for the default group.
        timeout: seconds or timedelta for the whole call; None for the group's.

    Returns:
        RecordedDestinations of this rank.

    Raises:
        LayoutError: the loader failed, as for a name that the checkpoint does not have; it left a
            parameter as it was; it uses nothing of the checkpoint, or an argument is wrong.
        PlanMismatchError: another rank raised that, ranks give other shapes, or a parameter has another
            dtype on another rank. Every rank raises one of these two, and nothing was changed.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``: rows of q and k, fused by the loader::

        class Engine(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.qk = torch.nn.Parameter(torch.zeros(4, 2))

            def load_weights(self, weights):
                for name, tensor in weights:
                    place = self.qk.data.narrow(0, 0 if name == "q" else 2, 2)
                    place.copy_(tensor.chunk(2)[dist.get_rank() - 2])  # ranks 2 and 3 have a half each

        training = DeviceMesh("cpu", [0, 1])
        whole = {"q": torch.ones(4, 2), "k": 2 * torch.ones(4, 2)}
        state = {name: distribute_tensor(x, training, [Shard(1)]) for name, x in whole.items()}
        holds = dist.get_rank() in (0, 1)
        engine = None if holds else Engine()
        recorded = meshcast.record_destinations(engine, names_and_shapes=state if holds else None)
        meshcast.reshard_state_dict(state if holds else None, recorded)
        assert holds or engine.qk[:, 0].tolist() == [1, 1, 2, 2]
    """
    if not (dist.is_available() and dist.is_initialized()):
        if group is not None:
            raise Caller(_OP).error(LayoutError, "group= without a process group: call init_process_group")
        with Caller(_OP):
            entries = _read_names(names_and_shapes)
            if entries is None:
                raise LayoutError("names_and_shapes is needed: the names and shapes of the checkpoint")
            recording = _record(model, load_of(model, load), entries, strict)
            return _ended(recording._replace(skipped=_skipped(recording, [recording])), model, load, after)
    try:
        parent = parent_group(group, _OP)
    except Exception as error:
        raise_refused(error, _OP, (), group, timeout)
    with Caller(_OP, parent.rank):
        begin, limit, wrong = time.monotonic(), parent.timeout, None
        try:
            limit = seconds(timeout, parent.timeout)
        except Exception as error:
            wrong = error
        agreement = _Agreement(Rounds(conversation(parent).rows, begin + limit))
        try:
            return agreement.record(model, load, names_and_shapes, strict, wrong, after)
        except MeshcastError as error:
            if error.op == OP:  # of the rows, which are those of calls that move tensors
                error.args, error.op = (str(error).replace(OP, _OP), *error.args[1:]), _OP
            raise


@once
class _Named(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype


_Names = dict[str, _Named]


class _Agreement:
    """The conversation of the ranks of one call."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds

    def record(
        self,
        model: Any,
        load: Load | None,
        names: Any,
        strict: bool,
        wrong: Exception | None,
        after: Callable[[], object] | None,
    ) -> RecordedDestinations:
        entries = self._agreed_names(names, wrong)
        failure: Exception | None = None
        recording, found = Recording({}, {}, {}, (), (), {}, (), ()), load
        try:
            found = load_of(model, load)
            recording = _record(model, found, entries, strict)
        except Exception as error:
            failure = error
        used = _used(recording)
        order = sorted(entries)
        bits = [
            sum(1 << at for at, name in enumerate(order[begin : begin + _BITS]) if name in used)
            for begin in range(0, len(order), _BITS)
        ]
        rows = self._rounds.gather("recorded", failure, [_FINE, *bits], "could not record its loader")
        together = [0] * len(bits)
        for row in rows.values():
            together = [a | b for a, b in zip(together, row[1:], strict=True)]
        skipped = tuple(name for at, name in enumerate(order) if not together[at // _BITS] >> at % _BITS & 1)
        failure = None
        if len(skipped) == len(order):
            failure = LayoutError("no rank's loader uses anything of the checkpoint")
        self._compare_dtypes(recording, failure)
        if failure is not None:
            raise failure
        made = RecordedDestinations(Recording({}, {}, {}, (), (), {}, (), ()), None, None)
        failure = None
        try:
            made = RecordedDestinations(recording._replace(skipped=skipped), model, found, after)
            made._place_constants()
        except Exception as error:
            failure = error
        what = "could not write the constants of its loader"
        self._rounds.gather("placed", failure, [_FINE], what, last=True)
        return made

    def _agreed_names(self, names: Any, wrong: Exception | None) -> dict[str, Entry]:
        """The names and shapes that the ranks give, together."""
        mine: dict[str, Entry] | None = None
        try:
            if wrong is not None:
                raise wrong
            mine = _read_names(names)
        except Exception as error:
            wrong = error
        text = "" if mine is None else pack({n: _Named(e.shape, e.dtype) for n, e in mine.items()}, _Names)
        row = [_FINE, int(mine is not None), *text_digest(text)]
        rows = self._rounds.gather("names", wrong, row, "refused its arguments")
        given = {rank: (low, high) for rank, (_, holds, low, high) in rows.items() if holds}
        if not given:
            raise LayoutError("names_and_shapes is given on no rank: the names and shapes of the checkpoint")
        texts, _ = self._rounds.texts("names and shapes", lambda: text, given)
        found: dict[str, tuple[int, Entry]] = {}
        for rank in sorted(texts):
            for name, (shape, dtype) in unpack(_Names, texts[rank]).items():
                entry = Entry(name, shape, dtype)
                before, other = found.setdefault(name, (rank, entry))
                if other != entry:
                    raise mismatch(
                        f"names_and_shapes has {name!r} as {dtype_name(other.dtype)} {other.shape} on rank "
                        f"{before}, but as {dtype_name(dtype)} {shape} on rank {rank}"
                    )
        return {name: entry for name, (_, entry) in found.items()}

    def _compare_dtypes(self, recording: Recording, failure: Exception | None) -> None:
        """Raises on all ranks where a parameter has another dtype on another rank."""
        mine = {name: _Named((), each.dtype) for name, each in sorted(recording.landings.items())}
        text = pack(mine, _Names)
        row = [_FINE, *text_digest(text)]
        rows = self._rounds.gather("dtypes", failure, row, "could not record its loader")
        texts, _ = self._rounds.texts(
            "dtypes", lambda: text, {rank: tuple(each) for rank, each in rows.items()}
        )
        found: dict[str, tuple[int, torch.dtype]] = {}
        for rank in sorted(texts):
            for name, (_, dtype) in unpack(_Names, texts[rank]).items():
                before, other = found.setdefault(name, (rank, dtype))
                if other != dtype:
                    raise mismatch(
                        f"the parameter {name!r} is {dtype_name(other)} on rank {before}, but "
                        f"{dtype_name(dtype)} on rank {rank}"
                    )


def _ended(
    recording: Recording, model: Any, load: Load | None, after: Callable[[], object] | None
) -> RecordedDestinations:
    made = RecordedDestinations(recording, model, load_of(model, load), after)
    made._place_constants()
    return made


def _used(recording: Recording) -> set[str]:
    """The entries that the loader of a rank uses."""
    return {*recording.whole(), *(s.entry for each in recording.landings.values() for s in each.sources)}


def _skipped(recording: Recording, all_: Sequence[Recording]) -> tuple[str, ...]:
    used = {name for each in all_ for name in _used(each)}
    if not used:
        raise LayoutError("the loader uses nothing of the checkpoint")
    return tuple(name for name in sorted(recording.entries) if name not in used)


def _read_names(given: Any) -> dict[str, Entry] | None:
    """The entries of a checkpoint as a user gives them. Raises LayoutError."""
    if given is None:
        return None
    pairs = given.items() if isinstance(given, Mapping) else checks.listed("names_and_shapes", given)
    found: dict[str, Entry] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise LayoutError(
                f"names_and_shapes has {checks.shown(pair)}: expected a name and (shape, dtype)"
            )
        name, value = pair
        if isinstance(value, torch.Tensor | TensorSpec):
            shape, dtype = tuple(value.shape), value.dtype
        elif isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[1], torch.dtype | str):
            shape, dtype = checks.shape(value[0]), checks.dtype(value[1])
        elif isinstance(value, tuple | list):
            shape, dtype = checks.shape(value), torch.get_default_dtype()
        else:
            continue  # entries of a state dict that are no tensors
        found[name] = Entry(name, shape, dtype)
    return found


class _Run(NamedTuple):
    """One run of a loader: its recorder, and the tensors that it has put where the model's were."""

    recorder: Recorder
    assigned: dict[str, torch.Tensor]
    stopped: Unknown | None


def _record(model: Any, load: Load | None, entries: Mapping[str, Entry], strict: bool) -> Recording:
    """Raises LayoutError where the loader fails, or strict."""
    if model is None:
        return Recording({}, {}, {}, (), (), {}, (), ())
    tensors = tensors_of(model)
    if load is None:
        raise LayoutError("load is needed: the model has neither load_weights nor load_state_dict")
    stopped: dict[str, Left] = {}
    while True:
        given = [entry for name, entry in entries.items() if name not in stopped]
        run = _dry(model, load, given)
        if run.stopped is None:
            break
        names = [name for name in run.stopped.entries if name not in stopped]
        if not names:
            raise LayoutError(f"the loader cannot be recorded: {run.stopped.reason}, at {run.stopped.where}")
        for name in names:
            stopped[name] = Left(run.stopped.reason, run.stopped.where, (name,))
    found = _Found(model, tensors, run, entries, stopped)
    if strict and not stopped:
        found.check_written()
    while found.whole() and found.leave_more(lambda names: _dry(model, load, [entries[n] for n in names])):
        pass
    return found.recording()


def _dry(model: Any, load: Load, entries: Sequence[Entry]) -> _Run:
    """Runs the loader on recording tensors. Raises LayoutError where it fails."""
    before = tensors_of(model)
    memory, odd = {}, {}
    for name, tensor in before.items():
        x = memory_of(tensor)
        plain = isinstance(x, _PLAIN) and not _dispatches(x) and x.layout is torch.strided
        if plain and x.untyped_storage().nbytes():
            memory[name] = x
        elif not plain:
            odd[name] = x
    recorder = Recorder(memory)
    at: list[Entry] = []

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for entry in entries:
            at[:] = [entry]
            yield entry.name, recorder.tensor(entry, torch.device("cpu"))

    cause = None
    try:
        with recorder.run():
            call_load(load, pairs())
    except Unrecordable as error:
        cause = error.cause
        if not cause.entries and at:
            cause = cause._replace(entries=frozenset([at[0].name]))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)
        own = next((each for each in reversed(last) if "/torch/" not in each.filename), last[-1])
        text = f" at {at[0].name!r}" if at else ""
        raise LayoutError(
            f"the loader failed{text}, in {own.filename}:{own.lineno}: {type(error).__name__}: {error}"
        ) from error
    finally:
        assigned = _put_back(model, before)
    return _Run(recorder, assigned, cause)


def _dispatches(x: torch.Tensor) -> bool:
    return type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _put_back(model: Any, before: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives the model its tensors again. Returns those that were in their place."""
    now = tensors_of(model)
    found = {name: x for name, x in now.items() if x is not before.get(name)}
    for name in found:
        owner, last = model, name
        if isinstance(model, torch.nn.Module):
            path, _, last = name.rpartition(".")
            owner = model.get_submodule(path)
            owner = owner._buffers if last in owner._buffers else owner._parameters
        if name in before:
            owner[last] = before[name]
        else:
            del owner[last]
    return found


class _Found:
    """The links of one run as a recording."""

    def __init__(
        self,
        model: Any,
        tensors: Mapping[str, torch.Tensor],
        run: _Run,
        entries: Mapping[str, Entry],
        stopped: Mapping[str, Left],
    ) -> None:
        self._model, self._tensors, self._run, self._entries = model, tensors, run, entries
        self.left: dict[str, Left] = dict(stopped)
        self._stopped = stopped
        self._located: dict[str, Located] = {}
        self._links: dict[str, list[Link]] = {}
        self._memories: dict[str, Storage] = {}
        self._pieces: dict[str, dict[str, list[tuple[Piece, torch.dtype]]]] = {}
        self._sizes: dict[str, tuple[int, torch.dtype, str]] = {}
        self._find()
        self._spread()

    def whole(self) -> list[str]:
        """The entries that the loader has to get whole."""
        found = {name for left in self.left.values() for name in left.entries} | {*self._stopped}
        return [name for name in self._entries if name in found]

    def leave_more(self, dry: Callable[[Sequence[str]], _Run]) -> bool:
        """Leaves more to the loader where that, given what it has to get alone, writes elsewhere too. Returns
        whether there is more to leave."""
        names = self.whole()
        if len(names) == len(self._entries):
            return False
        try:
            touched = {
                name: "the loader writes it whatever it gets"
                for name, memory in dry(names).recorder.places.items()
                if memory.contents.links or memory.unknown
            }
        except LayoutError as error:
            text = f"the loader takes no part of the checkpoint: {error}"
            touched = dict.fromkeys(self._links, text)
        more = {
            name: text for name, text in touched.items() if self._entries_of(name) and name not in self.left
        }
        for name, text in more.items():
            self.left[name] = Left(text, "", tuple(sorted(self._entries_of(name))))
        self._spread()
        return self.whole() != names

    def recording(self) -> Recording:
        landings, again = self._landings()
        return Recording(
            {name: (entry.shape, entry.dtype) for name, entry in self._entries.items()},
            {n: each for n, each in self._located.items() if each.memory in self._links},
            landings,
            tuple(each for name in landings for each in self._constants(name)),
            again,
            self.left,
            tuple(self._stopped),
            (),
        )

    def check_written(self) -> None:
        """Raises LayoutError where a parameter stays as it is."""
        parameters = self._tensors
        if isinstance(self._model, torch.nn.Module):
            parameters = dict(self._model.named_parameters())
        silent = [name for name, x in parameters.items() if memory_of(x).numel() and self._is_silent(name)]
        if silent:
            shown = ", ".join(map(repr, silent[:5])) + (
                f" and {len(silent) - 5} more" if len(silent) > 5 else ""
            )
            raise LayoutError(
                f"the loader leaves {shown} as they are: the checkpoint has no such name, or the loader does "
                "not find it; pass strict=False where that is meant"
            )

    def _is_silent(self, name: str) -> bool:
        """The loader has written nothing of the checkpoint to it, or put other values in its place."""
        located = self._located.get(name)
        if located is None:
            return name in self._run.assigned
        return located.memory not in self._links

    def _find(self) -> None:
        """The memory of each parameter, and its links."""
        recorder, assigned = self._run.recorder, self._run.assigned
        for name, memory in recorder.places.items():
            if name in assigned:
                continue
            x = memory_of(self._tensors[name])
            assert memory.name is not None
            self._note(name, memory.name, x, memory, assigned=False)
            if memory.name not in self._links and (memory.contents.links or memory.unknown):
                self._keep(memory.name, memory, memory.contents.links)
        made: dict[int, str] = {}
        for name, tensor in assigned.items():
            x = memory_of(tensor)
            if not isinstance(x, RecordingTensor):
                continue
            first = made.setdefault(x._inner.untyped_storage()._cdata, name)
            old = self._tensors.get(name)
            like = memory_of(old) if old is not None else None
            fits = like is not None and not like.is_meta and (like.shape, like.dtype) == (x.shape, x.dtype)
            if isinstance(tensor, DTensor) and not fits:
                raise LayoutError(
                    f"the loader puts a DTensor whose part on this rank is {dtype_name(x.dtype)} "
                    f"{tuple(x.shape)} where the model has {name!r}, which has no such memory; give a model "
                    "that is not on the meta device, with the dtype that the loader makes"
                )
            place = like if fits and like is not None else torch.empty(x.shape, dtype=x.dtype, device="meta")
            memory = Storage(place, x.dtype, name=first)
            device = str(like.device) if like is not None and not like.is_meta else "cpu"
            self._note(name, first, place, memory, assigned=not fits, device=device)
            if first == name:
                links = recorder._read(x._inner, int(place.storage_offset()), _steps(place), x.dtype)
                self._keep(name, memory, links)

    def _note(
        self, name: str, first: str, x: torch.Tensor, memory: Storage, *, assigned: bool, device: str = ""
    ) -> None:
        self._memories.setdefault(first, memory)
        self._sizes.setdefault(first, (memory.numel, memory.dtype, torch.device(device or x.device).type))
        self._located[name] = Located(
            first,
            x.dtype,
            tuple(x.shape),
            x.stride(),
            int(x.storage_offset()),
            assigned,
            device or str(x.device),
        )

    def _keep(self, name: str, memory: Storage, links: Sequence[Link]) -> None:
        """The links of a memory; those that cannot be recorded are noted."""
        self._links[name] = list(links)
        cause = memory.unknown
        pieces: dict[str, list[tuple[Piece, torch.dtype]]] = {}
        for link in links:
            if isinstance(link.source, Unknown):
                cause = cause or link.source
            elif isinstance(link.source, Entry):
                path = _shorter(link.path)
                if len(path) > 2 or (len(path) == 2 and not all(d.is_floating_point for d in path)):
                    text = f"it is cast to {' and '.join(dtype_name(d) for d in path[1:])}"
                    cause = cause or Unknown(text, "", frozenset())
                try:
                    boxes = boxes_of(link, link.source.shape)
                except IrregularError as error:
                    cause = cause or Unknown(str(error), "", frozenset())
                    continue
                pieces.setdefault(link.source.name, []).extend((box, path[-1]) for box in boxes)
        self._pieces[name] = pieces
        if cause is not None:
            entries = self._entries_of(name) | cause.entries
            self.left[name] = Left(cause.reason, cause.where, tuple(sorted(entries)))

    def _entries_of(self, name: str) -> frozenset[str]:
        if name not in self._links:
            return frozenset()
        found = {link.source.name for link in self._links[name] if isinstance(link.source, Entry)}
        for link in self._links[name]:
            if isinstance(link.source, Unknown):
                found |= link.source.entries
        return frozenset(found) | self._memories[name].entries()

    def _spread(self) -> None:
        """Leaves parameters as well that share an entry with one that is left: the loader gets that entry
        again, and writes to both."""
        waiting = [name for left in self.left.values() for name in left.entries]
        users: dict[str, list[str]] = {}
        for name in self._links:
            for entry in self._entries_of(name):
                users.setdefault(entry, []).append(name)
        done: set[str] = set()
        while waiting:
            entry = waiting.pop()
            if entry in done:
                continue
            done.add(entry)
            for name in users.get(entry, ()):
                if name not in self.left:
                    all_ = self._entries_of(name)
                    text = f"{entry!r} goes into it, which the loader has to get whole"
                    self.left[name] = Left(text, "", tuple(sorted(all_)))
                    waiting += all_
        bare = [name for name, left in self.left.items() if not left.entries]
        if bare:
            left = self.left[bare[0]]
            raise LayoutError(
                f"{bare[0]!r} cannot be recorded, and is made of no tensor of the checkpoint: "
                f"{left.reason}, at {left.where}"
            )

    def _landings(self) -> tuple[dict[str, Landing], tuple[Again, ...]]:
        """Returns what arrives in each memory. A part that is wanted twice with one dtype arrives once."""
        landings, again = {}, []
        first: dict[tuple[str, torch.dtype], list[tuple[Box, str, Piece]]] = {}
        for name, pieces in self._pieces.items():
            if name in self.left:
                continue
            numel, dtype, device = self._sizes[name]
            sources = []
            for entry, boxes in pieces.items():
                rows = []
                for piece, kind in boxes:
                    known = first.setdefault((entry, kind), [])
                    fresh, copies = _apart(piece, known)
                    again += [_again(name, to, source, own) for to, source, own in copies]
                    known += [(each[0], name, each) for each in fresh]
                    rows += [_numbers(each) for each in fresh]
                if rows:
                    sources.append(LandingSource(entry, self._entries[entry].shape, tuple(rows)))
            landings[name] = Landing(dtype, numel, device, tuple(sources))
        return landings, tuple(again)

    def _constants(self, name: str) -> list[Constant]:
        found = []
        for link in self._links[name]:
            if isinstance(link.source, Fill):
                values = torch.tensor([link.source.value]).to(link.path[0])
            elif isinstance(link.source, Literal):
                values = link.source.tensor
            else:
                continue
            sizes = tuple(d.size for d in link.dims)
            steps, strides = tuple(d.step for d in link.dims), tuple(d.source for d in link.dims)
            if isinstance(link.source, Literal):  # of a whole storage: only what is used
                values = values.as_strided(sizes, strides, link.origin)
                strides = strides_of(sizes)
            path = tuple(dict.fromkeys(link.path))
            found.append(Constant(name, link.first, sizes, steps, bytes_of(values), 0, strides, path))
        return found


def _steps(place: torch.Tensor) -> list[int]:
    return [step if size > 1 else 0 for size, step in zip(place.shape, place.stride(), strict=True)]


def _shorter(path: Sequence[torch.dtype]) -> tuple[torch.dtype, ...]:
    """The casts without those that change no value: to a dtype that holds all values of the one before."""
    found = list(path)
    at = 1
    while at + 1 < len(found):
        if found[at] in _WIDER.get(found[at - 1], ()):
            del found[at]
            if found[at] == found[at - 1]:
                del found[at]
                at = max(at - 1, 1)
        else:
            at += 1
    return tuple(found)


def _numbers(piece: Piece) -> tuple[int, ...]:
    box, at, _, steps = piece
    sides = (number for (low, high), step in zip(box, steps, strict=True) for number in (low, high, step))
    return (at[0], *sides)


def _apart(
    piece: Piece, known: Sequence[tuple[Box, str, Piece]]
) -> tuple[list[Piece], list[tuple[Piece, str, Piece]]]:
    """The parts of a piece that are not known yet, and those that are: (part, memory that has it, its place
    there)."""
    fresh, copies = [piece], []
    for box, memory, other in known:
        left: list[Piece] = []
        for part in fresh:
            both = common(part[0], box)
            if both is None:
                left.append(part)
                continue
            copies.append((_inside(part, both), memory, _inside(other, both)))
            left += [_inside(part, each) for each in without(part[0], [both])]
        fresh = left
    return fresh, copies


def _inside(piece: Piece, box: Box) -> Piece:
    whole, at, axes, steps = piece
    more = sum((low - own) * step for (low, _), (own, _), step in zip(box, whole, steps, strict=True))
    return box, (at[0] + more,), axes, steps


def _again(name: str, to: Piece, source: str, own: Piece) -> Again:
    sizes = tuple(high - low for low, high in to[0])
    return Again(name, to[1][0], to[3], sizes, source, own[1][0], own[3])

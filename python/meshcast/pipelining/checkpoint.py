"""Checkpoints of a pipeline by torch.distributed.checkpoint, under the names of the whole model: they say
nothing of how the model was cut, nor of the meshes of its stages.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..base.checks import shown
from ..base.values import as_text, restored
from ..errors import AbortedError, Caller, LayoutError

if TYPE_CHECKING:
    from .schedule import PipelineSchedule

__all__ = ["Names", "WholeState", "load", "save"]


Names = Callable[[int, str], str] | None


@dataclass
class WholeState:
    """The modules of this rank's stages as one, and the whole model's name of each of its tensors."""

    container: torch.nn.ModuleDict
    optimizer: torch.optim.Optimizer | None
    whole: dict[str, str]  # by the name in the container; of a parameter with several names, the first
    again: dict[str, str]  # other names of a parameter in the container: the first
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, schedule: PipelineSchedule, optimizer: Any, names: Names) -> WholeState:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise LayoutError(f"optimizer must be a torch.optim.Optimizer, found {shown(optimizer)}")
        stages = schedule._mine
        container = torch.nn.ModuleDict({_key(index): stage.submod for index, stage in stages.items()})
        keys: dict[int, str] = {}  # of shared parameters
        for stage in stages.values():
            keys |= {id(parameter): key for key, parameter in stage.shared.items()}
        parameters = {_clean(n): p for n, p in container.named_parameters(remove_duplicate=False)}
        first: dict[int, str] = {}
        whole: dict[str, str] = {}
        again: dict[str, str] = {}
        taken: dict[str, str] = {}
        for name in get_model_state_dict(container):
            parameter = parameters.get(name)
            if parameter is not None and first.setdefault(id(parameter), name) != name:
                again[name] = first[id(parameter)]
                continue
            key, _, local = name.partition(".")
            index = int(key.removeprefix("stage"))
            if names is not None:
                new = names(index, local)
            else:
                new = keys.get(id(parameter), local)
            other = taken.setdefault(new, name)
            if other != name and keys.get(id(parameters.get(other))) != keys.get(id(parameter), name):
                raise LayoutError(
                    f"{other!r} and {name!r} both have the whole model's name {new!r}; give names= that "
                    "distinguishes them"
                )
            whole[name] = new
        return cls(container, optimizer, whole, again, next(iter(stages.values())).group)

    def state(self) -> dict[str, Any]:
        """Under the whole model's names."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        held = get_model_state_dict(self.container)
        state: dict[str, Any] = {"model": {new: held[name] for name, new in self.whole.items()}}
        if self.optimizer is not None:
            flat = get_optimizer_state_dict(self.container, self.optimizer, options=_flat())
            state["optimizer"] = {self._renamed(key, self.whole): value for key, value in flat.items()}
        return state

    def buffers(self) -> list[str]:
        """The whole model's names of what is in the model's state and no parameter."""
        parameters = {_clean(name) for name, _ in self.container.named_parameters(remove_duplicate=False)}
        return [new for name, new in self.whole.items() if name not in parameters]

    def take(self, state: Mapping[str, Any]) -> None:
        """Loads a state that state() gave and that has been filled since."""
        from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_optimizer_state_dict

        model = {name: state["model"][new] for name, new in self.whole.items()}
        model |= {name: model[first] for name, first in self.again.items()}
        set_model_state_dict(self.container, model)
        if self.optimizer is not None:
            local: dict[str, list[str]] = {}  # copies of a shared parameter have one name
            for name, new in self.whole.items():
                local.setdefault(new, []).append(name)
            found = {}
            for key, value in state["optimizer"].items():
                part, _, rest = key.partition(".")
                new, _, last = rest.rpartition(".")
                for name in local[new]:
                    found[f"{part}.{name}.{last}"] = value
            set_optimizer_state_dict(self.container, self.optimizer, found, options=_flat())

    @staticmethod
    def _renamed(key: str, names: Mapping[str, str]) -> str:
        """ "state.stage0.up.weight.exp_avg" under the whole model's name."""
        part, _, rest = key.partition(".")
        name, _, last = rest.rpartition(".")
        return f"{part}.{names[name]}.{last}"


def _key(stage: int) -> str:
    return f"stage{stage}"


def _clean(name: str) -> str:
    return name.replace("_orig_mod.", "")


def _flat() -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


_PARTIAL = ".partial"  # behind the name of a folder that is being written
_BEFORE = ".before"  # behind that of the one it is to replace, once it is whole
_ABOUT = "pipeline"


def save(
    schedule: PipelineSchedule,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Names = None,
    position: Any = None,
) -> None:
    """Writes the pipeline's state to a folder. A collective of all ranks of the pipeline.

    Args:
        path: of the folder, which all ranks see. It is there once it is whole, and replaces an older one
            then: a rank may die at any moment, and `load` finds the one or the other.
        optimizer: of the parameters of this rank's stages.
        names: ``names(stage, name)`` is the whole model's name of what a stage's module calls `name`. None:
            the same name, and for shared parameters their key.
        position: in the data, and what else goes with it, such as the state of a scheduler: tensors, and
            what `reshard_state_dict` carries to every rank (docs/resharding.md), with their types; that of
            the lowest rank.

    What is written: ``model.<name>``, ``optimizer.state.<name>.<key>``,
    ``optimizer.param_groups.<name>.<key>``, and under ``pipeline`` the number of steps, the state of the
    random generators of the lowest rank, and the position. DTensors are written shard by shard.

    Raises:
        LayoutError: two parameters have one name, or the position cannot be written, which the other ranks
            get as an AbortedError; the folder cannot be written, on all ranks.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        import tempfile

        rank, cpu = dist.get_rank(), torch.device("cpu")
        module = torch.nn.Linear(3, 3)
        schedule = pipelining.ScheduleGPipe(pipelining.PipelineStage(module, rank, 4, cpu), 2)
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)

        def name(stage: int, local: str) -> str:
            return f"layers.{stage}.{local}"

        pipelining.save(schedule, f"{folder[0]}/step-7", names=name, position=7)
        before = module.weight.detach().clone()
        torch.nn.init.zeros_(module.weight)
        assert pipelining.load(schedule, f"{folder[0]}/step-7", names=name) == 7
        assert torch.equal(module.weight, before)
    """
    import torch.distributed.checkpoint as dcp

    final = Path(path)
    partial, before = (final.with_name(final.name + end) for end in (_PARTIAL, _BEFORE))
    with _called("save", schedule, path) as caller:
        view, state, said = _begun(caller, schedule, optimizer, names, position)
        leads = dist.get_rank(view.group) == 0
        if leads:
            # Removes files that a failed rank has left. Others write only after they have learnt of this
            # rank's plan.
            shutil.rmtree(partial, ignore_errors=True)
            about = io.BytesIO()  # in one piece: lists and dicts would be entries of their own
            torch.save({"steps": schedule._steps, "random": _random_state(), "values": said}, about)
            state[_ABOUT] = about.getvalue()
        dcp.save(state, checkpoint_id=partial, process_group=view.group)
    if leads:
        if final.exists():  # else the one before is that of a save which ended between the two renames
            shutil.rmtree(before, ignore_errors=True)
            final.rename(before)
        partial.rename(final)
        shutil.rmtree(before, ignore_errors=True)
    dist.barrier(view.group)


def load(
    schedule: PipelineSchedule,
    path: str | os.PathLike[str],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    names: Names = None,
) -> Any:
    """Continues from what `save` wrote, on any cut, meshes and number of ranks. A collective of all ranks of
    the pipeline.

    Every rank reads its part, in place. All ranks get the state of the random generators of the rank that
    wrote it; under ``seed=`` of a schedule each forward has its own anyway, as the number of steps is read as
    well.

    Args:
        path, optimizer, names: as for `save`.

    Returns:
        The position in the data.

    Raises:
        LayoutError: the folder is none that `save` wrote, or lacks a tensor of this rank's stages. On all
            ranks.
    """
    import torch.distributed.checkpoint as dcp

    found, before = Path(path), Path(f"{path}{_BEFORE}")
    with _called("load", schedule, path) as caller:
        view, state, _ = _begun(caller, schedule, optimizer, names)
        state[_ABOUT] = b""
        if before.exists() and not found.exists():  # a save ended between its two renames
            found = before
        dcp.load(state, checkpoint_id=found, process_group=view.group)
    view.take(state)
    about = torch.load(io.BytesIO(state[_ABOUT]))
    schedule._steps = about["steps"]
    torch.set_rng_state(about["random"]["cpu"])
    if "cuda" in about["random"] and torch.cuda.is_available():
        torch.cuda.set_rng_state(about["random"]["cuda"])
    return about["position"] if "position" in about else restored(about["values"])  # the former up to 0.2.0


def _begun(
    caller: Caller, schedule: PipelineSchedule, optimizer: Any, names: Names, position: Any = None
) -> tuple[WholeState, dict[str, Any], str]:
    """This rank's state, and on the lowest rank the position as text, once all ranks have theirs: collectives
    of torch follow, which no rank can leave. Raises here at once what is wrong here, and AbortedError where
    another rank has raised."""
    board = schedule._board
    topic = f"checkpoint/{board.agreements}"
    try:
        with caller:  # the other ranks get the error with its name
            view = WholeState.of(schedule, optimizer, names)
            state = view.state()
            said = as_text(position, "position") if dist.get_rank(view.group) == 0 else ""
    except Exception as error:
        board.refuse(topic, {"refused": str(error) or type(error).__name__}, _refused, error)
        raise
    answer = board.agree(topic, {}, _refused)
    if answer:
        rank, text = answer["refused"]
        raise AbortedError(text, peer=rank, phase="agree")
    board.forget_past()
    return view, state, said


def _refused(said: Mapping[int, Any]) -> dict[str, Any]:
    """The first rank that refused, and why."""
    found = [[rank, each["refused"]] for rank, each in sorted(said.items()) if "refused" in each]
    return {"refused": found[0]} if found else {}


def _random_state() -> dict[str, torch.Tensor]:
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


@contextmanager
def _called(op: str, schedule: PipelineSchedule, path: str | os.PathLike[str]) -> Iterator[Caller]:
    """Names the call in its errors, and makes a LayoutError of the error of torch.distributed.checkpoint,
    which all ranks raise."""
    from torch.distributed.checkpoint.api import CheckpointException

    with Caller(op, schedule._board.rank) as caller:
        try:
            yield caller
        except CheckpointException as error:
            rank, failure = min(error.failures.items(), key=lambda each: each[0])
            raise LayoutError(f"{path}: rank {rank}: {failure[0]}") from error

"""The state of this rank's stages under the names of the whole model, which say nothing of how it is cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshcast.base.checks import shown
from meshcast.errors import LayoutError

if TYPE_CHECKING:
    from meshcast.pipelining.schedule import PipelineSchedule

__all__ = ["Names", "WholeState"]

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
                    "tells them apart"
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

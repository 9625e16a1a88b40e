"""torchtitan with the pipelines of meshcast.

- torchtitan 0.2: ``--experimental.custom_import=meshcast.integrations.torchtitan``
- torchtitan 0.3: ``--override.imports=meshcast.integrations.torchtitan.pipelines``

Importing this module is all. Stages and schedules that torchtitan makes from then on are those of
meshcast.pipelining, and ``--parallelism.pipeline_parallel_schedule`` takes its schedules too, such as
Eager1F1B, ZBH1 or auto. It changes names in torchtitan's modules, and nothing in torch.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

__all__: list[str] = []

_THEIRS, _OURS = "torch.distributed.pipelining", "meshcast.pipelining"
_PLACES = (
    "torchtitan.distributed.pipeline_parallel",
    "torchtitan.distributed.dual_pipe_v",
)  # the latter: 0.2


def _exchange(module: ModuleType) -> None:
    """Replaces what the module has imported of torch's pipelining by what has its name and place here."""
    for name, value in list(vars(module).items()):
        home = str(getattr(value, "__module__", None) or type(value).__module__)
        if home == _THEIRS or home.startswith(_THEIRS + "."):
            ours = importlib.import_module(_OURS + home.removeprefix(_THEIRS))
            setattr(module, name, getattr(ours, name))


for _place in _PLACES:
    if find_spec(_place):
        _exchange(importlib.import_module(_place))

if find_spec("torchtitan.config.override"):  # since 0.3, where a command line names a function, not a module
    from torchtitan.config.override import override
    from torchtitan.tools.profiler import Profiler

    @override(target=Profiler.Config, description="pipelines of meshcast")
    def pipelines(config: Any) -> Any:
        """Leaves the configuration as it is: torchtitan imports this module to find it, that is all."""
        return config

    __all__ += ["pipelines"]

"""torch.distributed.pipelining.microbatch under the same name here: all of it is torch's."""

from __future__ import annotations

from meshcast.pipelining.compat import names_of_torch

__getattr__, __dir__ = names_of_torch("microbatch", globals())

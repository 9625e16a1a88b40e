"""More programs that run under torch.distributed.pipelining and meshcast.pipelining, in another world."""

from __future__ import annotations

from multiproc.torch_more_programs import MORE

CASES = MORE
GROUP_TIMEOUT = 20.0  # seconds
CASE_LIMIT = 60.0

"""What is moved: the mesh-to-mesh cases of arXiv 2211.05322 (section 5.1.2), scaled to the emulated links.

Case 8 is left out: it is the same as case 7 in the paper's published code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One reshard between a source and a destination mesh of `ranks_per_host` ranks per host."""

    name: str
    shape: tuple[int, ...]  # of the paper, int32
    src: str
    dst: str
    hosts: int

    def scaled(self, factor: int) -> tuple[int, ...]:
        """The shape with its last dimension cut by `factor`, to 4 elements at least."""
        return (*self.shape[:-1], max(self.shape[-1] // factor, 4))


RANKS_PER_HOST = 4

CASES = [
    Case("1", (1024, 1024, 512), "2x4:S0RR", "2x4@8:S0RR", 4),
    Case("2", (1024, 1024, 512), "2x4:RRR", "2x4@8:S0RR", 4),
    Case("3", (1024, 1024, 512), "2x4:RS0R", "2x4@8:S0RR", 4),
    Case("4", (1024, 1024, 512), "2x4:RS01R", "2x4@8:S01RR", 4),
    Case("5", (1024, 1024, 512), "2x4:S1RR", "2x4@8:S0RR", 4),
    Case("6", (3072, 1024, 170), "2x4:S0RR", "3x4@8:S0RR", 5),
    Case("7", (1024, 1024, 512), "1x4:S1RR", "2x4@4:RRR", 3),
    Case("9", (1024, 1024, 512), "2x4:RS0R", "2x4@8:RRS0", 4),
]

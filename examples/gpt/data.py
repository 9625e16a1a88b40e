"""Byte-level text: the sources of Python's standard library, which every machine has, or text of yours.

The samples of a step depend on (seed, step) alone: every layout, and a run that resumes, sees the same data.
"""

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from training.layout import ConfigError
from training.rng import generator_for

TEXT_SUFFIXES = frozenset({".py", ".txt", ".md", ".rst"})
HELD_OUT = 20  # the last 1/20 of the text is for evaluation
# Third-party code and tests differ between machines; the rest of one Python version's library does not.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


def read_text(path: str | None) -> Tensor:
    """All bytes of the text as one uint8 tensor; None: the standard library. ConfigError if there is none."""
    root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(_text_files(root, SKIPPED_FOLDERS if path is None else frozenset()))
    else:
        raise ConfigError(f"--data {root}: no such file or folder")
    text = b"\n".join(file.read_bytes() for file in files)
    if not text:
        raise ConfigError(f"--data {root}: no text in it (looked for {', '.join(sorted(TEXT_SUFFIXES))})")
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _text_files(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]  # prunes the walk
        yield from (Path(folder, name) for name in names if Path(name).suffix in TEXT_SUFFIXES)


class TextSamples:
    """Random windows of text as ((inputs,), targets): int64 (batch, seq_len), targets one byte ahead."""

    def __init__(self, text: Tensor, seq_len: int, seed: int) -> None:
        cut = len(text) - len(text) // HELD_OUT
        self.train_text, self.held_out_text = text[:cut], text[cut:]
        self.seq_len = seq_len
        self.seed = seed
        if len(self.held_out_text) <= seq_len:
            raise ConfigError(
                f"--data: {len(text)} bytes of text are too few for --seq-len {seq_len}; "
                f"use at least {HELD_OUT * (seq_len + 2)} bytes"
            )

    def train(self, step: int, batch: int) -> tuple[tuple[Tensor], Tensor]:
        return self._draw(self.train_text, batch, "train", step)

    def held_out(self, index: int, batch: int) -> tuple[tuple[Tensor], Tensor]:
        return self._draw(self.held_out_text, batch, "held out", index)

    def _draw(self, text: Tensor, batch: int, split: str, index: int) -> tuple[tuple[Tensor], Tensor]:
        generator = generator_for(self.seed, split, index)
        starts = torch.randint(0, len(text) - self.seq_len, (batch,), generator=generator)
        windows = text[starts[:, None] + torch.arange(self.seq_len + 1)].long()
        return (windows[:, :-1].contiguous(),), windows[:, 1:].contiguous()

"""The examples of docs/resharding.md, in four processes, in the order of the page."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "resharding.md"
_names: dict = {}


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def _running(index: int, text: str):
    def case(context) -> None:
        assert context.world == 4
        exec(compile(text, f"{PAGE.name}, block {index}", "exec"), _names)

    case.__name__ = f"block_{index}"
    return case


CASES = [_running(index, text) for index, text in enumerate(blocks())]

"""Plans, schedules, recorded steps and flight records as pages that open from a file, without a network.

A page is `page.html` with the style, the scripts and the data in it. This package makes the data; the
scripts, which lie here as files of their own, draw it.
"""

from __future__ import annotations

__all__: list[str] = []

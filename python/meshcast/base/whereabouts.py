"""The place where the user's program is: the line of it that made a call, that its main thread has come to,
or that an exception left."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType, TracebackType
from typing import TypeAlias

__all__ = ["Site", "call_site", "main_thread_site", "raised_site", "site_text"]

# A frame itself would keep the values of its variables alive, tensors among them.
Site: TypeAlias = tuple[CodeType, int]
_OURS = ("meshcast", "torch", "threading")  # whose frames are passed by; the last begins every thread
_files: dict[str, bool] = {}  # whether a file is of these: each call asks


def call_site() -> Site | None:
    """The innermost line outside of meshcast and torch in this thread; None in a thread without one."""
    return _users(sys._getframe(1))


def main_thread_site() -> Site | None:
    """The same of the main thread, from any other one."""
    return _users(sys._current_frames().get(threading.main_thread().ident or 0))


def raised_site(traceback: TracebackType | None) -> Site | None:
    """The innermost such line that an exception has passed."""
    found: Site | None = None
    while traceback is not None:
        frame = traceback.tb_frame
        if not _is_ours(frame):
            found = frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next
    return found


def site_text(site: Site | None) -> str | None:
    """FILE:LINE in FUNCTION, as one line."""
    if site is None:
        return None
    code, line = site
    return f"{code.co_filename}:{line} in {code.co_name}"


def _users(frame: FrameType | None) -> Site | None:
    while frame is not None:
        ours = _files.get(frame.f_code.co_filename)
        if not (_is_ours(frame) if ours is None else ours):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def _is_ours(frame: FrameType) -> bool:
    name, file = frame.f_globals.get("__name__"), frame.f_code.co_filename
    ours = isinstance(name, str) and name.partition(".")[0] in _OURS
    if not file.startswith("<"):  # code that was made at run time is anybody's
        _files[file] = ours
    return ours

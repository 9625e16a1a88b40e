"""UCX alone: the library that meshcast loads, and ucp_messages.c built with it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from meshcast.errors import MeshcastError
from meshcast.groups.network import library

from ..peers.launch import compiled

__all__ = ["missing", "origin", "program"]

_SOURCE = Path(__file__).with_name("ucp_messages.c")
_COMPILER = "cc"


def missing() -> str:
    """The reason why it cannot be measured; "" if it can."""
    if shutil.which(_COMPILER) is None:
        return f"there is no C compiler, `{_COMPILER}`"
    if _headers() is None:
        return "the headers of UCX were not found: pip install -r requirements-build.txt, or set UCX_ROOT"
    try:
        library()
    except MeshcastError as error:
        return str(error)
    return ""


def _headers() -> Path | None:
    package = importlib.util.find_spec("libucx")
    places = [Path(os.environ["UCX_ROOT"])] if "UCX_ROOT" in os.environ else []
    places += [Path(each) for each in (package.submodule_search_locations or ())] if package else []
    found = [place / "include" for place in (*places, Path("/usr"))]
    return next((each for each in found if (each / "ucp/api/ucp.h").is_file()), None)


def program() -> Path:
    """Built where that has not been done. Raises RuntimeError where it does not compile."""
    ucp = Path(library())
    linked = [str(ucp), str(ucp.with_name("libucs.so.0")), f"-Wl,-rpath,{ucp.parent}"]
    if not ucp.is_absolute():  # the system's
        linked = ["-l:libucp.so.0", "-l:libucs.so.0"]
    return compiled([_COMPILER, f"-I{_headers()}"], _SOURCE, linked)


def origin() -> str:
    """Where the library comes from."""
    return "the wheel" if Path(library()).is_absolute() else "the system"

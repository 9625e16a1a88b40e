"""The site, which `make docs` builds from the Markdown and the docstrings of the tree.

The source folder is the whole tree: a link from one file to another is the same here as on a forge.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT / "python"), str(HERE / "_ext")]

import meshcast  # noqa: E402

project = "meshcast"
author = "The meshcast developers"
copyright = author  # noqa: A001
version = release = meshcast.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "meshcast_site",
]
root_doc = "docs/index"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**.md",
    "docs/tutorials/*.ipynb",
    "examples/*/README.md",
    "benchmarks/results/README.md",
]
# Folders that are not even looked into.
exclude_patterns = sorted(
    each.name
    for each in ROOT.iterdir()
    if each.is_dir() and each.name not in ("docs", "examples", "benchmarks")
)

myst_heading_anchors = 4
# Notebooks have what they printed: tests/multiproc/test_tutorials.py runs them.
nb_execution_mode = "off"
highlight_language = "none"

# Single backticks in docstrings name something of meshcast, where there is such a thing.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "mixed"
# Packages that a plug-in is for: each user has one of them.
autodoc_mock_imports = ["accelerate", "megatron", "ray", "torchft", "torchtitan", "verl", "vllm"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = f"meshcast {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["from_files.js"]
html_copy_source = False
html_show_sphinx = False

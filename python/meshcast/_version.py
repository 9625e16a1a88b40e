"""The version, in one place: setup.py, CMake and `meshcast.__version__` all read it from here."""

__version__ = "0.2.0"

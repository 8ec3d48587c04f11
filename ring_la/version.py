"""The version: that of the git tag the package was built from, as its metadata say."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

UNKNOWN = "0.0.0+unknown"
"""The version of a source tree that is imported as it lies, where nothing is installed."""


def installed() -> str:
    """The version of the installed package, or `UNKNOWN`."""
    try:
        return version("ring_la")
    except PackageNotFoundError:
        return UNKNOWN

# SPDX-License-Identifier: Apache-2.0
"""A pool of KV-cache objects in the memory of many processes and hosts, on top of te."""


def __getattr__(name: str) -> str:
    """``__version__``, which is looked up when somebody asks."""
    if name == "__version__":
        from te.version import version

        return version()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

# SPDX-License-Identifier: Apache-2.0
"""Network namespaces (network_namespaces(7)) of this process: to make and to enter them, and the
tools that configure their devices.

A namespace goes with the last process and descriptor of it, and its devices with it, so nothing has
to be undone.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cpu_serving.processes import ServingError

__all__ = ["NoNetwork", "enter_new_namespace", "inside", "need_programs", "run_tool"]

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class NoNetwork(Exception):
    """This machine or user cannot have it; the message says why and what would help."""


def need_programs() -> None:
    """Raises NoNetwork unless the tools are there."""
    for program in ("ip", "tc", "nsenter"):
        if shutil.which(program) is None:
            raise NoNetwork(f"{program} is missing: apt-get install iproute2 util-linux")


def enter_new_namespace(command: str) -> int:
    """Moves the calling thread into a new namespace, and returns a descriptor of it. Raises
    NoNetwork, which says how `command` would be allowed to."""
    if _libc.unshare(_CLONE_NEWNET):
        reason = os.strerror(ctypes.get_errno())
        raise NoNetwork(
            f"no network namespace can be made here ({reason}): run it as root, or as"
            f" unshare --user --map-root-user --net {command}"
        )
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


@contextmanager
def inside(namespace: int, otherwise: int) -> Iterator[None]:
    """Sockets that the calling thread makes, and processes that it starts, are in `namespace`;
    afterwards the thread is in the other one."""
    _enter(namespace)
    try:
        yield
    finally:
        _enter(otherwise)


def run_tool(argv: Sequence[str], namespace: int | None = None) -> str:
    """What a program prints; in `namespace`, or where the calling thread is. Raises
    ServingError."""
    if namespace is not None:
        argv = ("nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}", *argv)
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ServingError(f"{' '.join(argv)}: {done.stderr.strip()}")
    return done.stdout


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")

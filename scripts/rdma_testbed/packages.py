# SPDX-License-Identifier: Apache-2.0
"""Debian packages: installed when this process may, named in the error when it may not."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from rdma_testbed.errors import SetupError

__all__ = ["PEER_FILES", "PROGRAMS", "ensure_files", "ensure_programs", "say"]

#: Program → the package that brings it; what the testbed itself starts.
PROGRAMS = {"busybox": "busybox-static", "rdma": "iproute2", "ip": "iproute2"}

#: What programs inside want of verbs: the libraries that ``te`` opens, and an independent peer.
PEER_FILES = {
    "/usr/lib/*/libibverbs.so.1": "libibverbs1",
    "/usr/lib/*/libibverbs/librxe-rdmav*.so": "ibverbs-providers",
    "/usr/lib/*/librdmacm.so.1": "librdmacm1",
    "/usr/lib/python3/dist-packages/pyverbs": "python3-pyverbs",
}

LOCK_TIMEOUT_S = 300


def say(text: str) -> None:
    """A line of progress, on stderr: stdout belongs to the command."""
    os.write(2, f"rdma-testbed: {text}\n".encode())


def ensure_programs(programs: Mapping[str, str], purpose: str) -> None:
    """Raises ``SetupError`` when a program is missing and cannot be installed."""
    _ensure({package for name, package in programs.items() if not shutil.which(name)}, purpose)


def ensure_files(files: Mapping[str, str], purpose: str) -> None:
    """The same for files, each given as a pattern below /."""
    missing = (
        package for name, package in files.items() if not any(Path("/").glob(name.lstrip("/")))
    )
    _ensure(set(missing), purpose)


def _ensure(packages: Iterable[str], purpose: str) -> None:
    names = sorted(packages)
    if not names:
        return
    command = f"apt-get install {' '.join(names)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SetupError(f"{purpose} needs packages that are not here; run: {command}")
    say(f"{command} ({purpose})")
    install = ["install", "-q", "-y", "--no-install-recommends", *names]
    try:
        _apt(install, command)
    except SetupError:
        # The package lists of an image are as old as the image.
        _apt(["update", "-q"], "apt-get update")
        _apt(install, command)


def _apt(arguments: list[str], what: str) -> None:
    done = subprocess.run(
        ["apt-get", "-o", f"DPkg::Lock::Timeout={LOCK_TIMEOUT_S}", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise SetupError(f"{what} failed with code {done.returncode}:\n{tail}")

# SPDX-License-Identifier: Apache-2.0
"""A rank that holds its lease in a process of its own, for tests that kill or freeze it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import bootstrap_server
from bootstrap_server import RankRecord, RankStatus

__all__ = ["rank_process"]

_RANK = """
import functools, sys
from bootstrap_server import *
import msgspec
record = msgspec.json.decode(sys.argv[2], type=RankRecord)
status = msgspec.json.decode(sys.argv[3], type=RankStatus | None)
client = functools.partial(BootstrapClient, role=sys.argv[4])
lease = RankLease(sys.argv[1], record, status=lambda: status, make_client=client)
if status is not None:
    lease.renew()
print("registered", flush=True)
sys.stdin.read()
"""


@contextmanager
def rank_process(
    where: str,
    record: RankRecord,
    status: RankStatus | None = None,
    role: str = "prefill",
    listener: socket.socket | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Registered at `where` when this returns; the process is killed at the end. From then on it
    alone has the `listener`."""
    arguments = [msgspec.json.encode(one).decode() for one in (record, status)]
    process = subprocess.Popen(
        [sys.executable, "-c", _RANK, where, *arguments, role],
        cwd=Path(bootstrap_server.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        pass_fds=() if listener is None else (listener.fileno(),),
    )
    if listener is not None:
        listener.close()
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "registered\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)

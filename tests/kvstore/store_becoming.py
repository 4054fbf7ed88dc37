# SPDX-License-Identifier: Apache-2.0
"""A client of a host's owner that becomes another program, while a child asks on over its line.

python store_becoming.py PATH-OF-THE-OWNER'S-SOCKET
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np
from store_makers import SIG, TIMEOUT_S, keys, until

from kvstore.protocol.calling import Line
from kvstore.protocol.messages import CALL_BYTES_MAX, Fetch, decode_answer, encode

ADDR_NO_RANDOMIZE = 0x0040000
OTHER = [sys.executable, "-c", "import time; time.sleep(60)"]


def main() -> None:
    libc = ctypes.CDLL(None)
    if not libc.personality(0xFFFFFFFF) & ADDR_NO_RANDOMIZE:
        libc.personality(ADDR_NO_RANDOMIZE)
        os.execv(sys.executable, [sys.executable, *sys.argv])
    program = os.path.realpath(sys.executable)
    maps = Path("/proc/self/maps").read_text().splitlines()
    base = next(int(one.split("-")[0], 16) for one in maps if program in one)
    line = Line(sys.argv[1], "owner", TIMEOUT_S, lambda _: None)
    print(line.hello.reads, flush=True)  # noqa: T201
    kept, client = os.dup(line._socket.fileno()), os.getpid()
    if os.fork():
        os.execv(sys.executable, OTHER)
    until(lambda: b"time.sleep" in Path(f"/proc/{client}/cmdline").read_bytes())
    time.sleep(0.2)  # Its program is there.
    with Path(f"/proc/{client}/mem").open("rb", buffering=0) as memory:
        memory.seek(base)
        assert memory.read(4) == b"\x7fELF", "there is something to read"
    np.frombuffer(line.tray.memory, "<u8", 2)[:] = base, 4096
    asking = socket.socket(fileno=kept)
    asking.settimeout(TIMEOUT_S)
    asking.send(encode(Fetch(keys(1).tobytes(), SIG, 4096, 1)))
    print(type(decode_answer(asking.recv(CALL_BYTES_MAX))).__name__, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

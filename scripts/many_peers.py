# SPDX-License-Identifier: Apache-2.0
"""What many peers cost an engine: to connect to each, memory, and its processor while all idle.

The peers are engines of another process on this host. Prints one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from command_line import Parser

if __name__ == "__main__":  # before the packages that only .venv has are imported
    PARSER = Parser(".venv/bin/python scripts/many_peers.py", __doc__)
    PARSER.add_argument("--peers", type=int, default=400, metavar="N", help="(400)")
    PARSER.add_argument("--transport", default="tcp", help="tcp (default), samehost or rdma")
    PARSER.add_argument("--idle", type=float, default=10.0, metavar="S", help="(10)")
    PARSER.add_argument("--be-peers", action="store_true", help="internal: to be the peers")
    OPTIONS = PARSER.parse_args()

import te

TIMEOUT_S = 60.0
#: From the last connection to what counts as idle.
SETTLE_S = 1.0


def config_of(transport: str, workers: int) -> te.Config:
    """Of the engine that is measured, and of its peers."""
    return te.Config(
        transports=(transport,), workers=workers, status_dir=None, connect_timeout_s=TIMEOUT_S
    )


def be_peers(transport: str, count: int) -> None:
    """Until standard input ends; a card in each line."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            one = stack.enter_context(te.Engine(config_of(transport, 1)))
            print(one.card().hex(), flush=True)
        sys.stdin.read()


def memory_mb() -> float:
    """Resident, of this process."""
    found = re.search(r"VmRSS:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def wakeups() -> int:
    """How often its threads have slept so far."""
    each = [one.read_text() for one in Path("/proc/self/task").glob("*/status")]
    return sum(int(re.findall(r"\nvoluntary_ctxt_switches:\s+(\d+)", one)[0]) for one in each)


def measure(transport: str, cards: list[bytes], idle_s: float) -> dict[str, object]:
    """Connects to all, and looks what that costs."""
    with te.Engine(config_of(transport, 2)) as engine:
        engine.connect(cards[0])  # loads what all of them use
        before_mb, connect_s, cpu_s = memory_mb(), list[float](), time.process_time()
        for card in cards[1:]:
            begun_s = time.perf_counter()
            engine.connect(card)
            connect_s.append(time.perf_counter() - begun_s)
        after_mb, connect_cpu_s = memory_mb(), time.process_time() - cpu_s
        time.sleep(SETTLE_S)
        cpu_s, slept, begun_s = time.process_time(), wakeups(), time.perf_counter()
        time.sleep(idle_s)
        over_s = time.perf_counter() - begun_s
        used, woken = time.process_time() - cpu_s, wakeups() - slept
    return {
        "peers": len(cards),
        "transport": transport,
        "connect, ms, mean": round(1e3 * sum(connect_s) / len(connect_s), 3),
        "connect, ms, median": round(1e3 * sorted(connect_s)[len(connect_s) // 2], 3),
        "connect, ms of this process's processor, mean": round(
            1e3 * connect_cpu_s / len(connect_s), 3
        ),
        "memory, MB": round(after_mb - before_mb, 1),
        "processor while idle, %": round(100 * used / over_s, 3),
        "wake-ups while idle, 1/s": round(woken / over_s, 1),
    }


def main() -> None:
    """As the command line says."""
    if OPTIONS.be_peers:
        be_peers(OPTIONS.transport, OPTIONS.peers)
        return
    command = [sys.executable, __file__, "--be-peers", "--peers", str(OPTIONS.peers)]
    with subprocess.Popen(
        [*command, "--transport", OPTIONS.transport],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as them:
        assert them.stdin is not None
        assert them.stdout is not None
        cards = [bytes.fromhex(them.stdout.readline()) for _ in range(OPTIONS.peers)]
        print(json.dumps(measure(OPTIONS.transport, cards, OPTIONS.idle), indent=1))
        them.stdin.close()


if __name__ == "__main__":
    main()

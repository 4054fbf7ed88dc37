# SPDX-License-Identifier: Apache-2.0
"""``scripts/rdma-testbed``: a command under a kernel with soft RDMA devices."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from command_line import Parser

from rdma_testbed.boot import KERNEL_FAILED, allow_many_mappings, boot
from rdma_testbed.errors import SetupError
from rdma_testbed.guest import DRIVERS, Guest, exit_code, write_files
from rdma_testbed.kernel import ensure_kernel
from rdma_testbed.packages import PEER_FILES, PROGRAMS, ensure_files, ensure_programs, say
from rdma_testbed.processor import own_processor

__all__ = ["main"]

DESCRIPTION = """\
Runs COMMAND on real RDMA verbs, on a Linux host without an RDMA card.

Starts a user-mode Linux (a kernel that is an ordinary process: no KVM, about a second) with the
host's files under a throw-away layer and the current directory shared read-write. Inside there are
N network interfaces joined by a switch, veth0 = 10.77.0.1/24, veth1 = 10.77.0.2/24 ..., each with a
soft RDMA device: rxe0, rxe1 ... (RoCE) or siw0, siw1 ... (iWARP). COMMAND runs as root in the same
directory and environment, without standard input, and finds RDMA_TESTBED=1 there. stdout, stderr
and the exit code are COMMAND's own; whatever it started ends with it.

The first run builds the kernel (six CPU-minutes) and keeps it in $XDG_CACHE_HOME, by default
~/.cache. Missing Debian packages are installed if you are root, and named if you are not.
"""

EPILOG = """\
exit codes of its own: 2 wrong arguments, 124 --timeout is over, 125 the kernel or the set-up failed

faults, by name, from inside:
  ip link set veth1 down            the NIC's own link is gone (its queue pairs flush at once)
  ip link set port1 down            the switch's port is gone (the NIC still thinks it has a link)
  tc qdisc add dev veth1 root netem loss 10%                       ... del dev veth1 root: undone
  tc qdisc add dev veth1 root tbf rate 100mbit burst 64kb latency 50ms
  ip link add br1 type bridge; ip link set br1 mtu 9000 up; ip link set port1 master br1
                                    the NIC is in another network (rail-only fabrics)

It is no sandbox: COMMAND could mount the host's files with the rights of the user who runs it.
"""


def main(arguments: Sequence[str]) -> int:
    """The exit code of the testbed."""
    parsed = _parse(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    try:
        kernel = ensure_kernel()
        if parsed.build:
            print(kernel)
            return 0
        return _run(kernel, parsed)
    except SetupError as error:
        say(str(error))
        return KERNEL_FAILED
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        "scripts/rdma-testbed",
        DESCRIPTION,
        usage="scripts/rdma-testbed [options] -- COMMAND...",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nics", type=int, default=2, metavar="N", help="devices, 1 to 16 (2)")
    parser.add_argument("--driver", choices=DRIVERS, default="rxe", help="RoCE or iWARP (rxe)")
    parser.add_argument("--memory", type=int, default=4, metavar="G", help="guest's GiB (4)")
    parser.add_argument(
        "--timeout", type=float, default=0, metavar="S", help="seconds after which all is killed"
    )
    parser.add_argument("--build", action="store_true", help="build the kernel, print its path")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.command[:1] == ["--"]:
        parsed.command = parsed.command[1:]
    if not 1 <= parsed.nics <= 16:
        parser.error(f"--nics {parsed.nics}: between 1 and 16")
    if parsed.memory < 1:
        parser.error(f"--memory {parsed.memory}: at least 1 GiB")
    if not parsed.command and not parsed.build:
        parser.error("no command; usage: scripts/rdma-testbed [options] -- COMMAND...")
    return parsed


def _run(kernel: Path, parsed: argparse.Namespace) -> int:
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    ensure_programs(PROGRAMS, "the testbed")
    ensure_files(PEER_FILES, "verbs inside the testbed")
    allow_many_mappings()
    # Mode 0700: the environment is in there.
    with tempfile.TemporaryDirectory(prefix="rdma-testbed.", ignore_cleanup_errors=True) as name:
        files = Path(name)
        guest = Guest(parsed.nics, parsed.driver, parsed.command, Path.cwd())
        busybox = shutil.which("busybox")
        assert busybox is not None, "ensure_programs has seen it"
        write_files(files, guest, os.environ, busybox)
        with own_processor(kernel.parent) as processor:
            stopped = boot(kernel, files, parsed.memory, parsed.timeout, processor)
        code = exit_code(files) if stopped is None else stopped
        if code is None:
            say(f"the kernel ended without an exit code:\n{(files / 'console').read_text()}")
            return KERNEL_FAILED
        return code


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)

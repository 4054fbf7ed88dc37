# SPDX-License-Identifier: Apache-2.0
"""Starts the owner of a host as a process of its own: nothing ties it to the one that starts it, so
that it stays when that one ends, or is killed with all its children."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from kvstore.config import Config
from kvstore.host import agreement
from kvstore.host.place import Lock

__all__ = ["STARTED", "Starting"]

REPORT_BYTES_MAX: Final = 16 << 10
FORK_TIMEOUT_S: Final = 30.0
STARTED: Final = b"started\n"
"""What a process reports last that has started; else its report is why it could not."""

_CODE: Final = """\
import os, sys
if os.fork():
    os._exit(0)
root = sys.argv[1]
if root not in sys.path:
    sys.path.insert(0, root)
from kvstore.serving import main_of_started
sys.exit(main_of_started(int(sys.argv[2])))
"""
"""The process is nobody's child: servers kill their children and those of these."""

_ROOT: Final = str(Path(__file__).resolve().parents[2])
"""Where the package is: the new interpreter may look for it elsewhere."""


class Starting:
    """A process that has been started, until it has reported."""

    def __init__(self, config: Config, lock: Lock) -> None:
        """Starts it, and gives it the lock; returns once nothing ties it to this process any more
        (20 ms). ``OSError`` if it cannot be started."""
        self._report = bytearray()
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        self._fd = read_fd
        os.set_blocking(read_fd, False)
        try:
            command = [sys.executable, "-c", _CODE, _ROOT, str(lock.fd), str(config.directory)]
            with subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=write_fd,
                stderr=write_fd,
                cwd="/",
                start_new_session=True,
                pass_fds=[lock.fd],
            ) as process:
                try:
                    process.communicate(agreement.to_bytes(config), FORK_TIMEOUT_S)
                except subprocess.TimeoutExpired as exc:
                    process.kill()
                    raise OSError(errno.ETIMEDOUT, "the new process does not begin") from exc
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)

    def failure(self) -> str | None:
        """Why it has ended before it could be joined; empty if it could, and has ended since; None
        as long as it has not reported. Does not wait."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._fd, REPORT_BYTES_MAX):
                self._report += chunk[: REPORT_BYTES_MAX - len(self._report)]
            text = self._report.decode(errors="replace")
            if self._report.endswith(STARTED):
                return ""
            return text.strip() or "the owner of this host's store has ended without a word"
        return None

    def close(self) -> None:
        """Its report is not waited for any more."""
        os.close(self._fd)

# SPDX-License-Identifier: Apache-2.0
"""Runs `sglang-mooncake explain` on another host, or in another container, by a command that the
operator already uses to run programs there, such as `ssh HOST`. Ranks answer their own user alone,
so no rank has to listen to a network for this."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from sglang_mooncake.explain.questions import RankStories

__all__ = ["ANSWER_BYTES_MAX", "ANSWER_TIMEOUT_S", "EXIT_UNKNOWN", "NotTold", "ask_there"]

#: The command's exit status where no rank knows the request: an answer, too.
EXIT_UNKNOWN: Final = 1
ANSWER_TIMEOUT_S: Final = 30.0
ANSWER_BYTES_MAX: Final = 64 << 20
_PROGRAM: Final = "sglang-mooncake"
#: The reason comes last.
_ERRORS_BYTES: Final = 4096
_EXCERPT_CHARS: Final = 300


class NotTold(Exception):
    """The ranks there could not be asked. The sentence says why."""


def ask_there(
    command: str, arguments: Sequence[str], timeout_s: float = ANSWER_TIMEOUT_S
) -> list[RankStories]:
    """What `sglang-mooncake explain ARGUMENTS --json` prints where `command` runs it; nothing if no
    rank there knows such a request.

    Args:
        command: words as in a shell. The program is added, unless it is the last word.

    Raises:
        NotTold: the command cannot be run, fails, takes too long, or prints something else.
    """
    argv = _argv(command, arguments)
    with tempfile.TemporaryFile() as errors:
        status, out = _run(argv, errors, timeout_s)
        errors.seek(max(0, errors.seek(0, os.SEEK_END) - _ERRORS_BYTES))
        said = " ".join(errors.read().decode(errors="replace").split())
    if status is None:
        raise NotTold(f"{shlex.join(argv)} did not end within {timeout_s:g} s")
    if len(out) > ANSWER_BYTES_MAX:
        raise NotTold(f"{shlex.join(argv)} printed more than {ANSWER_BYTES_MAX} bytes")
    if status == EXIT_UNKNOWN and f"{_PROGRAM} explain: " in said:  # ssh may say something before.
        return []
    if status != 0:
        reason = said[-_EXCERPT_CHARS:] or "no reason"
        raise NotTold(f"{shlex.join(argv)} ended with status {status}: {reason}")
    try:
        return msgspec.json.decode(out, type=list[RankStories])
    except msgspec.MsgspecError as error:
        raise NotTold(f"{shlex.join(argv)} printed something else: {error}") from error


def _argv(command: str, arguments: Sequence[str]) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise NotTold(f"{command!r} is no command: {error}") from error
    if not words:
        raise NotTold("an empty command runs nowhere; give one such as 'ssh HOST'")
    if Path(words[-1]).name != _PROGRAM:
        words.append(_PROGRAM)
    for one in arguments:
        if shlex.quote(one) != one:  # Some of these commands have a shell there, others have none.
            raise NotTold(f"{one!r} cannot be passed on: it has characters that shells change")
    return [*words, "explain", *arguments, "--json"]


def _run(argv: Sequence[str], errors: IO[bytes], timeout_s: float) -> tuple[int | None, bytes]:
    """The exit status, None if it had to be ended, and what was printed, at most one byte more than
    is allowed. Without a terminal: a command that would ask for a password fails instead."""
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
    except OSError as error:
        raise NotTold(f"cannot run {argv[0]}: {error.strerror}") from error
    ended = threading.Event()

    def end() -> None:
        ended.set()
        _kill(process)

    deadline = threading.Timer(timeout_s, end)
    deadline.start()
    try:
        assert process.stdout is not None
        with process.stdout:
            out = process.stdout.read(ANSWER_BYTES_MAX + 1)
        if len(out) > ANSWER_BYTES_MAX:
            _kill(process)
        # It stays a zombie until nobody will kill it any more, so that its number stays its own.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    finally:
        deadline.cancel()
        deadline.join()
        status = process.wait()
    return (None if ended.is_set() else status), out


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it has started."""
    os.killpg(process.pid, signal.SIGKILL)

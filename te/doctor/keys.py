# SPDX-License-Identifier: Apache-2.0
"""The keys of a check between two hosts, from the file with the deployment's secrets."""

from __future__ import annotations

import hmac
import os
import stat
from pathlib import Path
from typing import Final

from te.errors import UsageError
from te.proof import KEYS_MAX, Key, keys_of

__all__ = ["read_keys"]

_BYTES_MAX: Final = 16_384
_CHARS_MIN: Final = 16
#: Of a channel of its own: nothing else in a deployment takes these keys.
_CHANNEL: Final = b"te doctor key, version 1"


def read_keys(path: Path | None) -> tuple[Key, ...]:
    """One for each secret of the file, a line each; the empty key without a file.

    ``UsageError`` when it cannot be read, when others may read it, and for what is no secret.
    """
    if path is None:
        return keys_of(())
    try:
        # A FIFO without a writer would not open otherwise.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            lines = file.read(_BYTES_MAX + 1).split(b"\n") if stat.S_ISREG(mode) else []
    except OSError as exc:
        raise UsageError(f"cannot read the secret from {path}: {exc.strerror}") from exc
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise UsageError(f"others may read the secret in {path}: chmod 600 {path}")
    secrets = [line.strip() for line in lines if line.strip()]
    if not 0 < len(secrets) <= KEYS_MAX or any(len(one) < _CHARS_MIN for one in secrets):
        raise UsageError(
            f"{path} must have 1 to {KEYS_MAX} secrets, one a line, of {_CHARS_MIN} characters or"
            " more; `sglang-mooncake secret` makes one"
        )
    return keys_of(hmac.digest(_CHANNEL, secret, "sha256") for secret in secrets)

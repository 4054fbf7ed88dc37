# SPDX-License-Identifier: Apache-2.0
"""The file that holds the deployment's secrets, one a line."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from bootstrap_server.admission.secret import Keys, new_secret, split_secrets

__all__ = ["check_private", "read_keys", "read_secret_file", "read_small_file", "write_secret_file"]

FILE_BYTES_MAX: Final = 16_384
#: Group may read: Kubernetes gives a pod's group (`fsGroup`) the secrets that it mounts.
_NOT_ALLOWED: Final = stat.S_IWGRP | stat.S_IRWXO


def read_secret_file(path: str | Path) -> list[bytes]:
    """The secrets in a file, in its order.

    Raises `ValueError` with a sentence that names the file: when it cannot be read, when others
    can read it or write to it, and for what `split_secrets` refuses.
    """
    try:
        content, mode = read_small_file(path, FILE_BYTES_MAX)
    except ValueError as error:
        raise ValueError(f"cannot read the secret from {path}: {error}") from error
    check_private(path, mode)
    try:
        return split_secrets(content.decode("ascii"))
    except UnicodeDecodeError:
        # From None, as this error shows the bytes.
        raise ValueError(f"{path}: a secret is printable ASCII") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_keys(path: str | Path | None) -> Keys:
    """Those of the secrets in a file; none without a file. Raises as `read_secret_file` does."""
    return Keys() if path is None else Keys.from_secrets(read_secret_file(path))


def read_small_file(path: str | Path, bytes_max: int) -> tuple[bytes, int]:
    """Content and mode of a regular file.

    Raises `ValueError` with the reason, without the path.
    """
    try:
        # A FIFO without a writer would hold the server up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise ValueError("it is no regular file")
            content = file.read(bytes_max + 1)
    except OSError as error:
        raise ValueError(error.strerror) from error
    if len(content) > bytes_max:
        raise ValueError(f"it has more than {bytes_max} bytes")
    return content, stat.S_IMODE(mode)


def check_private(path: str | Path, mode: int) -> None:
    """Raises `ValueError` when others can read a file that holds a secret, or write to it."""
    if mode & _NOT_ALLOWED:
        raise ValueError(
            f"others may read the secret in {path}, or write to it (mode {mode:04o}): "
            f"chmod 600 {path}"
        )


def write_secret_file(path: str | Path) -> None:
    """Make a secret and a file with it that its owner alone may read.

    Raises `ValueError` when the file exists already, or cannot be written.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            # The mode above is what the umask leaves of it.
            os.fchmod(descriptor, 0o600)
            file.write(new_secret() + "\n")
    except FileExistsError as error:
        raise ValueError(f"{path} exists already and stays as it is") from error
    except OSError as error:
        raise ValueError(f"cannot write a secret to {path}: {error.strerror}") from error

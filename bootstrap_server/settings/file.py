# SPDX-License-Identifier: Apache-2.0
"""The TOML file that holds settings."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from bootstrap_server.admission.secret_file import check_private, read_small_file
from bootstrap_server.settings.rows import Given, Setting, from_document
from bootstrap_server.settings.values import ConfigError

__all__ = ["read_settings_file"]

FILE_BYTES_MAX: Final = 65_536


def read_settings_file(
    path: str | Path, settings: Sequence[Setting], foreign: Collection[str] = ()
) -> tuple[dict[str, Given], list[str]]:
    """The settings in a file, by key, and what is wrong with others, as `from_document`.

    Args:
        foreign: tables of other programs, which are passed over.

    Raises:
        ConfigError: a file that cannot be read or is not TOML, or that holds a secret and may be
            read by others.
    """
    try:
        content, mode = read_small_file(path, FILE_BYTES_MAX)
    except ValueError as error:
        raise ConfigError(f"cannot read settings from {path}: {error}") from error
    try:
        document = tomllib.loads(content.decode())
    except UnicodeDecodeError:
        # From None, as this error shows the bytes.
        raise ConfigError(f"{path} is not TOML: it is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    given, problems = from_document(settings, document, str(path), foreign)
    if any(one.secret and one.key in given for one in settings):
        try:
            check_private(path, mode)
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return given, problems

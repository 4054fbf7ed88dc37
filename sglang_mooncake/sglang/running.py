# SPDX-License-Identifier: Apache-2.0
"""`sglang-mooncake run`: another program, with what this package replaces in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from bootstrap_server.settings.values import ConfigError
from sglang_mooncake.sglang import at_start
from sglang_mooncake.sglang.config import Config
from sglang_mooncake.sglang.settings import PREFIX

__all__ = ["DESCRIPTION", "environment_for", "run"]

EXIT_REFUSED: Final = 2
EXIT_NOT_FOUND: Final = 127  # A shell's.
_SWITCH: Final = f"{PREFIX}DROP_IN"
_PATH: Final = "PYTHONPATH"

DESCRIPTION: Final = """\
Runs a command in whose Python processes mooncake.engine and nixl are te, and mooncake.store is
kvstore. The command's own flags stay as they are. All settings of the hand-over count
(sglang-mooncake config shows them).

  sglang-mooncake run -- vllm serve MODEL \\
      --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
"""


def run(command: Sequence[str]) -> int:
    """Becomes the command; returns an exit status only if it cannot."""
    environment = environment_for(os.environ)
    try:
        Config.from_environment(environment)
    except ConfigError as error:
        sys.stderr.write("".join(f"sglang-mooncake run: {one}\n" for one in error.sentences))
        return EXIT_REFUSED
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))
    except OSError as error:
        sys.stderr.write(f"sglang-mooncake run: {command[0]}: {error.strerror}\n")
        return EXIT_NOT_FOUND


def environment_for(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Of the command: its processes and all that they start find `at_start` on their path."""
    folder = str(Path(at_start.__file__).parent)
    path = [folder, *filter(None, environment.get(_PATH, "").split(os.pathsep))]
    return {_SWITCH: "1"} | dict(environment) | {_PATH: os.pathsep.join(dict.fromkeys(path))}

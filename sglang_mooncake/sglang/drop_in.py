# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine`` over te, with this process's settings (`SGLANG_MOONCAKE_DROP_IN`)."""

from __future__ import annotations

from dataclasses import replace

import te
from sglang_mooncake.mooncake_face import Options
from sglang_mooncake.mooncake_face import install as install_face
from sglang_mooncake.sglang.config import INSECURE, Config
from sglang_mooncake.sglang.transports import open_engine

__all__ = ["install", "options"]


def install(config: Config | None = None) -> None:
    """For programs without SGLang's plugins, before they import ``mooncake.engine``; whatever the
    setting says. ``config``: default, the settings of the environment.

    Raises:
        config.ConfigError: what it says.
        RuntimeError: ``mooncake.engine`` was imported in this process before.
    """
    install_face(options(Config.from_environment() if config is None else config))


def options(config: Config) -> Options:
    """The same secret, devices, ports and transports as for the hand-over."""

    def open_it(host: str, devices: tuple[str, ...], transports: tuple[str, ...]) -> te.Engine:
        return open_engine(
            replace(config, transports=config.transports or transports), host, devices
        )

    return Options(
        open_engine=open_it,
        keys=config.keys.control,
        ports=config.ports,
        insecure=config.insecure,
        how_to_insist=f"{INSECURE}=1",
    )

# SPDX-License-Identifier: Apache-2.0
"""``mooncake.engine`` and ``nixl`` over te and ``mooncake.store`` over kvstore, with this process's
settings, for programs that were written for Mooncake or NIXL (`SGLANG_MOONCAKE_DROP_IN`)."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NoReturn

import te
from bootstrap_server.settings.values import ConfigError
from sglang_mooncake.faces import mooncake_engine, mooncake_store, nixl
from sglang_mooncake.faces.nixl.notices import TeNotices
from sglang_mooncake.sglang.config import INSECURE, Config
from sglang_mooncake.sglang.transports import open_engine

if TYPE_CHECKING:
    from kvstore.store import Store
    from sglang_mooncake.faces.mooncake_store.settings import Setup

__all__ = ["NAMES", "engine_options", "install", "nixl_options", "register", "store_options"]

logger = logging.getLogger(__name__)

NAMES: Final = (*mooncake_engine.PACKAGES, *nixl.PACKAGES)
"""The packages of which something is replaced."""

_VLLMS_ADDRESS: Final = "VLLM_HOST_IP"
_TELEMETRY: Final = "NIXL_TELEMETRY_ENABLE"
#: A host with a default route has a way to it (RFC 5737); nothing is sent there.
_ELSEWHERE: Final = ("192.0.2.1", 9)
_EXIT_CODE: Final = 70  # EX_SOFTWARE of sysexits.h


def install(config: Config | None = None) -> None:
    """For programs without a plugin of ours, before they import ``mooncake`` or ``nixl``; whatever
    the setting says. ``config``: default, the settings of the environment.

    Raises:
        config.ConfigError: what it says.
        RuntimeError: one of the modules that are replaced was imported in this process before.
    """
    config = Config.from_environment() if config is None else config
    mooncake_engine.install(engine_options(config))
    mooncake_store.install(store_options(config))
    nixl.install(nixl_options(config))
    logger.warning(
        "mooncake.engine and nixl are te, and mooncake.store is kvstore, in this process (%s); its"
        " peers need the same",
        " ".join(sys.orig_argv[:6]),
    )


def register() -> None:
    """As vLLM's plugin, and for what `sglang-mooncake run` starts: `install`, if the setting says
    so. What goes wrong ends the process, as its caller would go on without us."""
    try:
        config = Config.from_environment(_with_vllms(os.environ))
        if config.drop_in:
            install(config)
    except Exception as error:  # noqa: BLE001 - whatever it is
        _stop(error)


def engine_options(config: Config) -> mooncake_engine.Options:
    """The same secret, devices, ports and transports as for the hand-over."""

    def open_it(host: str, devices: tuple[str, ...], transports: tuple[str, ...]) -> te.Engine:
        return open_engine(
            replace(config, transports=config.transports or transports), host, devices
        )

    return mooncake_engine.Options(
        open_engine=open_it,
        keys=config.keys.control,
        ports=config.ports,
        insecure=config.insecure,
        how_to_insist=f"{INSECURE}=1",
    )


def store_options(config: Config) -> mooncake_store.Options:
    """The store's settings (`SGLANG_MOONCAKE_STORE`), and for its engine those of the hand-over.
    Devices that the caller names count if there are several hosts and the operator names none."""

    def open_it(setup: Setup) -> Store:
        # A process that sets up no store does without its modules.
        from kvstore.store import Store
        from sglang_mooncake.sglang.store.options import config_of

        nics = config.nics or setup.devices
        given = {"memory": setup.segment_bytes} | dict(config.store)
        label = f"mooncake.store of {setup.hostname}"
        return Store(config_of(given, replace(config, nics=nics), label=label))

    return mooncake_store.Options(open_store=open_it)


def nixl_options(config: Config) -> nixl.Options:
    """The same. NIXL's callers name no address: without one in the settings it is that of the
    default route, as UCX would take it."""

    def open_it(host: str, devices: tuple[str, ...], threads: int) -> te.Engine:
        workers = {"workers": threads} if threads else {}
        return open_engine(replace(config, engine=workers | dict(config.engine)), host, devices)

    return nixl.Options(
        open_engine=open_it,
        make_notices=TeNotices,
        host=_host_of(config) or _own_address(),
        has_secret=bool(config.keys),
        insecure=config.insecure,
        how_to_insist=f"{INSECURE}=1",
        telemetry=_telemetry(os.environ),
    )


def _with_vllms(environment: Mapping[str, str]) -> Mapping[str, str]:
    """vLLM's variable for a host's address counts as SGLang's does."""
    address = environment.get(_VLLMS_ADDRESS)
    return environment if not address else {"SGLANG_HOST_IP": address} | dict(environment)


def _telemetry(environment: Mapping[str, str]) -> Callable[[], bool | None]:
    """What NIXL's own variable says when an agent is made; None if it says nothing."""

    def said() -> bool | None:
        match environment.get(_TELEMETRY, "").lower():
            case "y" | "yes" | "on" | "1" | "true":
                return True
            case "n" | "no" | "off" | "0" | "false":
                return False
        return None

    return said


def _host_of(config: Config) -> str | None:
    """The setting's, or that of SGLang's variable, which stands beside the settings."""
    named = config.given.get("sglang_mooncake.host")
    return config.host or (None if named is None else named.text)


def _own_address() -> str:
    """Of the interface of the default route; the loopback's without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _stop(error: Exception) -> NoReturn:
    sentences = error.sentences if isinstance(error, ConfigError) else ()
    if not sentences:
        traceback.print_exc()
        sentences = (f"mooncake and nixl cannot be replaced: {error}",)
    sys.stderr.write("".join(f"sglang-mooncake: {one}\n" for one in sentences))
    sys.stderr.write(
        "The process stops here: it would otherwise run without us. Leave SGLANG_MOONCAKE_DROP_IN"
        " out to have it run so.\n"
    )
    sys.stderr.flush()
    os._exit(_EXIT_CODE)

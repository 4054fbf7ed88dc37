# SPDX-License-Identifier: Apache-2.0
"""How a process of the store is reached, by settings that programs of their own give: their te
engine. (SGLang servers have that of their hand-over.) Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

import te
from bootstrap_server.admission.secret import Keys
from kvstore.config import NO_KEYS, Config
from kvstore.values import typed
from te.transports.registry import WITHOUT_DEVICES

__all__ = ["config_of", "engine_of"]

TEXTS: Final = ("transports", "nics", "ports")
"""Transports and names of RDMA devices separated by commas, a range of ports with a dash."""
SETTINGS: Final = (*TEXTS, "encrypt")
"""``encrypt``: whether what goes over the network is encrypted; that needs a secret."""


def config_of(
    values: Mapping[str, Any], others: Collection[str] = (), keys: Keys = NO_KEYS
) -> Config:
    """``Config.of``, with these settings among the values."""
    rest = {name: value for name, value in values.items() if name not in SETTINGS}
    config = Config.of(rest, keys, (*others, *SETTINGS))
    return replace(config, engine=engine_of(values, config.index, config.keys))


def engine_of(values: Mapping[str, Any], index: str, keys: Keys = NO_KEYS) -> te.Config:
    """Of these settings, each of which may be missing. Without an index all processes are on one
    host: nothing goes over a network that could be encrypted, and they use no device unless they
    are told to. ``ValueError`` says what is wrong."""
    given: dict[str, Any] = {}
    if typed("encrypt", values.get("encrypt", False), "bool"):
        if not keys:
            raise ValueError("encrypt needs a secret: give all processes the same secret file")
        if index:
            given |= {"encrypt": True, "keys": keys.data}
    texts = {name: typed(name, values.get(name, ""), "str") for name in TEXTS}
    if texts["transports"]:
        given["transports"] = _names(texts["transports"])
    elif not index:
        given["transports"] = WITHOUT_DEVICES
    if texts["nics"]:
        given["nics"] = _names(texts["nics"])
    if texts["ports"]:
        given["port"], given["port_last"] = _ports(texts["ports"])
    return te.Config(**given)


def _ports(text: str) -> tuple[int, int]:
    """The first and the last one of a range such as "20000-20100": te's engine and the owner listen
    at one each. ``ValueError`` if that is no range of two and more."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) < int(last) <= 65535):
        raise ValueError(f"ports={text!r} is no range of two ports and more, such as 20000-20100")
    return int(first), int(last)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())

# SPDX-License-Identifier: Apache-2.0
"""All settings of a server's ranks, one row each. Those of the table `te` are fields of te.Config
by the same name. docs/configuration.md is written out of these rows."""

from __future__ import annotations

import json
from typing import Any

from bootstrap_server.settings.rows import Setting
from bootstrap_server.settings.values import (
    Kind,
    address,
    choice,
    choices,
    file_path,
    names_of,
    port_range,
    seconds,
    switch,
    text,
    whole,
)
from sglang_mooncake.kept_bytes import FILES_MAX
from sglang_mooncake.layout.cells import NBYTES_KEPT_MAX
from sglang_mooncake.layout.chosen import SAMPLE_CELLS_MIN, SAMPLE_NBYTES, SAMPLE_ROOMS, Verify
from sglang_mooncake.registries import Registries, addresses
from sglang_mooncake.sglang.mooncake_variables import VARIABLES
from sglang_mooncake.stats import STORY_ROOMS
from te.config import LIMITS, TRANSPORTS
from te.config import Config as EngineConfig

__all__ = ["BY_KEY", "CONFIG_FILE", "ENGINE", "INSTEAD_OF", "PREFIX", "SETTINGS", "SGLANGS_OWN"]

PREFIX = "SGLANG_MOONCAKE_"
#: Names the TOML file.
CONFIG_FILE = f"{PREFIX}CONFIG"
#: SGLang's own variables that begin like ours. They tune the engine of the mooncake package or its
#: memory and mean nothing to the hand-over, but must not stop a server whose recipe sets them.
SGLANGS_OWN = frozenset(
    {
        "SGLANG_MOONCAKE_CUSTOM_MEM_POOL",
        "SGLANG_MOONCAKE_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK",
        "SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES",
        "SGLANG_MOONCAKE_SEND_AUX_TCP",
    }
)
#: One of the two is used. Of one source, both are an error.
INSTEAD_OF = {
    "te.nics": "te.topology",
    "te.topology": "te.nics",
    "sglang_mooncake.secret": "sglang_mooncake.secret_file",
    "sglang_mooncake.secret_file": "sglang_mooncake.secret",
}


def _row(table: str, name: str, kind: Kind, help_: str, **more: Any) -> Setting:
    variable = f"{PREFIX}{name.upper()}"
    more["others"] = (*more.pop("others", ()), *VARIABLES.get(name.upper(), ()))
    return Setting(table=table, name=name, kind=kind, help=help_, variable=variable, **more)


def _json_object(given: str) -> dict[str, Any]:
    try:
        value = json.loads(given)
    except ValueError as error:
        raise ValueError(f"give a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("give a JSON object, in braces")
    return value


def _engine(name: str, kind: Kind, help_: str, **more: Any) -> Setting:
    if not more.get("unset"):
        more["default"] = f"{getattr(EngineConfig, name):g}"
    return _row("te", name, kind, help_, **more)


def _number(name: str, help_: str, **more: Any) -> Setting:
    return _engine(name, whole(*LIMITS[name]), help_, **more)


def _own(name: str, kind: Kind, help_: str, **more: Any) -> Setting:
    return _row("sglang_mooncake", name, kind, help_, **more)


#: Those that are handed to te.Config as they are.
ENGINE = (
    _number("rails", "Connections to each peer over TCP and on the same host."),
    _number(
        "rails_per_nic",
        "Queue pairs to each peer for each pair of RDMA devices. A link has at most"
        f" {LIMITS['rails'][1]} queue pairs in all.",
    ),
    _number("workers", "Threads that move bytes, for all peers together."),
    _number(
        "traffic_class",
        "Traffic class of RDMA packets (ibv_modify_qp(3)). iWARP ignores it.",
    ),
    _number(
        "service_level",
        "InfiniBand service level, or Ethernet priority (0 to 7) with RoCE. iWARP ignores it.",
    ),
    _number(
        "partition_key_index",
        "Index into each port's table of partition keys. iWARP ignores it.",
    ),
    _number(
        "gid_index",
        "RoCE: index into each port's GID table. A port without this entry is not used. -1 is the"
        " same as no value.",
        unset="found by trying with each peer",
    ),
)
SETTINGS: tuple[Setting, ...] = (
    _own(
        "host",
        address(),
        "Address of this host that the ranks of other hosts can reach.",
        unset="the address that SGLang finds; `--host` on a host without a default route",
        others=("SGLANG_HOST_IP",),
    ),
    _own(
        "ports",
        port_range(),
        "Range of ports that a rank listens on: one port for the transfer engine, on prefill one"
        " more for control messages, with iWARP one for each address of a device.",
        unset="any free ports",
    ),
    _own(
        "registries",
        names_of(
            "names, addresses or networks, each with a port or without:"
            " `prefill-*.svc,10.1.0.0/16:8998`",
            lambda given: Registries(given, f"{PREFIX}REGISTRIES"),
        ),
        "Registries (`bootstrap_host` and `bootstrap_port` of a request) that a decode server"
        " asks. Without this list, whoever may send a request decides whom the server connects to.",
        unset="all",
    ),
    _own(
        "registry",
        names_of("addresses, HOST:PORT", addresses),
        "Registries that run by themselves (`python -m bootstrap_server`), beside the one of each"
        " prefill server. Prefill and decode ranks register there, too, so that one status page"
        " shows all servers, and outlives them. A decode server asks them for a prefill server"
        " whose own registry does not answer, and its log says from the start on which of the"
        " prefill servers there do not fit it.",
        unset="none",
    ),
    _own(
        "layerwise",
        switch(),
        "A prefill server sends KV cache in groups of layers while its forward pass still runs."
        " Where that is impossible (pipeline stages, two-batch overlap, full prefill CUDA graphs),"
        " it sends after the forward pass, and its log says why.",
        default="0",
    ),
    _own(
        "verify",
        choice(tuple(one.name.lower() for one in Verify)),
        "How much of the KV cache is compared by digests when it has arrived, before SGLang is"
        " told: nothing, a sample, or all. For a sample each pair of ranks draws one request in"
        f" {SAMPLE_ROOMS}, and of that about {SAMPLE_NBYTES >> 20} MiB at most, or"
        f" {SAMPLE_CELLS_MIN} pages of a layer each if these are more. A request of which"
        " something differs fails, and its reason names pages, layers and both ranks. One whose"
        " digests cannot be made or compared fails with `all`; of a sample it arrives all the same,"
        " and the log and the metrics say so. Where the two servers have different values, the"
        " stricter one counts: `off` on both sides compares nothing.",
        default="sample",
    ),
    _own(
        "verify_dir",
        file_path(),
        "Directory in which a server keeps the bytes where a decode server has got others than were"
        " sent: a decode server what has arrived, a prefill server what it has sent, if its memory"
        " still has that. Each keeps one file for such a request, of about"
        f" {NBYTES_KEPT_MAX >> 20} MiB at most. All ranks that share the directory keep"
        f" {FILES_MAX} files, which only their user may read. They are parts of prompts.",
        unset="nothing is kept",
    ),
    _own(
        "drop_in",
        switch(),
        "`mooncake.engine` and `nixl` are te, and `mooncake.store` is kvstore, in the processes of"
        " this server: for SGLang's encoders, remote weights, backend `nixl` and HiCache backend"
        " `mooncake`, and for vLLM's and LMCache's connectors of NIXL and Mooncake. The peers of"
        " such a server need the same setting.",
        default="0",
    ),
    _own(
        "store",
        Kind('JSON object, `{"memory": "16GiB"}`', _json_object),
        "Settings of the [store](kvstore.md#settings) for programs that use it by Mooncake's names"
        " (`mooncake.store`), such as `index`, `copies`, `disk` and `disk_size`. `memory`"
        " is what the program says, unless it is given here.",
        unset="the store's defaults",
    ),
    _own(
        "register_timeout_s",
        seconds(),
        "Time in which a prefill rank must reach its registry at start.",
        default="60",
    ),
    _own(
        "link_timeout_s",
        seconds(),
        "Time in which a prefill rank must answer a decode rank that connects to it.",
        default="10",
    ),
    _own(
        "stats_dir",
        file_path(),
        "Directory in which each scheduler process keeps a JSON file of its counters.",
        unset="no files",
    ),
    _own(
        "story_rooms",
        whole(0, 65_536),
        "How many ended requests each rank remembers for `sglang-mooncake explain`.",
        default=str(STORY_ROOMS),
    ),
    _own(
        "secret_file",
        file_path(),
        "File with the deployment's secrets, one per line, the same for all servers. Only its"
        " owner and group may read it. `sglang-mooncake secret --file PATH` makes one.",
        unset="no secret: everybody who reaches the ports is served",
        needs_value=True,
    ),
    _own(
        "secret",
        text("secrets, one per line"),
        "The secrets themselves, instead of `secret_file`. Only the owner and group of a TOML file"
        " with this setting may read it.",
        unset="no secret",
        secret=True,
        needs_value=True,
    ),
    _own(
        "insecure",
        switch(),
        "A server starts without a secret on a public address, too.",
        default="0",
    ),
    _engine(
        "transports",
        choices(TRANSPORTS),
        "Transports to use, the preferred one first. If only one is named and does not work, the"
        " server does not start.",
        unset="all that can move the KV cache",
    ),
    _engine(
        "nics",
        names_of("patterns, with `!` before devices to exclude: `mlx5_*,!mlx5_1`"),
        "RDMA devices to use.",
        unset="all active devices",
        others=("--disaggregation-ib-device",),
    ),
    _engine(
        "topology",
        file_path(),
        "JSON file that maps each memory location to preferred and fallback RDMA devices, instead"
        " of `nics`, in the form of Mooncake's `MC_CUSTOM_TOPO_JSON`."
        " `te topology --override FILE` shows the resulting order.",
        unset="the order that `te topology` shows",
    ),
    *ENGINE,
    _engine(
        "stall_timeout_s",
        seconds(),
        "A transfer that makes no progress for this long fails.",
    ),
    _engine(
        "encrypt",
        switch(),
        "Encrypts KV cache between hosts. It needs a secret, and leaves TCP as the only transport"
        " between hosts.",
    ),
    _engine(
        "status_dir",
        file_path("none"),
        "Directory of the Unix sockets over which `te top` and `sglang-mooncake explain` ask the"
        " ranks of the same user. `none`: no sockets.",
        unset="`$XDG_RUNTIME_DIR/te`, else `/tmp/te-UID`",
    ),
)
BY_KEY = {one.key: one for one in SETTINGS}

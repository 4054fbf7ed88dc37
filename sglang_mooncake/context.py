# SPDX-License-Identifier: Apache-2.0
"""What the hand-over needs to know of the serving process that it lives in, as plain values: for
SGLang `sglang/seam.py` takes them from there once, tests make them up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bootstrap_server import InstanceConfig, RankCoords
from bootstrap_server.admission.secret import Keys
from bootstrap_server.ranks.records import FLAGS
from sglang_mooncake.layout import UNSPLIT, Place, Split, Verify
from te.config import LABEL_CHARS_MAX

__all__ = [
    "FIELD_NAMES",
    "PREFILL_COMPLETE",
    "Deadlines",
    "RankContext",
    "Role",
    "SettingNames",
    "engine_label",
]

Role = Literal["prefill", "decode"]

#: SGLang's --disaggregation-decode-allocation-policy beside the default, `early`.
PREFILL_COMPLETE = "prefill_complete"


@dataclass(frozen=True, slots=True)
class Deadlines:
    """
    bootstrap_s: how long the two sides of a room wait until they have found each other.
    waiting_s: how long a request waits for its prompt, and then for its KV cache.
    heartbeat_s: how often each side of a control link shows that it is there.
    heartbeat_failures_max: after how many of these without a sign it counts as gone. By default
        that is 4 s. Busy processes alone hardly delay zmq's thread: 64 of them on two cores by
        0.05 s at most. But while several servers of vLLM started on two cores of a virtual machine,
        threads that could run waited for up to 1.7 s, and a link was silent for 2 s.
    """

    bootstrap_s: float = 300.0
    waiting_s: float = 300.0
    heartbeat_s: float = 0.5
    heartbeat_failures_max: int = 8


@dataclass(frozen=True, slots=True)
class SettingNames:
    """What those who run a server call its settings, for sentences about them: its deadlines, and
    what must be equal on both servers (by the names of `FLAGS`)."""

    bootstrap: str = "bootstrap_s"
    waiting: str = "waiting_s"
    link: str = "link_timeout_s"
    flags: Mapping[str, str] = field(default_factory=lambda: FLAGS)


#: Where nobody has other words for them.
FIELD_NAMES = SettingNames()


@dataclass(frozen=True, slots=True)
class RankContext:
    """One rank of one instance.

    host: the address under which other hosts reach this rank.
    bootstrap_address: "host:port" of the instance's own registry; prefill ranks register there.
    prefill_http_port: port of SGLang's HTTP API on the prefill node.
    register_dp_rank: tell the registry which DP rank took a room, because the decode side cannot
        derive it (several DP ranks, and the load balancer does not follow the room number).
    all_cp_ranks: decode: every CP rank of the prefill instance shall send its share of the pages,
        instead of the first one all of them.
    split: how this rank's KV cache is split beside TP and pipeline stages.
    keys: those of the deployment's secrets; empty without one.
    verify: how much of what is handed over is digested at least.
    verify_dir: decode: where bytes that differ are kept; None: nowhere.
    """

    role: Role
    coords: RankCoords
    config: InstanceConfig
    host: str
    bootstrap_address: str
    prefill_http_port: int | None
    register_dp_rank: bool
    deadlines: Deadlines
    all_cp_ranks: bool = False
    split: Split = UNSPLIT
    names: SettingNames = FIELD_NAMES
    keys: Keys = Keys()  # noqa: RUF009 - it is frozen
    verify: Verify = Verify.OFF
    verify_dir: Path | None = None

    @property
    def place(self) -> Place:
        """Which part of the model's caches this rank holds follows from it."""
        return Place(self.config.topology, self.coords)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether decode ranks make room for a request only once its prompt is computed."""
        return self.config.decode_allocation_policy == PREFILL_COMPLETE

    @property
    def name(self) -> str:
        """For sentences: which rank speaks."""
        return f"{self.role} rank ({self.coords}) at {self.host}"


def engine_label(who: str, model: str, port: int | None = None) -> str:
    """What `te top` and `kvstore top` call a server's engine: `prefill (dp 0 cp 0 tp 1 pp 0) of m,
    port 30000`.

    Args:
        who: the part that the engine has in the server.
        model: its name, or its path, of which the last part is taken.
        port: of the server's HTTP API, if that is known.
    """
    name = model.rstrip("/").rpartition("/")[2] or model
    at_port = "" if port is None else f", port {port}"
    return f"{who} of {name[: LABEL_CHARS_MAX // 2]}{at_port}"[:LABEL_CHARS_MAX]

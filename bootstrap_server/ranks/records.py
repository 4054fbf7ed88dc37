# SPDX-License-Identifier: Apache-2.0
"""What a rank says about itself, and what an instance is: frozen data, checked when made.

The structs are both the objects of the registry and, encoded by msgspec as JSON, the
bodies of this package's own `/v1` routes. A bad value raises `ValueError` with a sentence;
decoding the same value from JSON raises `msgspec.ValidationError` with that sentence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple, TypeAlias

import msgspec

__all__ = [
    "DEFAULT_INSTANCE",
    "FLAGS",
    "RANKS_MAX",
    "ROLES",
    "Difference",
    "Instance",
    "InstanceConfig",
    "KVFormat",
    "Rank",
    "RankCoords",
    "RankLife",
    "RankRecord",
    "Renewal",
    "Role",
    "SpecLayout",
    "Topology",
    "check_instance_name",
    "differences",
    "instance_name_of",
    "registry_port_of",
]

#: Far above any deployment (SGLang's largest published ones have a few hundred ranks), low
#: enough that a hostile topology costs the registry nothing.
RANKS_MAX: Final = 65_536
#: DNS names end at 253 characters; dtype, layout and policy names are far shorter.
TEXT_CHARS_MAX: Final = 255
#: Epochs are nanoseconds since 1970 and travel as signed 64-bit numbers.
EPOCH_MAX: Final = 2**63 - 1
VALUE_CHARS_MAX: Final = 120
#: The instance of a bootstrap server that serves one SGLang server, as SGLang's own does.
DEFAULT_INSTANCE: Final = "default"
#: As JSON. A model of 61 layers has about 5 kB.
SPEC_LAYOUT_BYTES_MAX: Final = 16 << 10
_SIGNATURE: Final = re.compile("[0-9a-f]{64}")
#: Z85 (RFC 32) of 32 bytes.
_CONTROL_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
INSTANCE_NAME_CHARS_MAX: Final = 64
_INSTANCE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

#: The SGLang flag behind each value, for sentences that say what to change. Other servers hand
#: their own to whoever compares values.
FLAGS: Final[dict[str, str]] = {
    "dp_size": "--dp-size or --attn-dp-size",
    "cp_size": "--attn-cp-size",
    "tp_size": "--tp-size divided by --attn-dp-size, formerly --dp-size --enable-dp-attention",
    "pp_size": "--pp-size",
    "model": "--model-path",
    "page_size": "--page-size",
    "kv_cache_dtype": "--kv-cache-dtype, or --dtype where that is auto",
    "kv_layout": "--attention-backend, --dsv4-attn-backend and SGLANG_DSV4_KV_LAYOUT",
    "load_balance_method": "--load-balance-method",
    "decode_allocation_policy": "--disaggregation-decode-allocation-policy",
    "enable_dsa_cache_layer_split": "--enable-dsa-cache-layer-split",
    "enable_kv_cache_sharding": "--enable-kv-cache-sharding",
    "dcp_size": "--dcp-size",
    "dsv41_spec_layout": "--speculative-algorithm",
    "protocol": "the installed version of sglang-mooncake",
}

Role: TypeAlias = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, Role]] = ("prefill", "decode")
_Leaf: TypeAlias = int | float | str | bool | None
#: What SGLang's `get_dsv41_spec_layout` (`disaggregation/utils.py`) makes: numbers, names and
#: lists of lists of them. Spelt out because arbitrary nesting can exhaust the stack.
SpecLayout: TypeAlias = dict[str, _Leaf | list[_Leaf | list[_Leaf]]]


class RankCoords(msgspec.Struct, frozen=True, order=True):
    """Where a rank stands in its instance; every number counts from 0."""

    dp: int
    cp: int
    tp: int
    pp: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_range(f"{name} rank", getattr(self, name), 0, RANKS_MAX - 1)

    @property
    def is_first_of_dp(self) -> bool:
        """Whether it is the one that speaks for all ranks of its DP rank."""
        return (self.cp, self.tp, self.pp) == (0, 0, 0)

    def __str__(self) -> str:
        return f"dp {self.dp} cp {self.cp} tp {self.tp} pp {self.pp}"


class Topology(msgspec.Struct, frozen=True):
    """How many ranks an instance has along each axis.

    `tp_size` is the *attention* TP width inside one DP-attention group, and `dp_size` counts
    those groups (or whole replicas). `SGLangParallel.place` translates SGLang's numbers.
    """

    dp_size: int
    cp_size: int
    tp_size: int
    pp_size: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            _check_range(name, getattr(self, name), 1, RANKS_MAX)
        if self.ranks > RANKS_MAX:
            raise ValueError(f"{self} makes {self.ranks} ranks, more than {RANKS_MAX}")

    def __str__(self) -> str:
        return (
            f"dp_size {self.dp_size} cp_size {self.cp_size} "
            f"tp_size {self.tp_size} pp_size {self.pp_size}"
        )

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dp_size * self.cp_size * self.tp_size * self.pp_size

    def coords(self) -> Iterator[RankCoords]:
        """All coordinates in ascending order, which is also the order of `index`."""
        for dp in range(self.dp_size):
            for cp in range(self.cp_size):
                for tp in range(self.tp_size):
                    for pp in range(self.pp_size):
                        yield RankCoords(dp, cp, tp, pp)

    def index(self, coords: RankCoords) -> int:
        """Position of `coords` in `coords()`; `ValueError` when they lie outside."""
        self.check(coords)
        row = (coords.dp * self.cp_size + coords.cp) * self.tp_size + coords.tp
        return row * self.pp_size + coords.pp

    def check(self, coords: RankCoords) -> None:
        """Raise `ValueError` naming rank and size of the first axis that `coords` leave."""
        for axis in RankCoords.__struct_fields__:
            rank, size = getattr(coords, axis), getattr(self, f"{axis}_size")
            if rank >= size:
                raise ValueError(f"{axis} rank {rank} does not exist: {axis}_size is {size}")


class KVFormat(msgspec.Struct, frozen=True):
    """What must be equal for KV bytes to mean the same on both sides.

    `page_size` counts tokens; `kv_cache_dtype` and `kv_layout` are SGLang's names for them.
    `kv_layout` is None for pools that have only one layout.
    """

    page_size: int
    kv_cache_dtype: str
    kv_layout: str | None = None

    def __post_init__(self) -> None:
        _check_range("page_size", self.page_size, 1, 2**31 - 1)
        _check_text("kv_cache_dtype", self.kv_cache_dtype)
        if self.kv_layout is not None:
            _check_text("kv_layout", self.kv_layout)


class InstanceConfig(msgspec.Struct, frozen=True):
    """What all ranks of one instance must agree on.

    Fields below `format` carry what SGLang 0.5.23 registers
    (`disaggregation/common/conn.py`, `CommonKVManager.register_to_bootstrap`).
    `protocol` is the version of sglang_mooncake's hand-over protocol; 0 is a stock SGLang rank.
    `dcp_size`: over how many of its attention TP ranks the tokens of a page are dealt out (decode
    context parallelism); stock ranks do not say. `model`: its architecture and sizes in words,
    which are alike for all copies of a model; empty where nobody says.
    """

    topology: Topology
    format: KVFormat
    load_balance_method: str = "follow_bootstrap_room"
    decode_allocation_policy: str = "early"
    enable_dsa_cache_layer_split: bool = False
    enable_kv_cache_sharding: bool = False
    dsv41_spec_layout: SpecLayout | None = None
    protocol: int = 0
    dcp_size: int = 1
    model: str = ""

    def __post_init__(self) -> None:
        _check_text("load_balance_method", self.load_balance_method)
        _check_text("decode_allocation_policy", self.decode_allocation_policy)
        _check_range("protocol", self.protocol, 0, 2**31 - 1)
        _check_range("dcp_size", self.dcp_size, 1, self.topology.tp_size)
        if self.model:
            _check_text("model", self.model)
        if self.dsv41_spec_layout is not None:
            size_bytes = len(msgspec.json.encode(self.dsv41_spec_layout))
            if size_bytes > SPEC_LAYOUT_BYTES_MAX:
                raise ValueError(
                    f"dsv41_spec_layout has {size_bytes} bytes, more than {SPEC_LAYOUT_BYTES_MAX}"
                )

    @property
    def follow_bootstrap_room(self) -> bool:
        """Whether SGLang sends a room to DP rank `room mod dp_size`."""
        return self.load_balance_method == "follow_bootstrap_room"


class Rank(msgspec.Struct, frozen=True):
    """One life of one scheduler process.

    `host` and `port` are its control endpoint. `epoch` is the start of this life in
    nanoseconds since 1970, so that a restarted rank can be told from its former self;
    0 means unknown (stock SGLang ranks do not say). `prefill_http_port` is the port of
    SGLang's HTTP API on that node. `control_key` is the public key of the control endpoint, in Z85,
    or empty where links are not encrypted. `signature` is the rank's over all this and its
    configuration (`signatures.py`), 64 hexadecimal digits, or empty.
    """

    coords: RankCoords
    host: str
    port: int
    epoch: int = 0
    prefill_http_port: int | None = None
    control_key: str = ""
    signature: str = ""

    def __post_init__(self) -> None:
        _check_text("host", self.host)
        if any(char.isspace() for char in self.host):
            raise ValueError(f"host {self.host!r} contains white space")
        _check_range("port", self.port, 1, 65_535)
        _check_range("epoch", self.epoch, 0, EPOCH_MAX)
        if self.prefill_http_port is not None:
            _check_range("prefill_http_port", self.prefill_http_port, 1, 65_535)
        if self.control_key and not _CONTROL_KEY.fullmatch(self.control_key):
            raise ValueError(
                f"control_key {_short(self.control_key)!r} is not 40 characters of Z85 (RFC 32)"
            )
        if self.signature and not _SIGNATURE.fullmatch(self.signature):
            raise ValueError(f"signature {_short(self.signature)!r} is not 64 hexadecimal digits")


class RankRecord(msgspec.Struct, frozen=True):
    """What a rank registers: itself, and the instance as it sees it."""

    config: InstanceConfig
    rank: Rank

    def __post_init__(self) -> None:
        self.config.topology.check(self.rank.coords)


class RankLife(msgspec.Struct, frozen=True):
    """Which life of which rank renews or releases its lease."""

    coords: RankCoords
    epoch: int


class Renewal(RankLife, frozen=True):
    """A renewal with what the rank reports about itself: a `RankStatus`, still as JSON, because a
    lease does not depend on it. Empty when there is none."""

    status: msgspec.Raw = msgspec.Raw()


class Instance(msgspec.Struct, frozen=True):
    """A complete instance: `ranks` holds one live rank per coordinate, in ascending order.

    `generation` counts the configurations that this registry has seen. `revision` grows with
    every change of who is live, also over restarts of the server.
    """

    config: InstanceConfig
    generation: int
    ranks: tuple[Rank, ...]
    revision: int = 0

    def __post_init__(self) -> None:
        topology = self.config.topology
        if len(self.ranks) != topology.ranks:
            raise ValueError(f"{len(self.ranks)} ranks listed, but {topology} has {topology.ranks}")
        for index, rank in enumerate(self.ranks):
            if topology.index(rank.coords) != index:
                raise ValueError(f"rank {rank.coords} is listed out of order, at place {index}")

    def rank(self, coords: RankCoords) -> Rank:
        """The live rank at `coords`; `ValueError` when they lie outside the topology."""
        return self.ranks[self.config.topology.index(coords)]


class Difference(NamedTuple):
    """One value on which two configurations differ."""

    name: str
    left: str
    right: str

    @property
    def flag(self) -> str:
        """What sets this value."""
        return FLAGS[self.name]


def differences(left: InstanceConfig, right: InstanceConfig) -> Iterator[Difference]:
    """Every leaf value on which `left` and `right` differ, values as short text."""
    for part, other in (
        (left.topology, right.topology),
        (left.format, right.format),
        (left, right),
    ):
        for name in part.__struct_fields__:
            if name not in FLAGS:
                continue
            ours, theirs = getattr(part, name), getattr(other, name)
            if ours != theirs:
                yield Difference(name, *_short_pair(ours, theirs))


def check_instance_name(name: str) -> None:
    """Raise `ValueError` unless `name` can name an instance (it is part of URLs and sentences)."""
    if not _INSTANCE_NAME.fullmatch(name):
        raise ValueError(
            f"instance name {_short(name)!r} is not 1 to 64 letters, digits, dots, dashes or "
            "underscores that begin with a letter or digit"
        )


def instance_name_of(address: str) -> str:
    """The name of a prefill server's instance at registries beside its own: its own registry's
    `host:port`, with dashes for what a name may not have.

    A name that would be too long keeps its end, as host names of one cluster begin alike.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", address)[-INSTANCE_NAME_CHARS_MAX:]
    return plain if plain[:1].isalnum() else f"i{plain[1:]}"


def registry_port_of(name: str) -> int | None:
    """The port of a prefill server's own registry, out of its name at another one
    (`instance_name_of`); None for a name that was not made so."""
    port = name.rpartition("-")[2]
    return int(port) if re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) <= 65_535 else None


def _short_pair(left: object, right: object) -> tuple[str, str]:
    # Of two long descriptions only the differing entries help, and they may be at the end.
    if isinstance(left, dict) and isinstance(right, dict):
        keys = sorted(key for key in left.keys() | right.keys() if left.get(key) != right.get(key))
        left = {key: left.get(key) for key in keys}
        right = {key: right.get(key) for key in keys}
    return _short(left), _short(right)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= VALUE_CHARS_MAX else text[:VALUE_CHARS_MAX] + "…"


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {_short(value)}, outside {low}..{high}")


def _check_text(name: str, text: str) -> None:
    if not 1 <= len(text) <= TEXT_CHARS_MAX:
        raise ValueError(f"{name} has {len(text)} characters, outside 1..{TEXT_CHARS_MAX}")
    if not text.isprintable():
        raise ValueError(f"{name} {text!r} contains control characters")

# SPDX-License-Identifier: Apache-2.0
"""What the operator says of the store (``linker_extra_config``), and what this rank's pages are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_parallel, get_serving

import te
from kvstore.config import Config
from kvstore.signature import Signature
from sglang_mooncake.sglang.config import Config as Settings
from sglang_mooncake.sglang.store.kv_pool import KVPool
from sglang_mooncake.sglang.store.weights import identity
from te.transports.registry import WITHOUT_DEVICES

__all__ = ["Options", "SignatureNow"]

LAYERS_PER_READ: Final = 4
LOAD_TIMEOUT_S: Final = 10.0
STALL_TIMEOUT_S: Final = 1.0
CONNECT_TIMEOUT_S: Final = 2.0
"""An owner that sends nothing of a load for so long is given up. SGLang's forward waits for it."""


@dataclass(frozen=True)
class Options:
    """The settings of one server: those of ``kvstore.Config``, and these."""

    store: Config
    #: Tells the weights apart. Servers with the same text share pages. Without it a few bytes of
    #: every tensor on disk are hashed.
    weights: str | None
    #: Layers that one read brings.
    layers_per_read: int
    #: A load that takes longer is given up, and its requests are aborted.
    load_timeout_s: float

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """``ValueError`` names what is unknown or wrong."""
        rest = dict(given)
        weights = rest.pop("weights", None)
        layers = int(rest.pop("layers_per_read", LAYERS_PER_READ))
        timeout_s = float(rest.pop("load_timeout_s", LOAD_TIMEOUT_S))
        if layers < 1 or not timeout_s > 0:
            raise ValueError(
                f"layers_per_read={layers} and load_timeout_s={timeout_s} must be positive"
            )
        settings = Settings.from_environment()
        store = Config.of(rest, settings.keys)
        return cls(replace(store, engine=_engine(settings, store)), weights, layers, timeout_s)


def _engine(settings: Settings, store: Config) -> te.Config:
    """With an index as the hand-over's engine. Without, all processes are on one host, and need no
    device."""
    given: dict[str, Any] = {"transports": WITHOUT_DEVICES}
    if store.index:
        given = dict(settings.engine)
        if "port_last" not in given:
            given.pop("port", None)  # The hand-over's engine has it.
    given |= {"status_dir": settings.status_dir, "stall_timeout_s": STALL_TIMEOUT_S}
    return te.Config(**given | {"connect_timeout_s": CONNECT_TIMEOUT_S})


#: Flags by which servers with the same weights compute other keys and values.
_CHANGES_VALUES: Final = (
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
)


class SignatureNow:
    """The signature of the pages that this rank computes now. It changes when the weights of the
    running server are updated under a new version."""

    def __init__(self, server_args: Any, pool: KVPool, page_size: int, weights: str | None) -> None:
        """``ValueError`` if the weights cannot be told apart from others."""
        model = ModelConfig.from_server_args(server_args)
        computed = [f"{name}={getattr(server_args, name)!r}" for name in _CHANGES_VALUES]
        self._weights = " ".join(
            [weights or _weights_of(server_args), f"dtype={model.dtype}", *computed]
        )
        self._facts: dict[str, Any] = {
            "dtype": pool.dtype,
            "page_size": page_size,
            "layers": (pool.first_layer, pool.first_layer + pool.layers),
            "heads": _heads(pool, int(model.get_total_num_kv_heads())),
            "layout": pool.layout,
        }
        self._version: str | None = None
        self._now = self._make("")
        self._digest = b""

    def __str__(self) -> str:
        return str(self._now)

    @property
    def digest(self) -> bytes:
        """16 bytes. For the scheduler's thread, which changes the version."""
        version = str(get_serving().weight_version)
        if version != self._version:
            self._version, self._now = version, self._make(version)
            self._digest = self._now.digest
        return self._digest

    def _make(self, version: str) -> Signature:
        return Signature(weights=f"{self._weights} version {version}", **self._facts)


def _heads(pool: KVPool, total: int) -> tuple[int, int]:
    """Which KV heads of the model this rank has; ranks that share one have the same."""
    if pool.is_mla:
        return 0, 0
    parallel = get_parallel()
    size, rank = int(parallel.attn_tp_size), int(parallel.attn_tp_rank)
    first = rank * pool.heads if total >= size else rank * total // size
    return first, first + pool.heads


def _weights_of(server_args: Any) -> str:
    folder = Path(server_args.model_path)
    try:
        if str(server_args.load_format).lower().endswith("dummy"):
            raise ValueError("--load-format dummy loads none")
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    server_args.model_path, revision=server_args.revision, local_files_only=True
                )
            )
        return identity(folder)
    except (ValueError, LocalEntryNotFoundError) as exc:
        raise ValueError(
            f"the store must tell this server's weights from others, and cannot: {exc}; give a text"
            ' of your own as "weights" in linker_extra_config, the same for servers with the same'
            " weights alone"
        ) from exc

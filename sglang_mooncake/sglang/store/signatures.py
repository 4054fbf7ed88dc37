# SPDX-License-Identifier: Apache-2.0
"""What this rank's pages are: the signatures under which they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_parallel, get_serving

from kvstore.signature import Signature
from kvstore.weights import identity

__all__ = ["PoolFacts", "SignatureNow", "facts_by_rank", "heads_of_rank", "weights_of"]

#: Flags by which servers with the same weights compute other keys and values.
_CHANGES_VALUES: Final = (
    "quantization",
    "quantization_param_path",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
)


@dataclass(frozen=True)
class PoolFacts:
    """What a signature says of a pool. See ``kvstore.signature.Signature``."""

    dtype: str
    page_size: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    layout: str
    pool: str = "kv"


class SignatureNow:
    """The signature of a pool's pages that this rank computes now. It changes when the weights of
    the running server are updated under a new version. Thread-safe."""

    def __init__(self, weights: str, pool: PoolFacts) -> None:
        """``weights``: what ``weights_of`` returns."""
        self._weights = weights
        self._pool = pool
        version = _version()
        self._known = version, self._make(version).digest

    def __str__(self) -> str:
        return str(self._make(_version()))

    @property
    def digest(self) -> bytes:
        """16 bytes."""
        version = _version()
        known, digest = self._known
        if version != known:
            digest = self._make(version).digest
            self._known = version, digest
        return digest

    def _make(self, version: str) -> Signature:
        return Signature(weights=f"{self._weights} version {version}", **vars(self._pool))


def _version() -> str:
    return str(get_serving().weight_version)


def weights_of(server_args: Any, given: str | None) -> str:
    """What tells the values that this server computes from those of servers with other weights, or
    with flags that change them. ``given``: the operator's own name for the weights.

    Raises:
        ValueError: the weights cannot be told apart from others.
    """
    model = ModelConfig.from_server_args(server_args)
    computed = [f"{name}={getattr(server_args, name)!r}" for name in _CHANGES_VALUES]
    return " ".join([given or _identity_of(server_args), f"dtype={model.dtype}", *computed])


def heads_of_rank(heads: int, server_args: Any) -> tuple[int, int]:
    """Which KV heads of the model this rank has, which has so many; ranks that share one have the
    same."""
    total = int(ModelConfig.from_server_args(server_args).get_total_num_kv_heads())
    parallel = get_parallel()
    size, rank = int(parallel.attn_tp_size), int(parallel.attn_tp_rank)
    first = rank * heads if total >= size else rank * total // size
    return first, first + heads


def facts_by_rank(
    facts: PoolFacts, name: str, tp: tuple[int, int] | None, pp: tuple[int, int]
) -> PoolFacts:
    """Of a pool of which it is not known which layers and heads of the model a rank has: its
    number tells ranks apart. ``tp``: the rank and how many there are; None if all have the same.
    ``pp``: likewise."""
    layout = facts.layout
    if tp is not None:
        layout += f" tp {tp[0]}/{tp[1]}"
    layout += f" pp {pp[0]}/{pp[1]}"
    return replace(facts, layers=(0, 0), heads=(0, 0), layout=layout, pool=name)


def _identity_of(server_args: Any) -> str:
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
            ' of your own as "weights" in the extra config, the same for servers with the same'
            " weights alone"
        ) from exc

# SPDX-License-Identifier: Apache-2.0
"""What this rank's pages are: the signatures under which they are stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.runtime_context import get_lora, get_parallel
from sglang.version import __version__

from kvstore.objects.signature import Signature
from kvstore.objects.weights import identity, identity_of_config, identity_of_file
from sglang_mooncake.sglang.store.adapters import name_adapters
from sglang_mooncake.sglang.store.refusals import check_served, check_told_by_files
from sglang_mooncake.sglang.store.updates import updates

__all__ = ["PoolFacts", "SignatureNow", "facts_by_rank", "heads_of_rank", "weights_of"]

#: Flags by which servers with the same weights compute other keys and values.
_CHANGES_VALUES: Final = (
    "load_format",
    "model_loader_extra_config",
    "quantization",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "prefill_kv_cache_dequant_dtype",
    "json_model_override_args",
    "model_config_parser",
    "model_impl",
    "context_length",
    "mm_process_config",
    "mamba_ssm_dtype",
    "enable_mamba_cache_stochastic_rounding",
    "mamba_cache_philox_rounds",
    "enable_int8_mamba_checkpoint",
    "enable_quant_communications",
    "boundary_reduction",
    "custom_weight_loader",
)


@dataclass(frozen=True)
class PoolFacts:
    """What a signature says of a pool. See ``kvstore.objects.signature.Signature``."""

    dtype: str
    page_size: int
    layers: tuple[int, int]
    heads: tuple[int, int]
    layout: str
    pool: str = "kv"


class SignatureNow:
    """The signature of a pool's pages that this rank computes now. It changes when the weights of
    the running server are updated. Thread-safe."""

    def __init__(self, weights: str, pool: PoolFacts) -> None:
        """``weights``: what ``weights_of`` returns."""
        self._weights = weights
        self._pool = pool
        self._updates = updates()
        self._known: tuple[str, bytes] | None = None

    def __str__(self) -> str:
        return str(self._make(self._updates.now or "that change"))

    @property
    def digest(self) -> bytes | None:
        """16 bytes; None while there may be pages of several weights: none is stored or loaded."""
        now = self._updates.now
        if now is None:
            return None
        if self._known is None or self._known[0] != now:
            self._known = now, self._make(now).digest
        return self._known[1]

    def _make(self, now: str) -> Signature:
        return Signature(weights=f"{self._weights} {now}", **vars(self._pool))


def weights_of(server_args: Any, given: str | None) -> str:
    """What tells the values that this server computes from those of servers with other weights, or
    with flags that change them. ``given``: the operator's own name for the weights.

    From now on adapters are a part of the names of pages.

    Raises:
        ValueError: the weights cannot be told apart from others, or the store does not serve such
            a server.
    """
    check_served(server_args)
    name_adapters(lambda: get_lora().lora_paths or ())
    model = ModelConfig.from_server_args(server_args)
    computed = [f"{name}={getattr(server_args, name)!r}" for name in _CHANGES_VALUES]
    scales = server_args.quantization_param_path
    if scales is not None:
        computed.append(f"scales={identity_of_file(Path(scales))}")
    return " ".join(
        [
            given or _identity_of(server_args),
            f"sglang={__version__}",
            f"config={identity_of_config(model.hf_config.to_dict())}",
            f"dtype={model.dtype}",
            *computed,
        ]
    )


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
        check_told_by_files(server_args)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    server_args.model_path, revision=server_args.revision, local_files_only=True
                )
            )
        return identity(folder)
    except (OSError, ValueError, LocalEntryNotFoundError) as exc:
        raise ValueError(
            f"the store must tell this server's weights from others, and cannot: {exc}; give a text"
            ' of your own as "weights" in the extra config, the same for servers with the same'
            " weights alone"
        ) from exc

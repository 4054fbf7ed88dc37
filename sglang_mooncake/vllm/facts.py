# SPDX-License-Identifier: Apache-2.0
"""What the connector takes from vLLM's configuration (`vllm/config`), and which servers it
refuses. Imports nothing of vLLM, so that it is tested without."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvstore.objects.signature import Signature
from kvstore.objects.weights import identity, identity_of_config
from sglang_mooncake.vllm.page_map import PageMap

__all__ = [
    "block_tokens",
    "check_server",
    "computed_by",
    "heads_of_rank",
    "refuse_caches",
    "refuse_hashes",
    "refuse_sleep",
    "refuse_split",
    "share_of_rank",
    "signature_of",
    "total_heads",
]

#: Of ``ModelConfig``: by which servers with the same weights compute other keys and values.
_CHANGES_VALUES: Final = ("dtype", "quantization", "hf_overrides", "model_impl")
#: Load formats that read safetensors files and change nothing.
LOAD_FORMATS: Final = ("auto", "hf", "safetensors")
#: vLLM's classes of caches that keep each block of a request until that ends. From others (sliding
#: windows, states) it takes blocks away while the request runs, and gives them to another one.
KEEPS_BLOCKS: Final = ("FullAttentionSpec", "MLAAttentionSpec")
#: Quantisations whose values follow from the files and the flag.
QUANTIZATIONS: Final = (
    None,
    "awq",
    "awq_marlin",
    "compressed-tensors",
    "fp8",
    "gptq",
    "gptq_marlin",
    "modelopt",
    "modelopt_fp4",
    "mxfp4",
)


def check_server(config: Any, caches: Any) -> None:
    """Refuses what the store cannot hold, or what could take wrong pages.

    ``config``: vLLM's ``VllmConfig``; ``caches``: its ``KVCacheConfig``.

    Raises:
        ValueError: says which flag to change.
    """
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    refuse_split(parallel)
    refuse_caches(caches, "the store holds pages of full attention alone")
    if config.speculative_config is not None:
        raise ValueError(
            "with --speculative-config pages may hold tokens that are rejected later, and the store"
            " does not hold the draft model's cache: leave the one or the other out"
        )
    if config.lora_config is not None:
        raise ValueError(
            "vLLM names a page by its adapter's name, which says nothing of what is in it: leave"
            " --enable-lora or the store out"
        )
    if config.weight_transfer_config is not None:
        raise ValueError(
            "the store does not see when weights are updated, and would take the former ones'"
            " pages: leave --weight-transfer-config or the store out"
        )
    if transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            "a page may be evicted between look-up and load, and its request would fail with"
            f' "kv_load_failure_policy": "{transfer.kv_load_failure_policy}": say "recompute" in'
            " --kv-transfer-config"
        )
    refuse_hashes(config)
    refuse_sleep(config)


def refuse_caches(caches: Any, served: str) -> None:
    """``ValueError`` unless vLLM keeps all blocks of a request until that ends, in one table of
    blocks for all layers.

    caches: vLLM's ``KVCacheConfig``.
    served: the end of the sentence.
    """
    groups = caches.kv_cache_groups
    if len(groups) != 1:
        raise ValueError(
            f"this model has {len(groups)} groups of KV caches, with sliding windows or states;"
            f" {served}. With --disable-hybrid-kv-cache-manager vLLM keeps windows as if they were"
            " full attention, where other layers have that"
        )
    spec = groups[0].kv_cache_spec
    layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
    others = sorted({type(one).__name__ for one in layers} - set(KEEPS_BLOCKS))
    if others:
        raise ValueError(
            f"this model's KV caches are of vLLM's kind {', '.join(others)}, which gives blocks"
            f" back while their request runs; {served}"
        )


def refuse_hashes(config: Any) -> None:
    """``ValueError`` unless two servers' hashes are equal for equal prompts alone."""
    algorithm = str(config.cache_config.prefix_caching_hash_algo)
    if not algorithm.startswith("sha256"):
        raise ValueError(
            f"--prefix-caching-hash-algo {algorithm} is not made to tell the prompts of several"
            " servers apart: use sha256 or sha256_cbor"
        )


def refuse_sleep(config: Any) -> None:
    """``ValueError`` for a server that may sleep: vLLM then takes the memory from under the KV
    cache, which the transfer engine has registered and others may be reading or writing, and may
    wake up with other weights."""
    if config.model_config.enable_sleep_mode:
        raise ValueError(
            "--enable-sleep-mode is not supported: the KV cache's memory is registered for the"
            " server's life, and sleep takes it away; leave that flag or the connector out"
        )


def refuse_split(parallel: Any) -> None:
    """``ValueError`` for a way to split the model over ranks, other than TP."""
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {getattr(parallel, name)} is not supported: give 1")


def block_tokens(config: Any) -> int:
    """Tokens of a page."""
    return int(config.cache_config.block_size)


def heads_of_rank(config: Any, rank: int) -> tuple[int, int]:
    """Which KV heads of the model a TP rank has; ranks that share one have the same. (0, 0) where
    every rank has all of the cache (MLA)."""
    model, parallel = config.model_config, config.parallel_config
    if model.use_mla:
        return 0, 0
    size, total = int(parallel.tensor_parallel_size), int(model.get_total_num_kv_heads())
    heads = int(model.get_num_kv_heads(parallel))
    first = rank * heads if total >= size else rank * total // size
    return first, first + heads


def share_of_rank(config: Any, rank: int) -> tuple[int, int]:
    """Which part of its pages a TP rank stores, and of how many: one that shares its KV heads with
    others leaves them theirs."""
    size, heads = int(config.parallel_config.tensor_parallel_size), heads_of_rank(config, rank)
    same = [one for one in range(size) if heads_of_rank(config, one) == heads]
    return same.index(rank), len(same)


def total_heads(config: Any) -> int:
    """KV heads of the model, over all TP ranks. Its one latent counts as a head (MLA)."""
    model = config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())


def signature_of(
    config: Any, pages: PageMap, kernel: str, rank: int, weights: str | None, release: str
) -> Signature:
    """Of the pages of one TP rank.

    kernel: what arranges the numbers of a block.
    release: of vLLM.
    weights: the operator's own name for them.

    Raises:
        ValueError: the weights cannot be told apart from others.
    """
    model = config.model_config
    computed = [
        f"vllm={release}",
        f"max_model_len={model.max_model_len}",
        f"load_format={_plain(config.load_config.load_format)}",
        computed_by(config, weights),
    ]
    return Signature(
        weights=" ".join(computed),
        dtype=f"{config.cache_config.cache_dtype} of {model.dtype}",
        page_size=block_tokens(config),
        layers=(0, pages.layers),
        heads=heads_of_rank(config, rank),
        layout=f"vllm {kernel} {pages.layout}/1",
    )


def computed_by(config: Any, weights: str | None) -> str:
    """The weights, and the flags by which servers with the same ones compute other values.
    ``weights`` and ``ValueError`` as for ``signature_of``."""
    model = config.model_config
    computed = [f"{name}={getattr(model, name, None)!r}" for name in _CHANGES_VALUES]
    computed.append(f"cache_dtype={config.cache_config.cache_dtype!r}")
    computed.append(f"config={identity_of_config(model.hf_config.to_dict())}")
    return " ".join([weights or _identity_of(config), *computed])


def _plain(given: Any) -> str | None:
    return None if given is None else str(getattr(given, "value", given)).lower()


def _check_told_by_files(config: Any) -> None:
    for flag, given, known in (
        ("--load-format", config.load_config.load_format, LOAD_FORMATS),
        ("--quantization", config.model_config.quantization, QUANTIZATIONS),
    ):
        if _plain(given) not in known:
            accepted = ", ".join(one for one in known if one)
            raise ValueError(
                f"{flag} {_plain(given)} is none of those of which the store knows that the files"
                f" tell the weights ({accepted})"
            )


def _identity_of(config: Any) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    folder = Path(config.model_config.model)
    try:
        _check_told_by_files(config)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    config.model_config.model,
                    revision=config.model_config.revision,
                    local_files_only=True,
                )
            )
        return identity(folder)
    except (OSError, ValueError, LocalEntryNotFoundError) as exc:
        raise ValueError(
            f"the store must tell this server's weights from others, and cannot: {exc}; give a text"
            ' of your own as "weights" in kv_connector_extra_config, the same for servers with the'
            " same weights alone"
        ) from exc

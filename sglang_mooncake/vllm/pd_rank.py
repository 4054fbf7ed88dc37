# SPDX-License-Identifier: Apache-2.0
"""A rank of vLLM as the hand-over knows ranks: which servers are refused, the layout of its KV
cache, what else is known of the process. Imports nothing of vLLM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from bootstrap_server import InstanceConfig, KVFormat, MismatchError, RankCoords, Topology
from bootstrap_server.admission.exposure import exposure
from bootstrap_server.ranks.records import FLAGS
from sglang_mooncake.context import Deadlines, RankContext, Role, SettingNames
from sglang_mooncake.layout import Buffers, Component, Layout, Place, Units
from sglang_mooncake.messages import PROTOCOL_VERSION
from sglang_mooncake.vllm.facts import (
    block_tokens,
    computed_by,
    refuse_caches,
    refuse_hashes,
    refuse_sleep,
    refuse_split,
    total_heads,
)
from sglang_mooncake.vllm.page_map import CacheTensor, PageMap
from sglang_mooncake.vllm.pd_options import PdOptions
from sglang_mooncake.vllm.releases import line_of

__all__ = [
    "ROLES",
    "VLLM_FLAGS",
    "check_exposure",
    "check_pair_server",
    "context_of",
    "layout_of",
    "place_of",
    "role_of",
    "server_facts",
]

ROLES: Final[dict[str, Role]] = {"kv_producer": "prefill", "kv_consumer": "decode"}
#: What vLLM calls what must be equal; see ``bootstrap_server.ranks.records.FLAGS``.
VLLM_FLAGS: Final[dict[str, str]] = {
    "tp_size": "--tensor-parallel-size",
    "page_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype, or --dtype where that is auto",
    "kv_layout": "--attention-backend, and on a CPU its instructions",
}
NO_METADATA: Final = Buffers((), (), ())
INSIST: Final = '"insecure": true in kv_connector_extra_config'


def role_of(config: Any) -> Role:
    """``ValueError`` for a server that would be both."""
    said = str(config.kv_transfer_config.kv_role)
    if said not in ROLES:
        raise ValueError(
            f'"kv_role": "{said}" is not supported: say "kv_producer" for a prefill server, and'
            ' "kv_consumer" for a decode server'
        )
    return ROLES[said]


def check_pair_server(config: Any, caches: Any) -> None:
    """Refuses what cannot be handed over.

    ``config``: vLLM's ``VllmConfig``; ``caches``: its ``KVCacheConfig``.

    Raises:
        ValueError: says which flag to change.
    """
    role_of(config)
    parallel = config.parallel_config
    refuse_split(parallel)
    size = getattr(parallel, "data_parallel_size", 1)
    if size != 1:
        raise ValueError(
            f"--data-parallel-size {size} is not supported between prefill and decode: give 1, and"
            " start more servers instead"
        )
    refuse_caches(caches, "blocks of full attention alone can be handed over")
    if config.speculative_config is not None:
        raise ValueError(
            "with --speculative-config the draft model's cache would have to be handed over, too,"
            " and is not: leave it out"
        )
    if config.weight_transfer_config is not None:
        raise ValueError(
            "the hand-over does not see when weights are updated, and the decode server would go on"
            " with a prompt of the former ones: leave --weight-transfer-config or the connector out"
        )
    refuse_hashes(config)
    refuse_sleep(config)


def check_exposure(options: PdOptions, host: str) -> str | None:
    """What is to be said of a server without a secret. ``ValueError`` if it must not start."""
    said = exposure(host, bool(options.keys), options.insecure, INSIST)
    if said is None:
        return None
    if said.refused:
        raise ValueError(said.sentence)
    return said.sentence


def number_type(config: Any) -> str:
    """Of the cached numbers. vLLM's name for it is "auto" where it is the model's own."""
    name = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if name == "auto" else name


def server_facts(
    config: Any, pages: PageMap, kernel: str, weights: str | None, release: str
) -> dict[str, str]:
    """What must be equal on both servers, by what sets it (``Offer.server``). All TP ranks of a
    server say the same. How many there are need not be equal.

    kernel: what arranges the numbers of a block.
    weights: the operator's own name for them.
    release: of vLLM.

    Raises:
        ValueError: the weights cannot be told apart from others.
    """
    return {
        "vLLM": line_of(release),
        VLLM_FLAGS["page_size"]: str(block_tokens(config)),
        VLLM_FLAGS["kv_cache_dtype"]: number_type(config),
        "layers with a KV cache": str(pages.layers),
        "KV heads": str(total_heads(config)),
        VLLM_FLAGS["kv_layout"]: f"{kernel} {pages.arrangement}",
        "weights, and flags that change values": computed_by(config, weights),
    }


def place_of(config: Any, tp_rank: int) -> Place:
    """Which part of the model a worker has."""
    size = int(config.parallel_config.tensor_parallel_size)
    return Place(Topology(1, 1, size, 1), RankCoords(0, 0, tp_rank, 0))


def layout_of(
    config: Any,
    tensors: Sequence[CacheTensor],
    kernel: str,
    place: Place,
    completions: Buffers = NO_METADATA,
) -> Layout:
    """Of the layers' KV caches, in the order of layers.

    place: which rank has them.
    completions: of the decode side.

    Raises:
        ValueError: blocks of a layer do not lie behind each other, or have other heads than the
            model gives this rank.
    """
    pages = PageMap(tensors, tensors[0].shape[0] if tensors else 0)
    one = tensors[0]
    nbytes, step = one.block_bytes, one.strides[0] * one.item_bytes
    if step != nbytes:
        raise ValueError(
            f"a layer's blocks of {nbytes} bytes lie {step} bytes apart: other layers' lie between"
            " them, and cannot be handed over so"
        )
    blocks, layers = one.shape[0], len(tensors)
    buffers = Buffers(
        tuple(one.address for one in tensors), (nbytes,) * layers, (nbytes * blocks,) * layers
    )
    cuts = (Units(total_heads(config), one.head_bytes),)
    component = Component("kv", tuple(range(layers)), buffers, cuts=cuts, rows=one.rows)
    _check_heads(component, one, place)
    return Layout(
        page_size=block_tokens(config),
        dtype=number_type(config),
        kv_layout=f"vllm {kernel} {pages.arrangement}",
        components=(component,),
        aux=NO_METADATA,
        completions=completions,
    )


def _check_heads(component: Component, one: CacheTensor, place: Place) -> None:
    size, rank = place.topology.tp_size, place.coords.tp
    (cut,) = component.cuts
    try:
        expected = len(component.holding(cut, size, rank))
    except MismatchError as error:
        raise ValueError(
            f"{VLLM_FLAGS['tp_size']} {size}: the model has {cut.total} KV heads, and neither"
            " number divides the other"
        ) from error
    if one.heads != expected:
        raise ValueError(
            f"the KV cache of TP rank {rank} of {size} has {one.heads} heads, where a model of"
            f" {cut.total} should have {expected}: a model whose layers have other heads cannot be"
            " handed over"
        )


def context_of(
    role: Role, options: PdOptions, layout: Layout, place: Place, host: str
) -> RankContext:
    """``host``: the address of this rank that others reach."""
    first_s = options.hold_timeout_s if role == "prefill" else options.load_timeout_s
    first = "hold_timeout_s" if role == "prefill" else "load_timeout_s"
    return RankContext(
        role=role,
        coords=place.coords,
        config=InstanceConfig(
            place.topology,
            KVFormat(layout.page_size, layout.dtype, layout.kv_layout),
            protocol=PROTOCOL_VERSION,
        ),
        host=host,
        bootstrap_address="",
        prefill_http_port=None,
        register_dp_rank=False,
        deadlines=Deadlines(
            bootstrap_s=first_s,
            waiting_s=options.load_timeout_s,
            heartbeat_failures_max=math.ceil(options.silence_timeout_s / Deadlines().heartbeat_s),
        ),
        names=SettingNames(first, "load_timeout_s", "link_timeout_s", FLAGS | VLLM_FLAGS),
        keys=options.keys,
    )

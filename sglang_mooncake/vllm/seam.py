# SPDX-License-Identifier: Apache-2.0
"""All that the connectors import of vLLM, from the releases that `releases.py` names. Nothing else
asks for a release. Between them no name, and no call that the connectors take or make, has changed:

- Since 0.33 vLLM asks a connector whether its server may sleep (`supports_sleep_mode`), and has
  calls for those that follow a sleep, which are never made here. Before, `--enable-sleep-mode` is
  refused by the configuration alone.

Raises:
    ImportError: the installed release cannot work; names the nearest one that does.
"""

from __future__ import annotations

import logging

from vllm import __version__ as release

from sglang_mooncake.vllm.releases import lacks, too_old, untested

_sentence = too_old(release)
if _sentence is not None:
    raise ImportError(_sentence)

try:
    from vllm.distributed import get_tensor_model_parallel_rank
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backend
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorHandshakeMetadata,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.model_executor.models.utils import extract_layer_index
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_ip
    from vllm.v1.attention.backends import cpu_attn
    from vllm.v1.request import RequestStatus
except ImportError as error:
    raise ImportError(lacks(release, error)) from error

__all__ = [
    "KVConnectorBase_V1",
    "KVConnectorHandshakeMetadata",
    "KVConnectorMetadata",
    "KVConnectorRole",
    "RequestStatus",
    "SupportsHMA",
    "cpu_attn",
    "current_platform",
    "extract_layer_index",
    "get_current_attn_backend",
    "get_ip",
    "get_tensor_model_parallel_rank",
    "logger",
    "release",
]

#: Below vLLM's own, whose level and form it has.
logger = logging.getLogger("vllm.sglang_mooncake")

_sentence = untested(release)
if _sentence is not None:
    logger.warning("%s", _sentence)

# SPDX-License-Identifier: Apache-2.0
"""The registry of an SGLang server, with the deployment's secret: the one that SGLang makes in its
main process, and SGLang's own questions to that of another server."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bootstrap_server import BootstrapClient, BootstrapError, BootstrapServer
from bootstrap_server.admission.exposure import exposure
from bootstrap_server.admission.own_addresses import addresses_behind
from sglang_mooncake.sglang.config import INSECURE, Config

__all__ = ["ServersRegistry", "prove_dp_rank_queries", "query_dp_ranks"]

logger = logging.getLogger(__name__)


class ServersRegistry(BootstrapServer):
    """Constructed by SGLang as its own is (`managers/disagg_service.py`). Takes the secret from the
    environment, as the manager does in the schedulers.

    Raises:
        config.ConfigError: what it says.
        ValueError: everybody on the internet could reach it, and there is no secret. The ranks say
            the same, but when the model has been loaded: the registry would be open for minutes.
        BootstrapError: it cannot listen.
    """

    def __init__(self, host: str, port: int) -> None:
        config = Config.from_environment()
        said = exposure(
            host, bool(config.keys), config.insecure, f"{INSECURE}=1", addresses_behind(host)
        )
        if said is not None and said.refused:
            raise ValueError(said.sentence)
        super().__init__(host, port, keys=config.keys.registry)


def prove_dp_rank_queries(keys: Sequence[bytes]) -> None:
    """For the manager of a decode rank with a secret. SGLang's decode scheduler asks registries by
    `CommonKVReceiver.query_prefill_dp_ranks`, whatever its receivers are, which prove nothing.

    Raises:
        LookupError: this SGLang asks otherwise.
    """
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver

    if not callable(getattr(CommonKVReceiver, "query_prefill_dp_ranks", None)):
        raise LookupError("this version of SGLang has no CommonKVReceiver.query_prefill_dp_ranks")

    def query(bootstrap_addr: str, bootstrap_rooms: list[int]) -> dict[str, int]:
        return query_dp_ranks(bootstrap_addr, bootstrap_rooms, keys)

    CommonKVReceiver.query_prefill_dp_ranks = staticmethod(query)


def query_dp_ranks(address: str, rooms: Sequence[int], keys: Sequence[bytes]) -> dict[str, int]:
    """The DP ranks of those rooms that are registered. As SGLang's own, which asks again, logs what
    goes wrong and returns nothing then."""
    try:
        with BootstrapClient(address, keys=keys) as client:
            return {str(room): rank for room, rank in client.query_dp_ranks(rooms).items()}
    except BootstrapError as error:
        logger.error("cannot ask for the DP ranks of %d rooms: %s", len(rooms), error)
        return {}

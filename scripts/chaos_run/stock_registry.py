# SPDX-License-Identifier: Apache-2.0
"""What SGLang's own registry tells of the only rank of a prefill server."""

from __future__ import annotations

import json
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException

from cpu_serving.processes import ServingError

__all__ = ["stock_port"]

_RANK = "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"


def stock_port(registry: str, timeout_s: float) -> int:
    """On which the rank waits for messages of decode servers. registry: host and port. Raises
    ServingError."""
    connection = HTTPConnection(registry, timeout=timeout_s)
    try:
        connection.request("GET", f"/route?{_RANK}")
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != HTTPStatus.OK:
            raise ServingError(f"the registry at {registry} says {answer.status}: {body!r}")
        return int(json.loads(body)["rank_port"])
    except (OSError, HTTPException, ValueError, KeyError) as error:
        raise ServingError(f"the registry at {registry} tells no rank: {error!r}") from error
    finally:
        connection.close()

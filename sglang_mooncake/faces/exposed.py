# SPDX-License-Identifier: Apache-2.0
"""Whether a face may listen: whoever reaches its ports may read and write the memory that is
registered, unless the deployment has a secret."""

from __future__ import annotations

import logging

from bootstrap_server.admission.exposure import exposure

__all__ = ["check_exposure"]

logger = logging.getLogger(__name__)


def check_exposure(host: str, has_secret: bool, insecure: bool, how_to_insist: str) -> None:
    """Of an address to listen on. ``ValueError`` with the reason if a face must not; the log has
    what an operator has to know otherwise.

    Args:
        insecure: the operator insists.
        how_to_insist: the setting by which he would.
    """
    said = exposure(host, has_secret, insecure, how_to_insist)
    if said is not None and said.refused:
        raise ValueError(said.sentence)
    if said is not None:
        logger.warning("%s", said.sentence)

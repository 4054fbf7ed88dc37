# SPDX-License-Identifier: Apache-2.0
"""Memory of a client that its engine does not let go of at once."""

from __future__ import annotations

import numpy as np
import pytest

import te
from kvstore.client.memory import Memory


def test_memory_that_was_there_before_its_engine_can_be_deregistered_at_a_second_try() -> None:
    """Its engine may refuse while transfers read from it, and knows it by another region."""
    with te.Engine(te.Config(transports=("tcp",), status_dir=None)) as engine:
        memory, array = Memory(lambda: engine), np.zeros(4096, np.uint8)
        region = memory.register(array)
        assert memory.engine is engine
        real = te.Engine.deregister

        def refuses(self: te.Engine, region: te.Region) -> None:
            raise te.RegistrationError("1 unfinished transfers read from the region")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(te.Engine, "deregister", refuses)
            with pytest.raises(te.RegistrationError, match="unfinished"):
                memory.deregister(region)
        assert te.Engine.deregister is real
        memory.deregister(region)
        engine.register(array)

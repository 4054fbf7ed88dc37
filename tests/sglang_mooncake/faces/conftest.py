# SPDX-License-Identifier: Apache-2.0
"""Settings of the tests of the faces."""

from __future__ import annotations

import pytest
from handover import NEVER_S

from sglang_mooncake.faces.mooncake_engine import answering, sessions


@pytest.fixture(autouse=True)
def patient_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `patient`, for Mooncake's sessions."""
    for module, name in [
        (answering, "ANSWER_TIMEOUT_S"),
        (answering, "CLOSE_TIMEOUT_S"),
        (sessions, "ASK_TIMEOUT_S"),
    ]:
        monkeypatch.setattr(module, name, NEVER_S)

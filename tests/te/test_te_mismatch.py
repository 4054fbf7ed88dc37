# SPDX-License-Identifier: Apache-2.0
"""Which failures to connect would come again until one of the engines is another one. (Keys:
test_te_keys.py; encryption: test_te_encryption.py.)"""

from __future__ import annotations

import re

import pytest

import te

HOST = "127.0.0.1"


def engine(*transports: str) -> te.Engine:
    return te.Engine(te.Config(host=HOST, transports=transports))


@pytest.mark.pure
def test_engines_without_a_common_transport_name_those_of_both() -> None:
    with engine("tcp") as target, engine("samehost") as source:
        said = f"the engine {target.id} offers tcp, this one samehost"
        with pytest.raises(te.TransportMismatch, match=re.escape(said)):
            source.connect(target.card())


@pytest.mark.pure
def test_an_engine_that_has_gone_is_no_mismatch() -> None:
    """Another attempt, with the card of its next life, may go well."""
    with engine("samehost") as source:
        with engine("samehost") as target:
            card = target.card()
        with pytest.raises(te.ConnectError, match="no engine") as caught:
            source.connect(card)
    assert not isinstance(caught.value, te.TransportMismatch)

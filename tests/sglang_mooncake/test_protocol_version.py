# SPDX-License-Identifier: Apache-2.0
"""Whoever changes what ranks tell each other raises the version of the protocol: peers of another
release drop fields that they do not know."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from bootstrap_server import RankRecord
from sglang_mooncake import messages
from sglang_mooncake.messages import PROTOCOL_VERSION, Message

#: Of the schemas of all messages and of a rank's record, by the version that has them.
DIGESTS = {18: "1793b6a3872511f1"}


def test_the_messages_are_those_of_this_version() -> None:
    schemas = _without_words(msgspec.json.schema_components([Message, RankRecord]))
    digest = hashlib.sha256(msgspec.json.encode(schemas, order="deterministic")).hexdigest()[:16]
    assert DIGESTS.get(PROTOCOL_VERSION) == digest, (
        f"what ranks tell each other has changed: raise {messages.__name__}.PROTOCOL_VERSION, and"
        f" note {digest} for it here"
    )


def _without_words(schema: Any) -> Any:
    """Docstrings change nothing."""
    if isinstance(schema, dict):
        return {key: _without_words(one) for key, one in schema.items() if key != "description"}
    return [_without_words(one) for one in schema] if isinstance(schema, list | tuple) else schema

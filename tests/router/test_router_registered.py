# SPDX-License-Identifier: Apache-2.0
"""Caches that are registered at the router, and are no servers of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_mooncake.router.registered import Registered, Registration, Unregistration
from sglang_mooncake.router.sglang_http import RequestError


def registration(**more: Any) -> Registration:
    usual = {"endpoint": "tcp://10.0.0.1:5557", "modelname": "m", "instance_id": "a"}
    return msgspec.convert({**usual, "block_size": 4, "dp_rank": 0, **more}, Registration)


def test_caches_are_kept_apart_by_tenant_model_and_rank() -> None:
    known = Registered()
    for more in (
        {"dp_rank": 1},
        {"instance_id": 7, "modelname": None, "model_name": "other"},
        {"tenant_id": "t", "type": "sglang"},
        {},
    ):
        known.add(registration(**more))
    names = {name: list(ranks) for name, ranks in known.asked("default", None).items()}
    assert names == {"a": [1, 0], "7": [0]}
    assert list(known.asked("default", "other")) == ["7"]
    assert list(known.asked("t", "m")) == ["a"]
    assert not known.asked("t", "other")
    gone = msgspec.convert({"instance_id": "a", "dp_rank": 1}, Unregistration)
    assert (known.remove(gone), known.remove(gone)) == (["a|default|1"], [])
    assert list(known.asked("default", "m")["a"]) == [0]


def test_who_registers_anew_is_followed_anew() -> None:
    known = Registered(caches_max=1)
    known.add(registration())
    (first,) = known.all()
    known.add(registration(endpoint="tcp://10.0.0.2:5557"))
    (second,) = known.all()
    assert second is not first
    assert str(second) == "the registered cache a|default|0"
    with pytest.raises(RequestError, match="1 caches are registered already"):
        known.add(registration(instance_id="b"))


def test_no_more_are_registered_when_their_pages_take_all_the_room() -> None:
    known = Registered(pages_max=2)
    known.add(registration())
    known.room.pages -= 2
    with pytest.raises(RequestError, match="have told of 2 pages"):
        known.add(registration(instance_id="b"))
    known.add(registration(endpoint="tcp://10.0.0.2:5557"))
    assert len(known.all()) == 1, "who registers anew gives his room back"
    known.room.pages += 1
    known.add(registration(instance_id="b"))
    assert len(known.all()) == 2


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"endpoint": "ipc:///tmp/x"}, "endpoint: 'ipc:///tmp/x' is not of the form"),
        ({"endpoint": "tcp://*:1"}, "is not of the form"),
        ({"replay_endpoint": "http://a:1"}, "replay_endpoint"),
        ({"type": "vLLM"}, "of 'vLLM' the names of pages"),
        ({"lora_name": "x"}, "lora_name"),
        ({"additionalsalt": "w8a8"}, "additionalsalt"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"dp_rank": -1}, "not negative"),
    ],
)
def test_what_cannot_be_answered_for_is_refused(more: dict[str, Any], words: str) -> None:
    known = Registered()
    with pytest.raises(RequestError, match=words):
        known.add(registration(**more))
    assert not known.all()

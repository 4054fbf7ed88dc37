# SPDX-License-Identifier: Apache-2.0
"""What a prefill server of vLLM answers, and what its decode server makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_makers import hashes

from sglang_mooncake.vllm.pd_offers import Offer, prompt_digest

BLOCK = 4
SERVER = {"--block-size": "32", "weights": "the model"}
TEXTS = st.text(max_size=8)
OFFERS = st.builds(
    Offer,
    TEXTS,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
    TEXTS,
    st.dictionaries(TEXTS, TEXTS, max_size=3),
)
ONE = Offer("host:1", 7, 65, "digest", SERVER)


@given(OFFERS)
def test_an_offer_passes_through_json(offer: Offer) -> None:
    params = json.loads(json.dumps(offer.params()))
    assert params["do_remote_prefill"] is True
    assert Offer.of(params) == offer
    assert offer.refusal(offer.tokens, offer.prompt, offer.server) is None


@pytest.mark.slow
@given(OFFERS, st.sampled_from(["registry", "room", "tokens", "prompt", "server"]), st.data())
def test_what_a_client_has_made_up_is_named(offer: Offer, name: str, data: st.DataObject) -> None:
    wrong = data.draw(st.sampled_from([None, True, 1.5, ["x"], "", {}, 1]))
    params = offer.params()
    if type(wrong) is type(params[name]):
        wrong = None
    with pytest.raises(ValueError, match=f"kv_transfer_params: {name} is "):
        Offer.of(params | {name: wrong})
    del params[name]
    with pytest.raises(ValueError, match=f"{name} is 'None'"):
        Offer.of(params)


@pytest.mark.parametrize("room", [-1, 2**63])
def test_a_number_that_is_no_room_is_refused(room: int) -> None:
    with pytest.raises(ValueError, match="is no room"):
        Offer.of(ONE.params() | {"room": room})


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"server": SERVER | {"--block-size": "64"}}, ["--block-size", "has 64,", "has 32;"]),
        ({"server": {"weights": "the model"}}, ["--block-size", "has None,", "has 32;"]),
        ({"server": SERVER | {"weights": "another"}}, ["weights", "another", "the model"]),
        ({"tokens": 66}, ["another prompt", "of 66 tokens", "has 65"]),
        ({"prompt": "another"}, ["another prompt", "(digests another and digest)"]),
    ],
)
def test_what_differs_is_named_with_both_values(changed: dict[str, Any], parts: list[str]) -> None:
    said = replace(ONE, **changed).refusal(65, "digest", SERVER) or ""
    for part in parts:
        assert part in said


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.data())
def test_prompts_with_one_digest_are_one_prompt(tokens: list[int], data: st.DataObject) -> None:
    other = data.draw(st.one_of(st.just(tokens), st.lists(st.integers(0, 3), min_size=1)))

    def digest(prompt: list[int]) -> str:
        whole = len(prompt) // BLOCK * BLOCK
        # The generated tokens' blocks have hashes, too.
        chain = [h for i in range(0, whole, BLOCK) for h in hashes(1, str(prompt[: i + BLOCK]))]
        return prompt_digest(prompt, BLOCK, [*chain, b"generated"], [])

    assert (digest(tokens) == digest(other)) == (tokens == other)


def test_a_digest_has_what_the_tokens_behind_full_blocks_depend_on() -> None:
    assert prompt_digest([1, 2], BLOCK, [], []) != prompt_digest([1, 2], BLOCK, [], ["image"])

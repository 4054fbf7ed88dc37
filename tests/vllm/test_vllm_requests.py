# SPDX-License-Identifier: Apache-2.0
"""Which pages vLLM's scheduler has loaded and stored."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_makers import hashes

from kvstore.objects.changes import Keys, keys_of_digests
from sglang_mooncake.vllm.requests import Requests, held_by_all

BLOCK = 4


class Pages:
    """What a store has."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def put(self, digests: list[bytes]) -> None:
        self.held |= {key.tobytes() for key in keys_of_digests(digests)}

    def stored(self, keys: Keys) -> npt.NDArray[np.bool_]:
        return np.array([key.tobytes() in self.held for key in keys], bool)


@pytest.fixture
def pages() -> Pages:
    return Pages()


@pytest.fixture
def requests(pages: Pages) -> Requests:
    return Requests(BLOCK, pages.stored)


def test_the_pages_behind_those_on_the_device_are_loaded(pages: Pages, requests: Requests) -> None:
    all_of_it = hashes(6)
    pages.put(all_of_it[:5])
    assert requests.match("r", all_of_it, 2 * BLOCK) == 3 * BLOCK
    load = requests.given("r", all_of_it, [10, 11, 12, 13, 14, 15], 3 * BLOCK)
    assert load is not None
    assert load.blocks == [12, 13, 14]
    assert load.keys.tobytes() == keys_of_digests(all_of_it[2:5]).tobytes()


def test_a_page_that_is_missing_ends_the_prefix(pages: Pages, requests: Requests) -> None:
    prompt = hashes(6)
    pages.put([prompt[0], prompt[1], prompt[3]])
    assert requests.match("r", prompt, 0) == 2 * BLOCK


@pytest.mark.parametrize("computed", [6 * BLOCK, 7 * BLOCK])
def test_nothing_is_found_where_all_is_on_the_device(
    pages: Pages, requests: Requests, computed: int
) -> None:
    pages.put(hashes(6))
    assert requests.match("r", hashes(6), computed) == 0


def test_vllm_may_take_fewer_tokens_than_were_found(pages: Pages, requests: Requests) -> None:
    pages.put(hashes(4))
    assert requests.match("r", hashes(4), 0) == 4 * BLOCK
    load = requests.given("r", hashes(4), [7, 8], 2 * BLOCK)
    assert load is not None
    assert load.blocks == [7, 8]


@pytest.mark.parametrize("tokens", [1, BLOCK - 1])
def test_a_page_that_vllm_takes_in_part_is_loaded_whole(
    pages: Pages, requests: Requests, tokens: int
) -> None:
    pages.put(hashes(4))
    assert requests.match("r", hashes(4), 0) == 4 * BLOCK
    load = requests.given("r", hashes(4), [7, 8, 9], 2 * BLOCK + tokens)
    assert load is not None
    assert load.blocks == [7, 8, 9]


def test_a_request_without_a_match_is_given_nothing(requests: Requests) -> None:
    assert requests.given("r", hashes(2), [1, 2], 0) is None
    assert requests.given("r", hashes(2), [1, 2], BLOCK) is None


def test_the_match_before_the_last_one_counts_no_more(pages: Pages, requests: Requests) -> None:
    pages.put(hashes(4))
    requests.match("r", hashes(4), 0)
    pages.held.clear()
    assert requests.match("r", hashes(4), 0) == 0
    assert requests.given("r", hashes(4), [1, 2, 3, 4], BLOCK) is None


def test_more_tokens_than_blocks_are_an_error(pages: Pages, requests: Requests) -> None:
    pages.put(hashes(4))
    requests.match("r", hashes(4), 0)
    with pytest.raises(ValueError, match="pages 0 to 4 are to be loaded, and it has 2 blocks"):
        requests.given("r", hashes(4), [1, 2], 4 * BLOCK)


def test_a_request_is_given_pages_once(pages: Pages, requests: Requests) -> None:
    # vLLM asks again when a page has not come: it would be found, and not come, without an end.
    pages.put(hashes(2))
    requests.match("r", hashes(2), 0)
    requests.given("r", hashes(2), [1, 2], 2 * BLOCK)
    assert requests.match("r", hashes(2), 0) == 0
    requests.finished("r")
    assert requests.match("r", hashes(2), 0) == 2 * BLOCK


def test_whole_pages_are_stored_as_they_are_computed(pages: Pages, requests: Requests) -> None:
    prompt = hashes(3)
    assert requests.computed("r", prompt, [5, 6, 7], BLOCK - 1) is None
    first = requests.computed("r", prompt, [5, 6, 7], 2 * BLOCK + 1)
    assert first is not None
    assert first.blocks == [5, 6]
    rest = requests.computed("r", prompt, [5, 6, 7], 3 * BLOCK)
    assert rest is not None
    assert rest.blocks == [7]
    assert rest.keys.tobytes() == keys_of_digests(prompt[2:]).tobytes()
    assert requests.computed("r", prompt, [5, 6, 7], 3 * BLOCK) is None


def test_a_page_waits_until_vllm_knows_its_tokens(requests: Requests) -> None:
    assert requests.computed("r", hashes(0), [5], BLOCK) is None
    late = requests.computed("r", hashes(1), [5], BLOCK + 1)
    assert late is not None
    assert late.blocks == [5]


def test_what_is_stored_already_is_not_stored_again(pages: Pages, requests: Requests) -> None:
    prompt = hashes(3)
    pages.put([prompt[1]])
    save = requests.computed("r", prompt, [5, 6, 7], 3 * BLOCK)
    assert save is not None
    assert save.blocks == [5, 7]
    pages.put(prompt)
    assert requests.computed("s", prompt, [5, 6, 7], 3 * BLOCK) is None
    assert not requests.finished("s"), "no worker reads its blocks"


def test_the_blocks_of_a_finished_request_stay_while_they_may_be_read(requests: Requests) -> None:
    requests.computed("r", hashes(1), [5], BLOCK)
    assert requests.finished("r")
    assert not requests.finished("r"), "it is forgotten"
    assert not requests.finished("unknown")


def test_a_page_is_found_if_every_rank_has_its_part() -> None:
    parts = {b"rank 0": [True, True, False], b"rank 1": [True, False, True]}

    def exists(keys: Keys, signature: bytes, page_bytes: int) -> npt.NDArray[np.bool_]:
        assert page_bytes == 64
        return np.array(parts[signature])

    keys = keys_of_digests(hashes(3))
    assert held_by_all(keys, [(one, 64) for one in parts], exists).tolist() == [True, False, False]
    assert not held_by_all(keys, [], exists).any(), "the workers have not said yet what they have"


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 11)),
    st.integers(0, 12),
    st.lists(st.integers(0, 20), max_size=8),
)
def test_no_page_is_loaded_or_stored_under_another_ones_name(
    held: set[int], local: int, steps: list[int]
) -> None:
    prompt, blocks = hashes(12), list(range(100, 112))
    pages = Pages()
    pages.put([prompt[i] for i in held])
    requests = Requests(BLOCK, pages.stored)
    name = {keys_of_digests([one]).tobytes(): 100 + i for i, one in enumerate(prompt)}
    tokens = requests.match("r", prompt, local * BLOCK)
    works = [requests.given("r", prompt, blocks, tokens)]
    computed, stored = local * BLOCK + tokens, []
    for step in steps:
        computed = min(computed + step, 12 * BLOCK)
        save = requests.computed("r", prompt, blocks, computed)
        works.append(save)
        stored += save.blocks if save else []
    assert len(stored) == len(set(stored)), "a page is stored once"
    assert all(one < 100 + computed // BLOCK for one in stored), "and not before it is computed"
    for one in works:
        for key, block in zip(one.keys, one.blocks, strict=True) if one else ():
            assert name[key.tobytes()] == block

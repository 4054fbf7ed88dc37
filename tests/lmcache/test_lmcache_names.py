# SPDX-License-Identifier: Apache-2.0
"""What LMCache's objects are called in the store: nothing that differs has one name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache_makers import SHAPE, key

from kvstore.lmcache.names import Layout, keys_of_objects, signature_of

pytestmark = pytest.mark.pure

LAYOUT = Layout.of([SHAPE], [torch.bfloat16])


def test_keys_are_16_bytes_and_equal_for_equal_objects() -> None:
    made = keys_of_objects([key(1), key(1), key(2)])
    assert made.shape == (3, 16)
    assert (made[0] == made[1]).all()
    assert (made[0] != made[2]).any()


@pytest.mark.parametrize(
    "other",
    [
        {"model_name": "tiny2"},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0)},
        {"kv_rank": ObjectKey.ComputeKVRank(4, 1, 4, 1)},
        {"object_group_id": 1},
        {"cache_salt": "somebody"},
        {"chunk_hash": b"\2" * 32},
    ],
    ids=str,
)
def test_each_field_of_a_key_counts(other: dict[str, Any]) -> None:
    one, another = keys_of_objects([key(1), key(1, **other)])
    assert (one != another).any()


def test_what_two_fields_say_cannot_be_moved_from_one_to_the_other() -> None:
    one, another = keys_of_objects(
        [key(1, model_name="ab", cache_salt="c"), key(1, model_name="a", cache_salt="bc")]
    )
    assert (one != another).any()


@pytest.mark.parametrize(
    "other",
    [
        Layout.of([(2, 3, 32, 8)], [torch.bfloat16]),
        Layout.of([(2, 3, 8, 16)], [torch.bfloat16]),
        Layout.of([SHAPE], [torch.float16]),
        Layout.of([SHAPE, SHAPE], [torch.bfloat16] * 2),
    ],
    ids=str,
)
def test_shapes_and_types_are_in_the_signature(other: Layout) -> None:
    assert len(signature_of("", LAYOUT)) == 16
    assert signature_of("", LAYOUT) == signature_of("", Layout.of([list(SHAPE)], [torch.bfloat16]))
    assert signature_of("", LAYOUT) != signature_of("", other)


def test_weights_are_in_the_signature() -> None:
    assert signature_of("step 1", LAYOUT) != signature_of("step 2", LAYOUT)


def test_the_size_is_that_of_all_tensors() -> None:
    assert LAYOUT.nbytes == 2 * 3 * 16 * 8 * 2
    assert Layout.of([(4,), (2, 2)], [torch.float32, torch.uint8]).nbytes == 20

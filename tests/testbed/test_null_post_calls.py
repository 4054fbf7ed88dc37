# SPDX-License-Identifier: Apache-2.0
"""Over RDMA no call to the kernel is made for a block: counted by strace (Debian's package)."""

from __future__ import annotations

import pytest
from rdma_testbed.packages import ensure_programs

from te_bench import null_post
from te_bench.shapes import Shape

pytestmark = pytest.mark.testbed


def test_more_blocks_of_as_many_bytes_need_no_more_system_calls() -> None:
    ensure_programs({"strace": "strace"}, "counting system calls")
    calls = {}
    for blocks in (2048, 16_384):
        shape = Shape("x", blocks, (64 << 20) // blocks)
        found = null_post.measure(shape, 1, 1, lambda part, what: None)
        assert found.system_calls is not None, found.system_calls_problem
        assert found.system_calls > 0  # the words between the engines, at least
        calls[blocks] = found.system_calls * blocks
    # A turn of the worker, with an epoll_wait, fills four send queues of 512.
    assert calls[16_384] - calls[2048] < (16_384 - 2048) / 100, calls

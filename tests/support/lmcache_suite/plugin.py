# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest's: LMCache's mock of a second level is the store's adapter from here on."""

from __future__ import annotations

import lmcache
from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

from lmcache_suite.stand_in import StandIn

mock_l2_adapter.MockL2Adapter = StandIn
# The tests of prefetches ask for an accelerator, and use none.
lmcache.torch_dev.is_available = lambda: True

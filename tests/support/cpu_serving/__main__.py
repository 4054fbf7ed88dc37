# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`."""

from __future__ import annotations

import sys

from cpu_serving import demo, hits_demo, store_demo, vllm_demo

words = sys.argv[1:]
if words[:1] == ["--store"]:
    sys.exit(store_demo.main(words[1:]))
if words[:1] == ["--store-hits"]:
    sys.exit(hits_demo.main(words[1:]))
if words[:1] == ["--vllm"]:
    sys.exit(vllm_demo.main(words[1:]))
sys.exit(demo.main(words))

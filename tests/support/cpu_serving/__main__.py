# SPDX-License-Identifier: Apache-2.0
"""`scripts/demo`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType

from cpu_serving import demo, hits_demo, store_demo, vllm_demo

_OTHERS = {
    "--store": store_demo.main,
    "--store-hits": hits_demo.main,
    "--vllm": vllm_demo.main,
}


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _main(words: Sequence[str]) -> int:
    # Ended by SIGTERM at once, it would leave servers behind that do not end with it, as vLLM's.
    signal.signal(signal.SIGTERM, _interrupt)
    if not words or words[0] not in _OTHERS:
        return demo.main(words)
    try:
        return _OTHERS[words[0]](words[1:])
    except KeyboardInterrupt:
        print("demo: interrupted, all servers are stopped", file=sys.stderr)
        return demo.EXIT_INTERRUPTED


sys.exit(_main(sys.argv[1:]))

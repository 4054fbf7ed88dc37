# SPDX-License-Identifier: Apache-2.0
"""KV pools that a driver without a GPU reports as CUDA memory.

The pools are tensors of the host, and the model computes with them. The driver is the tests'
stand-in (`tests/te/cuda_driver`): its copies read their source late and ruin their destination
early, so that who does not wait for one hands over wrong bytes. A rank loads it before its manager
registers the memory, as PyTorch would have by then. Set up by the JSON of `CPU_SERVING_CUDA`, see
`Settings`.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

__all__ = ["Settings", "claim_pools"]

VARIABLE = "CPU_SERVING_CUDA"
#: How often a rank writes what the driver has counted.
PERIOD_S = 0.2
#: Of the driver's calls, those that may wait for the device (`stand_in.h`).
SYNCHRONISES = 2
NEWEST = 13000
BATCH = b"cuMemcpyBatchAsync_v2"


class Settings(NamedTuple):
    """library: of the driver.
    delay_us: a copy is late by twice that at most.
    folder: of one file of counts for each rank.
    """

    library: str
    delay_us: int
    seed: int
    folder: str


class _Driver:
    """The driver, in a process that uses the first GPU. `scheduler`: SGLang's thread, by the
    kernel's number."""

    def __init__(self, settings: Settings, scheduler: int) -> None:
        self._folder, self._scheduler = Path(settings.folder), scheduler
        # For all to see: te asks whether the process has a driver.
        library = self._library = ctypes.CDLL(settings.library, mode=os.RTLD_GLOBAL)
        library.fake_calls.restype = library.fake_pageable_copies.restype = ctypes.c_uint64
        library.fake_reset(
            ctypes.c_uint64(settings.seed), ctypes.c_uint64(settings.delay_us), NEWEST
        )
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._must(library.cuInit(0))
        self._must(library.cuDeviceGet(ctypes.byref(device), 0))
        self._must(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))

    def claim(self, address: int, nbytes: int) -> None:
        self._library.fake_claim(ctypes.c_uint64(address), ctypes.c_size_t(nbytes), 0, 0)

    def watch(self) -> None:
        """From now on, which is after the memory was registered, calls count."""
        self._library.fake_forget_calls()
        threading.Thread(target=self._write_counts, name="cuda-counts", daemon=True).start()

    def _write_counts(self) -> None:
        path = self._folder / f"{os.getpid()}.cuda"
        while True:
            written = path.with_suffix(".new")
            written.write_text(json.dumps(self._counts()))
            written.replace(path)
            time.sleep(PERIOD_S)

    def _counts(self) -> dict[str, int]:
        calls, scheduler = self._library.fake_calls, ctypes.c_long(self._scheduler)
        return {
            "batches": calls(ctypes.c_long(0), BATCH, 0),
            "pageable_copies": self._library.fake_pageable_copies(),
            "synchronising_calls": calls(scheduler, None, SYNCHRONISES),
        }

    def _must(self, error: int) -> None:
        if error:
            raise RuntimeError(f"the driver without a GPU: error {error}")


def claim_pools(module: ModuleType) -> None:
    """Patches our manager module. Nothing happens unless `CPU_SERVING_CUDA` is set."""
    original = module.KVManager.__init__

    @functools.wraps(original)
    def init(manager: Any, args: Any, *rest: Any, **named: Any) -> None:
        text = os.environ.get(VARIABLE)
        if not text:
            original(manager, args, *rest, **named)
            return
        driver = _Driver(Settings(**json.loads(text)), threading.get_native_id())
        for address, nbytes in zip(args.kv_data_ptrs, args.kv_data_lens, strict=True):
            driver.claim(address, nbytes)
        original(manager, args, *rest, **named)
        driver.watch()

    module.KVManager.__init__ = init

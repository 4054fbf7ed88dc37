# SPDX-License-Identifier: Apache-2.0
"""Memory of CUDA's GPUs.

``abi.h`` declares what is used of the driver, ``_driver`` finds it where the process has loaded it
already, ``_copier`` has the streams, events and copies of one GPU, and ``kind`` is the kind.
"""

from te.memory_kinds.cuda.kind import recognise_cuda

__all__ = ["recognise_cuda"]

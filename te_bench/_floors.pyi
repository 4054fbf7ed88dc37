# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def run(
    kind: int,
    pid: int,
    step: bool,
    near: npt.NDArray[np.uint64],
    far: npt.NDArray[np.uint64],
    bounds: npt.NDArray[np.int64],
    fds: npt.NDArray[np.int32],
    controls: npt.NDArray[np.int32],
    times_ns: npt.NDArray[np.uint64],
    /,
) -> int: ...
def post(blocks: npt.NDArray[np.void], bounds: npt.NDArray[np.int64], /) -> int: ...

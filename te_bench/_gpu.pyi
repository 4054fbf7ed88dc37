# SPDX-License-Identifier: Apache-2.0
import numpy as np
import numpy.typing as npt

def copy_each(
    function: int,
    copies: npt.NDArray[np.uint64],
    stream: int,
    times_ns: npt.NDArray[np.uint64],
    /,
) -> tuple[int, int]: ...
def query_each(function: int, event: int, times_ns: npt.NDArray[np.uint64], /) -> int: ...
def kind_copy(
    capsule: object, copies: npt.NDArray[np.uint64], direction: int, /
) -> tuple[int, int, int]: ...

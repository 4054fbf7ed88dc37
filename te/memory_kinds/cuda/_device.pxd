# SPDX-License-Identifier: Apache-2.0
# One GPU, as te's threads have it.

from te.core.sync cimport pthread_mutex_t, store64, u32, u64
from te.memory_kinds.cuda._driver cimport (
    CU_STREAM_CAPTURE_MODE_RELAXED, CUcontext, CUevent, CUresult, CUstream, CUstreamCaptureMode,
    errno_of, Functions,
)

cdef enum:
    # One for each direction of copies, as a GPU has a copy engine for each; and one for copies within it.
    STREAMS = 3

# What was asked of the driver when it failed.
cdef enum:
    IN_CONTEXT = 0
    IN_EVENT = 1
    IN_COPY = 2
    IN_RECORD = 3
    IN_QUERY = 4
    IN_UNMAP = 5
    IN_FLUSH = 6

# `Event` of te/core/kinds.h.
cdef struct Batch:
    CUevent event  # NULL until it is used for the first time
    CUstream stream
    bint is_recorded  # else the whole stream stands for it
    int failure  # of a part of the batch, once the rest is over
    Batch *next  # that is free

cdef struct Device:
    Functions *functions
    CUcontext context
    int ordinal
    CUstream streams[STREAMS]
    pthread_mutex_t lock
    Batch *free
    u64 trouble  # atomic: the call that failed last, and its error


cdef inline CUresult enter(Device *d, CUstreamCaptureMode *mode) noexcept nogil:
    """Has the GPU's context current in the calling thread, and keeps what is done in it from ending the
    capture of a graph by another thread; until `leave`."""
    cdef CUresult error
    mode[0] = CU_STREAM_CAPTURE_MODE_RELAXED
    d.functions.cuThreadExchangeStreamCaptureMode(mode)
    error = d.functions.cuCtxPushCurrent(d.context)
    if error:
        d.functions.cuThreadExchangeStreamCaptureMode(mode)
    return error


cdef inline void leave(Device *d, CUstreamCaptureMode *mode) noexcept nogil:
    cdef CUcontext popped
    d.functions.cuCtxPopCurrent(&popped)
    d.functions.cuThreadExchangeStreamCaptureMode(mode)


cdef inline int failed(Device *d, u32 call, CUresult error) noexcept nogil:
    """The errno of it."""
    store64(&d.trouble, (<u64>call << 32) | error)
    return errno_of(error)

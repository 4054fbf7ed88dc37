# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
#
# Workers that copy the same way share a stream: they would wait for the same copy engine in any case. The
# driver's calls are safe among threads; an event that is
# recorded behind another worker's copies as well as one's own is only later.

cimport cython
from cpython.pycapsule cimport PyCapsule_GetContext, PyCapsule_New, PyCapsule_SetContext
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN
from libc.stdlib cimport free
from libc.string cimport memset
from te.core.heap cimport need
from te.core.kinds cimport (
    Copy, Direction, Event, Kind, KIND_CAPSULE, KindOps, TOUCHED_BY_NIC, WITHIN,
)
from te.core.sync cimport (
    load64, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
    u32, u64,
)
from te.memory_kinds.cuda._device cimport (
    Batch, Device, enter, failed, IN_CONTEXT, IN_COPY, IN_EVENT, IN_FLUSH, IN_QUERY, IN_RECORD,
    IN_UNMAP, leave, STREAMS,
)
from te.memory_kinds.cuda._driver cimport (
    CU_EVENT_DISABLE_TIMING, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, CU_MEMHOSTREGISTER_PORTABLE, CU_STREAM_NON_BLOCKING,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_NOT_READY, CUDA_SUCCESS, CUdevice,
    CUdeviceptr, CUipcMemHandle, CUmemcpyAttributes, CUresult, CUstream, CUstreamCaptureMode, Driver,
    errno_of, Functions,
)
from te.memory_kinds.cuda._mapping cimport (
    block_export, block_open, Mapping, mapping_new, piece_export, pieces_map, PIECES_LIMIT, unmap,
)

cdef enum:
    # Of one call: the first of many copies are under way before the last are handed over, and no other
    # thread waits long for the driver's lock.
    COPIES_MAX = 256

cdef const char *CALLS[7]
CALLS[IN_CONTEXT] = b"cuCtxPushCurrent"
CALLS[IN_EVENT] = b"cuEventCreate"
CALLS[IN_COPY] = b"the call that copies"
CALLS[IN_RECORD] = b"cuEventRecord"
CALLS[IN_QUERY] = b"cuEventQuery"
CALLS[IN_UNMAP] = b"the call that unmaps"
CALLS[IN_FLUSH] = b"cuFlushGPUDirectRDMAWrites"


cdef Batch *batch_take(Device *d) noexcept nogil:
    cdef Batch *b
    pthread_mutex_lock(&d.lock)
    b = d.free
    if b != NULL:
        d.free = b.next
    pthread_mutex_unlock(&d.lock)
    return <Batch *>need(sizeof(Batch)) if b == NULL else b


cdef void batch_give(Device *d, Batch *b) noexcept nogil:
    pthread_mutex_lock(&d.lock)
    b.next = d.free
    d.free = b
    pthread_mutex_unlock(&d.lock)


cdef CUresult submit_some(
    Functions *f, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, u32 n, unsigned flags,
    CUstream stream
) noexcept nogil:
    cdef CUmemcpyAttributes how
    cdef CUresult error = CUDA_SUCCESS
    cdef size_t first = 0, which
    cdef u32 i
    memset(&how, 0, sizeof(how))
    how.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    how.flags = flags
    if f.cuMemcpyBatchAsync_13000 != NULL:
        return f.cuMemcpyBatchAsync_13000(dsts, srcs, sizes, n, &how, &first, 1, stream)
    if f.cuMemcpyBatchAsync_12080 != NULL:
        return f.cuMemcpyBatchAsync_12080(dsts, srcs, sizes, n, &how, &first, 1, &which, stream)
    for i in range(n):
        if error == CUDA_SUCCESS:
            error = f.cuMemcpyAsync(dsts[i], srcs[i], sizes[i], stream)
    return error


cdef CUresult submit(
    Device *d, const Copy *copies, u32 n, unsigned flags, CUstream stream
) noexcept nogil:
    cdef CUdeviceptr dsts[COPIES_MAX]
    cdef CUdeviceptr srcs[COPIES_MAX]
    cdef size_t sizes[COPIES_MAX]
    cdef CUresult error = CUDA_SUCCESS
    cdef u32 i, k
    while n and error == CUDA_SUCCESS:
        k = min(n, <u32>COPIES_MAX)
        for i in range(k):
            dsts[i], srcs[i] = <CUdeviceptr>copies[i].dst, <CUdeviceptr>copies[i].src
            sizes[i] = copies[i].nbytes
        error = submit_some(d.functions, dsts, srcs, sizes, k, flags, stream)
        copies += k
        n -= k
    return error


cdef void begin(
    Device *d, Batch *b, const Copy *copies, u32 n, Direction direction
) noexcept nogil:
    """Also when the driver refuses: copies before the one that it refused may be under way, so that
    the end of all has to be waited for before the failure is told."""
    cdef CUresult error
    cdef unsigned flags = 0
    # To and from the host by copy engines, which take nothing from kernels. Within one GPU an engine
    # reaches a twentieth of what the driver does by itself (87 and 1,627 GiB/s, nccl #2177).
    if direction != WITHIN:
        flags = CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    b.stream = d.streams[<int>direction]
    error = submit(d, copies, n, flags, b.stream)
    b.failure = failed(d, IN_COPY, error) if error else 0
    error = d.functions.cuEventRecord(b.event, b.stream)
    b.is_recorded = error == CUDA_SUCCESS
    if error:
        failed(d, IN_RECORD, error)


cdef int copy(
    void *state, const Copy *copies, u32 n, Direction direction, Event **event
) noexcept nogil:
    cdef Device *d = <Device *>state
    cdef Batch *b = batch_take(d)
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error:
        batch_give(d, b)
        return failed(d, IN_CONTEXT, error)
    if b.event == NULL:
        error = d.functions.cuEventCreate(&b.event, CU_EVENT_DISABLE_TIMING)
    if error == CUDA_SUCCESS:
        begin(d, b, copies, n, direction)
        event[0] = <Event *>b
    leave(d, &mode)
    if error:
        batch_give(d, b)
        return failed(d, IN_EVENT, error)
    return 0


cdef int query(void *state, Event *event) noexcept nogil:
    cdef Device *d = <Device *>state
    cdef Batch *b = <Batch *>event
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error:  # The context is broken, or gone: nothing goes on in it.
        return failed(d, IN_CONTEXT, error)
    if b.is_recorded:
        error = d.functions.cuEventQuery(b.event)
    else:
        error = d.functions.cuStreamQuery(b.stream)
    leave(d, &mode)
    if error == CUDA_ERROR_NOT_READY:
        return EAGAIN
    return failed(d, IN_QUERY, error) if error else b.failure


cdef void release(void *state, Event *event) noexcept nogil:
    batch_give(<Device *>state, <Batch *>event)


cdef int flush(void *state) noexcept nogil:
    cdef Device *d = <Device *>state
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error:
        return failed(d, IN_CONTEXT, error)
    error = d.functions.cuFlushGPUDirectRDMAWrites(
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER)
    leave(d, &mode)
    return failed(d, IN_FLUSH, error) if error else 0


cdef KindOps OPS
OPS.copy, OPS.query, OPS.release, OPS.unmap = copy, query, release, unmap

# Of a GPU that does not show what NICs have written without being told to.
cdef KindOps LATE_OPS = OPS
LATE_OPS.flush = flush


cdef void forget(object capsule) noexcept:
    Py_DECREF(<object>PyCapsule_GetContext(capsule))


@cython.no_gc_clear
cdef class Copier:
    cdef Driver driver
    cdef Device device
    cdef Kind kind
    cdef CUdevice number
    cdef bint is_retained

    def __cinit__(self, Driver driver, int ordinal):
        self.driver = driver
        self.device.functions = &driver.functions
        self.device.ordinal = ordinal
        self.kind.ops, self.kind.state = &OPS, &self.device
        self.kind.touched_by = TOUCHED_BY_NIC
        pthread_mutex_init(&self.device.lock, NULL)

    def __init__(self, Driver driver, int ordinal):
        cdef CUresult error
        error = driver.functions.cuDeviceGet(&self.number, ordinal)
        self.must(error, "cuDeviceGet")
        error = driver.functions.cuDevicePrimaryCtxRetain(&self.device.context, self.number)
        self.must(error, "cuDevicePrimaryCtxRetain")
        self.is_retained = True
        if not driver.shows_writes(ordinal):
            self.kind.ops = &LATE_OPS
        self.must(self.make_streams(), "cuStreamCreate")

    cdef CUresult make_streams(self):
        cdef Device *d = &self.device
        cdef CUstreamCaptureMode mode
        cdef CUresult error
        cdef int i
        with nogil:
            error = enter(d, &mode)
            if error:
                return error
            for i in range(STREAMS):
                if error == CUDA_SUCCESS:
                    error = d.functions.cuStreamCreate(&d.streams[i], CU_STREAM_NON_BLOCKING)
            leave(d, &mode)
        return error

    cdef int must(self, CUresult error, str what) except -1:
        if error:
            raise OSError(errno_of(error), f"{what}: {self.driver.name_of(error)}")
        return 0

    def __dealloc__(self):
        cdef Device *d = &self.device
        cdef Batch *b
        cdef int i
        with nogil:
            while d.free != NULL:
                b = d.free
                d.free = b.next
                if b.event != NULL:
                    d.functions.cuEventDestroy(b.event)
                free(b)
            for i in range(STREAMS):
                if d.streams[i] != NULL:
                    d.functions.cuStreamDestroy(d.streams[i])
            if self.is_retained:
                d.functions.cuDevicePrimaryCtxRelease(self.number)
            pthread_mutex_destroy(&d.lock)

    @property
    def compiled(self):
        capsule = PyCapsule_New(&self.kind, KIND_CAPSULE, <void (*)(object) noexcept>forget)
        PyCapsule_SetContext(capsule, <void *>self)
        Py_INCREF(self)
        return capsule

    @property
    def trouble(self):
        cdef u64 trouble = load64(&self.device.trouble)
        if trouble == 0:
            return ""
        return f"{CALLS[trouble >> 32].decode()}: {self.driver.name_of(<CUresult>trouble)}"

    def mapped_until(self, unsigned long long address, unsigned long long end):
        cdef Device *d = &self.device
        cdef CUstreamCaptureMode mode
        cdef CUdeviceptr base = 0
        cdef size_t nbytes = 0
        self.must(enter(d, &mode), "cuCtxPushCurrent")
        # One block of cuMemAlloc, or one piece of those that a reservation is backed by.
        while address < end and d.functions.cuMemGetAddressRange(&base, &nbytes, address) == 0:
            address = base + nbytes
        leave(d, &mode)
        return min(address, end)

    def block(self, unsigned long long address):
        cdef CUipcMemHandle handle
        cdef CUdeviceptr base = 0
        cdef size_t nbytes = 0
        cdef CUresult error
        with nogil:
            error = block_export(&self.device, address, &handle, &base, &nbytes)
        self.must(error, "cuIpcGetMemHandle")
        return handle.reserved[:sizeof(handle)], base, nbytes

    def piece(self, unsigned long long address):
        cdef CUdeviceptr base = 0
        cdef size_t nbytes = 0
        cdef int fd = -1
        cdef CUresult error
        with nogil:
            error = piece_export(&self.device, address, &fd, &base, &nbytes)
        self.must(error, "cuMemExportToShareableHandle")
        return fd, base, nbytes

    def open_block(self, bytes handle, size_t nbytes):
        cdef Mapping *o = NULL
        cdef CUresult error
        cdef const char *given = handle
        if len(handle) != sizeof(CUipcMemHandle):
            raise ValueError(f"a handle of {len(handle)} bytes")
        with nogil:
            error = block_open(&self.device, given, nbytes, &o)
        self.must(error, "cuIpcOpenMemHandle")
        return o.base, <unsigned long long>o, o.nbytes

    def map_pieces(self, list fds, list sizes):
        cdef Mapping *o = NULL
        cdef CUresult error
        cdef u32 i, n = len(fds)
        if n == 0 or n != <u32>len(sizes) or n > PIECES_LIMIT or not all(sizes):
            raise ValueError(f"{len(fds)} pieces, {len(sizes)} sizes")
        o = mapping_new(n)
        for i in range(n):
            o.sizes[i] = sizes[i]
            o.fds[i] = fds[i]
        with nogil:
            error = pieces_map(&self.device, o)
        if error:
            free(o)
        self.must(error, "cuMemMap")
        return o.base, <unsigned long long>o

    def unmap(self, unsigned long long number):
        with nogil:
            unmap(&self.device, number)

    def pin(self, unsigned long long address, size_t nbytes):
        cdef Device *d = &self.device
        cdef CUstreamCaptureMode mode
        cdef CUresult error
        with nogil:
            error = enter(d, &mode)
            if error == CUDA_SUCCESS:
                error = d.functions.cuMemHostRegister(
                    <void *>address, nbytes, CU_MEMHOSTREGISTER_PORTABLE)
                leave(d, &mode)
        if error == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
            return False
        self.must(error, f"cuMemHostRegister of {nbytes} bytes")
        return True

    def unpin(self, unsigned long long address):
        cdef Device *d = &self.device
        cdef CUstreamCaptureMode mode
        cdef CUresult error
        with nogil:
            error = enter(d, &mode)
            if error == CUDA_SUCCESS:
                error = d.functions.cuMemHostUnregister(<void *>address)
                leave(d, &mode)
        self.must(error, "cuMemHostUnregister")


def is_in_use(Driver driver, int ordinal):
    cdef CUdevice device
    cdef unsigned flags
    cdef int is_active = 0
    cdef Functions *f = &driver.functions
    return (
        f.cuDeviceGet(&device, ordinal) == 0
        and f.cuDevicePrimaryCtxGetState(device, &flags, &is_active) == 0
        and is_active != 0
    )

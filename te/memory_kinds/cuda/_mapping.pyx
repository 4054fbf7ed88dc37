# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport intptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy
from te.core.heap cimport need
from te.core.sync cimport u32, u64
from te.memory_kinds.cuda._device cimport Device, enter, failed, IN_UNMAP, leave
from te.memory_kinds.cuda._driver cimport (
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, CUDA_ERROR_INVALID_VALUE,
    CUDA_SUCCESS, CUdeviceptr, CUipcMemHandle, CUmemAccessDesc, CUmemGenericAllocationHandle, CUresult,
    CUstreamCaptureMode, Functions,
)


# -- the process whose memory it is

cdef CUresult block_export(
    Device *d, CUdeviceptr address, CUipcMemHandle *handle, CUdeviceptr *base, size_t *nbytes
) noexcept nogil:
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error:
        return error
    error = d.functions.cuMemGetAddressRange(base, nbytes, address)
    if error == CUDA_SUCCESS:
        error = d.functions.cuIpcGetMemHandle(handle, base[0])
    leave(d, &mode)
    return error


cdef CUresult piece_export(
    Device *d, CUdeviceptr address, int *fd, CUdeviceptr *base, size_t *nbytes
) noexcept nogil:
    cdef Functions *f = d.functions
    cdef CUmemGenericAllocationHandle handle
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error:
        return error
    error = f.cuMemGetAddressRange(base, nbytes, address)
    if error == CUDA_SUCCESS:
        error = f.cuMemRetainAllocationHandle(&handle, <void *>address)
    if error == CUDA_SUCCESS:
        error = f.cuMemExportToShareableHandle(
            fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        f.cuMemRelease(handle)
    leave(d, &mode)
    return error


# -- the process that maps it

cdef Mapping *mapping_new(u32 n) noexcept nogil:
    cdef Mapping *o = <Mapping *>need(sizeof(Mapping) + n * (sizeof(size_t) + sizeof(int)))
    o.n = n
    o.sizes = <size_t *>(o + 1)
    o.fds = <int *>(o.sizes + n)
    return o


cdef CUresult block_open(
    Device *d, const char *handle, size_t nbytes, Mapping **mapping
) noexcept nogil:
    cdef Functions *f = d.functions
    cdef CUipcMemHandle copied
    cdef CUstreamCaptureMode mode
    cdef CUdeviceptr base = 0, start = 0
    cdef size_t found = 0
    cdef CUresult error = enter(d, &mode)
    if error:
        return error
    memcpy(&copied, handle, sizeof(copied))
    error = f.cuIpcOpenMemHandle(&base, copied, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    if error == CUDA_SUCCESS:
        # What the peer says of it is not believed: a copy from beyond it would break the context.
        error = f.cuMemGetAddressRange(&start, &found, base)
        if error == CUDA_SUCCESS and (start != base or found < nbytes):
            error = CUDA_ERROR_INVALID_VALUE
        if error:
            f.cuIpcCloseMemHandle(base)
    leave(d, &mode)
    if error == CUDA_SUCCESS:
        mapping[0] = mapping_new(0)
        mapping[0].base, mapping[0].nbytes = base, found
    return error


cdef CUresult map_piece(Functions *f, CUdeviceptr at, size_t nbytes, int fd) noexcept nogil:
    cdef CUmemGenericAllocationHandle handle
    cdef CUresult error = f.cuMemImportFromShareableHandle(
        &handle, <void *><intptr_t>fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    if error:
        return error
    error = f.cuMemMap(at, nbytes, 0, handle, 0)
    f.cuMemRelease(handle)  # The mapping keeps it.
    return error


cdef CUresult unmap_pieces(Functions *f, Mapping *o, u32 n, size_t total) noexcept nogil:
    """The first so many of them, and the addresses. The first error; it goes on behind that."""
    cdef CUdeviceptr at = o.base
    cdef CUresult error, first = CUDA_SUCCESS
    cdef u32 i
    for i in range(n):
        error = f.cuMemUnmap(at, o.sizes[i])
        first = first if first else error
        at += o.sizes[i]
    error = f.cuMemAddressFree(o.base, total)
    return first if first else error


cdef size_t bytes_of(Mapping *o) noexcept nogil:
    cdef size_t total = 0
    cdef u32 i
    for i in range(o.n):
        total += o.sizes[i]
    return total


cdef CUresult pieces_map(Device *d, Mapping *o) noexcept nogil:
    cdef Functions *f = d.functions
    cdef CUmemAccessDesc access
    cdef CUstreamCaptureMode mode
    cdef CUdeviceptr at
    cdef size_t total = bytes_of(o)
    cdef u32 done = 0
    cdef CUresult error = enter(d, &mode)
    if error:
        return error
    error = f.cuMemAddressReserve(&o.base, total, 0, 0, 0)
    if error == CUDA_SUCCESS:
        at = o.base
        while done < o.n and error == CUDA_SUCCESS:
            error = map_piece(f, at, o.sizes[done], o.fds[done])
            if error == CUDA_SUCCESS:
                at += o.sizes[done]
                done += 1
        if error == CUDA_SUCCESS:
            access.location.type, access.location.id = CU_MEM_LOCATION_TYPE_DEVICE, d.ordinal
            access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            error = f.cuMemSetAccess(o.base, total, &access, 1)
        if error:
            unmap_pieces(f, o, done, total)
    leave(d, &mode)
    return error


cdef void unmap(void *device, u64 mapping) noexcept nogil:
    cdef Device *d = <Device *>device
    cdef Mapping *o = <Mapping *>mapping
    cdef CUstreamCaptureMode mode
    cdef CUresult error = enter(d, &mode)
    if error == CUDA_SUCCESS:
        if o.n == 0:
            error = d.functions.cuIpcCloseMemHandle(o.base)
        else:
            error = unmap_pieces(d.functions, o, o.n, bytes_of(o))
        leave(d, &mode)
    if error:  # The context is broken, and its mappings end with it.
        failed(d, IN_UNMAP, error)
    free(o)

# SPDX-License-Identifier: Apache-2.0
# Memory of a GPU that another process maps: blocks of cuMemAlloc by the handles of CUDA's IPC, and the
# pieces of virtual memory by their descriptors. Any thread; the GPU's context need not be current.

from te.core.sync cimport u32, u64
from te.memory_kinds.cuda._device cimport Device
from te.memory_kinds.cuda._driver cimport CUdeviceptr, CUipcMemHandle, CUresult

cdef enum:
    PIECES_LIMIT = 1024

# What this process has mapped; of malloc.
cdef struct Mapping:
    CUdeviceptr base
    size_t nbytes  # of a block
    u32 n  # pieces, side by side in addresses reserved for them; 0: a block
    size_t *sizes
    int *fds

# The block that has the address: its handle, and where it lies.
cdef CUresult block_export(
    Device *d, CUdeviceptr address, CUipcMemHandle *handle, CUdeviceptr *base, size_t *nbytes
) noexcept nogil
# The piece of virtual memory that is mapped there: a descriptor, which is the caller's.
cdef CUresult piece_export(
    Device *d, CUdeviceptr address, int *fd, CUdeviceptr *base, size_t *nbytes
) noexcept nogil
# Another process's block, which must have so many bytes at least.
cdef CUresult block_open(
    Device *d, const char *handle, size_t nbytes, Mapping **mapping
) noexcept nogil
cdef Mapping *mapping_new(u32 n) noexcept nogil
# Another process's pieces, by their descriptors and sizes, which stay the caller's. With an error
# nothing is mapped.
cdef CUresult pieces_map(Device *d, Mapping *o) noexcept nogil
# `KindOps.unmap`: frees a mapping, by its address.
cdef void unmap(void *device, u64 mapping) noexcept nogil

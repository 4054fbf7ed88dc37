/* SPDX-License-Identifier: Apache-2.0
 * Device memory that cuMemAlloc does not make: in the order of a stream (pools), and managed. */
#include "stand_in.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PAGE = 4096 };

static size_t whole_pages(size_t nbytes) { return (nbytes + PAGE - 1) / PAGE * PAGE; }

CUresult cuMemGetInfo_v2(size_t *free_nbytes, size_t *nbytes) {
    CUresult r = enter("cuMemGetInfo", NEEDS_CONTEXT);
    *nbytes = (size_t)8 << 30;
    *free_nbytes = *nbytes - device_nbytes();
    return leave(r);
}

/* A pool's memory has no legacy handle. */
CUresult cuMemAllocAsync(CUdeviceptr *address, size_t nbytes, CUstream stream) {
    CUresult r = enter("cuMemAllocAsync", NEEDS_CONTEXT);
    r = r ? r : check_stream(stream);
    if (r == 0 && nbytes == 0)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    int fd = memfd_create("pool", MFD_CLOEXEC);
    Memory *m = memory_new(DEVICE, 0, whole_pages(nbytes));
    if (fd < 0 || ftruncate(fd, (off_t)m->nbytes) || !map_file(m, fd, 0)) {
        m->owner = NOTHING;
        close(fd);
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    m->nbytes = nbytes;
    m->ordinal = current()->ordinal;
    m->reached_by = 1u << m->ordinal;
    *address = m->start;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream stream) {
    CUresult r = enter("cuMemFreeAsync", NEEDS_CONTEXT);
    Memory *m = memory_at(address);
    r = r ? r : check_stream(stream);
    if (r == 0 && (m == NULL || !m->is_ours || m->is_ipc || m->start != address))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        drain(stream); /* what was copied before is copied */
        m->nbytes = whole_pages(m->nbytes);
        memory_drop(m);
    }
    return leave(r);
}

/* The processor reaches it; it is never given back. */
CUresult cuMemAllocManaged(CUdeviceptr *address, size_t nbytes, unsigned flags) {
    CUresult r = enter("cuMemAllocManaged", NEEDS_CONTEXT);
    if (r == 0 && (nbytes == 0 || flags != CU_MEM_ATTACH_GLOBAL))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    char *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    Memory *m = memory_new(DEVICE, (uintptr_t)at, nbytes);
    m->alias = at;
    m->ordinal = current()->ordinal;
    m->reached_by = 1u << m->ordinal;
    m->is_managed = true;
    *address = m->start;
    return leave(CUDA_SUCCESS);
}

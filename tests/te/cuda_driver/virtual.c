/* SPDX-License-Identifier: Apache-2.0
 * Virtual memory: addresses that are reserved, and memory that is mapped there by its handle. A handle is
 * exported as its memory file, if it was made to be; one that was not (PyTorch's memory saver) never is. */
#include "stand_in.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { GRANULARITY = 2 << 20, HANDLES_MAX = 4096 };

typedef struct {
    int references; /* handles that the application holds, and mappings */
    int fd, ordinal;
    unsigned types;
    size_t nbytes;
} Handle;

static Handle handles[HANDLES_MAX]; /* the first is none */

static Handle *handle_of(CUmemGenericAllocationHandle number) {
    bool is_one = number > 0 && number < HANDLES_MAX && handles[number].references > 0;
    return is_one ? &handles[number] : NULL;
}

static CUmemGenericAllocationHandle handle_new(int fd, size_t nbytes, unsigned types, int ordinal) {
    Handle *h = &handles[1];
    while (h->references)
        if (++h == handles + HANDLES_MAX)
            abort();
    *h = (Handle){1, fd, ordinal, types, nbytes};
    return (CUmemGenericAllocationHandle)(h - handles);
}

static void handle_drop(Handle *h) {
    if (--h->references == 0)
        close(h->fd);
}

static bool is_whole(CUdeviceptr address, size_t nbytes) {
    return nbytes > 0 && address % GRANULARITY == 0 && nbytes % GRANULARITY == 0;
}

CUresult cuMemGetAllocationGranularity(
    size_t *nbytes, const CUmemAllocationProp *properties, CUmemAllocationGranularity_flags which) {
    CUresult r = enter("cuMemGetAllocationGranularity", 0);
    (void)which;
    if (r == 0 && properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        r = CUDA_ERROR_INVALID_VALUE;
    *nbytes = GRANULARITY;
    return leave(r);
}

CUresult cuMemCreate(
    CUmemGenericAllocationHandle *handle, size_t nbytes, const CUmemAllocationProp *properties,
    unsigned long long flags) {
    CUresult r = enter("cuMemCreate", 0);
    if (r == 0 && (flags || !is_whole(0, nbytes) || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    int fd = memfd_create("virtual memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)nbytes)) {
        close(fd);
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *handle = handle_new(
        fd, nbytes, (unsigned)properties->requestedHandleTypes, properties->location.id);
    return leave(CUDA_SUCCESS);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle number) {
    CUresult r = enter("cuMemRelease", 0);
    Handle *h = handle_of(number);
    if (r == 0 && h == NULL)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        handle_drop(h);
    return leave(r);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
    CUresult r = enter("cuMemRetainAllocationHandle", 0);
    Memory *m = memory_at((uintptr_t)address);
    if (r == 0 && (m == NULL || m->handle == 0))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        *handle = m->handle;
        handles[m->handle].references++;
    }
    return leave(r);
}

CUresult cuMemAddressReserve(
    CUdeviceptr *address, size_t nbytes, size_t alignment, CUdeviceptr hint,
    unsigned long long flags) {
    CUresult r = enter("cuMemAddressReserve", 0);
    if (r == 0 && (flags || alignment || hint || !is_whole(0, nbytes)))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *room = mmap(NULL, nbytes + GRANULARITY, PROT_NONE, kind, -1, 0);
    if (room == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    uintptr_t start = ((uintptr_t)room + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    memory_new(RESERVED, start, nbytes);
    *address = start;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    CUresult r = enter("cuMemAddressFree", 0);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || m->owner != RESERVED || m->start != address || m->nbytes != nbytes))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        munmap((void *)m->start, m->nbytes);
        memory_drop(m);
    }
    return leave(r);
}

CUresult cuMemMap(
    CUdeviceptr address, size_t nbytes, size_t offset, CUmemGenericAllocationHandle number,
    unsigned long long flags) {
    CUresult r = enter("cuMemMap", SYNCHRONISES);
    Memory *around = memory_at(address);
    Handle *h = handle_of(number);
    if (r == 0 && (flags || offset || h == NULL || !is_whole(address, nbytes) || h->nbytes != nbytes))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && (around == NULL || around->owner != RESERVED ||
                   nbytes > around->nbytes - (address - around->start)))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    Memory *m = memory_new(DEVICE, 0, nbytes);
    if (!map_file(m, dup(h->fd), address)) {
        m->owner = NOTHING;
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    m->ordinal = h->ordinal;
    m->types = h->types;
    m->handle = number;
    m->is_ours = false; /* the reservation stays */
    h->references++;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    CUresult r = enter("cuMemUnmap", SYNCHRONISES);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || m->handle == 0 || m->start != address || m->nbytes != nbytes))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        int kind = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
        mmap((void *)m->start, m->nbytes, PROT_NONE, kind, -1, 0);
        munmap(m->alias, m->nbytes);
        handle_drop(&handles[m->handle]);
        memory_drop(m);
    }
    return leave(r);
}

CUresult cuMemSetAccess(
    CUdeviceptr address, size_t nbytes, const CUmemAccessDesc *access, size_t count) {
    CUresult r = enter("cuMemSetAccess", SYNCHRONISES);
    if (r == 0 && (count != 1 || !is_whole(address, nbytes) || access->location.id >= DEVICES))
        r = CUDA_ERROR_INVALID_VALUE;
    for (CUdeviceptr at = address; r == 0 && at < address + nbytes;) {
        Memory *m = memory_at(at);
        if (m == NULL || m->handle == 0) {
            r = CUDA_ERROR_INVALID_VALUE;
        } else {
            m->reached_by |= 1u << access->location.id;
            at = m->start + m->nbytes;
        }
    }
    return leave(r);
}

CUresult cuMemExportToShareableHandle(
    void *out, CUmemGenericAllocationHandle number, CUmemAllocationHandleType type,
    unsigned long long flags) {
    CUresult r = enter("cuMemExportToShareableHandle", 0);
    Handle *h = handle_of(number);
    if (r == 0 && (flags || h == NULL))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !(h->types & type)))
        r = CUDA_ERROR_NOT_SUPPORTED;
    if (r == 0)
        *(int *)out = fcntl(h->fd, F_DUPFD_CLOEXEC, 0);
    return leave(r);
}

CUresult cuMemImportFromShareableHandle(
    CUmemGenericAllocationHandle *handle, void *in, CUmemAllocationHandleType type) {
    CUresult r = enter("cuMemImportFromShareableHandle", 0);
    int fd = (int)(intptr_t)in;
    struct stat found;
    if (r == 0 && (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fstat(fd, &found) ||
                   !is_whole(0, (size_t)found.st_size)))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        *handle = handle_new(
            fcntl(fd, F_DUPFD_CLOEXEC, 0), (size_t)found.st_size, (unsigned)type,
            current() ? current()->ordinal : 0);
    return leave(r);
}

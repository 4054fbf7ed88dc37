/* SPDX-License-Identifier: Apache-2.0
 * Memory of devices and pinned memory of the host: what an address is, and where engines find it. */
#include "stand_in.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096 };

static Memory memories[MEMORIES_MAX];
static Memory *memories_end = memories; /* behind the last that was ever used */
static uint64_t last_id;
static uintptr_t exported_start;
static size_t exported_nbytes;

/* The innermost: what is mapped before what is reserved around it. */
Memory *memory_at(uintptr_t address) {
    Memory *found = NULL;
    for (Memory *m = memories; m < memories_end; m++)
        if (m->owner != NOTHING && address >= m->start && address - m->start < m->nbytes &&
            (found == NULL || found->owner == RESERVED))
            found = m;
    return found;
}

Memory *memory_opened(long pid, uint64_t id) {
    for (Memory *m = memories; m < memories_end; m++)
        if (m->owner == DEVICE && m->opened && m->opened_pid == pid && m->opened_id == id)
            return m;
    return NULL;
}

Memory *memory_new(Owner owner, uintptr_t start, size_t nbytes) {
    Memory *m = memories;
    while (m->owner != NOTHING)
        if (++m == memories + MEMORIES_MAX)
            abort();
    if (m == memories_end)
        memories_end++;
    *m = (Memory){.owner = owner, .start = start, .nbytes = nbytes, .fd = -1, .id = ++last_id};
    return m;
}

bool map_file(Memory *m, int fd, uintptr_t fixed) {
    char *alias = mmap(NULL, m->nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    int flags = MAP_SHARED | (fixed ? MAP_FIXED : 0);
    char *bare = mmap((void *)fixed, m->nbytes, PROT_NONE, flags, fd, 0);
    if (alias == MAP_FAILED || bare == MAP_FAILED)
        return false;
    m->alias = alias;
    m->start = (uintptr_t)bare;
    m->fd = fd;
    m->is_ours = true;
    return true;
}

void memory_drop(Memory *m) {
    if (m->is_ours) {
        munmap(m->alias, m->nbytes);
        munmap((void *)m->start, m->nbytes);
    }
    if (m->fd >= 0)
        close(m->fd);
    m->owner = NOTHING;
}

char *reach(uintptr_t address, size_t nbytes) {
    Memory *m = memory_at(address);
    if (m == NULL || m->alias == NULL || nbytes > m->nbytes - (address - m->start))
        return NULL;
    return m->alias + (address - m->start);
}

size_t device_nbytes(void) {
    size_t sum = 0;
    for (Memory *m = memories; m < memories_end; m++)
        sum += m->owner == DEVICE && m->opened == 0 ? m->nbytes : 0;
    return sum;
}

/* -- what an address is */

static CUresult attribute_of(const Memory *m, unsigned attribute, void *data) {
    bool is_device = m->owner == DEVICE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)data = is_device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
        *(unsigned long long *)data = m->id;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)data = m->is_managed;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = m->ordinal;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        *(unsigned *)data = m->is_ipc;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        *(unsigned long long *)data = m->types;
        return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        *(void **)data = NULL;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr address) {
    CUresult r = enter("cuPointerGetAttribute", 0);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || m->owner == RESERVED))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        r = attribute_of(m, (unsigned)attribute, data);
    return leave(r);
}

/* Of an address that it does not know: null values, and no error. */
CUresult cuPointerGetAttributes(
    unsigned n, CUpointer_attribute *attributes, void **data, CUdeviceptr address) {
    static const Memory none;
    CUresult r = enter("cuPointerGetAttributes", 0);
    Memory *m = memory_at(address);
    for (unsigned i = 0; r == 0 && i < n; i++) {
        if (m != NULL && m->owner != RESERVED) {
            r = attribute_of(m, (unsigned)attributes[i], data[i]);
        } else {
            r = attribute_of(&none, (unsigned)attributes[i], data[i]);
            if (attributes[i] == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
                *(unsigned *)data[i] = 0;
            if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
                *(int *)data[i] = -2;
        }
    }
    return leave(r);
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *nbytes, CUdeviceptr address) {
    CUresult r = enter("cuMemGetAddressRange", NEEDS_CONTEXT);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || m->owner != DEVICE))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && base)
        *base = m->start;
    if (r == 0 && nbytes)
        *nbytes = m->nbytes;
    return leave(r);
}

/* -- device memory */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t nbytes) {
    CUresult r = enter("cuMemAlloc", NEEDS_CONTEXT | ENDS_CAPTURE);
    if (r == 0 && nbytes == 0)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r)
        return leave(r);
    int fd = memfd_create("device memory", MFD_CLOEXEC);
    size_t whole = (nbytes + PAGE - 1) / PAGE * PAGE;
    Memory *m = memory_new(DEVICE, 0, whole);
    if (fd < 0 || ftruncate(fd, (off_t)whole) || !map_file(m, fd, 0)) {
        m->owner = NOTHING;
        close(fd);
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    m->nbytes = nbytes; /* what is behind it is nobody's */
    m->ordinal = current()->ordinal;
    m->reached_by = 1u << m->ordinal;
    m->is_ipc = true;
    *address = m->start;
    return leave(CUDA_SUCCESS);
}

/* Other processes that have opened it hold a lock of the file (sharing.c). */
static bool is_open_elsewhere(const Memory *m) {
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    return m->fd >= 0 && fcntl(m->fd, F_OFD_GETLK, &whole) == 0 && whole.l_type != F_UNLCK;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
    CUresult r = enter("cuMemFree", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || !m->is_ipc || m->start != address))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        freed_while_open += is_open_elsewhere(m);
        m->nbytes = (m->nbytes + PAGE - 1) / PAGE * PAGE;
        memory_drop(m);
    }
    return leave(r);
}

CUresult cuMemGetHandleForAddressRange(
    void *handle, CUdeviceptr address, size_t nbytes, CUmemRangeHandleType type,
    unsigned long long flags) {
    CUresult r = enter("cuMemGetHandleForAddressRange", 0);
    Memory *m = memory_at(address);
    if (r == 0 && (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || address % PAGE ||
                   nbytes % PAGE))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && m == NULL && memory_at(address + PAGE - 1) == NULL)
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        exported_start = address;
        exported_nbytes = nbytes;
        *(int *)handle = memfd_create("dma-buf", MFD_CLOEXEC);
    }
    return leave(r);
}

/* -- host memory */

CUresult cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags) {
    CUresult r = enter("cuMemHostAlloc", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    (void)flags;
    if (r)
        return leave(r);
    char *at = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        return leave(CUDA_ERROR_OUT_OF_MEMORY);
    Memory *m = memory_new(PINNED, (uintptr_t)at, nbytes);
    m->alias = at;
    m->is_allocated = true;
    *memory = at;
    return leave(CUDA_SUCCESS);
}

CUresult cuMemFreeHost(void *memory) {
    CUresult r = enter("cuMemFreeHost", NEEDS_CONTEXT | SYNCHRONISES);
    Memory *m = memory_at((uintptr_t)memory);
    if (r == 0 && (m == NULL || !m->is_allocated || m->start != (uintptr_t)memory))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        munmap(memory, m->nbytes);
        memory_drop(m);
    }
    return leave(r);
}

CUresult cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags) {
    CUresult r = enter("cuMemHostRegister", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    uintptr_t start = (uintptr_t)memory;
    (void)flags;
    if (r == 0 && (memory_at(start) || memory_at(start + nbytes - 1)))
        r = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    if (r == 0)
        memory_new(PINNED, start, nbytes)->alias = memory;
    return leave(r);
}

CUresult cuMemHostUnregister(void *memory) {
    CUresult r = enter("cuMemHostUnregister", NEEDS_CONTEXT | SYNCHRONISES);
    Memory *m = memory_at((uintptr_t)memory);
    if (r == 0 && (m == NULL || m->owner != PINNED || m->is_allocated ||
                   m->start != (uintptr_t)memory))
        r = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    if (r == 0)
        memory_drop(m);
    return leave(r);
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *address, void *memory, unsigned flags) {
    CUresult r = enter("cuMemHostGetDevicePointer", NEEDS_CONTEXT);
    Memory *m = memory_at((uintptr_t)memory);
    if (r == 0 && (flags || m == NULL || m->owner != PINNED))
        r = CUDA_ERROR_INVALID_VALUE;
    *address = (uintptr_t)memory;
    return leave(r);
}

/* -- what tests call */

char *fake_alias(uintptr_t address);
void fake_claim(uintptr_t address, size_t nbytes, int ordinal, int is_managed);
void fake_unclaim(uintptr_t address);
uintptr_t fake_exported(size_t *nbytes);
uint64_t fake_pinned_bytes(void);
void fake_forget_pinned(void);

/* Where a test finds device memory. */
char *fake_alias(uintptr_t address) {
    pthread_mutex_lock(&lock);
    char *alias = reach(address, 1);
    pthread_mutex_unlock(&lock);
    return alias;
}

/* Host memory that is said to be a device's: for soft NICs, which have to reach it; or managed. */
void fake_claim(uintptr_t address, size_t nbytes, int ordinal, int is_managed) {
    pthread_mutex_lock(&lock);
    Memory *m = memory_new(DEVICE, address, nbytes);
    m->alias = (char *)address;
    m->ordinal = ordinal;
    m->reached_by = 1u << ordinal;
    m->is_managed = is_managed;
    pthread_mutex_unlock(&lock);
}

void fake_unclaim(uintptr_t address) {
    pthread_mutex_lock(&lock);
    memory_drop(memory_at(address));
    pthread_mutex_unlock(&lock);
}

/* The range of the last dma-buf. */
uintptr_t fake_exported(size_t *nbytes) {
    pthread_mutex_lock(&lock);
    uintptr_t start = exported_start;
    *nbytes = exported_nbytes;
    pthread_mutex_unlock(&lock);
    return start;
}

uint64_t fake_pinned_bytes(void) {
    uint64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (Memory *m = memories; m < memories_end; m++)
        sum += m->owner == PINNED ? m->nbytes : 0;
    pthread_mutex_unlock(&lock);
    return sum;
}

/* As at the end of a context that is broken. */
void fake_forget_pinned(void) {
    pthread_mutex_lock(&lock);
    for (Memory *m = memories; m < memories_end; m++)
        if (m->owner == PINNED && !m->is_allocated)
            memory_drop(m);
    pthread_mutex_unlock(&lock);
}

/* SPDX-License-Identifier: Apache-2.0
 * Legacy handles, by which other processes open cuMemAlloc's memory. */
#include "stand_in.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    uint64_t magic, id, nbytes;
    int pid, fd, ordinal;
} Ticket;
_Static_assert(sizeof(Ticket) <= sizeof(CUipcMemHandle), "a handle");

static const uint64_t MAGIC = 0xC0DA1BC;

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address) {
    CUresult r = enter("cuIpcGetMemHandle", NEEDS_CONTEXT);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || !m->is_ipc))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0) {
        Ticket t = {MAGIC, m->id, m->nbytes, getpid(), m->fd, m->ordinal};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &t, sizeof t);
    }
    return leave(r);
}

static CUresult open_ticket(CUdeviceptr *address, const Ticket *t) {
    char path[64];
    struct stat found;
    struct flock held = {.l_type = F_RDLCK, .l_whence = SEEK_SET};
    Memory *m = memory_opened(t->pid, t->id);
    if (m) {
        m->opened++;
        m->reached_by |= 1u << current()->ordinal;
        *address = m->start;
        return CUDA_SUCCESS;
    }
    snprintf(path, sizeof path, "/proc/%d/fd/%d", t->pid, t->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &found) || (uint64_t)found.st_size < t->nbytes) {
        close(fd);
        return CUDA_ERROR_INVALID_VALUE;
    }
    m = memory_new(DEVICE, 0, t->nbytes);
    if (fcntl(fd, F_OFD_SETLK, &held) || !map_file(m, fd, 0)) {
        m->owner = NOTHING;
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->ordinal = t->ordinal;
    m->reached_by = 1u << current()->ordinal;
    m->opened = 1;
    m->opened_pid = t->pid;
    m->opened_id = t->id;
    *address = m->start;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags) {
    CUresult r = enter("cuIpcOpenMemHandle", NEEDS_CONTEXT | SYNCHRONISES);
    Ticket t;
    memcpy(&t, &handle, sizeof t);
    if (r == 0 && (t.magic != MAGIC || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && t.pid == getpid())
        r = CUDA_ERROR_INVALID_CONTEXT;
    return leave(r ? r : open_ticket(address, &t));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    CUresult r = enter("cuIpcCloseMemHandle", NEEDS_CONTEXT | SYNCHRONISES);
    Memory *m = memory_at(address);
    if (r == 0 && (m == NULL || m->opened == 0 || m->start != address))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && --m->opened == 0)
        memory_drop(m);
    return leave(r);
}

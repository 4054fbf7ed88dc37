# SPDX-License-Identifier: Apache-2.0
# The two shared libraries, opened at run time.

from libc.errno cimport ECONNREFUSED, EINTR, EIO, ENODEV, ENOSYS, ETIMEDOUT, errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from te.core.sync cimport store32
from te.verbs.abi cimport *

import os
import time

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)
    char *dlerror()
    enum: RTLD_NOW

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    enum: F_GETFL, F_SETFL, O_NONBLOCK

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events
    int poll(pollfd *fds, unsigned long n, int timeout_ms)
    enum: POLLIN

cdef extern from "<netinet/in.h>" nogil:
    struct in_addr:
        pass
    struct in6_addr:
        pass
    struct sockaddr_storage:
        pass
    struct sockaddr_in:
        uint16_t sin_family, sin_port
        in_addr sin_addr
    struct sockaddr_in6:
        uint16_t sin6_family, sin6_port
        in6_addr sin6_addr
    uint16_t htons(uint16_t v)
    uint16_t ntohs(uint16_t v)
    enum: AF_INET, AF_INET6

cdef enum:
    BACKLOG = 128
    # The kernel misses an ARP reply that comes at once (ib_core's addr.c), and only looks again when
    # this is over.
    RESOLVE_MS = 500
    READS_MAX = 16  # RDMA reads of a queue pair that are under way at once; every device has them
    INLINE_BYTES_MAX = 16
    GIDS_MAX = 2047  # the kernel counts the bytes of an answer in 16 bits
    SCRATCH_BYTES = 4096

cdef struct Lib:
    bint is_open, has_cm
    VDevice **(*get_device_list)(int *) noexcept nogil
    void (*free_device_list)(VDevice **) noexcept nogil
    VContext *(*open_device)(VDevice *) noexcept nogil
    int (*close_device)(VContext *) noexcept nogil
    int (*query_device)(VContext *, VDeviceAttr *) noexcept nogil
    int (*query_port)(VContext *, uint8_t, VPortAttr *) noexcept nogil
    ssize_t (*query_gid_table)(VContext *, VGidEntry *, size_t, uint32_t, size_t) noexcept nogil
    int (*get_async_event)(VContext *, VAsyncEvent *) noexcept nogil
    void (*ack_async_event)(VAsyncEvent *) noexcept nogil
    void *(*alloc_pd)(VContext *) noexcept nogil
    int (*dealloc_pd)(void *) noexcept nogil
    void *(*reg_mr)(void *, void *, size_t, int) noexcept nogil
    void *(*reg_mr_iova2)(void *, void *, size_t, uint64_t, unsigned int) noexcept nogil
    void *(*reg_dmabuf_mr)(void *, uint64_t, size_t, uint64_t, int, int) noexcept nogil
    int (*dereg_mr)(void *) noexcept nogil
    VChannel *(*create_comp_channel)(VContext *) noexcept nogil
    int (*destroy_comp_channel)(void *) noexcept nogil
    void *(*create_cq)(VContext *, int, void *, void *, int) noexcept nogil
    int (*destroy_cq)(void *) noexcept nogil
    int (*get_cq_event)(void *, void **, void **) noexcept nogil
    void (*ack_cq_events)(void *, unsigned int) noexcept nogil
    VQp *(*create_qp)(void *, VQpInitAttr *) noexcept nogil
    int (*modify_qp)(void *, VQpAttr *, int) noexcept nogil
    int (*destroy_qp)(void *) noexcept nogil
    VContext **(*cm_get_devices)(int *) noexcept nogil
    void (*cm_free_devices)(VContext **) noexcept nogil
    void *(*cm_create_event_channel)() noexcept nogil
    void (*cm_destroy_event_channel)(void *) noexcept nogil
    int (*cm_create_id)(void *, VCmId **, void *, int) noexcept nogil
    int (*cm_destroy_id)(void *) noexcept nogil
    int (*cm_bind_addr)(void *, void *) noexcept nogil
    int (*cm_listen)(void *, int) noexcept nogil
    int (*cm_resolve_addr)(void *, void *, void *, int) noexcept nogil
    int (*cm_resolve_route)(void *, int) noexcept nogil
    int (*cm_create_qp)(void *, void *, VQpInitAttr *) noexcept nogil
    void (*cm_destroy_qp)(void *) noexcept nogil
    int (*cm_connect)(void *, VCmParam *) noexcept nogil
    int (*cm_accept)(void *, VCmParam *) noexcept nogil
    int (*cm_reject)(void *, const void *, uint8_t) noexcept nogil
    int (*cm_get_event)(void *, VCmEvent **) noexcept nogil
    int (*cm_ack_event)(VCmEvent *) noexcept nogil
    int (*cm_migrate_id)(void *, void *) noexcept nogil
    const char *(*cm_event_text)(int) noexcept nogil
    uint16_t (*cm_get_src_port)(void *) noexcept nogil

cdef Lib lib
memset(&lib, 0, sizeof(lib))


cdef inline int last_errno() noexcept nogil:
    return errno


cdef int fail(str what, int errnum) except -1:
    raise OSError(errnum, f"{what}: {os.strerror(errnum)}")


cdef int set_nonblocking(int fd) except -1:
    if fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0:
        fail("fcntl", last_errno())
    return 0


cdef void *open_library(const char *name) except NULL:
    cdef void *handle = dlopen(name, RTLD_NOW)
    if handle == NULL:
        raise OSError(ENOSYS, f"{dlerror().decode()}; install rdma-core's libibverbs and librdmacm")
    return handle


cdef void *symbol(void *library, const char *name) except NULL:
    cdef void *found = dlsym(library, name)
    if found == NULL:
        raise OSError(ENOSYS, f"{name.decode()} is missing: {dlerror().decode()}")
    return found


cdef int load_library() except -1:
    cdef void *v
    if lib.is_open:
        return 0
    v = open_library(b"libibverbs.so.1")
    (<void **>&lib.get_device_list)[0] = symbol(v, b"ibv_get_device_list")
    (<void **>&lib.free_device_list)[0] = symbol(v, b"ibv_free_device_list")
    (<void **>&lib.open_device)[0] = symbol(v, b"ibv_open_device")
    (<void **>&lib.close_device)[0] = symbol(v, b"ibv_close_device")
    (<void **>&lib.query_device)[0] = symbol(v, b"ibv_query_device")
    (<void **>&lib.query_port)[0] = symbol(v, b"ibv_query_port")
    (<void **>&lib.get_async_event)[0] = symbol(v, b"ibv_get_async_event")
    (<void **>&lib.ack_async_event)[0] = symbol(v, b"ibv_ack_async_event")
    (<void **>&lib.alloc_pd)[0] = symbol(v, b"ibv_alloc_pd")
    (<void **>&lib.dealloc_pd)[0] = symbol(v, b"ibv_dealloc_pd")
    (<void **>&lib.reg_mr)[0] = symbol(v, b"ibv_reg_mr")
    (<void **>&lib.dereg_mr)[0] = symbol(v, b"ibv_dereg_mr")
    (<void **>&lib.create_comp_channel)[0] = symbol(v, b"ibv_create_comp_channel")
    (<void **>&lib.destroy_comp_channel)[0] = symbol(v, b"ibv_destroy_comp_channel")
    (<void **>&lib.create_cq)[0] = symbol(v, b"ibv_create_cq")
    (<void **>&lib.destroy_cq)[0] = symbol(v, b"ibv_destroy_cq")
    (<void **>&lib.get_cq_event)[0] = symbol(v, b"ibv_get_cq_event")
    (<void **>&lib.ack_cq_events)[0] = symbol(v, b"ibv_ack_cq_events")
    (<void **>&lib.create_qp)[0] = symbol(v, b"ibv_create_qp")
    (<void **>&lib.modify_qp)[0] = symbol(v, b"ibv_modify_qp")
    (<void **>&lib.destroy_qp)[0] = symbol(v, b"ibv_destroy_qp")
    # What ibv_query_gid_table(3), an inline function, calls.
    (<void **>&lib.query_gid_table)[0] = symbol(v, b"_ibv_query_gid_table")
    # Younger than the rest: rdma-core 27 and 34.
    (<void **>&lib.reg_mr_iova2)[0] = dlsym(v, b"ibv_reg_mr_iova2")
    (<void **>&lib.reg_dmabuf_mr)[0] = dlsym(v, b"ibv_reg_dmabuf_mr")
    lib.is_open = True
    return 0


cdef int load_cm() except -1:
    """Only devices that are connected by rdma_cm need it."""
    cdef void *v
    if lib.has_cm:
        return 0
    v = open_library(b"librdmacm.so.1")
    (<void **>&lib.cm_get_devices)[0] = symbol(v, b"rdma_get_devices")
    (<void **>&lib.cm_free_devices)[0] = symbol(v, b"rdma_free_devices")
    (<void **>&lib.cm_create_event_channel)[0] = symbol(v, b"rdma_create_event_channel")
    (<void **>&lib.cm_destroy_event_channel)[0] = symbol(v, b"rdma_destroy_event_channel")
    (<void **>&lib.cm_create_id)[0] = symbol(v, b"rdma_create_id")
    (<void **>&lib.cm_destroy_id)[0] = symbol(v, b"rdma_destroy_id")
    (<void **>&lib.cm_bind_addr)[0] = symbol(v, b"rdma_bind_addr")
    (<void **>&lib.cm_listen)[0] = symbol(v, b"rdma_listen")
    (<void **>&lib.cm_resolve_addr)[0] = symbol(v, b"rdma_resolve_addr")
    (<void **>&lib.cm_resolve_route)[0] = symbol(v, b"rdma_resolve_route")
    (<void **>&lib.cm_create_qp)[0] = symbol(v, b"rdma_create_qp")
    (<void **>&lib.cm_destroy_qp)[0] = symbol(v, b"rdma_destroy_qp")
    (<void **>&lib.cm_connect)[0] = symbol(v, b"rdma_connect")
    (<void **>&lib.cm_accept)[0] = symbol(v, b"rdma_accept")
    (<void **>&lib.cm_reject)[0] = symbol(v, b"rdma_reject")
    (<void **>&lib.cm_get_event)[0] = symbol(v, b"rdma_get_cm_event")
    (<void **>&lib.cm_ack_event)[0] = symbol(v, b"rdma_ack_cm_event")
    (<void **>&lib.cm_migrate_id)[0] = symbol(v, b"rdma_migrate_id")
    (<void **>&lib.cm_event_text)[0] = symbol(v, b"rdma_event_str")
    (<void **>&lib.cm_get_src_port)[0] = symbol(v, b"rdma_get_src_port")
    lib.has_cm = True
    return 0

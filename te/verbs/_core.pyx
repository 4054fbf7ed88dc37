# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0
# Devices, memory regions and queue pairs; see _core.pyi for the contract. Calls that may go to the
# kernel give the interpreter lock away.

cimport cython

include "library.pxi"
include "endpoint.pxi"
include "cm.pxi"


def load():
    """Opens the libraries, once; raises ``OSError`` that says what is missing."""
    load_library()


def device_list():
    """(name, is it iWARP) of each device of this host."""
    load_library()
    cdef int n = 0, i
    cdef VDevice **devices = lib.get_device_list(&n)
    if devices == NULL:
        fail("ibv_get_device_list", last_errno())
    found = []
    for i in range(n):
        found.append((
            (<bytes>devices[i].name).decode("ascii", "replace"),
            devices[i].transport_type == TRANSPORT_IWARP,
        ))
    lib.free_device_list(devices)
    return found


cdef class DeviceContext:
    """A device until the last of what was made of it has gone."""
    cdef VContext *context
    cdef VContext *watched  # whose events are read
    cdef void *pd
    cdef str name
    cdef bint is_iwarp

    def __init__(self, str name):
        load_library()
        self.name = name
        self.open_context(name.encode())
        if self.context == NULL:
            raise OSError(ENODEV, f"there is no RDMA device {name}")
        with nogil:
            self.pd = lib.alloc_pd(self.context)
        if self.pd == NULL:
            fail(f"ibv_alloc_pd of {name}", last_errno())

    cdef int open_context(self, bytes name) except -1:
        cdef int n = 0, i
        cdef VDevice **devices = lib.get_device_list(&n)
        cdef VDevice *found = NULL
        cdef int errnum = 0
        if devices == NULL:
            fail("ibv_get_device_list", last_errno())
        for i in range(n):
            if <bytes>devices[i].name == name:
                found = devices[i]
        if found != NULL:
            self.is_iwarp = found.transport_type == TRANSPORT_IWARP
            self.watched = lib.open_device(found)
            errnum = last_errno()
        lib.free_device_list(devices)
        if found == NULL:
            return 0
        if self.watched == NULL:
            fail(f"ibv_open_device of {self.name}", errnum)
        # librdmacm's context serves the whole process: what one engine read there, another missed.
        self.context = cm_context(name) if self.is_iwarp else self.watched
        set_nonblocking(self.watched.async_fd)
        return 0

    def __dealloc__(self):
        # A queue pair that no worker has taken, or released, goes on using its device.
        if self.pd != NULL and lib.dealloc_pd(self.pd):
            return
        # Contexts of librdmacm are its own, and live as long as the process.
        if self.watched != NULL:
            lib.close_device(self.watched)


@cython.no_gc_clear
cdef class Device:
    cdef DeviceContext context  # None: closed
    cdef VDeviceAttr attr
    cdef readonly str name
    cdef readonly bint is_iwarp

    def __init__(self, str name):
        cdef DeviceContext device = DeviceContext(name)
        cdef int errnum
        with nogil:
            errnum = lib.query_device(device.context, &self.attr)
        if errnum:
            fail(f"ibv_query_device of {name}", errnum)
        self.context = device
        self.name = name
        self.is_iwarp = device.is_iwarp

    cdef DeviceContext use(self):
        if self.context is None:
            raise OSError(ENODEV, f"the device {self.name} was closed")
        return self.context

    def close(self):
        self.context = None

    @property
    def events_fd(self):
        return self.use().watched.async_fd

    def events(self):
        """(type, port or 0) of each event that waits; one that breaks a queue pair is told to its
        endpoint."""
        cdef VAsyncEvent event
        cdef Endpoint *broken
        cdef DeviceContext device = self.use()
        cdef int port
        found = []
        while lib.get_async_event(device.watched, &event) == 0:
            port = 0
            if event.event_type in (EVENT_QP_FATAL, EVENT_QP_REQ_ERR, EVENT_QP_ACCESS_ERR):
                # It is not destroyed before the event is acknowledged.
                broken = <Endpoint *>(<VQp *>event.element).qp_context
                store32(&broken.fault, event.event_type)
            elif event.event_type in (EVENT_PORT_ACTIVE, EVENT_PORT_ERR):
                port = (<int32_t *>&event.element)[0]
            lib.ack_async_event(&event)
            found.append((event.event_type, port))
        return found

    @property
    def limits(self):
        """(max_mr_size, max_qp_wr, max_cqe, max_mr, ports)"""
        return (self.attr.max_mr_size, self.attr.max_qp_wr, self.attr.max_cqe, self.attr.max_mr,
                self.attr.phys_port_cnt)

    def port(self, int number):
        """(state, active MTU as its enum, LID, is it Ethernet, partition keys, longest message in
        bytes)"""
        cdef VPortAttr attr
        cdef DeviceContext device = self.use()
        cdef int errnum
        memset(&attr, 0, sizeof(attr))
        with nogil:
            errnum = lib.query_port(device.context, number, &attr)
        if errnum:
            fail(f"ibv_query_port of {self.name} port {number}", errnum)
        return (attr.state, attr.active_mtu, attr.lid, attr.link_layer == LINK_LAYER_ETHERNET,
                attr.pkey_tbl_len, attr.max_msg_sz)

    def gids(self):
        """(port, index, 16 bytes, type, number of the interface) of each valid entry."""
        cdef DeviceContext device = self.use()
        cdef VGidEntry *entries = <VGidEntry *>calloc(GIDS_MAX, sizeof(VGidEntry))
        cdef ssize_t n, i
        if entries == NULL:
            raise MemoryError
        with nogil:
            n = lib.query_gid_table(device.context, entries, GIDS_MAX, 0, sizeof(VGidEntry))
        found = [
            (entries[i].port, entries[i].index, bytes(entries[i].gid[:16]), entries[i].type,
             entries[i].netdev)
            for i in range(n)
        ]
        free(entries)
        if n < 0:
            fail(f"ibv_query_gid_table of {self.name}", -n)
        return found

    def register(
        self, uint64_t address, uint64_t nbytes, bint relaxed, bint remote_read, bint remote_write
    ):
        """A MemoryRegion of host memory, or of CUDA memory through the peer-memory module."""
        cdef int access = access_of(remote_read, remote_write)
        cdef DeviceContext device = self.use()
        cdef void *mr
        cdef int errnum
        with nogil:
            if relaxed and lib.reg_mr_iova2 != NULL:
                mr = lib.reg_mr_iova2(
                    device.pd, <void *>address, nbytes, address, access | ACCESS_RELAXED_ORDERING)
            else:
                mr = lib.reg_mr(device.pd, <void *>address, nbytes, access)
            errnum = last_errno()
        if mr == NULL:
            fail(f"ibv_reg_mr of {nbytes} bytes at {address:#x} on {self.name}", errnum)
        return wrap_mr(device, <VMr *>mr)

    def register_dma_buf(
        self, int fd, uint64_t offset, uint64_t address, uint64_t nbytes, bint remote_read,
        bint remote_write
    ):
        cdef int access = access_of(remote_read, remote_write) | ACCESS_RELAXED_ORDERING
        cdef DeviceContext device = self.use()
        cdef void *mr = NULL
        cdef int errnum = ENOSYS
        if lib.reg_dmabuf_mr != NULL:
            with nogil:
                mr = lib.reg_dmabuf_mr(device.pd, offset, nbytes, address, fd, access)
                errnum = last_errno()
        if mr == NULL:
            fail(f"ibv_reg_dmabuf_mr of {nbytes} bytes at {address:#x} on {self.name}", errnum)
        return wrap_mr(device, <VMr *>mr)

    def queue_pair(
        self, int port, uint32_t send_depth, uint32_t receive_depth, uint32_t message_bytes
    ):
        """A QueuePair that is not connected yet."""
        cdef QueuePair q = QueuePair.__new__(QueuePair)
        q.device = self.use()
        q.port = port
        q.e = endpoint_new(q.device, send_depth, receive_depth)
        q.e.max_msg_bytes = message_bytes
        endpoint_create_qp(q.e, q.device.pd, self.name)
        return q


    def dial(
        self, bytes local, bytes remote, uint16_t remote_port, bytes token, uint32_t send_depth,
        uint32_t message_bytes, double timeout_s
    ):
        return cm_dial(
            self.use(), local, remote, remote_port, token, send_depth, message_bytes, timeout_s)


cdef int access_of(bint remote_read, bint remote_write) noexcept:
    """enum ibv_access_flags; this side itself may do everything."""
    cdef int access = ACCESS_LOCAL_WRITE
    if remote_read:
        access |= ACCESS_REMOTE_READ
    if remote_write:
        access |= ACCESS_REMOTE_WRITE
    return access


@cython.no_gc_clear
cdef class MemoryRegion:
    cdef VMr *mr
    cdef DeviceContext device  # It must outlive the region.

    @property
    def lkey(self):
        return self.mr.lkey

    @property
    def rkey(self):
        return self.mr.rkey

    def close(self):
        """After it returns nothing can land through these keys. Idempotent."""
        cdef int errnum
        cdef VMr *mr = self.mr
        if mr == NULL:
            return
        with nogil:
            errnum = lib.dereg_mr(mr)
        if errnum:
            fail(f"ibv_dereg_mr on {self.device.name}", errnum)
        self.mr = NULL
        self.device = None  # Which may go now.

    def __dealloc__(self):
        if self.mr != NULL:
            lib.dereg_mr(self.mr)


cdef MemoryRegion wrap_mr(DeviceContext device, VMr *mr):
    cdef MemoryRegion region = MemoryRegion.__new__(MemoryRegion)
    region.mr = mr
    region.device = device
    return region


@cython.no_gc_clear
cdef class QueuePair:
    cdef Endpoint *e
    cdef DeviceContext device
    cdef int port

    def __dealloc__(self):
        if self.e != NULL:
            with nogil:  # One that was only half connected may take its device seconds.
                self.e.release(self.e)

    @property
    def number(self):
        return self.e.qp_num

    @property
    def address(self):
        return <uint64_t>self.e

    def disown(self):
        self.e = NULL

    def connect(
        self, uint32_t remote_number, uint32_t remote_psn, uint32_t local_psn, bytes remote_gid,
        int gid_index, int remote_lid, int mtu, int timeout, int retries, int traffic_class,
        int service_level, int partition_key_index, bint is_target
    ):
        """RESET → INIT → RTR → RTS; ibv_modify_qp(3)."""
        cdef VQpAttr a
        cdef int errnum, mask
        cdef bint is_global = len(remote_gid) == 16
        memset(&a, 0, sizeof(a))
        a.qp_state = QPS_INIT
        a.port_num = self.port
        a.pkey_index = partition_key_index
        a.qp_access_flags = access_of(is_target, is_target)
        self.modify(&a, QP_STATE | QP_PKEY_INDEX | QP_PORT | QP_ACCESS_FLAGS, "INIT")
        memset(&a, 0, sizeof(a))
        a.qp_state = QPS_RTR
        a.path_mtu = mtu
        a.dest_qp_num = remote_number
        a.rq_psn = remote_psn
        a.max_dest_rd_atomic = READS_MAX
        a.min_rnr_timer = 12
        a.ah.port_num = self.port
        a.ah.dlid = remote_lid
        a.ah.sl = service_level
        a.ah.is_global = is_global
        if is_global:
            memcpy(a.ah.dgid, <const char *>remote_gid, 16)
            a.ah.sgid_index = gid_index
            a.ah.hop_limit = 64
            a.ah.traffic_class = traffic_class
        self.modify(&a, QP_STATE | QP_AV | QP_PATH_MTU | QP_DEST_QPN | QP_RQ_PSN
                    | QP_MAX_DEST_RD_ATOMIC | QP_MIN_RNR_TIMER, "RTR")
        memset(&a, 0, sizeof(a))
        a.qp_state = QPS_RTS
        a.timeout = timeout
        a.retry_cnt = retries
        a.rnr_retry = retries
        a.sq_psn = local_psn
        a.max_rd_atomic = READS_MAX
        self.modify(&a, QP_STATE | QP_TIMEOUT | QP_RETRY_CNT | QP_RNR_RETRY | QP_SQ_PSN
                    | QP_MAX_QP_RD_ATOMIC, "RTS")

    cdef int modify(self, VQpAttr *a, int mask, str state) except -1:
        cdef int errnum
        cdef void *qp = self.e.qp
        with nogil:
            errnum = lib.modify_qp(qp, a, mask)
        if errnum:
            fail(f"ibv_modify_qp of {self.device.name} to {state}", errnum)
        return 0

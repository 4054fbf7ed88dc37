# SPDX-License-Identifier: Apache-2.0
# Connections by rdma_cm(7): the only way for devices of the iWARP family.

MAPPED = bytes(10) + b"\xff\xff"  # what an IPv4 address begins with as one of IPv6


cdef VContext *cm_context(bytes name) except? NULL:
    """The context that librdmacm has opened for a device: queue pairs of its connections belong to
    that one. NULL if it has none."""
    cdef int n = 0, i
    cdef VContext **contexts
    cdef VContext *found = NULL
    load_cm()
    contexts = lib.cm_get_devices(&n)
    if contexts == NULL:
        fail("rdma_get_devices", last_errno())
    for i in range(n):
        if <bytes>(<VDevice *>contexts[i].device).name == name:
            found = contexts[i]
    lib.cm_free_devices(contexts)
    return found


cdef int fill_address(sockaddr_storage *s, bytes raw, uint16_t port) except -1:
    """From the 16 bytes of an IPv6 address, or of an IPv4 address mapped to one."""
    cdef sockaddr_in *four = <sockaddr_in *>s
    cdef sockaddr_in6 *six = <sockaddr_in6 *>s
    if len(raw) != 16:
        raise ValueError(f"an address of {len(raw)} bytes instead of 16")
    memset(s, 0, sizeof(s[0]))
    if raw.startswith(MAPPED):
        four.sin_family = AF_INET
        four.sin_port = htons(port)
        memcpy(&four.sin_addr, <const char *>raw + len(MAPPED), 4)
    else:
        six.sin6_family = AF_INET6
        six.sin6_port = htons(port)
        memcpy(&six.sin6_addr, <const char *>raw, 16)
    return 0


cdef int check_device(VCmId *cm, DeviceContext device) except -1:
    if cm.verbs != device.context:
        raise OSError(ENODEV, f"the connection does not go through {device.name}: another device"
                      " has its address, or takes its route")
    return 0


cdef int cm_channel_new(Endpoint *e) except -1:
    """A channel of its own for each connection: its events disturb nobody, and it goes with it."""
    e.cm_channel = lib.cm_create_event_channel()
    if e.cm_channel == NULL:
        fail("rdma_create_event_channel", last_errno())
    return 0


cdef int cm_create_qp(Endpoint *e, DeviceContext device) except -1:
    """rdma_create_qp(3)."""
    cdef VQpInitAttr a
    cdef VCmId *cm = <VCmId *>e.cm
    cdef int failed
    fill_init(e, &a)
    with nogil:
        failed = lib.cm_create_qp(cm, device.pd, &a)
    if failed:
        fail(f"rdma_create_qp of {e.send_depth} sends and {e.receive_depth} receives on"
             f" {device.name}", last_errno())
    e.qp = cm.qp
    e.qp_num = cm.qp.qp_num
    return 0


cdef bytes cm_await(Endpoint *e, int wanted, str call, uint64_t deadline_ns):
    """Waits for the event that follows a call; returns what the other side said with it."""
    cdef pollfd one
    cdef VCmEvent *event = NULL
    cdef int n, kind, status
    cdef int64_t left_ms
    one.fd = (<int *>e.cm_channel)[0]
    one.events = POLLIN
    while True:
        left_ms = (<int64_t>deadline_ns - <int64_t>time.monotonic_ns()) // 1000000
        if left_ms <= 0:
            raise OSError(ETIMEDOUT, f"{call}: no answer in time")
        with nogil:
            n = poll(&one, 1, <int>left_ms)
        if n > 0:
            break
        if n < 0 and last_errno() != EINTR:
            fail("poll", last_errno())
    with nogil:
        n = lib.cm_get_event(e.cm_channel, &event)
    if n:
        fail("rdma_get_cm_event", last_errno())
    kind, status = event.event, event.status
    said = b""
    if event.param.private_data != NULL:
        said = (<const char *>event.param.private_data)[:event.param.private_data_len]
    text = lib.cm_event_text(kind).decode()
    lib.cm_ack_event(event)
    if kind != wanted:
        fail(f"{call}: {text}", -status if status < 0 else ECONNREFUSED)
    return said


cdef tuple cm_dial(
    DeviceContext device, bytes local, bytes remote, uint16_t remote_port, bytes token,
    uint32_t send_depth, uint32_t message_bytes, double timeout_s
):
    cdef uint64_t deadline_ns = time.monotonic_ns() + <uint64_t>(timeout_s * 1e9)
    cdef int failed
    cdef sockaddr_storage from_, to
    cdef VCmParam p
    cdef VCmId *cm = NULL
    cdef QueuePair q = QueuePair.__new__(QueuePair)
    q.device = device
    q.e = endpoint_new(device, send_depth, 1)
    q.e.max_msg_bytes = message_bytes
    fill_address(&from_, local, 0)
    fill_address(&to, remote, remote_port)
    cm_channel_new(q.e)
    if lib.cm_create_id(q.e.cm_channel, &cm, NULL, CM_PS_TCP):
        fail("rdma_create_id", last_errno())
    q.e.cm = cm
    with nogil:
        failed = lib.cm_resolve_addr(cm, &from_, &to, RESOLVE_MS)
    if failed:
        fail("rdma_resolve_addr", last_errno())
    cm_await(q.e, CM_ADDR_RESOLVED, "rdma_resolve_addr", deadline_ns)
    check_device(cm, device)
    with nogil:
        failed = lib.cm_resolve_route(cm, RESOLVE_MS)
    if failed:
        fail("rdma_resolve_route", last_errno())
    cm_await(q.e, CM_ROUTE_RESOLVED, "rdma_resolve_route", deadline_ns)
    cm_create_qp(q.e, device)
    memset(&p, 0, sizeof(p))
    p.private_data = <const char *>token
    p.private_data_len = len(token)
    p.responder_resources = p.initiator_depth = READS_MAX
    with nogil:  # siw connects its socket in here, for as long as the kernel likes to.
        failed = lib.cm_connect(cm, &p)
    if failed:
        fail("rdma_connect", last_errno())
    return q, cm_await(q.e, CM_ESTABLISHED, "rdma_connect", deadline_ns)


cdef int endpoint_accept(Endpoint *e, uint64_t word) noexcept nogil:
    cdef VCmParam p
    memset(&p, 0, sizeof(p))
    p.private_data = &word
    p.private_data_len = sizeof(word)
    p.responder_resources = p.initiator_depth = READS_MAX
    return last_errno() if lib.cm_accept(e.cm, &p) else 0


cdef class CmRequest:
    cdef VCmId *cm
    cdef readonly bytes token

    def __dealloc__(self):
        if self.cm != NULL:
            lib.cm_reject(self.cm, NULL, 0)
            lib.cm_destroy_id(self.cm)

    def queue_pair(self, Device used, uint32_t receive_depth, uint32_t message_bytes):
        cdef QueuePair q = QueuePair.__new__(QueuePair)
        cdef DeviceContext device = used.use()
        cdef int failed
        check_device(self.cm, device)
        q.device = device
        q.e = endpoint_new(device, 1, receive_depth)
        q.e.max_msg_bytes = message_bytes
        cm_channel_new(q.e)
        with nogil:
            failed = lib.cm_migrate_id(self.cm, q.e.cm_channel)
        if failed:
            fail("rdma_migrate_id", last_errno())
        q.e.cm, self.cm = self.cm, NULL
        cm_create_qp(q.e, device)
        q.e.accept = endpoint_accept
        return q


cdef class CmListener:
    cdef void *channel
    cdef VCmId *cm
    cdef readonly int port

    def __init__(self, bytes address, uint16_t port):
        cdef sockaddr_storage where
        load_cm()
        fill_address(&where, address, port)
        self.channel = lib.cm_create_event_channel()
        if self.channel == NULL:
            fail("rdma_create_event_channel", last_errno())
        set_nonblocking(self.fd)
        if lib.cm_create_id(self.channel, &self.cm, NULL, CM_PS_TCP):
            fail("rdma_create_id", last_errno())
        if lib.cm_bind_addr(self.cm, &where):
            fail("rdma_bind_addr", last_errno())
        if lib.cm_listen(self.cm, BACKLOG):
            fail("rdma_listen", last_errno())
        self.port = ntohs(lib.cm_get_src_port(self.cm))

    def __dealloc__(self):
        if self.cm != NULL:
            lib.cm_destroy_id(self.cm)
        if self.channel != NULL:
            lib.cm_destroy_event_channel(self.channel)

    @property
    def fd(self):
        return (<int *>self.channel)[0]

    def requests(self):
        cdef VCmEvent *event = NULL
        cdef CmRequest request
        found = []
        while lib.cm_get_event(self.channel, &event) == 0:
            if event.event == CM_CONNECT_REQUEST:
                request = CmRequest.__new__(CmRequest)
                request.cm = event.id
                request.token = b""
                if event.param.private_data != NULL:
                    request.token = (<const char *>event.param.private_data)[
                        :event.param.private_data_len]
                found.append(request)
            lib.cm_ack_event(event)
        return found

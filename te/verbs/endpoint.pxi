# SPDX-License-Identifier: Apache-2.0
# What the data plane takes over: a queue pair, its completion queue and channel.

cdef void endpoint_take_events(Endpoint *e) noexcept nogil:
    cdef void *cq = NULL
    cdef void *context = NULL
    while lib.get_cq_event(e.channel, &cq, &context) == 0:
        lib.ack_cq_events(cq, 1)


cdef int endpoint_to_error(Endpoint *e) noexcept nogil:
    cdef VQpAttr a
    memset(&a, 0, sizeof(a))
    a.qp_state = QPS_ERR
    return lib.modify_qp(e.qp, &a, QP_STATE)


cdef int endpoint_release(Endpoint *e) noexcept nogil:
    """In the order that the libraries ask for. A device that has gone has no queue pair any more."""
    cdef int errnum = 0
    if e.qp != NULL:
        if e.cm != NULL:
            lib.cm_destroy_qp(e.cm)
        else:
            errnum = lib.destroy_qp(e.qp)
        if errnum and errnum != EIO and errnum != ENODEV:
            return errnum
    if e.cm != NULL:
        lib.cm_destroy_id(e.cm)
    if e.cm_channel != NULL:
        lib.cm_destroy_event_channel(e.cm_channel)
    if e.cq != NULL:
        endpoint_take_events(e)
        lib.destroy_cq(e.cq)
    if e.channel != NULL:
        lib.destroy_comp_channel(e.channel)
    if e.scratch_mr != NULL:
        lib.dereg_mr(e.scratch_mr)
    free(e.scratch)
    free(e)
    return 0


cdef Endpoint *endpoint_new(DeviceContext device, uint32_t send_depth, uint32_t receive_depth) except NULL:
    """Everything but the queue pair."""
    cdef Endpoint *e = <Endpoint *>calloc(1, sizeof(Endpoint))
    if e == NULL:
        raise MemoryError
    e.send_depth = send_depth
    e.receive_depth = receive_depth
    e.is_iwarp = device.is_iwarp
    e.take_events = endpoint_take_events
    e.to_error = endpoint_to_error
    e.release = endpoint_release
    try:
        endpoint_create_cq(e, device)
    except OSError:
        e.release(e)
        raise
    return e


cdef int endpoint_create_cq(Endpoint *e, DeviceContext device) except -1:
    cdef VChannel *channel
    cdef int n = e.send_depth + e.receive_depth + 1
    cdef void **ops = device.context.ops
    cdef VMr *mr
    with nogil:
        channel = lib.create_comp_channel(device.context)
    if channel == NULL:
        fail(f"ibv_create_comp_channel of {device.name}", last_errno())
    e.channel = channel
    e.fd = channel.fd
    set_nonblocking(e.fd)
    with nogil:
        e.cq = lib.create_cq(device.context, n, NULL, channel, 0)
    if e.cq == NULL:
        fail(f"ibv_create_cq of {n} entries on {device.name}", last_errno())
    (<void **>&e.post_send)[0] = ops[OPS_POST_SEND]
    (<void **>&e.post_recv)[0] = ops[OPS_POST_RECV]
    (<void **>&e.poll_cq)[0] = ops[OPS_POLL_CQ]
    (<void **>&e.req_notify_cq)[0] = ops[OPS_REQ_NOTIFY_CQ]
    if not e.is_iwarp:
        return 0
    e.scratch = <uint8_t *>calloc(1, SCRATCH_BYTES)
    if e.scratch == NULL:
        raise MemoryError
    with nogil:
        mr = <VMr *>lib.reg_mr(device.pd, e.scratch, SCRATCH_BYTES, ACCESS_LOCAL_WRITE)
    if mr == NULL:
        fail(f"ibv_reg_mr of {SCRATCH_BYTES} bytes on {device.name}", last_errno())
    e.scratch_mr = mr
    e.scratch_lkey = mr.lkey
    return 0


cdef void fill_init(Endpoint *e, VQpInitAttr *a) noexcept:
    memset(a, 0, sizeof(a[0]))
    a.qp_context = e
    a.send_cq = a.recv_cq = e.cq
    a.max_send_wr = e.send_depth
    a.max_recv_wr = e.receive_depth
    a.max_send_sge = a.max_recv_sge = 1
    a.max_inline_data = INLINE_BYTES_MAX if e.is_iwarp else 0
    a.qp_type = QPT_RC


cdef int endpoint_create_qp(Endpoint *e, void *pd, str name) except -1:
    """ibv_create_qp(3)."""
    cdef VQpInitAttr a
    cdef VQp *qp
    fill_init(e, &a)
    with nogil:
        qp = lib.create_qp(pd, &a)
    if qp == NULL:
        fail(f"ibv_create_qp of {e.send_depth} sends and {e.receive_depth} receives on {name}",
             last_errno())
    e.qp = qp
    e.qp_num = qp.qp_num
    return 0

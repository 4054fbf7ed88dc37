# SPDX-License-Identifier: Apache-2.0
# abi.h for Cython: what its structs and numbers are is said there.

from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "verbs/abi.h" nogil:
    ctypedef struct VSge:
        uint64_t addr
        uint32_t length, lkey
    ctypedef struct VSendWr:
        uint64_t wr_id
        VSendWr *next
        VSge *sg_list
        int32_t num_sge, opcode
        uint32_t send_flags, imm_data
        uint64_t remote_addr
        uint32_t rkey
    ctypedef struct VRecvWr:
        uint64_t wr_id
        VRecvWr *next
        VSge *sg_list
        int32_t num_sge
    ctypedef struct VWc:
        uint64_t wr_id
        int32_t status, opcode
        uint32_t vendor_err, byte_len, imm_data, wc_flags
    ctypedef struct VContext:
        void *device
        void **ops
        int32_t cmd_fd, async_fd
    ctypedef struct VQp:
        VContext *context
        void *qp_context
        uint32_t qp_num
    ctypedef struct VCq:
        VContext *context
    ctypedef struct VChannel:
        VContext *context
        int32_t fd
    ctypedef struct VMr:
        uint32_t lkey, rkey
    ctypedef struct VDevice:
        int32_t node_type, transport_type
        char name[64]
    ctypedef struct VDeviceAttr:
        uint64_t max_mr_size
        int32_t max_qp_wr, max_cqe, max_mr
        uint8_t phys_port_cnt
    ctypedef struct VPortAttr:
        int32_t state, active_mtu
        uint32_t max_msg_sz
        uint16_t pkey_tbl_len, lid
        uint8_t link_layer
    ctypedef struct VQpInitAttr:
        void *qp_context
        void *send_cq
        void *recv_cq
        uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data
        int32_t qp_type
    ctypedef struct VAh:
        uint8_t dgid[16]
        uint8_t sgid_index, hop_limit, traffic_class, sl, is_global, port_num
        uint16_t dlid
    ctypedef struct VQpAttr:
        int32_t qp_state, path_mtu
        uint32_t rq_psn, sq_psn, dest_qp_num, qp_access_flags
        VAh ah
        uint16_t pkey_index
        uint8_t max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt
        uint8_t rnr_retry
    ctypedef struct VGidEntry:
        uint8_t gid[16]
        uint32_t index, port, type, netdev
    ctypedef struct VAsyncEvent:
        void *element
        int32_t event_type
    ctypedef struct VCmId:
        VContext *verbs
        VQp *qp
    ctypedef struct VCmParam:
        const void *private_data
        uint8_t private_data_len, responder_resources, initiator_depth
    ctypedef struct VCmEvent:
        VCmId *id
        int32_t event, status
        VCmParam param
    ctypedef struct Endpoint:
        void *qp
        void *cq
        void *channel
        void *cm
        void *cm_channel
        void *scratch_mr
        int32_t fd
        uint32_t qp_num, send_depth, receive_depth, is_iwarp, max_msg_bytes, scratch_lkey
        uint8_t *scratch
        int (*post_send)(void *, VSendWr *, VSendWr **) noexcept nogil
        int (*post_recv)(void *, VRecvWr *, VRecvWr **) noexcept nogil
        int (*poll_cq)(void *, int, VWc *) noexcept nogil
        int (*req_notify_cq)(void *, int) noexcept nogil
        void (*take_events)(Endpoint *) noexcept nogil
        int (*to_error)(Endpoint *) noexcept nogil
        int (*accept)(Endpoint *, uint64_t) noexcept nogil
        int (*release)(Endpoint *) noexcept nogil
        uint32_t fault
    enum:
        WR_RDMA_WRITE, WR_RDMA_WRITE_WITH_IMM, WR_SEND, WR_RDMA_READ, SEND_SIGNALED, SEND_INLINE
        WC_SUCCESS, WC_WR_FLUSH_ERR, WC_RECV, PORT_ACTIVE
        EVENT_QP_FATAL, EVENT_QP_REQ_ERR, EVENT_QP_ACCESS_ERR, EVENT_PORT_ACTIVE, EVENT_PORT_ERR
        OPS_POLL_CQ, OPS_REQ_NOTIFY_CQ, OPS_POST_SEND, OPS_POST_RECV, TRANSPORT_IWARP
        LINK_LAYER_ETHERNET, QPT_RC, QPS_INIT, QPS_RTR, QPS_RTS, QPS_ERR
        QP_STATE, QP_ACCESS_FLAGS, QP_PKEY_INDEX, QP_PORT, QP_AV, QP_PATH_MTU, QP_TIMEOUT
        QP_RETRY_CNT, QP_RNR_RETRY, QP_RQ_PSN, QP_MAX_QP_RD_ATOMIC, QP_MIN_RNR_TIMER, QP_SQ_PSN
        QP_MAX_DEST_RD_ATOMIC, QP_DEST_QPN
        ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, ACCESS_REMOTE_READ, ACCESS_RELAXED_ORDERING
        CM_ADDR_RESOLVED, CM_ROUTE_RESOLVED, CM_CONNECT_REQUEST, CM_ESTABLISHED, CM_PS_TCP

/* SPDX-License-Identifier: Apache-2.0
 * The part of libibverbs' and librdmacm's binary interface that te uses, declared here so that the
 * package builds without their headers. Layouts are those of the IBVERBS_1.x and RDMACM_1.x
 * symbols on 64-bit Linux, which may only grow at their ends; sizes and offsets are checked below,
 * and all of it against the headers in tests/testbed.
 * Source: the manual pages ibv_post_send(3), ibv_poll_cq(3), ibv_modify_qp(3), rdma_cm(7). */
#ifndef TE_VERBS_ABI_H
#define TE_VERBS_ABI_H

#include <stdint.h>
#include <stddef.h>

/* ibv_post_send and its like are inline functions of the headers: they call what the context of
 * their object points to, at these indices of its table. */
enum { OPS_POLL_CQ = 11, OPS_REQ_NOTIFY_CQ = 12, OPS_POST_SEND = 25, OPS_POST_RECV = 26 };

enum {
    WR_RDMA_WRITE = 0, WR_RDMA_WRITE_WITH_IMM = 1, WR_SEND = 2, WR_RDMA_READ = 4,
    SEND_SIGNALED = 2, SEND_INLINE = 8,
    WC_SUCCESS = 0, WC_WR_FLUSH_ERR = 5, WC_REM_ACCESS_ERR = 10, WC_RETRY_EXC_ERR = 12,
    WC_RECV = 128,
};

typedef struct {
    uint64_t addr;
    uint32_t length, lkey;
} VSge;

typedef struct VSendWr {
    uint64_t wr_id;
    struct VSendWr *next;
    VSge *sg_list;
    int32_t num_sge, opcode;
    uint32_t send_flags, imm_data; /* imm_data: network byte order */
    uint64_t remote_addr;
    uint32_t rkey;
    uint8_t other_kinds[76];
} VSendWr;
_Static_assert(sizeof(VSendWr) == 128, "struct ibv_send_wr");

typedef struct VRecvWr {
    uint64_t wr_id;
    struct VRecvWr *next;
    VSge *sg_list;
    int32_t num_sge;
} VRecvWr;
_Static_assert(sizeof(VRecvWr) == 32, "struct ibv_recv_wr");

typedef struct {
    uint64_t wr_id;
    int32_t status, opcode;
    uint32_t vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
} VWc;
_Static_assert(sizeof(VWc) == 48, "struct ibv_wc");

typedef struct {
    void *device;
    void *ops[32];
    int32_t cmd_fd, async_fd, num_comp_vectors;
} VContext; /* the beginning of it */
_Static_assert(offsetof(VContext, async_fd) == 268, "struct ibv_context");

typedef struct {
    VContext *context;
    void *qp_context, *pd, *send_cq, *recv_cq, *srq;
    uint32_t handle, qp_num;
} VQp; /* the beginning of it */
_Static_assert(offsetof(VQp, qp_num) == 52, "struct ibv_qp");

typedef struct {
    VContext *context;
} VCq; /* the beginning of it */

typedef struct {
    VContext *context;
    int32_t fd, refcnt;
} VChannel;

typedef struct {
    void *context, *pd, *addr;
    uint64_t length;
    uint32_t handle, lkey, rkey;
} VMr;
_Static_assert(offsetof(VMr, rkey) == 40, "struct ibv_mr");

typedef struct {
    void *ops[2];
    int32_t node_type, transport_type;
    char name[64];
} VDevice; /* the beginning of it */
enum { TRANSPORT_IWARP = 1 };

typedef struct {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
    uint32_t vendor_id, vendor_part_id, hw_ver;
    int32_t max_qp, max_qp_wr;
    uint32_t device_cap_flags;
    int32_t max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd;
    int32_t max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom, max_qp_init_rd_atom;
    uint8_t rest[67];
    uint8_t phys_port_cnt, padding[4];
} VDeviceAttr;
_Static_assert(offsetof(VDeviceAttr, phys_port_cnt) == 227, "struct ibv_device_attr");
_Static_assert(sizeof(VDeviceAttr) == 232, "struct ibv_device_attr");

typedef struct {
    int32_t state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed;
    uint8_t phys_state, link_layer, flags;
    uint16_t port_cap_flags2;
} VPortAttr;
_Static_assert(sizeof(VPortAttr) == 52, "struct ibv_port_attr");
enum { PORT_ACTIVE = 4, LINK_LAYER_ETHERNET = 2 };

typedef struct {
    void *qp_context;
    void *send_cq, *recv_cq, *srq;
    uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
    int32_t qp_type, sq_sig_all;
} VQpInitAttr;
_Static_assert(sizeof(VQpInitAttr) == 64, "struct ibv_qp_init_attr");
enum { QPT_RC = 2 };

typedef struct {
    _Alignas(8) uint8_t dgid[16];
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
} VAh;
_Static_assert(sizeof(VAh) == 32, "struct ibv_ah_attr");

typedef struct {
    int32_t qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags;
    uint32_t cap[5];
    VAh ah, alt_ah;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer;
    uint8_t port_num, timeout, retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
} VQpAttr;
_Static_assert(offsetof(VQpAttr, pkey_index) == 120, "struct ibv_qp_attr");
_Static_assert(sizeof(VQpAttr) == 144, "struct ibv_qp_attr");
enum { QPS_INIT = 1, QPS_RTR = 2, QPS_RTS = 3, QPS_ERR = 6 };
enum {
    QP_STATE = 1, QP_ACCESS_FLAGS = 1 << 3, QP_PKEY_INDEX = 1 << 4, QP_PORT = 1 << 5,
    QP_AV = 1 << 7, QP_PATH_MTU = 1 << 8, QP_TIMEOUT = 1 << 9, QP_RETRY_CNT = 1 << 10,
    QP_RNR_RETRY = 1 << 11, QP_RQ_PSN = 1 << 12, QP_MAX_QP_RD_ATOMIC = 1 << 13,
    QP_MIN_RNR_TIMER = 1 << 15, QP_SQ_PSN = 1 << 16, QP_MAX_DEST_RD_ATOMIC = 1 << 17,
    QP_DEST_QPN = 1 << 20,
};
enum {
    ACCESS_LOCAL_WRITE = 1, ACCESS_REMOTE_WRITE = 2, ACCESS_REMOTE_READ = 4,
    ACCESS_RELAXED_ORDERING = 1 << 20,
};

typedef struct {
    uint8_t gid[16];
    uint32_t index, port, type, netdev; /* netdev: number of the interface, or 0 */
} VGidEntry;
_Static_assert(sizeof(VGidEntry) == 32, "struct ibv_gid_entry");

typedef struct {
    void *element; /* by the type a VQp *, or in its first four bytes the number of a port */
    int32_t event_type;
} VAsyncEvent;
_Static_assert(sizeof(VAsyncEvent) == 16, "struct ibv_async_event");
enum {
    EVENT_QP_FATAL = 1, EVENT_QP_REQ_ERR = 2, EVENT_QP_ACCESS_ERR = 3, EVENT_PORT_ACTIVE = 9,
    EVENT_PORT_ERR = 10,
};

typedef struct {
    VContext *verbs;
    void *channel, *context;
    VQp *qp;
} VCmId; /* the beginning of it */

typedef struct {
    const void *private_data;
    uint8_t private_data_len, responder_resources, initiator_depth, flow_control;
    uint8_t retry_count, rnr_retry_count, srq;
    uint32_t qp_num;
} VCmParam;
_Static_assert(sizeof(VCmParam) == 24, "struct rdma_conn_param");

typedef struct {
    VCmId *id, *listen_id;
    int32_t event, status;
    VCmParam param;
    uint8_t rest[32];
} VCmEvent;
_Static_assert(sizeof(VCmEvent) == 80, "struct rdma_cm_event");
enum {
    CM_ADDR_RESOLVED = 0, CM_ROUTE_RESOLVED = 2, CM_CONNECT_REQUEST = 4, CM_ESTABLISHED = 9,
    CM_PS_TCP = 0x106,
};

/* One connected queue pair with what belongs to it: made by te/verbs, used by the data plane
 * through these pointers alone, whose names say which verb they are. All return 0 or an errno
 * unless they say otherwise. */
typedef struct Endpoint {
    void *qp, *cq, *channel, *cm, *cm_channel, *scratch_mr;
    int32_t fd; /* of the completion channel, non-blocking */
    uint32_t qp_num, send_depth, receive_depth, max_msg_bytes, scratch_lkey;
    /* No write with immediate data; and a send or write is done when it is on its way, not when it
     * is there: a completion says nothing of the other side. */
    uint32_t is_iwarp;
    uint8_t *scratch; /* iWARP: where trailing sends land */
    int (*post_send)(void *qp, VSendWr *first, VSendWr **bad);
    int (*post_recv)(void *qp, VRecvWr *first, VRecvWr **bad);
    int (*poll_cq)(void *cq, int n, VWc *wc); /* completions found, or below 0 */
    int (*req_notify_cq)(void *cq, int solicited_only);
    void (*take_events)(struct Endpoint *e); /* empties the channel */
    int (*to_error)(struct Endpoint *e);     /* after its flushes nothing lands through it */
    /* The last step of one that another side dialled: tells it the word, after which it may send.
     * NULL for one that is connected. */
    int (*accept)(struct Endpoint *e, uint64_t word);
    /* Destroys all of it, and `e`. Where the device does not destroy the queue pair, which may write
     * for as long, nothing is destroyed, and it can be called again. */
    int (*release)(struct Endpoint *e);
    uint32_t fault; /* atomic: the type of an event of the device that says that it is broken */
} Endpoint;

#endif

/* SPDX-License-Identifier: Apache-2.0
 * The contract of a kind of memory, compiled half; te/memory_kinds/base.py has the other. A header,
 * so that a kind can be written in C as well as in Cython.
 *
 * All of it is called without the interpreter's lock, by any of te's threads, by several at once, and
 * nothing of it but `unmap` waits: a worker that waits for one device serves nobody else. */
#ifndef TE_CORE_KINDS_H
#define TE_CORE_KINDS_H

#include <stddef.h>
#include <stdint.h>

/* What touches memory of a kind directly, given its address. */
enum {
    TOUCHED_BY_CPU = 1,    /* loads and stores, memcpy(3) */
    TOUCHED_BY_KERNEL = 2, /* sendmsg(2), recvmsg(2), process_vm_readv(2) */
    TOUCHED_BY_NIC = 4,    /* an RDMA device that has registered it */
};

/* Which side of a batch of copies is host memory; that was pinned (te.memory_kinds.base). WITHIN: neither
 * is; both sides are the kind's own memory, or memory of another process that it has mapped. */
typedef enum { TO_HOST, FROM_HOST, WITHIN } Direction;

typedef struct {
    void *dst;
    const void *src;
    size_t nbytes; /* at least 1 */
} Copy;

/* One batch of copies under way, as its kind knows it. */
typedef struct Event Event;

typedef struct {
    /* Begins to copy, in any order; the ranges do not overlap. 0 and an event, or an errno when nothing
     * was begun. `copies` is the caller's again after the call. A kind that needs something of the
     * calling thread (CUDA: a current context, a relaxed capture mode) sees to it here. */
    int (*copy)(void *state, const Copy *copies, uint32_t n, Direction direction, Event **event);
    /* 0 when all of the batch is copied, EAGAIN while it is under way, another errno when it failed.
     * After 0 the caller sees the bytes; after 0 or a failure nothing touches either memory for this
     * batch any more. */
    int (*query)(void *state, Event *event);
    /* Once, after `query` has given another answer than EAGAIN. */
    void (*release)(void *state, Event *event);
    /* Undoes a `MemoryKind.map` (te.memory_kinds.base), by the number that it gave, once no copy touches
     * that memory any more. This alone may wait, for the device. NULL of a kind that maps nothing. */
    void (*unmap)(void *state, uint64_t mapped);
    /* Has what NICs have written be seen by what begins on the device from now on. 0 or an errno; it takes
     * microseconds. NULL where that is so anyway. */
    int (*flush)(void *state);
} KindOps;

typedef struct {
    const KindOps *ops; /* NULL: it is not copied, only touched directly */
    void *state;
    uint32_t touched_by;
} Kind;

/* Name of the PyCapsule by which Python hands a Kind over; its number rises when this file changes. */
#define KIND_CAPSULE "te.memory_kind.2"

#endif

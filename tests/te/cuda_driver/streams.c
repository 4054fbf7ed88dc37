/* SPDX-License-Identifier: Apache-2.0
 * Streams, each a thread, events, and the copies. Objects are never freed: who uses one that was
 * destroyed gets error 400. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PIECES_MAX = 3, RUINED = 0xA5 };

static uint64_t streams_alive, events_alive;

static void pause_us(uint64_t us) {
    struct timespec t = {0, (long)us * 1000};
    nanosleep(&t, NULL);
}

static void *object(size_t nbytes) {
    void *p = calloc(1, nbytes);
    if (p == NULL)
        abort();
    return p;
}

static void pause_unlocked(void) {
    uint64_t us = draw(delay_us + 1);
    pthread_mutex_unlock(&lock);
    pause_us(us);
    pthread_mutex_lock(&lock);
}

/* -- copies, under the lock but for the pauses, as memory may go meanwhile */

static void shuffle(CopyOp *copies, size_t n) {
    for (size_t i = n; i > 1; i--) {
        size_t k = draw(i);
        CopyOp swapped = copies[i - 1];
        copies[i - 1] = copies[k];
        copies[k] = swapped;
    }
}

/* A piece of one copy; false where there is no memory (any more). */
static bool copy_piece(const CopyOp *c, size_t low, size_t high) {
    char *dst = reach(c->dst, c->nbytes);
    const char *src = c->snapshot ? c->snapshot : reach(c->src, c->nbytes);
    if (dst == NULL || src == NULL)
        return false;
    memcpy(dst + low, src + low, high - low);
    return true;
}

static bool copy_one(const CopyOp *c) {
    size_t low = 0, pieces = 1 + draw(PIECES_MAX);
    for (size_t i = 1; i <= pieces; i++) {
        size_t high = c->nbytes * i / pieces;
        if (!copy_piece(c, low, high))
            return false;
        low = high;
    }
    return true;
}

static void execute_copies(Op *op) {
    for (size_t i = 0; i < op->copies_n; i++) { /* the destination is nobody's from now on */
        char *dst = reach(op->copies[i].dst, op->copies[i].nbytes);
        if (dst)
            memset(dst, RUINED, op->copies[i].nbytes);
    }
    pause_unlocked();
    shuffle(op->copies, op->copies_n);
    for (size_t i = 0; i < op->copies_n && !broken; i++) {
        if (op->failure && i >= op->copies_n / 2)
            break_context(op->failure);
        else if (!copy_one(&op->copies[i]))
            break_context(CUDA_ERROR_ILLEGAL_ADDRESS);
        if (i % 16 == 15) { /* others have their turn */
            pthread_mutex_unlock(&lock);
            pthread_mutex_lock(&lock);
        }
    }
    pause_unlocked();
}

static void execute(Op *op) {
    if (op->copies_n)
        execute_copies(op);
    else if (op->is_record && op->event->done < op->record)
        op->event->done = op->record;
}

static bool may_begin(const Op *op) {
    bool is_wait = op->copies_n == 0 && !op->is_record;
    return !is_stuck && (!is_wait || op->event->done >= op->record);
}

static void *work(void *argument) {
    CUstream s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (broken == 0 && s->first && !may_begin(s->first))
            pthread_cond_wait(&changed, &lock);
        if (s->first == NULL && s->is_gone)
            break;
        if (s->first == NULL) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        Op *op = s->first;
        s->is_running = true;
        if (broken == 0)
            execute(op);
        s->is_running = false;
        s->first = op->next;
        for (size_t i = 0; i < op->copies_n; i++)
            free(op->copies[i].snapshot);
        free(op->copies);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    streams_alive--;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}

void enqueue(CUstream s, Op op) {
    Op *kept = object(sizeof op);
    *kept = op;
    if (s->first == NULL)
        s->first = kept;
    else
        s->last->next = kept;
    s->last = kept;
    pthread_cond_broadcast(&changed);
}

void drain(CUstream s) {
    while (s->first && !broken)
        pthread_cond_wait(&changed, &lock);
}

/* te names its streams: none of the default ones comes from it. */
CUresult check_stream(CUstream s) {
    if (s == NULL || (uintptr_t)s < 3)
        return CUDA_ERROR_INVALID_VALUE;
    return s->is_gone || s->context != current() ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

/* -- streams and events */

static CUresult stream_new(CUstream *stream, unsigned flags) {
    pthread_attr_t detached;
    pthread_t thread;
    if (flags != CU_STREAM_NON_BLOCKING) /* nobody here has a use for the other kind */
        return CUDA_ERROR_INVALID_VALUE;
    CUstream s = object(sizeof *s);
    s->context = current();
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &detached, work, s))
        return CUDA_ERROR_OUT_OF_MEMORY;
    streams_alive++;
    *stream = s;
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *stream, unsigned flags) {
    CUresult r = enter("cuStreamCreate", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    return leave(r ? r : stream_new(stream, flags));
}

CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority) {
    CUresult r = enter("cuStreamCreateWithPriority", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    (void)priority;
    return leave(r ? r : stream_new(stream, flags));
}

CUresult cuStreamDestroy_v2(CUstream s) {
    CUresult r = enter("cuStreamDestroy", NEVER_FAILS);
    if (r == 0 && s->is_gone)
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == 0)
        s->is_gone = true;
    pthread_cond_broadcast(&changed);
    return leave(r);
}

CUresult cuStreamQuery(CUstream s) {
    CUresult r = enter("cuStreamQuery", NEEDS_CONTEXT | ENDS_CAPTURE);
    r = r ? r : check_stream(s);
    return leave(r ? r : s->first ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS);
}

CUresult cuStreamSynchronize(CUstream s) {
    CUresult r = enter("cuStreamSynchronize", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    r = r ? r : check_stream(s);
    if (r == 0)
        drain(s);
    return leave(r ? r : broken);
}

CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned flags) {
    CUresult r = enter("cuStreamWaitEvent", NEEDS_CONTEXT);
    r = r ? r : check_stream(s);
    if (r == 0 && (flags || event->is_gone))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        enqueue(s, (Op){.event = event, .record = event->recorded});
    return leave(r);
}

CUresult cuEventCreate(CUevent *event, unsigned flags) {
    CUresult r = enter("cuEventCreate", NEEDS_CONTEXT);
    (void)flags;
    if (r == 0) {
        *event = object(sizeof **event);
        (*event)->context = current();
        events_alive++;
    }
    return leave(r);
}

CUresult cuEventRecord(CUevent event, CUstream s) {
    CUresult r = enter("cuEventRecord", NEEDS_CONTEXT);
    r = r ? r : check_stream(s);
    if (r == 0 && (event->is_gone || event->context != s->context))
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == 0) {
        event->recorded++;
        enqueue(s, (Op){.event = event, .is_record = true, .record = event->recorded});
    }
    return leave(r);
}

CUresult cuEventQuery(CUevent event) {
    CUresult r = enter("cuEventQuery", NEEDS_CONTEXT | ENDS_CAPTURE);
    if (r == 0 && event->is_gone)
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == 0 && event->done < event->recorded)
        r = CUDA_ERROR_NOT_READY;
    return leave(r);
}

CUresult cuEventSynchronize(CUevent event) {
    CUresult r = enter("cuEventSynchronize", NEEDS_CONTEXT | SYNCHRONISES | ENDS_CAPTURE);
    while (r == 0 && event->done < event->recorded && !broken)
        pthread_cond_wait(&changed, &lock);
    return leave(r ? r : broken);
}

CUresult cuEventDestroy_v2(CUevent event) {
    CUresult r = enter("cuEventDestroy", NEVER_FAILS);
    if (r == 0 && event->is_gone)
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == 0) {
        event->is_gone = true;
        events_alive--;
    }
    return leave(r);
}

/* -- calls that copy */

typedef enum { BAD, PAGEABLE, GOOD } Side;

static Side side_of(CUstream s, uintptr_t address, size_t nbytes) {
    Memory *m = memory_at(address);
    if (m == NULL)
        return PAGEABLE;
    if (m->owner == DEVICE && !(m->reached_by & 1u << s->context->ordinal))
        return BAD; /* te has a stream for each device, and maps what it copies of others */
    return reach(address, nbytes) ? GOOD : BAD;
}

/* Pageable memory: it is copied at once, and the caller waits. */
static CUresult copy_pageable(CUstream s, CopyOp c) {
    char *dst = reach(c.dst, c.nbytes), *src = reach(c.src, c.nbytes);
    pageable_copies++;
    drain(s);
    memcpy(dst ? dst : (char *)c.dst, src ? src : (char *)c.src, c.nbytes);
    return broken;
}

/* How much of a copy lies in one memory on either side: virtual memory is made of pieces. */
static size_t within_one(uintptr_t dst, uintptr_t src, size_t nbytes) {
    uintptr_t sides[] = {dst, src};
    for (int i = 0; i < 2; i++) {
        Memory *m = memory_at(sides[i]);
        if (m && nbytes > m->nbytes - (sides[i] - m->start))
            nbytes = m->nbytes - (sides[i] - m->start);
    }
    return nbytes;
}

/* Of one copy, its parts; how many. */
static size_t split(CopyOp *parts, uintptr_t dst, uintptr_t src, size_t nbytes) {
    size_t n = 0, part;
    for (; nbytes; dst += part, src += part, nbytes -= part, n++) {
        part = within_one(dst, src, nbytes);
        if (parts)
            parts[n] = (CopyOp){dst, src, part, NULL};
    }
    return n;
}

static CUresult submit(
    CUstream s, const CUdeviceptr *dsts, const CUdeviceptr *srcs, const size_t *sizes, size_t n,
    unsigned order) {
    CUresult r = check_stream(s);
    size_t parts_n = 0;
    for (size_t i = 0; i < n; i++)
        parts_n += split(NULL, dsts[i], srcs[i], sizes[i]);
    Op op = {.copies = object(parts_n * sizeof(CopyOp)), .copies_n = 0};
    for (size_t i = 0; r == 0 && i < n; i++) {
        op.copies_n += split(op.copies + op.copies_n, dsts[i], srcs[i], sizes[i]);
        if (sizes[i] == 0)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; r == 0 && i < op.copies_n; i++) {
        CopyOp *c = &op.copies[i];
        Side dst = side_of(s, c->dst, c->nbytes), src = side_of(s, c->src, c->nbytes);
        if (dst == BAD || src == BAD)
            return CUDA_ERROR_INVALID_VALUE;
        if (dst == PAGEABLE || src == PAGEABLE)
            return copy_pageable(s, *c);
    }
    if (r)
        return r;
    op.failure = next_copy_failure();
    bool at_once = order == CU_MEMCPY_SRC_ACCESS_ORDER_ANY && draw(2);
    for (size_t i = 0; at_once && i < op.copies_n; i++) {
        CopyOp *c = &op.copies[i];
        c->snapshot = object(c->nbytes);
        memcpy(c->snapshot, reach(c->src, c->nbytes), c->nbytes);
    }
    enqueue(s, op);
    return CUDA_SUCCESS;
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream s) {
    CUresult r = enter("cuMemcpyAsync", NEEDS_CONTEXT);
    if (r == 0)
        r = submit(s, &dst, &src, &nbytes, 1, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
    return leave(r);
}

static CUresult batch(
    const char *name, CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n,
    CUmemcpyAttributes *attributes, size_t *starts, size_t attributes_n, CUstream s) {
    CUresult r = enter(name, NEEDS_CONTEXT | ENDS_CAPTURE);
    if (r == 0 && (n == 0 || attributes_n != 1 || starts[0] != 0 || attributes->flags > 1))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0 && (attributes->srcAccessOrder == 0 || attributes->srcAccessOrder > 3))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        r = submit(s, dsts, srcs, sizes, n, (unsigned)attributes->srcAccessOrder);
    return leave(r);
}

CUresult cuMemcpyBatchAsync(
    CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
    size_t *starts, size_t attributes_n, size_t *failed, CUstream s) {
    *failed = SIZE_MAX;
    return batch(
        "cuMemcpyBatchAsync", dsts, srcs, sizes, n, attributes, starts, attributes_n, s);
}

CUresult cuMemcpyBatchAsync_v2(
    CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t n, CUmemcpyAttributes *attributes,
    size_t *starts, size_t attributes_n, CUstream s) {
    return batch(
        "cuMemcpyBatchAsync_v2", dsts, srcs, sizes, n, attributes, starts, attributes_n, s);
}

/* -- what tests call */

uint64_t fake_streams(void);
uint64_t fake_events(void);

/* Waits for those that were destroyed to have ended. */
uint64_t fake_streams(void) {
    pthread_mutex_lock(&lock);
    uint64_t n = streams_alive;
    pthread_mutex_unlock(&lock);
    return n;
}

uint64_t fake_events(void) {
    pthread_mutex_lock(&lock);
    uint64_t n = events_alive;
    pthread_mutex_unlock(&lock);
    return n;
}

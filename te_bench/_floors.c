/* SPDX-License-Identifier: Apache-2.0 */
/* The floors: the least a copy between two processes costs on a machine.
 *
 * Each is a bare loop over one system call (or memcpy) on a block list that both sides know, so
 * there are no headers, no checks and no interpreter inside: lower bounds, not transports.
 * A run is cut into parts; every part has a thread, a data descriptor and a control descriptor.
 *
 * Before the clock starts the far side says "ready" (one byte on the control descriptor), and a
 * part ends when the far side has said "landed" (one byte), so a time covers the whole hand-over.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "verbs/abi.h"

#define IOVECS_MAX 1024 /* UIO_MAXIOV: Linux takes no more in one call. */
/* A stream call takes at most about so much: the kernel reads the whole iovec array on every call,
 * however little it then moves. kv over TCP: 3.2 against 2.6 GB/s, 0.27 against 0.31 CPU-s/GB. */
#define STREAM_CALL_BYTES (4u << 20)
#define PARTS_MAX 64

/* What a part does; the numbers are te_bench._floors.Kind. */
enum kind {
    SEND = 0,     /* sendmsg to a stream socket */
    RECEIVE = 1,  /* recvmsg from it */
    SPLICE = 2,   /* vmsplice into a pipe */
    READ = 3,     /* readv from it */
    VM_WRITE = 4, /* process_vm_writev into the far process */
    VM_READ = 5,  /* process_vm_readv from it, when asked over the control descriptor */
    ASK = 6,      /* the source's side of VM_READ */
    COPY = 7,     /* memcpy to memory that both processes have mapped */
};

struct part {
    pthread_t thread;
    enum kind kind;
    int fd, control;
    pid_t pid;
    struct iovec *near, *far; /* near is consumed */
    size_t count;
    int step;           /* each block by itself, with its own "landed" */
    uint64_t *times_ns; /* one for each step */
    int error;
    const char *where;
};

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int fail(struct part *p, const char *where)
{
    p->error = errno ? errno : EPIPE;
    p->where = where;
    return -1;
}

static int say(struct part *p)
{
    char byte = 1;
    ssize_t n;
    do
        n = send(p->control, &byte, 1, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    return n == 1 ? 0 : fail(p, "send on the control connection");
}

static int hear(struct part *p)
{
    char byte;
    ssize_t n;
    do {
        errno = 0;
        n = recv(p->control, &byte, 1, 0);
    } while (n < 0 && errno == EINTR);
    return n == 1 ? 0 : fail(p, "recv on the control connection");
}

static ssize_t stream_call(struct part *p, struct iovec *iov, size_t count)
{
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = count};
    switch (p->kind) {
    case SEND:
        return sendmsg(p->fd, &message, MSG_NOSIGNAL);
    case RECEIVE:
        return recvmsg(p->fd, &message, 0);
    case SPLICE:
        return vmsplice(p->fd, iov, count, 0);
    default:
        return readv(p->fd, iov, (int)count);
    }
}

/* Moves blocks [first, end) through a stream; calls may stop anywhere inside a block. */
static int move_stream(struct part *p, size_t first, size_t end)
{
    while (first < end) {
        size_t count = 0, asked = 0;
        while (first + count < end && count < IOVECS_MAX && asked < STREAM_CALL_BYTES)
            asked += p->near[first + count++].iov_len;
        errno = 0;
        ssize_t n = stream_call(p, p->near + first, count);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return fail(p, "moving blocks through the stream");
        size_t moved = (size_t)n;
        while (first < end && moved >= p->near[first].iov_len)
            moved -= p->near[first++].iov_len;
        if (moved) {
            p->near[first].iov_base = (char *)p->near[first].iov_base + moved;
            p->near[first].iov_len -= moved;
        }
    }
    return 0;
}

/* Both lists have the same lengths, so a short count means a range that is not mapped. */
static int move_vm(struct part *p, size_t first, size_t end)
{
    while (first < end) {
        size_t count = end - first < IOVECS_MAX ? end - first : IOVECS_MAX;
        size_t want = 0;
        for (size_t i = 0; i < count; i++)
            want += p->near[first + i].iov_len;
        errno = 0;
        ssize_t n = p->kind == VM_WRITE
            ? process_vm_writev(p->pid, p->near + first, count, p->far + first, count, 0)
            : process_vm_readv(p->pid, p->near + first, count, p->far + first, count, 0);
        if (n < 0 || (size_t)n != want) {
            errno = errno ? errno : EFAULT;
            return fail(p, "process_vm_writev or process_vm_readv");
        }
        first += count;
    }
    return 0;
}

static int move(struct part *p, size_t first, size_t end)
{
    switch (p->kind) {
    case ASK:
        return say(p) || hear(p);
    case VM_READ:
        return hear(p) || move_vm(p, first, end) || say(p);
    case VM_WRITE:
        return move_vm(p, first, end);
    case COPY:
        for (size_t i = first; i < end; i++)
            memcpy(p->far[i].iov_base, p->near[i].iov_base, p->near[i].iov_len);
        return 0;
    case SEND:
    case SPLICE:
        return move_stream(p, first, end) || hear(p);
    default:
        return move_stream(p, first, end) || say(p);
    }
}

static void *run_part(void *argument)
{
    struct part *p = argument;
    size_t size = p->step ? 1 : p->count;
    for (size_t first = 0; first < p->count; first += size) {
        uint64_t start_ns = now_ns();
        if (move(p, first, first + size))
            return NULL;
        p->times_ns[first / size] = now_ns() - start_ns;
    }
    return NULL;
}

static int two_sided(enum kind kind)
{
    return kind != VM_WRITE && kind != COPY;
}

/* Runs the parts, one of them on the calling thread; returns the elapsed time in ns. */
static uint64_t run_parts(struct part *parts, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        enum kind kind = parts[i].kind;
        int source = kind == SEND || kind == SPLICE || kind == ASK;
        if (two_sided(kind) && (source ? hear(&parts[i]) : say(&parts[i])))
            return 0;
    }
    uint64_t start_ns = now_ns();
    size_t started = 1;
    for (; started < count; started++) {
        int error = pthread_create(&parts[started].thread, NULL, run_part, &parts[started]);
        if (error) {
            parts[started].error = error;
            parts[started].where = "pthread_create";
            break;
        }
    }
    run_part(&parts[0]);
    for (size_t i = 1; i < started; i++)
        pthread_join(parts[i].thread, NULL);
    return now_ns() - start_ns;
}

static int same_length(Py_buffer *buffer, size_t want, const char *what)
{
    if ((size_t)buffer->len == want)
        return 1;
    PyErr_Format(PyExc_ValueError, "%s has %zd bytes instead of %zu", what, buffer->len, want);
    return 0;
}

static PyObject *run_checked(int kind, int pid, int step, Py_buffer *near, Py_buffer *far,
                             Py_buffer *bounds, Py_buffer *fds, Py_buffer *controls,
                             Py_buffer *times)
{
    size_t blocks = (size_t)near->len / sizeof(struct iovec);
    size_t count = (size_t)bounds->len / sizeof(int64_t) - 1;
    const int64_t *bound = bounds->buf;
    if (kind < SEND || kind > COPY || bounds->len < 16 || count > PARTS_MAX)
        return PyErr_Format(PyExc_ValueError, "kind %d with %zu parts", kind, count);
    if (!same_length(far, blocks * sizeof(struct iovec), "far")
        || !same_length(fds, count * sizeof(int32_t), "fds")
        || !same_length(controls, count * sizeof(int32_t), "controls")
        || !same_length(times, blocks * sizeof(uint64_t), "times"))
        return NULL;
    if (bound[0] != 0 || bound[count] != (int64_t)blocks)
        return PyErr_Format(PyExc_ValueError, "the bounds do not cover %zu blocks", blocks);
    for (size_t i = 0; i < count; i++)
        if (bound[i] >= bound[i + 1])
            return PyErr_Format(PyExc_ValueError, "part %zu has no block", i);

    struct iovec *consumed = malloc(blocks * sizeof(struct iovec));
    if (!consumed)
        return PyErr_NoMemory();
    memcpy(consumed, near->buf, blocks * sizeof(struct iovec));
    struct part parts[PARTS_MAX];
    for (size_t i = 0; i < count; i++)
        parts[i] = (struct part){
            .kind = (enum kind)kind,
            .fd = ((int32_t *)fds->buf)[i],
            .control = ((int32_t *)controls->buf)[i],
            .pid = pid,
            .near = consumed + bound[i],
            .far = (struct iovec *)far->buf + bound[i],
            .count = (size_t)(bound[i + 1] - bound[i]),
            .step = step,
            .times_ns = (uint64_t *)times->buf + bound[i],
        };
    uint64_t elapsed_ns;
    Py_BEGIN_ALLOW_THREADS
    elapsed_ns = run_parts(parts, count);
    Py_END_ALLOW_THREADS
    free(consumed);
    for (size_t i = 0; i < count; i++)
        if (parts[i].error) {
            PyObject *where = PyUnicode_FromFormat("%s (%s)", strerror(parts[i].error),
                                                   parts[i].where);
            PyObject *pair = Py_BuildValue("(iN)", parts[i].error, where);
            PyErr_SetObject(PyExc_OSError, pair);
            Py_XDECREF(pair);
            return NULL;
        }
    return PyLong_FromUnsignedLongLong(elapsed_ns);
}

PyDoc_STRVAR(run_doc,
"run(kind, pid, step, near, far, bounds, fds, controls, times_ns) -> int\n\n"
"Moves all blocks once, without the interpreter lock; returns the elapsed time in ns.\n\n"
"near and far are struct iovec arrays, shape (blocks, 2): addresses here and there, bytes.\n"
"Part i moves blocks bounds[i] to bounds[i + 1] over fds[i], with controls[i] for 'ready' and\n"
"'landed'. With step each block is moved by itself, and times_ns, shape (blocks,), gets the\n"
"time of each; without it the first block's gets the time of the part. Raises OSError with\n"
"what failed.");

static PyObject *floors_run(PyObject *self, PyObject *arguments)
{
    (void)self;
    int kind, pid, step;
    Py_buffer near, far, bounds, fds, controls, times;
    if (!PyArg_ParseTuple(arguments, "iipy*y*y*y*y*w*", &kind, &pid, &step, &near, &far, &bounds,
                          &fds, &controls, &times))
        return NULL;
    PyObject *result = run_checked(kind, pid, step, &near, &far, &bounds, &fds, &controls, &times);
    Py_buffer *all[] = {&near, &far, &bounds, &fds, &controls, &times};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        PyBuffer_Release(all[i]);
    return result;
}

/* Work requests: what building and handing over a chain costs at least. */

struct block {
    uint64_t src, dst, nbytes;
};

#define CHAIN 512 /* requests of one call, as deep as te's send queues */
#define SIGNAL_EVERY 64

/* Stands for a device: looks at each request, as any has to. */
static int swallow(void *qp, VSendWr *first, VSendWr **bad)
{
    uint64_t *nbytes = qp;
    for (VSendWr *w = first; w != NULL; w = w->next) {
        *nbytes += w->sg_list->length;
        *bad = w;
    }
    return 0;
}

/* All blocks of one rail; returns the bytes that were handed over. */
static uint64_t post_rail(const struct block *blocks, size_t count, VSendWr *chain,
                          int (*volatile post_send)(void *, VSendWr *, VSendWr **))
{
    uint64_t nbytes = 0;
    VSendWr *bad;
    for (size_t begin = 0; begin < count; begin += CHAIN) {
        size_t n = count - begin < CHAIN ? count - begin : CHAIN;
        for (size_t i = 0; i < n; i++) {
            const struct block *b = &blocks[begin + i];
            VSendWr *w = &chain[i];
            w->wr_id = begin + i;
            w->opcode = WR_RDMA_WRITE;
            w->num_sge = 1;
            w->send_flags = i % SIGNAL_EVERY == SIGNAL_EVERY - 1 ? SEND_SIGNALED : 0;
            w->remote_addr = b->dst;
            w->rkey = 1;
            w->sg_list->addr = b->src;
            w->sg_list->length = (uint32_t)b->nbytes;
            w->sg_list->lkey = 1;
        }
        VSendWr *next = chain[n - 1].next;
        chain[n - 1].next = NULL;
        post_send(&nbytes, chain, &bad);
        chain[n - 1].next = next;
    }
    return nbytes;
}

PyDoc_STRVAR(post_doc,
"post(blocks, bounds) -> int\n\n"
"Builds a work request for each block and hands them over, in chains, to a function that only\n"
"looks at them; returns the elapsed time in ns. blocks are struct (src, dst, nbytes) of u64,\n"
"shape (n,); rail r has blocks[bounds[r]] to blocks[bounds[r + 1]], and requests of its own.");

static PyObject *floors_post(PyObject *self, PyObject *arguments)
{
    (void)self;
    Py_buffer blocks, bounds;
    if (!PyArg_ParseTuple(arguments, "y*y*", &blocks, &bounds))
        return NULL;
    const struct block *block = blocks.buf;
    const int64_t *bound = bounds.buf;
    size_t rails = (size_t)bounds.len / sizeof *bound - 1, nbytes = 0;
    VSendWr *requests = calloc(rails * CHAIN, sizeof *requests);
    VSge *pieces = calloc(rails * CHAIN, sizeof *pieces);
    uint64_t begun_ns = 0, ended_ns = 0;
    for (size_t i = 0; requests != NULL && pieces != NULL && i < rails * CHAIN; i++) {
        requests[i].sg_list = &pieces[i];
        requests[i].next = &requests[i + 1];
    }
    /* Twice: the second time in memory that was used before, as te's is. */
    for (int turn = 0; requests != NULL && pieces != NULL && turn < 2; turn++) {
        begun_ns = now_ns();
        for (size_t r = 0; r < rails; r++)
            nbytes += post_rail(block + bound[r], (size_t)(bound[r + 1] - bound[r]),
                                requests + r * CHAIN, swallow);
        ended_ns = now_ns();
    }
    free(requests);
    free(pieces);
    PyBuffer_Release(&blocks);
    PyBuffer_Release(&bounds);
    if (nbytes == 0)
        return PyErr_NoMemory();
    return PyLong_FromUnsignedLongLong(ended_ns - begun_ns);
}

static PyMethodDef methods[] = {
    {"run", floors_run, METH_VARARGS, run_doc},
    {"post", floors_post, METH_VARARGS, post_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_floors", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__floors(void)
{
    return PyModule_Create(&module);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* A copier for memory that te is not to touch itself: a thread that takes batches in their order, in
 * place of a GPU's copy engine. It copies by memcpy, which costs a processor what the engine does not. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/kinds.h"

struct Event {
    Event *next;
    atomic_int answer; /* EAGAIN, then 0 */
    uint32_t n;
    Copy copies[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t filled = PTHREAD_COND_INITIALIZER;
static Event *first, **last = &first; /* under the lock */

static void *copy_all(void *nothing)
{
    for (;;) {
        pthread_mutex_lock(&lock);
        while (first == NULL)
            pthread_cond_wait(&filled, &lock);
        Event *event = first;
        first = event->next;
        if (first == NULL)
            last = &first;
        pthread_mutex_unlock(&lock);
        for (uint32_t i = 0; i < event->n; i++)
            memcpy(event->copies[i].dst, event->copies[i].src, event->copies[i].nbytes);
        atomic_store_explicit(&event->answer, 0, memory_order_release);
    }
    return nothing;
}

static int copy(void *state, const Copy *copies, uint32_t n, Direction direction, Event **event)
{
    (void)state, (void)direction;
    Event *made = malloc(sizeof *made + n * sizeof *copies);
    if (made == NULL)
        return ENOMEM;
    made->next = NULL;
    made->n = n;
    atomic_init(&made->answer, EAGAIN);
    memcpy(made->copies, copies, n * sizeof *copies);
    pthread_mutex_lock(&lock);
    *last = made;
    last = &made->next;
    pthread_cond_signal(&filled);
    pthread_mutex_unlock(&lock);
    *event = made;
    return 0;
}

static int query(void *state, Event *event)
{
    (void)state;
    return atomic_load_explicit(&event->answer, memory_order_acquire);
}

static void release(void *state, Event *event)
{
    (void)state;
    free(event);
}

static const KindOps OPS = {.copy = copy, .query = query, .release = release};
static Kind kind = {&OPS, NULL, 0};

PyDoc_STRVAR(start_doc,
"start() -> capsule\n\n"
"Starts the thread, which never ends; the compiled half of the kind (te.memory_kinds.base). To be\n"
"called once. OSError without a thread.");

static PyObject *copier_start(PyObject *self, PyObject *nothing)
{
    (void)self, (void)nothing;
    pthread_t thread;
    errno = pthread_create(&thread, NULL, copy_all, NULL);
    if (errno)
        return PyErr_SetFromErrno(PyExc_OSError);
    pthread_detach(thread);
    return PyCapsule_New(&kind, KIND_CAPSULE, NULL);
}

static PyMethodDef methods[] = {
    {"start", copier_start, METH_NOARGS, start_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_copier", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__copier(void)
{
    return PyModule_Create(&module);
}

/* SPDX-License-Identifier: Apache-2.0 */
/* Calls of CUDA's driver in loops without the interpreter between them, and te's own copies of a GPU:
 * what te bench and scripts/gpu-check measure. The driver's functions come in as addresses. */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "core/kinds.h"

typedef unsigned (*CopyAsync)(unsigned long long dst, unsigned long long src, size_t nbytes, void *stream);
typedef unsigned (*Query)(void *event);

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

PyDoc_STRVAR(copy_each_doc,
"copy_each(function, copies, stream, times_ns) -> (result, elapsed_ns)\n\n"
"A call of cuMemcpyAsync for each copy, until one fails. copies: uint64, rows of destination, source\n"
"and bytes. times_ns: uint64, one for each copy, takes what each call took; or empty.");

static PyObject *copy_each(PyObject *self, PyObject *arguments)
{
    (void)self;
    unsigned long long function, stream, begun_ns;
    Py_buffer copies, times;
    if (!PyArg_ParseTuple(arguments, "Ky*Kw*", &function, &copies, &stream, &times))
        return NULL;
    size_t n = (size_t)copies.len / 24;
    const uint64_t *c = copies.buf;
    uint64_t *t = (size_t)times.len / 8 == n ? times.buf : NULL;
    unsigned result = 0;
    CopyAsync call = (CopyAsync)(uintptr_t)function;
    Py_BEGIN_ALLOW_THREADS
    begun_ns = now_ns();
    for (size_t i = 0; i < n && result == 0; i++) {
        uint64_t before_ns = t ? now_ns() : 0;
        result = call(c[3 * i], c[3 * i + 1], c[3 * i + 2], (void *)(uintptr_t)stream);
        if (t)
            t[i] = now_ns() - before_ns;
    }
    begun_ns = now_ns() - begun_ns;
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&copies);
    PyBuffer_Release(&times);
    return Py_BuildValue("IK", result, begun_ns);
}

PyDoc_STRVAR(query_each_doc,
"query_each(function, event, times_ns) -> result\n\n"
"As many calls of cuEventQuery as times_ns (uint64) has room for; what the last one gave.");

static PyObject *query_each(PyObject *self, PyObject *arguments)
{
    (void)self;
    unsigned long long function, event;
    Py_buffer times;
    if (!PyArg_ParseTuple(arguments, "KKw*", &function, &event, &times))
        return NULL;
    unsigned result = 0;
    uint64_t *t = times.buf;
    Query call = (Query)(uintptr_t)function;
    Py_BEGIN_ALLOW_THREADS
    for (size_t i = 0; i < (size_t)times.len / 8; i++) {
        uint64_t before_ns = now_ns();
        result = call((void *)(uintptr_t)event);
        t[i] = now_ns() - before_ns;
    }
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&times);
    return PyLong_FromUnsignedLong(result);
}

PyDoc_STRVAR(kind_copy_doc,
"kind_copy(capsule, copies, direction) -> (error, submit_ns, elapsed_ns)\n\n"
"One batch by the compiled half of a kind of memory (te/core/kinds.h), until it is over; error is an\n"
"errno or 0. copies: as for copy_each; direction: a number of Direction.");

static PyObject *kind_copy(PyObject *self, PyObject *arguments)
{
    (void)self;
    PyObject *capsule;
    Py_buffer rows;
    int direction, error;
    if (!PyArg_ParseTuple(arguments, "Oy*i", &capsule, &rows, &direction))
        return NULL;
    Kind *kind = PyCapsule_GetPointer(capsule, KIND_CAPSULE);
    size_t n = (size_t)rows.len / 24;
    Copy *copies = PyMem_Malloc((n ? n : 1) * sizeof *copies);
    if (kind == NULL || copies == NULL) {
        PyBuffer_Release(&rows);
        PyMem_Free(copies);
        return kind == NULL ? NULL : PyErr_NoMemory();
    }
    const uint64_t *c = rows.buf;
    for (size_t i = 0; i < n; i++)
        copies[i] = (Copy){(void *)(uintptr_t)c[3 * i], (const void *)(uintptr_t)c[3 * i + 1], c[3 * i + 2]};
    uint64_t begun_ns, submitted_ns, ended_ns;
    Py_BEGIN_ALLOW_THREADS
    Event *event = NULL;
    begun_ns = now_ns();
    error = kind->ops->copy(kind->state, copies, (uint32_t)n, (Direction)direction, &event);
    submitted_ns = now_ns();
    if (error == 0) {
        while ((error = kind->ops->query(kind->state, event)) == EAGAIN)
            sched_yield();
        kind->ops->release(kind->state, event);
    }
    ended_ns = now_ns();
    Py_END_ALLOW_THREADS
    PyMem_Free(copies);
    PyBuffer_Release(&rows);
    return Py_BuildValue(
        "iKK", error, (unsigned long long)(submitted_ns - begun_ns),
        (unsigned long long)(ended_ns - begun_ns));
}

static PyMethodDef methods[] = {
    {"copy_each", copy_each, METH_VARARGS, copy_each_doc},
    {"query_each", query_each, METH_VARARGS, query_each_doc},
    {"kind_copy", kind_copy, METH_VARARGS, kind_copy_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "_gpu", .m_size = -1, .m_methods = methods,
};

PyMODINIT_FUNC PyInit__gpu(void)
{
    return PyModule_Create(&module);
}

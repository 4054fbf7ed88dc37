# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.string cimport memcpy
from te.core.sync cimport u32

# Ordinary memory of the process: its copies are done when they are begun.
cdef KindOps host_ops
cdef Kind host
cdef char copied  # every batch of host memory: it is copied when there is an event of it


cdef int host_copy(
    void *state, const Copy *copies, u32 n, Direction direction, Event **event
) noexcept nogil:
    cdef u32 i
    for i in range(n):
        memcpy(copies[i].dst, copies[i].src, copies[i].nbytes)
    event[0] = <Event *>&copied
    return 0


cdef int host_query(void *state, Event *event) noexcept nogil:
    return 0


cdef void host_release(void *state, Event *event) noexcept nogil:
    pass


cdef Kind *kind_of(object capsule) except NULL:
    return <Kind *>PyCapsule_GetPointer(capsule, KIND_CAPSULE)


host_ops.copy, host_ops.query, host_ops.release = host_copy, host_query, host_release
host.ops = &host_ops
host.touched_by = TOUCHED_BY_CPU | TOUCHED_BY_KERNEL | TOUCHED_BY_NIC
HOST = PyCapsule_New(&host, KIND_CAPSULE, NULL)

cdef Kind nic_only
nic_only.touched_by = TOUCHED_BY_NIC
NIC_ONLY = PyCapsule_New(&nic_only, KIND_CAPSULE, NULL)

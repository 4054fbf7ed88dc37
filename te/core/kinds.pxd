# SPDX-License-Identifier: Apache-2.0
# Kinds of memory: who can touch it directly, and how it is copied where the processor cannot. The
# contract stands in kinds.h.

from libc.stdint cimport uint64_t
from te.core.sync cimport u32

cdef extern from "core/kinds.h" nogil:
    enum:
        TOUCHED_BY_CPU
        TOUCHED_BY_KERNEL
        TOUCHED_BY_NIC
    ctypedef enum Direction:
        TO_HOST
        FROM_HOST
        WITHIN
    ctypedef struct Copy:
        void *dst
        const void *src
        size_t nbytes
    ctypedef struct Event:
        pass
    ctypedef struct KindOps:
        int (*copy)(void *, const Copy *, u32, Direction, Event **) noexcept nogil
        int (*query)(void *, Event *) noexcept nogil
        void (*release)(void *, Event *) noexcept nogil
        void (*unmap)(void *, uint64_t) noexcept nogil
        int (*flush)(void *) noexcept nogil
    ctypedef struct Kind:
        const KindOps *ops
        void *state
        u32 touched_by
    const char *KIND_CAPSULE

cdef enum:
    KINDS_MAX = 16  # that an engine knows: host memory, and each of its GPUs is one

# What the capsule of a kind holds; ValueError for any other object. It is the capsule's: who keeps
# the pointer keeps the capsule.
cdef Kind *kind_of(object capsule) except NULL

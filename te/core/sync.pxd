# SPDX-License-Identifier: Apache-2.0
# Atomics, the clock, futexes, and the processor that a thread runs on. All atomics are sequentially
# consistent but `note_pointer` and `note64`.

from libc.stdint cimport uint32_t, uint64_t

ctypedef uint64_t u64
ctypedef uint32_t u32

cdef extern from "core/sync.h" nogil:
    u32 load32(const u32 *p)
    u64 load64(const u64 *p)
    void *load_pointer(void *p)
    void store32(u32 *p, u32 v)
    void store64(u64 *p, u64 v)
    void store_pointer(void *p, void *v)
    void note_pointer(void *p, void *v)
    void note64(u64 *p, u64 v)
    void *swap_pointer(void *p, void *v)
    bint swap_pointer_if(void *p, void *old, void *v)
    u32 swap32(u32 *p, u32 v)
    u32 swap_if(u32 *p, u32 old, u32 v)
    u32 add32(u32 *p, u32 v)
    u64 add64(u64 *p, u64 v)
    void or32(u32 *p, u32 v)
    void relax()
    u64 now_ns()
    void sleep_ns(u64 ns)
    void futex_wait(u32 *p, u32 v, u64 ns)
    void futex_wake_all(u32 *p)
    int last_errno()
    void set_errno(int e)
    void change_processor()
    u32 times_displaced()
    int start_thread(void *(*run)(void *) noexcept nogil, void *of)
    void name_thread(const char *name)
    int page_node(u64 address)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *m, void *attributes)
    int pthread_mutex_destroy(pthread_mutex_t *m)
    int pthread_mutex_lock(pthread_mutex_t *m)
    int pthread_mutex_trylock(pthread_mutex_t *m)
    int pthread_mutex_unlock(pthread_mutex_t *m)

cdef extern from "<time.h>" nogil:
    struct timespec:
        long tv_sec, tv_nsec

cdef enum:
    NEVER_NS = 0xFFFFFFFFFFFFFFFF
    LOOK_NS = 200000  # between two looks, where a device or another thread takes milliseconds

cdef extern from "<sched.h>" nogil:
    int sched_yield()
    int sched_getcpu()


cdef inline void lock_as_caller(pthread_mutex_t *m) noexcept:
    """By a thread that has the interpreter lock, which it gives up while it waits. It never waits for that one with the
    other: a worker may want it."""
    while pthread_mutex_trylock(m):
        with nogil:
            pthread_mutex_lock(m)
            pthread_mutex_unlock(m)


cdef inline u64 ns_of(double seconds) noexcept nogil:
    return <u64>(min(max(seconds, 0.0), 1e9) * 1e9)


cdef inline bint look_later(u64 until_ns, u64 pause_ns) noexcept nogil:
    """Of a thread that waits for what nobody wakes it for: sleeps before its next look; False when the time is over."""
    if now_ns() >= until_ns:
        return False
    sleep_ns(pause_ns)
    return True

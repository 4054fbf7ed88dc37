/* SPDX-License-Identifier: Apache-2.0
 * What Cython cannot say: atomics, the processor's pause, and calls to the kernel.
 * Every atomic but those called note is sequentially consistent: the protocols of the plane (mark, then look) need the
 * store-load order, and at one per call to the kernel its cost is not seen. */
#ifndef TE_CORE_SYNC_H
#define TE_CORE_SYNC_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static inline uint32_t load32(const uint32_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline uint64_t load64(const uint64_t *p) { return __atomic_load_n(p, __ATOMIC_SEQ_CST); }
static inline void *load_pointer(void *p) { return __atomic_load_n((void **)p, __ATOMIC_SEQ_CST); }
static inline void store32(uint32_t *p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline void store64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_SEQ_CST); }
static inline void store_pointer(void *p, void *v) {
    __atomic_store_n((void **)p, v, __ATOMIC_SEQ_CST);
}
/* Seen by whoever sees what the writer does next, and by nobody before what it has done last. */
static inline void note_pointer(void *p, void *v) {
    __atomic_store_n((void **)p, v, __ATOMIC_RELEASE);
}
/* Of a counter that one thread at a time writes; others may be told an older value. */
static inline void note64(uint64_t *p, uint64_t v) { __atomic_store_n(p, v, __ATOMIC_RELAXED); }
static inline void *swap_pointer(void *p, void *v) {
    return __atomic_exchange_n((void **)p, v, __ATOMIC_SEQ_CST);
}
static inline uint32_t swap32(uint32_t *p, uint32_t v) {
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
}
/* Writes v if *p is old; returns what *p was. */
static inline uint32_t swap_if(uint32_t *p, uint32_t old, uint32_t v) {
    __atomic_compare_exchange_n(p, &old, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return old;
}
/* Writes v if *p is old; whether it was. */
static inline int swap_pointer_if(void *p, void *old, void *v) {
    return __atomic_compare_exchange_n((void **)p, &old, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
/* Both return the new value. */
static inline uint32_t add32(uint32_t *p, uint32_t v) {
    return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST);
}
static inline uint64_t add64(uint64_t *p, uint64_t v) {
    return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST);
}

static inline void or32(uint32_t *p, uint32_t v) { __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST); }

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void sleep_ns(uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

/* Sleeps while *p is still v; returns early at will. */
static inline void futex_wait(uint32_t *p, uint32_t v, uint64_t ns) {
    struct timespec t = {(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)};
    syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, v, &t, NULL, 0);
}
static inline void futex_wake_all(uint32_t *p) {
    syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* A thread of no interpreter, which takes no signals, and which nobody joins; 0 or an errno. */
static inline int start_thread(void *(*run)(void *), void *of) {
    sigset_t all, before;
    pthread_t thread;
    int errnum;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    errnum = pthread_create(&thread, NULL, run, of);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return errnum ? errnum : pthread_detach(thread);
}

/* What top -H and debuggers call the calling thread: up to 15 characters. */
static inline void name_thread(const char *name) { prctl(PR_SET_NAME, name, 0, 0, 0); }

/* Whether more threads of this machine want to run than it has processors (proc_loadavg(5)). */
static inline int is_crowded(void) {
    char text[64];
    int running = INT_MAX, fd = open("/proc/loadavg", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, text, sizeof text - 1);
        close(fd);
        text[n > 0 ? n : 0] = 0;
        if (sscanf(text, "%*s %*s %*s %d/", &running) != 1)
            running = INT_MAX;
    }
    return running > sysconf(_SC_NPROCESSORS_ONLN);
}

/* Has the calling thread go on on another processor, if it may use one and one is free. It may use
 * the same ones as before afterwards: the kernel only moves threads apart by itself after
 * milliseconds. Never onto a busy one: where each session has a share of its own (sched(7),
 * autogroup; likewise control groups) a thread that is put onto a processor that another session
 * fills was seen to wait for up to 4.5 s, runnable, beside two SGLang servers. */
static inline void change_processor(void) {
    cpu_set_t may, others;
    int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || sched_getaffinity(0, sizeof may, &may))
        return;
    others = may;
    CPU_CLR(here, &others);
    if (CPU_COUNT(&others) && !is_crowded() && !sched_setaffinity(0, sizeof others, &others))
        sched_setaffinity(0, sizeof may, &may);
}

/* How often another thread has taken the processor from the calling one. */
static inline uint32_t times_displaced(void) {
    struct rusage used;
    getrusage(RUSAGE_THREAD, &used);
    return (uint32_t)used.ru_nivcsw;
}

static inline int last_errno(void) { return errno; }
static inline void set_errno(int e) { errno = e; }

/* The NUMA node that the page of the address lies on, or -errno; move_pages(2) without moving. */
static inline int page_node(uint64_t address) {
    void *page = (void *)(uintptr_t)(address & ~(uint64_t)(sysconf(_SC_PAGESIZE) - 1));
    int node = -ENOENT;
    if (syscall(SYS_move_pages, 0, 1ul, &page, NULL, &node, 0) < 0)
        return -errno;
    return node;
}

#endif

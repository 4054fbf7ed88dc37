/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded (LD_PRELOAD): what the scheduler, or a peer, would do to te's threads once in many thousand times. The
 * calling thread is the process's first one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Set by the test's program, and counted here. */
volatile int slow_worker_us;    /* a worker that reads payload is off its processor for so long before it does */
volatile int slow_caller_us;    /* the calling thread, once, when it has found the worker's turn taken */
volatile int workers_reading;   /* that have begun to */
volatile int callers_put_off;   /* how often it was */
volatile int is_flooded;        /* whatever the calling thread receives is the flood, without end */
char flood[64];                 /* what comes again and again, flood_nbytes of it */
volatile int flood_nbytes;

static int is_caller(void) { return syscall(SYS_gettid) == getpid(); }

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    static int (*real)(pthread_mutex_t *);
    static int (*has_lock)(void);
    if (!real)
        real = next("pthread_mutex_trylock");
    int failed = real(mutex);
    if (!failed || !slow_caller_us || !is_caller())
        return failed;
    if (!has_lock)
        has_lock = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    if (has_lock()) /* The next attempt, without the interpreter lock, would find what this one has lost. */
        return failed;
    int us = slow_caller_us;
    slow_caller_us = 0;
    callers_put_off++;
    usleep(us);
    return failed;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    static ssize_t (*real)(int, struct msghdr *, int);
    if (!real)
        real = next("recvmsg");
    if (slow_worker_us && !is_caller()) {
        workers_reading++;
        usleep(slow_worker_us);
    }
    return real(fd, message, flags);
}

ssize_t recv(int fd, void *into, size_t nbytes, int flags)
{
    static ssize_t (*real)(int, void *, size_t, int);
    static size_t at;
    if (!real)
        real = next("recv");
    if (!is_flooded || !is_caller())
        return real(fd, into, nbytes, flags);
    for (size_t i = 0; i < nbytes; i++)
        ((char *)into)[i] = flood[at++ % flood_nbytes];
    return nbytes;
}

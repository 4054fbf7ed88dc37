/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded (LD_PRELOAD): what the scheduler, or a peer, would do to te's threads once in many thousand times. The
 * calling thread is the process's first one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Set by the test's program, and counted here. */
volatile int holds_readers;     /* a worker that reads payload is off its processor, before it does, until that is 0 */
volatile int workers_reading;   /* that have begun to */
volatile int holds_caller;      /* the calling thread is off its processor, before it lands payload, until that is 0, */
volatile int caller_is_held;    /* which is said here meanwhile */
volatile int caller_receives;   /* so many bytes at most each time, the calling thread, unless it is 0; */
volatile int calls_cut_short;   /* how often that was less than it wanted */
volatile int puts_caller_off;   /* the calling thread, once, when it has found the worker's turn taken: until the worker */
volatile int callers_put_off;   /* has gone on and looks for events; how often it was */
volatile int fails_lock;        /* the calling thread's attempt of that number, without the interpreter lock, is in vain */
volatile int looks;             /* for events, by workers */
volatile int is_flooded;        /* whatever the calling thread receives is the flood, without end */
char flood[64];                 /* what comes again and again, flood_nbytes of it */
volatile int flood_nbytes;
volatile int holds_next_worker; /* the next worker that is woken up stands still, without its turn, */
volatile int holds_next_look;   /* or the next that looks for events, before it does, */
volatile int workers_held;      /* which is counted here, */
volatile int goes_on;           /* until this is set */
volatile int locks_to_hold;     /* the worker that takes the last of so many locks stands still with it until goes_on, */
volatile int lock_is_held;      /* which is said here meanwhile */
volatile int holds_senders;     /* a worker whose peer takes nothing waits, in its turn, until that is 0 */
volatile int senders_held;      /* that have begun to */
volatile int stood_still_s;     /* by so much the workers' clock goes on at once */
volatile long clock_stands_ns;  /* it stands at that, unless it is 0 */
volatile int sleeps_over;       /* of workers whom nothing has woken up: a check was due */
void (*volatile between)(void); /* what another thread does whenever the calling thread has given a lock back */

static int is_caller(void) { return syscall(SYS_gettid) == getpid(); }

static int is_worker(void)
{
    char name[16] = "";
    prctl(PR_GET_NAME, name);
    return strncmp(name, "te-worker", 9) == 0;
}

static void *next(const char *name) { return dlsym(RTLD_NEXT, name); }

static int has_interpreter(void)
{
    static int (*check)(void);
    if (!check)
        check = dlsym(RTLD_DEFAULT, "PyGILState_Check");
    return check();
}

static int took_lock(int failed)
{
    if (failed || !locks_to_hold || !is_worker() || __sync_sub_and_fetch(&locks_to_hold, 1))
        return failed;
    lock_is_held = 1;
    while (!goes_on)
        usleep(1000);
    lock_is_held = 0;
    return 0;
}

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*real)(pthread_mutex_t *);
    if (!real)
        real = next("pthread_mutex_lock");
    return took_lock(real(mutex));
}

int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    static int (*real)(pthread_mutex_t *);
    if (!real)
        real = next("pthread_mutex_trylock");
    if (fails_lock && is_caller() && !has_interpreter() && --fails_lock == 0)
        return EBUSY;
    int failed = took_lock(real(mutex));
    if (!failed || !puts_caller_off || !is_caller())
        return failed;
    if (has_interpreter()) /* The next attempt, without the interpreter lock, would find what this one has lost. */
        return failed;
    int before = looks;
    puts_caller_off = 0;
    callers_put_off++;
    holds_readers = 0;
    while (looks == before)
        usleep(1000);
    return failed;
}

int pthread_mutex_unlock(pthread_mutex_t *mutex)
{
    static int (*real)(pthread_mutex_t *);
    if (!real)
        real = next("pthread_mutex_unlock");
    int failed = real(mutex);
    void (*does)(void) = between;
    if (does && is_caller() && has_interpreter()) { /* Not one of the interpreter's own locks. */
        between = NULL;
        does();
        between = does;
    }
    return failed;
}

/* How many of so many bytes are received at once. */
static size_t cut_short(size_t nbytes)
{
    if (!caller_receives || nbytes <= (size_t)caller_receives || !is_caller() || has_interpreter())
        return nbytes;
    calls_cut_short++;
    return caller_receives;
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    static ssize_t (*real)(int, struct msghdr *, int);
    if (!real)
        real = next("recvmsg");
    if (holds_readers && !is_caller()) {
        workers_reading++;
        while (holds_readers)
            usleep(1000);
    }
    if (holds_caller && is_caller() && !has_interpreter()) {
        caller_is_held = 1;
        while (holds_caller)
            usleep(1000);
        caller_is_held = 0;
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
        return real(fd, into, cut_short(nbytes), flags);
    for (size_t i = 0; i < nbytes; i++)
        ((char *)into)[i] = flood[at++ % flood_nbytes];
    return nbytes;
}

static void stand_still(volatile int *next_one)
{
    if (!*next_one || !is_worker() || !__sync_bool_compare_and_swap(next_one, 1, 0))
        return;
    workers_held++;
    while (!goes_on)
        usleep(1000);
}

int epoll_wait(int fd, struct epoll_event *events, int most, int timeout_ms)
{
    static int (*real)(int, struct epoll_event *, int, int);
    if (!real)
        real = next("epoll_wait");
    if (is_worker())
        __sync_fetch_and_add(&looks, 1);
    stand_still(&holds_next_look);
    int n = real(fd, events, most, timeout_ms);
    if (n == 0 && timeout_ms > 0 && is_worker())
        __sync_fetch_and_add(&sleeps_over, 1);
    if (n > 0)
        stand_still(&holds_next_worker);
    return n;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = next("clock_gettime");
    int failed = real(clock, now);
    long stands_ns = clock_stands_ns;
    if (stood_still_s && is_worker())
        now->tv_sec += stood_still_s;
    if (stands_ns && is_worker()) {
        now->tv_sec = stands_ns / 1000000000;
        now->tv_nsec = stands_ns % 1000000000;
    }
    return failed;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    static ssize_t (*real)(int, const struct msghdr *, int);
    if (!real)
        real = next("sendmsg");
    ssize_t n = real(fd, message, flags);
    if (n >= 0 || errno != EAGAIN || !holds_senders || !is_worker())
        return n;
    senders_held++;
    while (holds_senders)
        usleep(1000);
    while ((n = real(fd, message, flags)) < 0 && errno == EAGAIN)
        usleep(1000); /* The kernel has not heard yet that there is room. */
    return n;
}

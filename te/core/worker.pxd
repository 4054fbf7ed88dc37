# SPDX-License-Identifier: Apache-2.0
# The threads that move bytes: each polls what it looks after, spins for a while, and sleeps.
#
# A worker knows nothing of transports. What it polls (a connection, a queue pair) begins with a
# `Polled`, and says by `PolledOps` what is to be done. All of these are called by the worker alone.

from te.core.sections cimport RUNNERS_MAX, Section, WORKERS_MAX
from te.core.sync cimport (
    load32, load_pointer, now_ns, pthread_mutex_t, store32, store64, swap_if, u32, u64,
)

cdef enum:
    LOOKS = 24  # at what other processes show in memory, for each turn of spinning

cdef struct Polled
cdef struct Worker
cdef struct Workers

cdef struct PolledOps:
    # It has come to the worker.
    void (*adopted)(Polled *p) noexcept nogil
    # Its descriptor is ready (epoll_wait(2)). Like `turn` it tells whether bytes moved. `is_patient`:
    # a wake-up of the other side may wait for the next turn.
    bint (*event)(Polled *p, bint is_patient) noexcept nogil
    # Each turn of the worker: what can be done without its descriptor. `slept`: the worker has.
    bint (*turn)(Polled *p, bint slept, bint is_patient) noexcept nogil
    # Whether memory shows that it has something to do; only of one that `is_in_memory`.
    bint (*look)(Polled *p) noexcept nogil
    # Before the worker sleeps: asks to be woken up. True if there is something to do already. What
    # nobody wakes a worker up for sets `Worker.naps`.
    bint (*arm)(Polled *p) noexcept nogil
    # Now and then: its deadlines, which `Silence` measures. False if it has none: then it is asked again behind
    # a later turn of its worker, so what gives it one happens in such a turn, or wakes the worker up.
    bint (*check)(Polled *p, u64 now) noexcept nogil
    # The engine is being closed.
    void (*stop)(Polled *p) noexcept nogil
    # It has gone, and the worker forgets it.
    void (*release)(Polled *p) noexcept nogil

# For how long something has not moved while its worker looked after it. A process that is stopped, or does not get
# the processor, hears nothing of peers that are well.
cdef struct Silence:
    u64 moved_ns  # when it had last moved, at the last check; 0: nothing was to move
    u64 checked_ns
    u64 lasted_ns

cdef struct Polled:
    const PolledOps *ops
    Worker *worker
    Polled *next
    u32 kicked  # atomic: it has something to do
    bint is_in_memory
    bint has_gone  # the worker's alone

# Looking again before sleeping. On a machine with idle cores a wake-up costs more than a small copy;
# on a busy one the spinning itself keeps off the processor whom it waits for. Which it is shows
# when the processor is offered to others: if somebody takes it, a worker tries another one, and
# if there it is the same, nothing spins for a while. That it took long is not enough: a virtual
# machine's processor itself stands still now and then (250 times a second, measured).
cdef struct Spin:
    u64 most_ns, resume_ns, backoff_ns
    u32 displaced  # as last counted
    u32 shared  # turns in a row that another spinning thread took
    bint may_move
    u64 moved_ns  # when it last changed the processor

cdef enum:  # states of a runner
    RUNNER_FREE = 0  # it is no thread's
    RUNNER_RUNS = 1
    RUNNER_WAITS = 2  # in the kernel, for another process
    RUNNER_LEFT = 3  # it still waits, or has since; another one runs the worker

# A thread that runs a worker. Where it waits for another process, whose memory may never answer,
# somebody else takes the worker over after a while, so that what else is the worker's goes on.
cdef struct Runner:
    u32 state  # atomic
    u64 since_ns  # atomic: when it last began to wait
    Section section  # for what it writes while it waits

# Something that a worker is to do in its turn, on the next occasion.
cdef struct Command:
    # False, and nothing was begun, if the turn is lent and another worker has what it needs: it is run again.
    bint (*run)(Command *c) noexcept nogil
    void *of
    Command *next

# What a worker polls is changed in its turn alone: by its own thread, or by a calling thread that has
# found the turn free. So a worker's thread gives it up while it sleeps, or waits for another process.
cdef struct Worker:
    Workers *all
    u32 index
    Runner *runner  # NULL while nobody runs it; its own thread's, and changed by who takes it over
    Spin spin
    int epoll, eventfd
    int timer  # set by who has borrowed its turn while it sleeps without an end
    u32 sleeping, kicked  # atomic
    u32 processor  # atomic: the one it copies on, plus 1; 0 while it does not copy
    Section section
    pthread_mutex_t turn
    u32 wanted  # atomic: the worker's own threads that wait for the turn, before any caller
    bint is_lent  # a calling thread has the turn
    bint will_check  # a look at deadlines is to come. Changed in its turn
    Command *commands  # atomic: the newest first; ENDED once nobody will run them any more
    Command *next_command  # of those that were taken off that list, in order
    Command *last_command
    pthread_mutex_t lock
    Polled *adopted  # under the lock, as the next
    bint has_ended  # nothing is taken over any more
    Polled *polled
    u64 due_ns  # when something that it polls has to have its next turn at the latest: `worker_by`
    bint has_gone  # something that it polls
    bint wakeup_due  # a wake-up to another process
    bint naps  # it sleeps for NAP_NS at most, this time

cdef struct Workers:
    Worker of[WORKERS_MAX]
    u32 n
    u32 stop  # atomic
    u64 check_ns  # between two looks at deadlines
    Runner runners[RUNNERS_MAX]
    u32 runners_n  # atomic: those that are not free
    u32 threads  # atomic: that were started here; one of them looks who waits for too long
    u32 is_watched  # atomic: there is that thread
    u32 will_watch  # atomic: it is to look soon, and its timer is set
    int watch_timer
    int pid  # of the process that has them: a child of fork(2) has not
    pthread_mutex_t lock  # of who takes a worker over

# At a check: for how long it has been silent that last moved then. What is beyond `most_ns` between two checks is
# time in which its worker did not run.
cdef u64 silence_lasts(Silence *s, u64 moved_ns, u64 now, u64 most_ns) noexcept nogil
# Between two checks: whether it may have lasted for longer than the limit at the next one.
cdef bint silence_ends_soon(const Silence *s, u64 limit_ns, u64 most_ns) noexcept nogil

# Of the time between two checks, which is to be `check_ns`, what counts at most. A few checks make a stall however
# seldom this process runs, and behind the longest freeze a peer has most of `stall_ns` to answer.
cdef u64 counts_most_ns(u64 check_ns, u64 stall_ns) noexcept nogil

# Of what has nothing to do for `adopted`, `look`, `check`, `stop` and `release`; the others are NULL.
cdef PolledOps plain_polled_ops() noexcept

# 0 or an errno; with an errno `workers_close` is still due.
cdef int workers_open(Workers *all, u32 n, u64 spin_ns) noexcept nogil
cdef void workers_close(Workers *all) noexcept nogil  # none of them runs
# From now on some of what they poll may have them wait for another process. Any thread.
cdef void workers_watch(Workers *all) noexcept nogil
# Somebody waits: the thread that watches has a look, in a while.
cdef void watch_soon(Workers *all) noexcept nogil
cdef void workers_stop(Workers *all) noexcept nogil  # asks them to end everything and themselves
# The whole life of a worker; without the interpreter lock. Also after another thread has taken the
# worker over it only returns once that one, too, has ended.
cdef void worker_work(Worker *w) noexcept nogil
# Gives it something to poll. 0, or an errno: of epoll_ctl(2) for its descriptor (-1: it has none), or ESHUTDOWN
# once it has ended. By a calling thread, with the worker's lock (`lock_as_caller`).
cdef int worker_add(Worker *w, Polled *p, int fd, u32 events) noexcept nogil
cdef void worker_wake(Worker *w) noexcept nogil
# Its turn: waits for it, by the worker's own threads.
cdef void worker_take(Worker *w) noexcept nogil
cdef void worker_give(Worker *w) noexcept nogil
# The same by a calling thread, which never waits: False if somebody has it. What others have ordered is done
# first.
cdef bint worker_borrow(Worker *w) noexcept nogil
cdef void worker_return(Worker *w) noexcept nogil
# Has it do something in its next turn. False if it has ended. Any thread.
cdef bint worker_put(Worker *w, Command *c) noexcept nogil
# In its turn: does what it was told until now.
cdef void worker_obey(Worker *w) noexcept nogil
# Takes over what it has been given until now; by the worker itself.
cdef void worker_adopt(Worker *w) noexcept nogil
# In a turn of something that it polls: that has the next one by then; the same for within a
# millisecond. A turn forgets what was asked for before it.
cdef void worker_by(Worker *w, u64 at_ns) noexcept nogil
cdef void worker_soon(Worker *w) noexcept nogil
# Has workers that copy do so on different processors: woken up by one source they start on one.
cdef void worker_spread(Worker *w) noexcept nogil
# Has it look at deadlines (`check`) once the descriptor is readable, which is told once. 0 or an errno. Any thread.
cdef int worker_checks_at(Worker *w, int fd) noexcept nogil
# Has epoll wait for a descriptor of it, by its worker; 0 or an errno. And changes what for.
cdef int polled_attach(Polled *p, int fd, u32 events) noexcept nogil
cdef void polled_watch(Polled *p, int fd, u32 events) noexcept nogil
# Not any more, also if it has been said before. By its worker.
cdef void polled_unwatch(Polled *p, int fd) noexcept nogil
# One turn of spinning, by a worker or a caller that waits.
cdef void spin_turn(Spin *s, u64 now) noexcept nogil


cdef inline bint has_left(Runner *r) noexcept nogil:
    """Whether another thread runs its worker. Then it touches nothing more of what that polls."""
    return load32(&r.state) == RUNNER_LEFT


cdef inline void runner_wait(Workers *all, Runner *r) noexcept nogil:
    """It waits for another process from now on. What it was called for knows that by then: whoever
    takes the worker over may come to it at once."""
    store64(&r.since_ns, now_ns())
    store32(&r.state, RUNNER_WAITS)
    watch_soon(all)


cdef inline bint runner_go_on(Runner *r) noexcept nogil:
    """The wait is over; False if it `has_left`."""
    return swap_if(&r.state, RUNNER_WAITS, RUNNER_RUNS) == RUNNER_WAITS


cdef inline bint has_commands(Worker *w) noexcept nogil:
    return load_pointer(&w.commands) != NULL


cdef inline bint may_wait(Workers *all) noexcept nogil:
    """Whether there are other threads, should all workers have to wait."""
    return load32(&all.runners_n) + all.n <= RUNNERS_MAX


cdef inline void polled_kick(Polled *p) noexcept nogil:
    """Has its worker give it a turn. Any thread."""
    store32(&p.kicked, 1)
    worker_wake(p.worker)


cdef inline void polled_again(Polled *p) noexcept nogil:
    """The same by its worker's own thread, which is awake; so not in a turn that is lent."""
    store32(&p.kicked, 1)
    store32(&p.worker.kicked, 1)


cdef inline void polled_gone(Polled *p) noexcept nogil:
    """It is released at the end of the turn. By its worker."""
    p.has_gone = True
    p.worker.has_gone = True


cdef inline bint may_spin(Spin *s, u64 since, u64 now) noexcept nogil:
    return now < since + s.most_ns and now >= s.resume_ns


cdef inline void spin_paid(Spin *s) noexcept nogil:
    """What it waited for came while it spun."""
    s.backoff_ns -= s.backoff_ns >> 4

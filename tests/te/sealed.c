/* SPDX-License-Identifier: Apache-2.0
 * The copier of memory that nobody else can touch (te_sealed.py). Its pages are mapped twice, without
 * any access where they are registered, and for this copier alone as an alias. A thread takes batches
 * in any order, late, and copies their parts in any order: who reads before the event of a batch gets
 * what was there before. A mutex and no atomics, so that ThreadSanitizer sees what is ordered. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "te/core/kinds.h"

enum { RANGES_MAX = 64 };

struct Event {
    Copy *copies;
    uint32_t n;
    Direction direction;
    int answer;  /* EAGAIN until it is over */
    int failure; /* what it shall end with, in the middle */
    Event *next;
};

typedef struct {
    uintptr_t start, nbytes;
    char *alias; /* NULL of pinned host memory */
} Range;

typedef struct {
    Kind kind;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    Event *queue;
    uint32_t queued;
    uint64_t random;
    uint32_t delay_us;
    Range ranges[RANGES_MAX];
    uint32_t ranges_n;
    int refuse_in, fail_in, stuck, stop; /* countdowns of batches; 0 is never */
    uint64_t events;                     /* not released yet */
} Sealed;

static uint64_t draw(Sealed *s, uint64_t below) { /* xorshift64* (Vigna 2016) */
    s->random ^= s->random >> 12;
    s->random ^= s->random << 25;
    s->random ^= s->random >> 27;
    return (s->random * 2685821657736338717u >> 32) % below;
}

/* Where the copier finds an address; NULL when the copy should never have been asked for. */
static char *reach(Sealed *s, const void *address, size_t nbytes, int is_host) {
    uintptr_t at = (uintptr_t)address;
    for (uint32_t i = 0; i < s->ranges_n; i++) {
        Range *r = &s->ranges[i];
        if (is_host == (r->alias == NULL) && at >= r->start && nbytes <= r->nbytes &&
            at - r->start <= r->nbytes - nbytes)
            return is_host ? (char *)at : r->alias + (at - r->start);
    }
    return NULL;
}

static void pause_us(uint64_t us) {
    struct timespec t = {0, (long)us * 1000};
    nanosleep(&t, NULL);
}

static int copy(void *state, const Copy *copies, uint32_t n, Direction direction, Event **event) {
    Sealed *s = state;
    Event *e = calloc(1, sizeof *e);
    e->copies = malloc(n * sizeof *copies);
    memcpy(e->copies, copies, n * sizeof *copies);
    e->n = n;
    e->direction = direction;
    e->answer = EAGAIN;
    pthread_mutex_lock(&s->lock);
    int refused = s->refuse_in && --s->refuse_in == 0;
    if (!refused) {
        e->failure = s->fail_in && --s->fail_in == 0 ? EIO : 0;
        e->next = s->queue;
        s->queue = e;
        s->queued++;
        s->events++;
        *event = e;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    if (refused) {
        free(e->copies);
        free(e);
    }
    return refused ? ENOSPC : 0;
}

static int query(void *state, Event *event) {
    Sealed *s = state;
    pthread_mutex_lock(&s->lock);
    int answer = event->answer;
    pthread_mutex_unlock(&s->lock);
    return answer;
}

static void release(void *state, Event *event) {
    Sealed *s = state;
    pthread_mutex_lock(&s->lock);
    if (event->answer == EAGAIN)
        abort(); /* the contract forbids it */
    s->events--;
    pthread_mutex_unlock(&s->lock);
    free(event->copies);
    free(event);
}

/* Under the lock: any of those that wait. */
static Event *take(Sealed *s) {
    Event **at = &s->queue;
    for (uint64_t skip = draw(s, s->queued); skip; skip--)
        at = &(*at)->next;
    Event *e = *at;
    *at = e->next;
    s->queued--;
    for (uint32_t i = e->n; i > 1; i--) {
        uint32_t k = (uint32_t)draw(s, i);
        Copy swapped = e->copies[i - 1];
        e->copies[i - 1] = e->copies[k];
        e->copies[k] = swapped;
    }
    return e;
}

/* Under the lock, one part at a time: ranges may go meanwhile. */
static int part(Sealed *s, Event *e, uint32_t i) {
    Copy *c = &e->copies[i];
    char *dst = reach(s, c->dst, c->nbytes, e->direction == TO_HOST);
    char *src = reach(s, c->src, c->nbytes, e->direction == FROM_HOST);
    if (e->failure && i >= e->n / 2)
        return e->failure;
    if (c->nbytes == 0)
        return EINVAL;
    if (dst == NULL || src == NULL)
        return EFAULT;
    memcpy(dst, src, c->nbytes);
    return 0;
}

static void *work(void *state) {
    Sealed *s = state;
    pthread_mutex_lock(&s->lock);
    for (;;) {
        while (!s->stop && (s->queue == NULL || s->stuck))
            pthread_cond_wait(&s->changed, &s->lock);
        if (s->stop)
            break;
        Event *e = take(s);
        uint64_t before = draw(s, s->delay_us + 1), after = draw(s, s->delay_us + 1);
        int answer = 0;
        pthread_mutex_unlock(&s->lock);
        pause_us(before);
        for (uint32_t i = 0; answer == 0 && i < e->n; i++) {
            pthread_mutex_lock(&s->lock);
            answer = part(s, e, i);
            pthread_mutex_unlock(&s->lock);
        }
        pause_us(after);
        pthread_mutex_lock(&s->lock);
        e->answer = answer;
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static const KindOps OPS = {.copy = copy, .query = query, .release = release};

Sealed *sealed_new(uint64_t seed, uint32_t delay_us) {
    Sealed *s = calloc(1, sizeof *s);
    s->kind = (Kind){&OPS, s, 0};
    s->random = seed * 2 + 1;
    s->delay_us = delay_us;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    if (pthread_create(&s->thread, NULL, work, s))
        abort();
    return s;
}

void sealed_free(Sealed *s) {
    pthread_mutex_lock(&s->lock);
    s->stop = 1;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
}

Kind *sealed_kind(Sealed *s) { return &s->kind; }

void sealed_add(Sealed *s, uintptr_t start, uintptr_t nbytes, char *alias) {
    pthread_mutex_lock(&s->lock);
    if (s->ranges_n == RANGES_MAX)
        abort();
    s->ranges[s->ranges_n++] = (Range){start, nbytes, alias};
    pthread_mutex_unlock(&s->lock);
}

void sealed_remove(Sealed *s, uintptr_t start) {
    pthread_mutex_lock(&s->lock);
    for (uint32_t i = 0; i < s->ranges_n; i++)
        if (s->ranges[i].start == start)
            s->ranges[i] = s->ranges[--s->ranges_n];
    pthread_mutex_unlock(&s->lock);
}

/* The batch so many calls from now is refused, or fails in its middle; nothing goes on while stuck. */
void sealed_set(Sealed *s, int refuse_in, int fail_in, int stuck) {
    pthread_mutex_lock(&s->lock);
    s->refuse_in = refuse_in;
    s->fail_in = fail_in;
    s->stuck = stuck;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

uint64_t sealed_events(Sealed *s) {
    pthread_mutex_lock(&s->lock);
    uint64_t n = s->events;
    pthread_mutex_unlock(&s->lock);
    return n;
}

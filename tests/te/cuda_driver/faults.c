/* SPDX-License-Identifier: Apache-2.0
 * What tests set and look at: faults, delays, the driver's version, and which thread called what. */
#include "stand_in.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { COUNTS_MAX = 4096, FAULTS_MAX = 16 };

typedef struct {
    long thread;
    const char *name;
    unsigned flags;
    uint64_t n;
} Count;

typedef struct {
    char name[NAME_MAX_BYTES]; /* empty: none */
    uint64_t after;            /* calls that still succeed */
    uint64_t times;            /* then so many fail; 0: all */
    CUresult error;
} Fault;

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
uint64_t delay_us = 100, pageable_copies, freed_while_open;
CUresult broken;
int driver_version = 13000;
int writes_ordering = 100;
int can_flush_writes = 1;
bool is_stuck, is_capturing, capture_is_dead;

static uint64_t random_state = 1;
static Count counts[COUNTS_MAX];
static size_t counts_n;
static Fault faults[FAULTS_MAX];
static uint64_t copies_until_failure;
static CUresult copy_failure;

uint64_t draw(uint64_t below) { /* xorshift64* (Vigna 2016) */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (random_state * 2685821657736338717u >> 32) % below;
}

static CUresult fault_of(const char *name) {
    for (int i = 0; i < FAULTS_MAX; i++) {
        Fault *f = &faults[i];
        if (f->name[0] == 0 || strcmp(f->name, name))
            continue;
        if (f->after) {
            f->after--;
            continue;
        }
        CUresult error = f->error;
        if (f->times && --f->times == 0)
            f->name[0] = 0;
        return error;
    }
    return CUDA_SUCCESS;
}

CUresult count_call(const char *name, unsigned flags) {
    long thread = gettid();
    Count *c = counts;
    while (c < counts + counts_n && (c->thread != thread || c->name != name))
        c++;
    if (c == counts + counts_n) {
        if (counts_n++ == COUNTS_MAX)
            abort();
        *c = (Count){thread, name, flags, 0};
    }
    c->n++;
    return fault_of(name);
}

CUresult next_copy_failure(void) {
    return copies_until_failure && --copies_until_failure == 0 ? copy_failure : CUDA_SUCCESS;
}

void break_context(CUresult error) {
    if (broken == CUDA_SUCCESS)
        broken = error;
    pthread_cond_broadcast(&changed);
}

/* -- what tests call */

void fake_reset(uint64_t seed, uint64_t longest_delay_us, int version);
void fake_fail(const char *name, uint64_t after, uint64_t times, unsigned error);
void fake_fail_copy(uint64_t after, unsigned error);
void fake_set(int stuck, int capturing);
void fake_order_writes(int order, int can_flush);
int fake_capture_is_dead(void);
uint64_t fake_calls(long thread, const char *name, unsigned flags);
void fake_forget_calls(void);
uint64_t fake_pageable_copies(void);
uint64_t fake_freed_while_open(void);

/* No faults and no counts, as after a start. Memory, streams and events stay. */
void fake_reset(uint64_t seed, uint64_t longest_delay_us, int version) {
    pthread_mutex_lock(&lock);
    random_state = seed * 2 + 1;
    delay_us = longest_delay_us;
    driver_version = version;
    writes_ordering = 100;
    can_flush_writes = 1;
    is_stuck = is_capturing = capture_is_dead = false;
    broken = copy_failure = CUDA_SUCCESS;
    copies_until_failure = pageable_copies = freed_while_open = 0;
    memset(faults, 0, sizeof faults);
    counts_n = 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* 0: what NICs have written has to be flushed; 100: its owner sees it; 200: all devices do. */
void fake_order_writes(int order, int can_flush) {
    pthread_mutex_lock(&lock);
    writes_ordering = order;
    can_flush_writes = can_flush;
    pthread_mutex_unlock(&lock);
}

/* Of the calls of a function, those that come after so many give the error; `times` 0: all. */
void fake_fail(const char *name, uint64_t after, uint64_t times, unsigned error) {
    pthread_mutex_lock(&lock);
    int i = 0;
    while (faults[i].name[0])
        if (++i == FAULTS_MAX)
            abort();
    snprintf(faults[i].name, sizeof faults[i].name, "%s", name);
    faults[i].after = after;
    faults[i].times = times;
    faults[i].error = error;
    pthread_mutex_unlock(&lock);
}

/* The call of copies that comes after so many is taken, and fails in its middle: a sticky error. */
void fake_fail_copy(uint64_t after, unsigned error) {
    pthread_mutex_lock(&lock);
    copies_until_failure = after + 1;
    copy_failure = error;
    pthread_mutex_unlock(&lock);
}

/* stuck: no work of any stream begins. capturing: another thread captures in global mode. */
void fake_set(int stuck, int capturing) {
    pthread_mutex_lock(&lock);
    is_stuck = stuck;
    is_capturing = capturing;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int fake_capture_is_dead(void) {
    pthread_mutex_lock(&lock);
    int answer = capture_is_dead;
    pthread_mutex_unlock(&lock);
    return answer;
}

/* How often: by one thread (0: any), one function (NULL: any), with one of the flags (0: any). */
uint64_t fake_calls(long thread, const char *name, unsigned flags) {
    uint64_t sum = 0;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < counts_n; i++)
        if ((thread == 0 || counts[i].thread == thread) &&
            (name == NULL || strcmp(counts[i].name, name) == 0) &&
            (flags == 0 || counts[i].flags & flags))
            sum += counts[i].n;
    pthread_mutex_unlock(&lock);
    return sum;
}

void fake_forget_calls(void) {
    pthread_mutex_lock(&lock);
    counts_n = 0;
    pthread_mutex_unlock(&lock);
}

uint64_t fake_pageable_copies(void) {
    pthread_mutex_lock(&lock);
    uint64_t n = pageable_copies;
    pthread_mutex_unlock(&lock);
    return n;
}

uint64_t fake_freed_while_open(void) {
    pthread_mutex_lock(&lock);
    uint64_t n = freed_while_open;
    pthread_mutex_unlock(&lock);
    return n;
}

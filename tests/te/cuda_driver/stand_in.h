/* SPDX-License-Identifier: Apache-2.0
 * A libcuda without a GPU, for tests. Device memory is a memory file that is mapped without any access
 * where the application believes it to be, and a second time, as an alias, for the engines here: a load
 * of the processor is a SIGSEGV, and a system call gets EFAULT. Each stream is a thread that is late by
 * a seeded delay; a copy destroys its destination when it begins and reads its source when it ends, so
 * that who does not wait for it, or gives memory away before, gets wrong bytes. One mutex guards
 * everything, and no atomics are used: ThreadSanitizer sees what is ordered by waiting, and what is not. */
#ifndef STAND_IN_H
#define STAND_IN_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <pthread.h>
#include <stdbool.h>

#include "driver.h"

enum { DEVICES = 8, MEMORIES_MAX = 4096, NAME_MAX_BYTES = 64 };

/* What a call does to the thread, and to others. */
enum {
    NEEDS_CONTEXT = 1, /* else error 201 */
    SYNCHRONISES = 2,  /* may wait for the device, or hold the driver's lock for long */
    ENDS_CAPTURE = 4,  /* while another thread captures in global mode: 900, unless relaxed */
    NEVER_FAILS = 8,   /* not even after a sticky error */
};

struct CUctx_st {
    int ordinal;
    int retained; /* of a primary context */
};

struct CUevent_st {
    CUcontext context;
    bool is_gone;
    uint64_t recorded, done; /* numbers of records */
};

typedef struct {
    uintptr_t dst, src;
    size_t nbytes;
    char *snapshot; /* of the source, where the order allowed to read it at once */
} CopyOp;

typedef struct Op { /* COPY: copies_n > 0; RECORD, WAIT: event */
    CopyOp *copies;
    size_t copies_n;
    CUevent event;
    bool is_record;
    uint64_t record;
    CUresult failure; /* what the copies end with, in their middle */
    struct Op *next;
} Op;

struct CUstream_st {
    CUcontext context;
    bool is_gone, is_running;
    Op *first, *last;
};

typedef enum { NOTHING, DEVICE, PINNED, RESERVED } Owner;

/* A range of addresses. */
typedef struct {
    Owner owner;
    uintptr_t start;
    size_t nbytes;
    char *alias; /* where the engines find it; NULL of what is reserved alone */
    int ordinal; /* of the device */
    unsigned reached_by; /* devices whose engines may, as bits */
    int fd;      /* its memory file, or -1 */
    uint64_t id;
    bool is_ours;     /* mapped here, and unmapped with it */
    bool is_managed;  /* the processor reaches it, too */
    bool is_ipc;      /* exportable by a legacy handle */
    bool is_allocated; /* by cuMemHostAlloc */
    unsigned types;   /* of handles, for virtual memory */
    uint64_t handle;  /* what is mapped there */
    int opened;       /* how often, of memory of another process */
    uint64_t opened_id;
    long opened_pid;
} Memory;

/* contexts.c. Every function of the API is `enter`, its work if that gave 0, and `leave`; in between
 * the lock is held. */
CUresult enter(const char *name, unsigned flags);
CUresult leave(CUresult result);
CUcontext current(void);
int ordinal_of(CUdevice device); /* -1: no device */
CUdevice device_of(int ordinal);
void *find_function(const char *name, int version);

/* faults.c, under the lock. */
CUresult count_call(const char *name, unsigned flags);
CUresult next_copy_failure(void);
void break_context(CUresult error); /* from now on every call fails with it */
uint64_t draw(uint64_t below);
extern uint64_t delay_us, pageable_copies, freed_while_open;
extern CUresult broken;
extern int driver_version, writes_ordering, can_flush_writes;
extern bool is_stuck, is_capturing, capture_is_dead;
extern pthread_mutex_t lock;
extern pthread_cond_t changed;

/* memory.c, under the lock. */
Memory *memory_at(uintptr_t address);
Memory *memory_opened(long pid, uint64_t id); /* what a legacy handle named */
Memory *memory_new(Owner owner, uintptr_t start, size_t nbytes);
void memory_drop(Memory *m);
size_t device_nbytes(void); /* that are in use, of all devices */
char *reach(uintptr_t address, size_t nbytes); /* NULL when it is no memory that engines reach */
bool map_file(Memory *m, int fd, uintptr_t fixed); /* PROT_NONE, and the alias */

/* streams.c, under the lock. */
void enqueue(CUstream stream, Op op);
void drain(CUstream stream);
CUresult check_stream(CUstream stream);

#endif

# SPDX-License-Identifier: Apache-2.0
# What Python is told, by two lists with an eventfd each: transfers that have an outcome, and what
# became of links and of their rails.

from te.core.sync cimport pthread_mutex_t, u32
from te.core.wire cimport RAILS_MAX

cdef struct Notice:
    void *what
    Notice *next

# The last that became of a rail, until Python has read it.
cdef struct News:
    bint is_new
    u32 epoch
    int code, errnum

# Of one link.
cdef struct Bulletin:
    void *link
    News news[RAILS_MAX]
    bint has_ended, is_listed
    Bulletin *next

cdef struct Notices:
    pthread_mutex_t lock
    Notice *first
    Bulletin *bulletins
    int notices_fd, bulletins_fd  # eventfd(2)

# 0 or an errno; with an errno `notices_close` is still due.
cdef int notices_open(Notices *all) noexcept nogil
cdef void notices_close(Notices *all) noexcept nogil

cdef void notice_put(Notices *all, Notice *one) noexcept nogil
# The next one; NULL if there is none.
cdef Notice *notice_take(Notices *all) noexcept nogil

# That the link has ended (rail -1), or what became of one of its rails; of each rail only the last is
# kept, which is where it stands, so that nothing can be lost. True if the link has come onto the
# list by it: the list needs a reference to it.
cdef bint bulletin_put(
    Notices *all, Bulletin *b, int rail, u32 epoch, int code, int errnum
) noexcept nogil
# Takes the next link off the list, and all there is about it into `out`; False if there is none.
cdef bint bulletin_take(Notices *all, Bulletin *out) noexcept nogil

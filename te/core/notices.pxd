# SPDX-License-Identifier: Apache-2.0
# What Python is told, by two lists with an eventfd each: transfers that have an outcome, and links
# that it has to look at.

from te.core.sync cimport pthread_mutex_t

cdef struct Notice:
    void *what
    Notice *next

# Of one link.
cdef struct Bulletin:
    void *link
    bint is_listed
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

# That something of the link has changed; what, the link itself says, so that nothing can be lost. True
# if it has come onto the list by it: the list needs a reference to it.
cdef bint bulletin_put(Notices *all, Bulletin *b) noexcept nogil
# Takes the next link off the list; NULL if there is none.
cdef void *bulletin_take(Notices *all) noexcept nogil

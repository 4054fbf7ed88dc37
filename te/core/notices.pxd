# SPDX-License-Identifier: Apache-2.0
# What Python is told, by two lists with an eventfd each: transfers that have an outcome, and links
# that it has to look at. No list has a lock, as calling threads put something there, too. What is taken is taken with
# the interpreter lock.

from te.core.sync cimport u32

# Of one transfer, or one link.
cdef struct Notice:
    void *of
    u32 is_listed  # atomic: of a link's
    Notice *next

cdef struct Notices:
    Notice *notices  # atomic, as the next: the newest first
    Notice *bulletins
    int notices_fd, bulletins_fd  # eventfd(2)

# 0 or an errno; with an errno `notices_close` is still due.
cdef int notices_open(Notices *all) noexcept nogil
cdef void notices_close(Notices *all) noexcept nogil

# That a transfer has its outcome. Once.
cdef void notice_put(Notices *all, Notice *one) noexcept nogil
# The next transfer; NULL if there is none.
cdef void *notice_take(Notices *all) noexcept

# That something of the link has changed; what, the link itself says, so that nothing can be lost. True
# if it has come onto the list by it: the list needs a reference to it.
cdef bint bulletin_put(Notices *all, Notice *one) noexcept nogil
# Takes the next link off the list; NULL if there is none.
cdef void *bulletin_take(Notices *all) noexcept

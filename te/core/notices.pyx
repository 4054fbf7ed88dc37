# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.posix cimport EFD_CLOEXEC, EFD_NONBLOCK, close, eventfd, eventfd_write
from te.core.sync cimport last_errno, load_pointer, store32, swap32, swap_pointer_if


cdef int notices_open(Notices *all) noexcept nogil:
    all.bulletins_fd = -1
    all.notices_fd = eventfd(0, EFD_CLOEXEC)
    if all.notices_fd < 0:
        return last_errno()
    all.bulletins_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)
    return last_errno() if all.bulletins_fd < 0 else 0


cdef void notices_close(Notices *all) noexcept nogil:
    if all.notices_fd >= 0:
        close(all.notices_fd)
    if all.bulletins_fd >= 0:
        close(all.bulletins_fd)


cdef void put(Notice **first, Notice *one) noexcept nogil:
    while True:
        one.next = <Notice *>load_pointer(first)
        if swap_pointer_if(first, one.next, one):
            return


cdef Notice *take(Notice **first) noexcept:
    """Nobody else takes one meanwhile, so the first that is still there has the same next one."""
    cdef Notice *one
    while True:
        one = <Notice *>load_pointer(first)
        if one == NULL or swap_pointer_if(first, one, one.next):
            return one


cdef void notice_put(Notices *all, Notice *one) noexcept nogil:
    put(&all.notices, one)
    eventfd_write(all.notices_fd, 1)


cdef void *notice_take(Notices *all) noexcept:
    cdef Notice *one = take(&all.notices)
    return NULL if one == NULL else one.of


cdef bint bulletin_put(Notices *all, Notice *one) noexcept nogil:
    if swap32(&one.is_listed, 1):
        return False
    put(&all.bulletins, one)
    eventfd_write(all.bulletins_fd, 1)
    return True


cdef void *bulletin_take(Notices *all) noexcept:
    cdef Notice *one = take(&all.bulletins)
    if one == NULL:
        return NULL
    store32(&one.is_listed, 0)  # Whoever puts it there from here on has told what it says by then, or tells again.
    return one.of

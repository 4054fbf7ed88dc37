# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.posix cimport EFD_CLOEXEC, EFD_NONBLOCK, close, eventfd, eventfd_write
from te.core.sync cimport (
    last_errno, pthread_mutex_destroy, pthread_mutex_init, pthread_mutex_lock, pthread_mutex_unlock,
)


cdef int notices_open(Notices *all) noexcept nogil:
    pthread_mutex_init(&all.lock, NULL)
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
    pthread_mutex_destroy(&all.lock)


cdef void notice_put(Notices *all, Notice *one) noexcept nogil:
    pthread_mutex_lock(&all.lock)
    one.next = all.first
    all.first = one
    pthread_mutex_unlock(&all.lock)
    eventfd_write(all.notices_fd, 1)


cdef Notice *notice_take(Notices *all) noexcept nogil:
    pthread_mutex_lock(&all.lock)
    cdef Notice *one = all.first
    if one != NULL:
        all.first = one.next
    pthread_mutex_unlock(&all.lock)
    return one


cdef bint bulletin_put(Notices *all, Bulletin *b) noexcept nogil:
    cdef bint is_first
    pthread_mutex_lock(&all.lock)
    is_first = not b.is_listed
    if is_first:
        b.is_listed = True
        b.next = all.bulletins
        all.bulletins = b
        eventfd_write(all.bulletins_fd, 1)
    pthread_mutex_unlock(&all.lock)
    return is_first


cdef void *bulletin_take(Notices *all) noexcept nogil:
    cdef void *link = NULL
    pthread_mutex_lock(&all.lock)
    cdef Bulletin *b = all.bulletins
    if b != NULL:
        all.bulletins = b.next
        b.is_listed = False
        link = b.link
    pthread_mutex_unlock(&all.lock)
    return link

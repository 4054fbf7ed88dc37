# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from te.core.inbound cimport arriving_forget_all
from te.core.link cimport link_tell
from te.core.sync cimport pthread_mutex_lock, pthread_mutex_unlock, store32
from te.core.transfer cimport fail_all


cdef void link_close(Link *link) noexcept nogil:
    link.ops.close(link)
    pthread_mutex_lock(&link.lock)
    fail_all(link)
    link.ops.forget(link)
    arriving_forget_all(link)
    pthread_mutex_unlock(&link.lock)
    store32(&link.has_ended, 1)
    link_tell(link)

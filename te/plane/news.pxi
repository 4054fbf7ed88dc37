# SPDX-License-Identifier: Apache-2.0
# What is told to Python, and to workers.

cdef void tell(Plane *p, Link *link, int rail, u32 epoch, int code, int errnum) noexcept nogil:
    """That a link has died (rail -1; why is in the link), or what became of a pair. Of each rail only
    the last is kept, which is where it stands, so that nothing can be lost."""
    cdef News *news
    pthread_mutex_lock(&p.events_lock)
    if rail < 0:
        link.has_died = True
    else:
        news = &link.news[rail]
        if not news.is_new or news.epoch <= epoch:
            news.is_new = True
            news.epoch, news.code, news.errnum = epoch, code, errnum
    if not link.has_news:
        link.has_news = True
        add32(&link.refs, 1)
        link.next_news = p.news
        p.news = link
        eventfd_write(p.events_eventfd, 1)
    pthread_mutex_unlock(&p.events_lock)


cdef void wake(Worker *w) noexcept nogil:
    store32(&w.kicked, 1)
    if load32(&w.sleeping) and swap32(&w.sleeping, 0):
        eventfd_write(w.eventfd, 1)


cdef void kick(Rail *r) noexcept nogil:
    """Has the rail's worker look for something to send."""
    store32(&r.kick, 1)
    wake(r.worker)

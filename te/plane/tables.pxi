# SPDX-License-Identifier: Apache-2.0
# What the plane keeps books of: maps and regions. And what is told to Python.

cdef void *need(size_t nbytes) noexcept nogil:
    """Zeroed memory for bookkeeping. Without a few hundred bytes nothing can go on."""
    cdef void *p = calloc(1, nbytes)
    if p == NULL:
        abort()
    return p


# -- maps

cdef inline u64 map_slot(Map *m, u64 key) noexcept nogil:
    return ((key * <u64>0x9E3779B97F4A7C15) >> 17) & (m.size - 1)


cdef void *map_get(Map *m, u64 key) noexcept nogil:
    if m.count == 0:
        return NULL
    cdef u64 i = map_slot(m, key)
    while m.values[i] != NULL:
        if m.keys[i] == key:
            return m.values[i]
        i = (i + 1) & (m.size - 1)
    return NULL


cdef void map_put(Map *m, u64 key, void *value) noexcept nogil:
    """The key must not be in it."""
    cdef Map bigger
    cdef u64 i
    if 2 * (m.count + 1) > m.size:
        bigger.size = 2 * m.size if m.size else 16
        bigger.count = 0
        bigger.keys = <u64 *>need(bigger.size * sizeof(u64))
        bigger.values = <void **>need(bigger.size * sizeof(void *))
        for i in range(m.size):
            if m.values[i] != NULL:
                map_put(&bigger, m.keys[i], m.values[i])
        map_free(m)
        m[0] = bigger
    i = map_slot(m, key)
    while m.values[i] != NULL:
        i = (i + 1) & (m.size - 1)
    m.keys[i] = key
    m.values[i] = value
    m.count += 1


cdef void *map_take(Map *m, u64 key) noexcept nogil:
    """Removes the key; its value, or NULL when it is not there."""
    if m.count == 0:
        return NULL
    cdef u64 i = map_slot(m, key), hole, home
    while m.values[i] != NULL and m.keys[i] != key:
        i = (i + 1) & (m.size - 1)
    cdef void *value = m.values[i]
    if value == NULL:
        return NULL
    m.count -= 1
    hole = i
    m.values[hole] = NULL
    while True:  # Moves up whatever could no longer be found across the hole.
        i = (i + 1) & (m.size - 1)
        if m.values[i] == NULL:
            return value
        home = map_slot(m, m.keys[i])
        if ((i - home) & (m.size - 1)) >= ((i - hole) & (m.size - 1)):
            m.keys[hole] = m.keys[i]
            m.values[hole] = m.values[i]
            m.values[i] = NULL
            hole = i


cdef void map_free(Map *m) noexcept nogil:
    free(m.keys)
    free(m.values)
    memset(m, 0, sizeof(Map))


# -- regions

cdef void region_drop(Region *r) noexcept nogil:
    if add32(&r.refs, -1) == 0:
        free(r.keys)
        free(r)


cdef void await_readers(Region *r, u64 until_ns) noexcept nogil:
    """Returns when no transfer reads from it any more, or the time is over."""
    cdef timespec pause
    pause.tv_sec = 0
    pause.tv_nsec = 200000
    while load32(&r.readers) and now_ns() < until_ns:
        nanosleep(&pause, NULL)


cdef void snapshot_free(Snapshot *s) noexcept nogil:
    cdef u32 i
    for i in range(s.count):
        region_drop(s.regions[i])
    free(s.regions)
    free(s)


cdef void snapshots_reclaim(Plane *p) noexcept nogil:
    """Frees the retired that no worker can be using: each has left the section it was in."""
    cdef Snapshot *s = p.retired
    cdef Snapshot *kept = NULL
    cdef Snapshot *older
    cdef u32 i
    cdef bint used
    while s != NULL:
        older = s.older
        used = False
        for i in range(p.workers_n):
            if s.seen[i] & 1 and load64(&p.workers[i].inside) == s.seen[i]:
                used = True
        if used:
            s.older = kept
            kept = s
        else:
            snapshot_free(s)
        s = older
    p.retired = kept


cdef void snapshot_publish(Plane *p, Snapshot *new) noexcept nogil:
    """Callers hold the interpreter lock, which makes them one at a time."""
    cdef Snapshot *old = p.regions
    cdef u32 i
    store_pointer(&p.regions, new)
    if old != NULL:
        for i in range(p.workers_n):
            old.seen[i] = load64(&p.workers[i].inside)
        old.older = p.retired
        p.retired = old
    snapshots_reclaim(p)


cdef inline u32 region_above(Snapshot *s, u64 address) noexcept nogil:
    """Index of the first region that starts above the address."""
    cdef u32 low = 0, high = s.count, middle
    while low < high:
        middle = (low + high) >> 1
        if s.regions[middle].start <= address:
            low = middle + 1
        else:
            high = middle
    return low


cdef bint is_registered(
    Snapshot *s, u64 address, u64 nbytes, u64 newest, uint8_t *touched
) noexcept nogil:
    """Whether every byte lies in regions, which may touch, with serials up to `newest`; notes the
    indices of the regions. Any u64 is safe here."""
    cdef u32 i = region_above(s, address)
    cdef u64 end = address + nbytes
    if i == 0 or end < address or address >= s.regions[i - 1].end:
        return False
    i -= 1
    while s.regions[i].serial <= newest:
        if touched != NULL:
            touched[i] = 1
        if end <= s.regions[i].end:
            return True
        i += 1
        if i == s.count or s.regions[i].start != s.regions[i - 1].end:
            return False
    return False


cdef inline u64 gap(u64 start, u64 end, u64 address) noexcept nogil:
    """How far the address lies from the range."""
    if address < start:
        return start - address
    return address - end if address >= end else 0


cdef void say_nearest(
    char *text, u64 address, u64 nbytes, u32 count, u64 start, u64 end
) noexcept nogil:
    """The sentence for a range that is not registered, of which [start, end) is the nearest of
    `count`; te.memory says the same of a source. It fits into half a text."""
    cdef int n = snprintf(
        text, TEXT_MAX // 2, b"%llu bytes at 0x%llx lie outside the registered memory; ",
        <unsigned long long>nbytes, <unsigned long long>address)
    if count == 0:
        snprintf(text + n, TEXT_MAX // 2 - n, b"nothing is registered")
        return
    snprintf(
        text + n, TEXT_MAX // 2 - n, b"the nearest of %u regions is [0x%llx, 0x%llx) of %llu bytes",
        count, <unsigned long long>start, <unsigned long long>end,
        <unsigned long long>(end - start))


cdef void say_outside(Snapshot *s, u64 address, u64 nbytes, char *text) noexcept nogil:
    cdef Region *near = NULL
    cdef u32 i
    for i in range(s.count):
        if near == NULL or gap(s.regions[i].start, s.regions[i].end, address) < gap(
            near.start, near.end, address
        ):
            near = s.regions[i]
    if near == NULL:
        say_nearest(text, address, nbytes, 0, 0, 0)
    else:
        say_nearest(text, address, nbytes, s.count, near.start, near.end)


# -- what Python is told

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

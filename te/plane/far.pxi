# SPDX-License-Identifier: Apache-2.0
# RDMA, the source's side: the other side's memory, as it has told.

cdef bint on_table(Rail *r, Header *h) noexcept nogil:
    """The destination's memory anew, or the rest of it: ranges that rise and do not overlap. False
    after a violation."""
    cdef Link *link = r.link
    cdef Far *items = <Far *>r.body
    cdef Far *table
    cdef u32 i, first = 0 if h.flags & TABLE_FIRST else link.table_n
    cdef u64 end = link.table[first - 1].end if first else 0
    if first + h.count > TABLE_RANGES_MAX:
        violate(r, b"more ranges of registered memory than an engine can have")
        return False
    for i in range(h.count):
        if items[i].start < end or items[i].end <= items[i].start:
            violate(r, b"ranges of registered memory that are empty, or not in their order")
            return False
        if not 0 < items[i].rights <= REMOTE_RIGHTS:
            violate(r, b"registered memory with rights that there are not")
            return False
        end = items[i].end
    if first + h.count > link.table_room:
        table = <Far *>realloc(link.table, 2 * (first + h.count) * sizeof(Far))
        if table == NULL:
            link_die(link, BROKE, ENOMEM, NULL)
            return False
        link.table = table
        link.table_room = 2 * (first + h.count)
    if h.count:
        memcpy(link.table + first, items, h.count * sizeof(Far))
    link.table_n = first + h.count
    return True


cdef inline u32 far_above(Link *link, u64 address) noexcept nogil:
    """Index of the first range that starts above the address."""
    cdef u32 low = 0, high = link.table_n, middle
    while low < high:
        middle = (low + high) >> 1
        if link.table[middle].start <= address:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline Far *far_key(Link *link, u64 address) noexcept nogil:
    """The range that has the address; NULL if there is none."""
    cdef u32 above = far_above(link, address)
    if above == 0 or address >= link.table[above - 1].end:
        return NULL
    return &link.table[above - 1]


cdef inline u32 right_of(Transfer *t) noexcept nogil:
    """What a transfer over RDMA does at the other side."""
    return RIGHT_READ if t.kind == READ_DIRECT else right_to_write(t.tag)


cdef bint far_is_registered(Link *link, u64 address, u64 nbytes) noexcept nogil:
    """Whether every byte lies in the other side's ranges, which may touch, whatever they allow."""
    cdef u32 above = far_above(link, address)
    cdef u64 end = address
    if above:
        end = link.table[above - 1].end
        while above < link.table_n and link.table[above].start == end:
            end = link.table[above].end
            above += 1
    return address + nbytes <= end


cdef char *text_outside(Link *link, Transfer *t, u64 address, u64 nbytes) noexcept nogil:
    """Why the other side would refuse it."""
    cdef char *text = <char *>need(TEXT_MAX)
    cdef u32 i, near = 0
    cdef int n = snprintf(
        text, TEXT_MAX, b"the %s: ", b"source" if t.kind == READ_DIRECT else b"destination")
    for i in range(link.table_n):
        if gap(link.table[i].start, link.table[i].end, address) < gap(
            link.table[near].start, link.table[near].end, address
        ):
            near = i
    if far_is_registered(link, address, nbytes):
        say_not_allowed(text + n, address, nbytes, right_of(t))
    elif link.table_n:
        say_nearest(
            text + n, address, nbytes, link.table_n, link.table[near].start, link.table[near].end)
    else:
        say_nearest(text + n, address, nbytes, 0, 0, 0)
    return text


cdef void check_far(Link *link, Transfer *t) noexcept nogil:
    """Gives a transfer up before a byte of it moves, if one of its blocks has no place at the other
    side. Under the rail's lock, which keeps the table as it is, and the link's: 1 to 4 ns a block,
    25 where each lies in another of 61 ranges."""
    cdef Far *table = link.table
    cdef Block *b
    cdef u64 i, address, start = 0, end = 0  # of ranges that touch, as far as was looked
    cdef u32 above = 0, right = right_of(t)
    cdef bint is_read = t.kind == READ_DIRECT
    for i in range(t.n):
        b = &t.blocks[i]
        address = b.src if is_read else b.dst
        if not start <= address < end:
            above = far_above(link, address)
            if above and table[above - 1].rights & right:
                start, end = table[above - 1].start, table[above - 1].end
        while start <= address < end < address + b.nbytes and (
            above < link.table_n and table[above].start == end and table[above].rights & right
        ):
            end = table[above].end
            above += 1
        if not start <= address < end or address + b.nbytes > end:
            t.text = text_outside(link, t, address, b.nbytes)
            t.verdict = WAS_REFUSED
            return

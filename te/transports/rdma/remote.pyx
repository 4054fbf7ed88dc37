# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdio cimport snprintf
from libc.stdlib cimport realloc
from libc.string cimport memcpy
from te.core.heap cimport need
from te.core.link cimport BROKE, WAS_REFUSED, link_die, violate
from te.core.posix cimport ENOMEM
from te.core.regions cimport *
from te.core.wire cimport Block, Header, REMOTE_RIGHTS, TABLE_FIRST, TABLE_RANGES_MAX, TEXT_MAX
from te.transports.rdma.state cimport direct_of


cdef bint on_table(Connection *c) noexcept nogil:
    cdef Link *link = c.link
    cdef Direct *d = direct_of(link)
    cdef Header *h = &c.head
    cdef RemoteRange *items = <RemoteRange *>c.body
    cdef RemoteRange *table
    cdef u32 i, first = 0 if h.flags & TABLE_FIRST else d.table_n
    cdef u64 end = d.table[first - 1].end if first else 0
    if first + h.count > TABLE_RANGES_MAX:
        violate(link, b"more ranges of registered memory than an engine can have")
        return False
    for i in range(h.count):
        if items[i].start < end or items[i].end <= items[i].start:
            violate(link, b"ranges of registered memory that are empty, or not in their order")
            return False
        if not 0 < items[i].rights <= REMOTE_RIGHTS:
            violate(link, b"registered memory with rights that there are not")
            return False
        end = items[i].end
    if first + h.count > d.table_room:
        table = <RemoteRange *>realloc(d.table, 2 * (first + h.count) * sizeof(RemoteRange))
        if table == NULL:
            link_die(link, BROKE, ENOMEM, NULL)
            return False
        d.table = table
        d.table_room = 2 * (first + h.count)
    if h.count:
        memcpy(d.table + first, items, h.count * sizeof(RemoteRange))
    d.table_n = first + h.count
    return True


cdef bint is_registered_there(Direct *d, u64 address, u64 nbytes) noexcept nogil:
    """Whether every byte lies in the other side's ranges, which may touch, whatever they allow."""
    cdef u32 above = remote_above(d, address)
    cdef u64 end = address
    if above:
        end = d.table[above - 1].end
        while above < d.table_n and d.table[above].start == end:
            end = d.table[above].end
            above += 1
    return address + nbytes <= end


cdef char *text_outside(Link *link, Transfer *t, u64 address, u64 nbytes) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef char *text = <char *>need(TEXT_MAX)
    cdef u32 i, near = 0
    cdef int n = snprintf(text, TEXT_MAX, b"the %s: ", b"source" if t.is_read else b"destination")
    for i in range(d.table_n):
        if gap(d.table[i].start, d.table[i].end, address) < gap(
            d.table[near].start, d.table[near].end, address
        ):
            near = i
    if is_registered_there(d, address, nbytes):
        say_not_allowed(text + n, address, nbytes, remote_right(t))
    elif d.table_n:
        say_nearest(
            text + n, address, nbytes, d.table_n, d.table[near].start, d.table[near].end)
    else:
        say_nearest(text + n, address, nbytes, 0, 0, 0)
    return text


cdef void check_remote(Link *link, Transfer *t) noexcept nogil:
    cdef Direct *d = direct_of(link)
    cdef RemoteRange *table = d.table
    cdef Block *b
    cdef u64 i, address, start = 0, end = 0  # of ranges that touch, as far as was looked
    cdef u32 above = 0, right = remote_right(t)
    for i in range(t.n):
        b = &t.blocks[i]
        address = b.src if t.is_read else b.dst
        if not start <= address < end:
            above = remote_above(d, address)
            if above and table[above - 1].rights & right:
                start, end = table[above - 1].start, table[above - 1].end
        while start <= address < end < address + b.nbytes and (
            above < d.table_n and table[above].start == end and table[above].rights & right
        ):
            end = table[above].end
            above += 1
        if not start <= address < end or address + b.nbytes > end:
            t.text = text_outside(link, t, address, b.nbytes)
            t.verdict = WAS_REFUSED
            return

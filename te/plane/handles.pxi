# SPDX-License-Identifier: Apache-2.0
# Links and transfers as Python holds them.

cdef int best_kind(u64 total, u64 n, bint is_shared) noexcept nogil:
    """How blocks go to a peer on the same host: copied by it, or through the connection.

    process_vm_readv costs 0.5 us and more for each block, and the ring a second copy.
    """
    return PULL if is_shared or total >= n * PULL_BLOCK_BYTES else SEGMENT


cdef class LinkHandle:
    cdef Link *k
    cdef Engine engine  # The plane must outlive the link.

    def __dealloc__(self):
        if self.k != NULL:
            if not load32(&self.k.dead) and self.k.rails_n:
                link_die(self.k, PEER_CLOSED, 0, NULL)
            link_drop(self.k)

    @property
    def number(self):
        return self.k.number

    @property
    def alive(self):
        return not load32(&self.k.dead)

    def name_peer(self, bytes peer):
        memcpy(&self.k.peer, <char *>peer, min(<size_t>len(peer), sizeof(Identity)))

    @property
    def rails(self):
        return self.k.rails_alive

    @property
    def death(self):
        """(code, errno, text)"""
        return self.k.code, self.k.errnum, (<bytes>self.k.text).decode("ascii", "replace")

    def add_rail(self, int fd, int rings_fd):
        cdef int errnum = 0
        cdef bint full
        pthread_mutex_lock(&self.k.lock)
        full = self.k.rails_n == RAILS_MAX or load32(&self.k.dead) or load32(&self.k.plane.stop)
        if not full:
            errnum = rail_new(self.k.plane, self.k, fd, rings_fd)
        pthread_mutex_unlock(&self.k.lock)
        if errnum:
            raise OSError(errnum, f"cannot use the connection: {os.strerror(errnum)}")
        if not full:
            wake(self.k.rails[self.k.rails_n - 1].worker)
        return not full

    def add_mapping(self, u64 serial, u64 start, int fd, u64 nbytes):
        cdef Mapping *m = self.k.mappings
        cdef u32 count = 0
        cdef u64 mapped = file_bytes(fd), total = mapped
        if nbytes == 0 or mapped < nbytes:
            raise OSError(EFAULT, "the memory file is too short, or can be made so")
        if start + nbytes < start:
            raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are not an address range")
        while m != NULL:
            count += 1
            total += m.mapped
            if m.serial == serial or (m.start < start + nbytes and start < m.end):
                raise OSError(EINVAL, f"{nbytes} bytes at {start:#x} are mapped already")
            m = m.next
        if count >= MAPPINGS_MAX or total > <u64>MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{count} mappings and {total} bytes are too many for a link")
        total = load64(&self.k.plane.mapped_bytes) + mapped
        if total > <u64>PLANE_MAPPED_GIB_MAX << 30:
            raise OSError(ENOMEM, f"{total} bytes of all peers are too many to be mapped")
        cdef void *near = mmap(NULL, mapped, PROT_READ, MAP_SHARED, fd, 0)
        if near == MAP_FAILED:
            raise OSError(last_errno(), os.strerror(last_errno()))
        m = <Mapping *>need(sizeof(Mapping))
        add64(&self.k.plane.mapped_bytes, mapped)
        m.serial, m.start, m.end, m.mapped = serial, start, start + nbytes, mapped
        m.near = <uint8_t *>near
        m.next = self.k.mappings
        store_pointer(&self.k.mappings, m)

    def remove_mapping(self, u64 serial):
        cdef Mapping *m = self.k.mappings
        cdef Mapping *before = NULL
        cdef bint done
        while m != NULL and m.serial != serial:
            before = m
            m = m.next
        if m == NULL:
            return True
        store_pointer(&self.k.mappings if before == NULL else &before.next, m.next)
        with nogil:
            done = quiesce(&self.k.plane.sections, self.k, NULL, QUIESCE_NS)
        if done:
            unmap(self.k.plane, m)
        else:  # Somebody still copies out of it; nobody does once the rails have gone.
            m.next = self.k.unlinked
            self.k.unlinked = m
        return done

    def die(self, int code):
        link_die(self.k, code, 0, NULL)

    def fence(self):
        store32(&self.k.dropped, 1)

    def quiesce(self, double timeout_s):
        cdef bint done
        with nogil:
            done = quiesce(
                &self.k.plane.sections, self.k, NULL, <u64>(max(timeout_s, 0.0) * 1e9))
        return done

    @property
    def ended(self):
        return load32(&self.k.has_ended) != 0 or (
            load32(&self.k.dead) != 0 and self.k.rails_n == 0)

    # -- over RDMA

    def add_pair(self, u64 endpoint, u32 index, u32 epoch, u32 near_nic, u32 far_nic, u64 fences):
        cdef int errnum
        if index >= RAILS_MAX or near_nic >= NICS_MAX or far_nic >= NICS_MAX:
            raise ValueError(f"no rail {index} between the devices {near_nic} and {far_nic}")
        errnum = pair_new(self.k, <Endpoint *>endpoint, index, epoch, near_nic, far_nic, fences)
        if errnum:
            raise OSError(errnum, f"ibv_post_recv: {os.strerror(errnum)}")

    @property
    def fences(self):
        cdef u64 fences
        pthread_mutex_lock(&self.k.lock)
        fences = self.k.fences
        pthread_mutex_unlock(&self.k.lock)
        return fences

    def rail_flows(self, u32 count):
        cdef u64 moved[RAILS_MAX]
        cdef u64 busy_ns[RAILS_MAX]
        pthread_mutex_lock(&self.k.lock)
        memcpy(moved, self.k.rail_moved, sizeof(moved))
        memcpy(busy_ns, self.k.rail_busy_ns, sizeof(busy_ns))
        pthread_mutex_unlock(&self.k.lock)
        return [(load64(&self.k.rail_bytes[i]), load64(&self.k.rail_flying[i]),
                 moved[i], busy_ns[i] * 1e-9) for i in range(min(count, <u32>RAILS_MAX))]

    def has_grant(self, Revocation revocation):
        cdef bint found
        pthread_mutex_lock(&self.k.lock)
        found = has_grant(self.k, revocation.o)
        pthread_mutex_unlock(&self.k.lock)
        return found

    def break_pairs(self, double timeout_s):
        cdef Link *k = self.k
        cdef bint done
        with nogil:
            done = break_pairs(k, now_ns() + <u64>(max(timeout_s, 0.0) * 1e9))
        return done

    def submit(
        self, object blocks, u64 total, u64 tag, int kind, u32 unfinished_max, bytes pieces=b"",
        bytes least=b"",
    ):
        """A TransferHandle; or the index of the first block whose local side is not registered;
        or None when too many are unfinished."""
        cdef Py_buffer view
        PyObject_GetBuffer(blocks, &view, PyBUF_SIMPLE)
        try:
            return self.submit_blocks(
                <Block *>view.buf, view.len / sizeof(Block), total, tag, kind, unfinished_max,
                <Piece *><char *>pieces, <u32>(len(pieces) / sizeof(Piece)), least)
        finally:
            PyBuffer_Release(&view)

    cdef object submit_blocks(
        self, Block *blocks, u64 n, u64 total, u64 tag, int kind, u32 unfinished_max,
        Piece *pieces, u32 pieces_n, bytes least
    ):
        cdef Plane *p = self.k.plane
        cdef Link *k = self.k
        cdef Scan scan
        cdef Snapshot *s
        scan.begun_ns = now_ns()
        scan.may_merge = pieces_n == 0
        while True:
            s = p.regions.now
            scan.snapshot = s
            scan.touched = <uint8_t *>need(s.count + 1)
            scan.out = blocks_new(k, n)
            if scan.out == NULL:
                free(scan.touched)
                raise MemoryError(f"no memory for the descriptors of {n} blocks")
            if n <= KEEP_LOCK_BLOCKS:
                scan_blocks(&scan, blocks, n, kind == READ)
                break
            # Inside no mark: the regions' own references keep the snapshot's regions, and a copy
            # of the snapshot is what is looked at.
            s = scan.snapshot = snapshot_copy(s)
            with nogil:
                scan_blocks(&scan, blocks, n, kind == READ)
            if s.version == p.regions.now.version:
                snapshot_free(s)
                scan.snapshot = s = p.regions.now
                break
            snapshot_free(s)
            free(scan.touched)
            blocks_free(k, scan.out)
        if scan.bad < n:
            free(scan.touched)
            blocks_free(k, scan.out)
            return scan.bad
        return self.enqueue(&scan, total, tag, kind, unfinished_max, pieces, pieces_n, least)

    cdef object enqueue(
        self, Scan *scan, u64 total, u64 tag, int kind, u32 unfinished_max,
        Piece *pieces, u32 pieces_n, bytes least
    ):
        cdef Link *k = self.k
        cdef Snapshot *s = scan.snapshot
        cdef Region **held = NULL
        cdef u32 i, n = 0
        cdef Transfer *t
        cdef bint alive, full = False, listed = False, is_shared = True
        held = <Region **>need((s.count + 1) * sizeof(Region *))
        if pieces_n:
            kind = READ_DIRECT if kind == READ else WRITE_DIRECT
        if kind != READ:
            for i in range(s.count):
                if scan.touched[i]:
                    held[n] = s.regions[i]
                    add32(&held[n].refs, 1)
                    add32(&held[n].readers, 1)
                    is_shared &= held[n].is_shared
                    n += 1
        free(scan.touched)
        if kind == SEGMENT and k.is_pull:
            kind = best_kind(total, scan.out_n, is_shared)
        t = transfer_new(k, kind, tag, scan.out, scan.out_n, total, held, n)
        t.submitted_ns = scan.begun_ns
        if kind == READ:
            t.opening = opening_for(scan.out, scan.out_n)
        if pieces_n:
            t.pieces = <Piece *>need(pieces_n * sizeof(Piece))
            memcpy(t.pieces, pieces, pieces_n * sizeof(Piece))
            t.pieces_n = pieces_n
            memcpy(t.least, <char *>least, min(<size_t>len(least), sizeof(t.least)))
            line_up(t)
        pthread_mutex_lock(&k.lock)
        alive = not load32(&k.dead) and k.rails_alive
        if alive and k.unfinished >= unfinished_max:
            full = True
        elif not alive:
            settle(t, FAILED, LINK_DIED)
        elif kind == READ and t.n == 0:
            settle(t, DONE, NO_REASON)  # There is nothing to ask the other side for.
        else:
            enlist(k, t)
            listed = True
        pthread_mutex_unlock(&k.lock)
        if full:
            discard_transfer(t)
            return None
        if listed:
            if kind == PULL:
                send_inline(k, SENDS_PER_TURN)
            elif kind != READ and (total <= INLINE_BYTES or k.is_direct):
                send_inline(k, 1)
            else:
                kick_rails(k, total)
        cdef TransferHandle handle = TransferHandle.__new__(TransferHandle)
        handle.t = t
        handle.link = self
        return handle


cdef Opening *opening_for(Block *blocks, u64 n) noexcept nogil:
    """What the replies to a read may be written under: its destinations, and nothing else."""
    cdef Range *ranges = <Range *>need((n + 1) * sizeof(Range))
    cdef u64 i
    for i in range(n):
        ranges[i].start = blocks[i].dst
        ranges[i].end = blocks[i].dst + blocks[i].nbytes
    return opening_new(0, ranges, ranges_normalise(ranges, n))


cdef void discard_transfer(Transfer *t) noexcept:
    """One that was never listed."""
    cdef u32 i
    for i in range(t.held_n):
        add32(&t.held[i].readers, -1)
        region_drop(t.held[i])
    free(t.held)
    blocks_free(t.link, t.blocks)
    free(t.pieces)
    transfer_drop(t)


cdef void scan_blocks(Scan *scan, Block *blocks, u64 n, bint is_read) noexcept nogil:
    """One pass: are the local sides registered, and which blocks touch so that they can be one."""
    cdef Snapshot *s = scan.snapshot
    cdef Region *hit = NULL
    cdef Block b
    cdef Block *last = NULL
    cdef u64 i, address
    scan.out_n = 0
    scan.bad = n
    for i in range(n):
        b = blocks[i]
        address = b.dst if is_read else b.src
        if hit == NULL or address < hit.start or address + b.nbytes > hit.end:
            if not is_registered(s, address, b.nbytes, s.newest, OWN_USE, scan.touched):
                scan.bad = i
                return
            hit = s.regions[regions_above(s.regions, s.count, address) - 1]
        if scan.may_merge and last != NULL and last.src + last.nbytes == b.src and last.dst + last.nbytes == b.dst:
            last.nbytes += b.nbytes
            continue
        last = &scan.out[scan.out_n]
        scan.out_n += 1
        last[0] = b


cdef class TransferHandle:
    cdef Transfer *t
    cdef LinkHandle link

    def __dealloc__(self):
        if self.t != NULL:
            transfer_drop(self.t)

    @property
    def name(self):
        return <u64>self.t

    def status(self):
        return load32(&self.t.status)

    def failure(self):
        """(code, errno, text), once the status is FAILED."""
        if self.t.code == LINK_DIED:
            return self.link.death
        text = "" if self.t.text == NULL else (<bytes>self.t.text).decode("ascii", "replace")
        return self.t.code, self.t.fault, text

    def cancel_requested(self):
        return load32(&self.t.cancel) != 0

    def duration_s(self):
        cdef u64 end = self.t.settled_ns if load32(&self.t.status) else now_ns()
        return (end - self.t.submitted_ns) * 1e-9

    def subscribe(self):
        """True if there is an outcome; False if `Engine.wait_notices` will name this transfer."""
        return not subscribe(self.t)

    def cancel(self):
        cdef bint done = True
        if self.t.kind == READ or self.t.kind == READ_DIRECT:
            with nogil:
                done = cancel_read(self.t)
        else:
            cancel(self.t)
        return done

    def wait(self, double timeout_s):
        cdef Transfer *t = self.t
        cdef u64 until = now_ns() + <u64>(min(max(timeout_s, 0.0), 1e9) * 1e9), now
        if load32(&t.status) == PENDING and t.total <= INLINE_BYTES:
            # Taking the interpreter lock back costs up to 5 ms beside a busy thread; an answer to
            # a small write comes in less time than anybody else would be let in.
            drive(t, min(until, now_ns() + KEEP_LOCK_NS))
        if load32(&t.status) == PENDING and t.total <= INLINE_BYTES:
            with nogil:
                drive(t, min(until, now_ns() + DRIVE_NS))
        while load32(&t.status) == PENDING:
            now = now_ns()
            if now >= until:
                return False
            with nogil:
                add32(&t.waiters, 1)
                futex_wait(&t.status, PENDING, min(until - now, <u64>100000000))
                add32(&t.waiters, -1)
            PyErr_CheckSignals()
        return True


cdef bint break_pairs(Link *k, u64 until_ns) noexcept nogil:
    """Has the link's worker drain every pair; False when that was not done in time."""
    cdef u64 now = now_ns()
    cdef u32 mine = add32(&k.breaks_asked, 1), done = load32(&k.breaks_done)
    wake(k.worker)
    while not load32(&k.has_ended) and mine - done - 1 < <u32>1 << 31:  # `done` is below `mine`.
        if now >= until_ns:
            return False
        futex_wait(&k.breaks_done, done, min(until_ns - now, <u64>10000000))
        done = load32(&k.breaks_done)
        now = now_ns()
    return True


cdef bint cancel_read(Transfer *t) noexcept nogil:
    """Ends a read, also one that has an outcome, and sees that nothing of it lands any more; False
    when that was not so in time. Each call looks anew."""
    cdef Link *link = t.link
    cdef u64 until = now_ns() + UNREAD_NS
    if t.kind == READ_DIRECT:
        # It ends with its last request; after a while by breaking its rails.
        cancel(t)
        while load32(&t.status) == PENDING and now_ns() < until:
            futex_wait(&t.status, PENDING, 1000000)
        return load32(&t.status) != PENDING or break_pairs(link, now_ns() + QUIESCE_NS)
    store32(&t.opening.is_open, 0)
    if load32(&t.status) == PENDING:
        store32(&t.cancel, 1)
    if not quiesce(&link.plane.sections, NULL, t.opening, QUIESCE_NS):
        return False
    pthread_mutex_lock(&link.lock)
    t.is_quiet = True
    if t.is_listed:
        stop(t)
    pthread_mutex_unlock(&link.lock)
    return True


cdef bint subscribe(Transfer *t) noexcept:
    cdef u32 none = 0
    return swap_if(&t.notify, none, 1) != 2

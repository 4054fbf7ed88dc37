# SPDX-License-Identifier: Apache-2.0
# What is used of Linux and of the C library.

from libc.stdint cimport int64_t
from te.core.sync cimport timespec, u32, u64

cdef extern from "<sys/types.h>" nogil:
    ctypedef int pid_t

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len
    ssize_t process_vm_readv(
        pid_t pid, const iovec *near, unsigned long near_n,
        const iovec *far, unsigned long far_n, unsigned long flags)
    ssize_t preadv(int fd, const iovec *v, int n, int64_t offset)
    ssize_t pwritev(int fd, const iovec *v, int n, int64_t offset)

cdef extern from "<arpa/inet.h>" nogil:
    u32 htonl(u32 v)
    u32 ntohl(u32 v)

cdef extern from "<malloc.h>" nogil:
    size_t malloc_usable_size(void *p)

cdef extern from "<sys/socket.h>" nogil:
    struct msghdr:
        void *msg_name
        unsigned int msg_namelen
        iovec *msg_iov
        size_t msg_iovlen
        void *msg_control
        size_t msg_controllen
        int msg_flags
    ssize_t sendmsg(int fd, const msghdr *m, int flags)
    ssize_t recvmsg(int fd, msghdr *m, int flags)
    ssize_t recv(int fd, void *p, size_t n, int flags)
    ssize_t send(int fd, const void *p, size_t n, int flags)
    enum: MSG_DONTWAIT, MSG_NOSIGNAL

cdef extern from "<sys/epoll.h>" nogil:
    ctypedef union epoll_data_t:
        void *ptr
    struct epoll_event:
        u32 events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int op, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int n, int timeout_ms)
    enum: EPOLLIN, EPOLLOUT, EPOLLET, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, EPOLL_CLOEXEC

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd(unsigned int value, int flags)
    int eventfd_read(int fd, u64 *value)
    int eventfd_write(int fd, u64 value)
    enum: EFD_NONBLOCK, EFD_CLOEXEC

cdef extern from "<sys/timerfd.h>" nogil:
    struct itimerspec:
        timespec it_interval, it_value
    int timerfd_create(int clock, int flags)
    int timerfd_settime(int fd, int flags, const itimerspec *value, itimerspec *before)
    enum: TFD_CLOEXEC

cdef extern from "<time.h>" nogil:
    enum: CLOCK_MONOTONIC

cdef extern from "<poll.h>" nogil:
    struct pollfd:
        int fd
        short events, revents
    int ppoll(pollfd *fds, unsigned long n, const timespec *timeout, const void *signals)
    enum: POLLIN, POLLRDHUP

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int ftruncate(int fd, int64_t nbytes)
    int64_t lseek(int fd, int64_t offset, int whence)
    long sysconf(int name)
    enum: SEEK_END, _SC_PAGESIZE

cdef extern from "<fcntl.h>" nogil:
    int fcntl(int fd, int command, ...)
    enum: F_GET_SEALS, F_SEAL_SHRINK, F_SEAL_WRITE

cdef extern from "<sys/vfs.h>" nogil:
    ctypedef struct FileSystem "struct statfs":
        long f_type
    int fstatfs(int fd, FileSystem *s)

cdef extern from "<sys/mman.h>" nogil:
    void *mmap(void *address, size_t nbytes, int protection, int flags, int fd, int64_t offset)
    int munmap(void *address, size_t nbytes)
    int mincore(void *address, size_t nbytes, unsigned char *there)
    int memfd_create(const char *name, unsigned int flags)
    enum: MFD_CLOEXEC
    void *MAP_FAILED
    enum: PROT_READ, PROT_WRITE, MAP_SHARED

cdef extern from "<errno.h>" nogil:
    enum: E2BIG, EAGAIN, EBADMSG, EINTR, EIO, EFAULT, EINVAL, EMSGSIZE, ENOMEM, ENOSYS, EOPNOTSUPP
    enum: EPIPE, ESHUTDOWN, ETIMEDOUT


cdef enum:
    F_SEAL_FUTURE_WRITE = 0x10  # C libraries before 2.29 have no name for it
    HUGETLBFS_MAGIC = 0x958458F6  # linux/magic.h


cdef inline ssize_t process_read(pid_t pid, u64 address, void *into, size_t nbytes) noexcept nogil:
    """Of another process's memory; as process_vm_readv(2)."""
    cdef iovec near, far
    near.iov_base, far.iov_base = into, <void *>address
    near.iov_len = far.iov_len = nbytes
    return process_vm_readv(pid, &near, 1, &far, 1, 0)


cdef inline int poll_one(int fd, short events, u64 ns) noexcept nogil:
    """Of one descriptor, for so much time at most, which is less than a second; as ppoll(2)."""
    cdef pollfd p
    cdef timespec most
    p.fd = fd
    p.events = events
    most.tv_sec = 0
    most.tv_nsec = ns
    return ppoll(&p, 1, &most, NULL)


cdef inline void ring_in(int timer, u64 ns) noexcept nogil:
    """Has a timer (timerfd_create(2)) ring once, in so much time, which is less than a second. It wakes nobody up
    now, and costs half a microsecond."""
    cdef itimerspec once
    once.it_interval.tv_sec = once.it_interval.tv_nsec = once.it_value.tv_sec = 0
    once.it_value.tv_nsec = ns
    timerfd_settime(timer, 0, &once, NULL)


cdef inline bint is_of_huge_pages(int fd) noexcept nogil:
    cdef FileSystem of
    return fstatfs(fd, &of) == 0 and <u32>of.f_type == HUGETLBFS_MAGIC


cdef inline bint keeps_pages(int fd) noexcept nogil:
    """Whether nobody can take pages out of a memory file: nobody punches holes where nobody writes,
    also who has it mapped for writing since before that seal (madvise(2), MADV_REMOVE)."""
    cdef int seals = fcntl(fd, F_GET_SEALS)
    return seals >= 0 and seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)


cdef inline u64 file_bytes(int fd) noexcept nogil:
    """Size of a memory file that can never shrink; 0 if it is none: touching what another process
    has cut off is a SIGBUS. So is a hole in one of huge pages once none of those is free. Ordinary
    files have no seals at all, -1."""
    cdef int seals = fcntl(fd, F_GET_SEALS)
    cdef int64_t nbytes
    if seals < 0 or not seals & F_SEAL_SHRINK:
        return 0
    if is_of_huge_pages(fd) and not keeps_pages(fd):
        return 0
    nbytes = lseek(fd, 0, SEEK_END)
    return <u64>nbytes if nbytes > 0 else 0

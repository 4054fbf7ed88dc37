# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.stdint cimport uint8_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memmove, memset
from te.core.channels cimport ChannelOps, channel_new, socket_ops
from te.core.heap cimport need
from te.core.posix cimport *
from te.core.sync cimport last_errno, load32, store32, u32, u64
from te.core.vectors cimport behind, file_copy

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)
    enum: RTLD_NOW

cdef enum:
    RECORD_BYTES = 64 << 10
    RECORD_HEAD_BYTES = 4
    TAG_BYTES = 16
    CIPHER_ROOM = 2 * (4 + (64 << 10) + 16)
    # In the file: one page that ends with the head of the record that goes out, its text, a page for
    # its tag, and the text of the record that came in.
    OUT_AT = 4096
    IN_AT = 4096 + RECORD_BYTES + 4096
    FILE_BYTES = 4096 + RECORD_BYTES + 4096 + RECORD_BYTES
    REKEY_RECORDS = 1 << 22
    NONCE_BYTES = 12
    CTRL_GET_TAG = 0x10
    CTRL_SET_TAG = 0x11

cdef struct Direction:
    void *cipher  # EVP_CIPHER_CTX
    uint8_t secret[32]
    u64 number  # of the next record, since the key was new
    u64 rekey_records

cdef struct Encrypted:
    Channel channel  # first
    # A file in memory, which the kernel copies from and to for the application: where the
    # application's memory has vanished that is -EFAULT, not a crash.
    int file
    uint8_t *base
    Direction out, into
    u64 out_from, out_left  # of the record in `base` that the socket has not taken yet
    u64 out_taken  # how many bytes of the application are in it
    uint8_t *cipher  # CIPHER_ROOM: what has come, from `cipher_from` on not opened yet
    u64 cipher_from, cipher_have
    u64 in_from, in_left  # of the record in `base` that was opened
    ssize_t failed  # 0, or why nothing more can come
    u32 ready  # atomic: there is more than the socket shows

cdef struct Crypto:  # of libcrypto 3
    void *(*cipher_new)() noexcept nogil
    void (*cipher_free)(void *) noexcept nogil
    int (*control)(void *, int, int, void *) noexcept nogil
    const void *(*aes_256_gcm)() noexcept nogil
    const void *(*sha256)() noexcept nogil
    int (*begin_encrypt)(void *, const void *, void *, const uint8_t *, const uint8_t *) noexcept nogil
    int (*encrypt)(void *, uint8_t *, int *, const uint8_t *, int) noexcept nogil
    int (*end_encrypt)(void *, uint8_t *, int *) noexcept nogil
    int (*begin_decrypt)(void *, const void *, void *, const uint8_t *, const uint8_t *) noexcept nogil
    int (*decrypt)(void *, uint8_t *, int *, const uint8_t *, int) noexcept nogil
    int (*end_decrypt)(void *, uint8_t *, int *) noexcept nogil
    uint8_t *(*hmac)(
        const void *, const void *, int, const uint8_t *, size_t, uint8_t *, unsigned int *
    ) noexcept nogil
    void (*cleanse)(void *, size_t) noexcept nogil
    bint is_complete

cdef Crypto crypto
memset(&crypto, 0, sizeof(crypto))


cdef void load_crypto():
    """Python's own _hashlib has it loaded, as a rule."""
    cdef void *library = dlopen(b"libcrypto.so.3", RTLD_NOW)
    cdef void **entry = <void **>&crypto
    cdef int i
    names = (
        b"EVP_CIPHER_CTX_new", b"EVP_CIPHER_CTX_free", b"EVP_CIPHER_CTX_ctrl", b"EVP_aes_256_gcm",
        b"EVP_sha256", b"EVP_EncryptInit_ex", b"EVP_EncryptUpdate", b"EVP_EncryptFinal_ex",
        b"EVP_DecryptInit_ex", b"EVP_DecryptUpdate", b"EVP_DecryptFinal_ex", b"HMAC",
        b"OPENSSL_cleanse",
    )
    if library == NULL:
        return
    for i, name in enumerate(names):
        entry[i] = dlsym(library, name)
        if entry[i] == NULL:
            return
    crypto.is_complete = True


load_crypto()


def has_libcrypto():
    return crypto.is_complete


# -- one direction

cdef bint expand(const uint8_t *secret, const char *label, size_t nbytes, uint8_t *key) noexcept nogil:
    """HKDF-Expand (RFC 5869, 2.3) to 32 bytes; `label` ends with the byte 1."""
    return crypto.hmac(
        crypto.sha256(), secret, SECRET_BYTES, <const uint8_t *>label, nbytes, key, NULL) != NULL


cdef bint new_key(Direction *d, bint encrypts) noexcept nogil:
    cdef uint8_t key[SECRET_BYTES]
    cdef bint good = expand(d.secret, b"te record key\0\x01", 15, key)
    if good and encrypts:
        good = crypto.begin_encrypt(d.cipher, crypto.aes_256_gcm(), NULL, key, NULL) > 0
    elif good:
        good = crypto.begin_decrypt(d.cipher, crypto.aes_256_gcm(), NULL, key, NULL) > 0
    crypto.cleanse(key, SECRET_BYTES)
    d.number = 0
    return good


cdef bint step(Direction *d, bint encrypts) noexcept nogil:
    """After a record: the next number, and in time the next key, from which nobody finds the last."""
    cdef uint8_t following[SECRET_BYTES]
    d.number += 1
    if d.number < d.rekey_records:
        return True
    if not expand(d.secret, b"te next secret\0\x01", 16, following):
        return False
    memcpy(d.secret, following, SECRET_BYTES)
    crypto.cleanse(following, SECRET_BYTES)
    return new_key(d, encrypts)


cdef void nonce_of(Direction *d, uint8_t *nonce) noexcept nogil:
    memset(nonce, 0, NONCE_BYTES)
    memcpy(nonce + 4, &d.number, sizeof(d.number))


cdef int encrypt_record(Direction *d, uint8_t *head, u32 nbytes) noexcept nogil:
    """Of the text behind the head, in place; 0 or -EIO."""
    cdef uint8_t nonce[NONCE_BYTES]
    cdef uint8_t *text = head + RECORD_HEAD_BYTES
    cdef int n = 0
    memcpy(head, &nbytes, RECORD_HEAD_BYTES)
    nonce_of(d, nonce)
    if (
        crypto.begin_encrypt(d.cipher, NULL, NULL, NULL, nonce) <= 0
        or crypto.encrypt(d.cipher, NULL, &n, head, RECORD_HEAD_BYTES) <= 0
        or crypto.encrypt(d.cipher, text, &n, text, nbytes) <= 0
        or crypto.end_encrypt(d.cipher, text + nbytes, &n) <= 0
        or crypto.control(d.cipher, CTRL_GET_TAG, TAG_BYTES, text + nbytes) <= 0
        or not step(d, True)
    ):
        return -EIO
    return 0


cdef int decrypt_record(Direction *d, uint8_t *head, u32 nbytes, uint8_t *text) noexcept nogil:
    """Into `text`, which has nothing of it afterwards unless it is good; 0 or -EBADMSG."""
    cdef uint8_t nonce[NONCE_BYTES]
    cdef uint8_t *encrypted = head + RECORD_HEAD_BYTES
    cdef int n = 0
    nonce_of(d, nonce)
    if (
        crypto.begin_decrypt(d.cipher, NULL, NULL, NULL, nonce) <= 0
        or crypto.decrypt(d.cipher, NULL, &n, head, RECORD_HEAD_BYTES) <= 0
        or crypto.decrypt(d.cipher, text, &n, encrypted, nbytes) <= 0
        or crypto.control(d.cipher, CTRL_SET_TAG, TAG_BYTES, encrypted + nbytes) <= 0
        or crypto.end_decrypt(d.cipher, text + nbytes, &n) <= 0
    ):
        memset(text, 0, nbytes)
        return -EBADMSG
    return 0 if step(d, False) else -EIO


# -- both

cdef ssize_t copy(
    Encrypted *s, u64 at, iovec *v, u32 n, u64 skip, u64 most, bint own, bint out
) noexcept nogil:
    """Between the file, from `at` on, and what lies `skip` bytes into the vectors; how many bytes."""
    cdef iovec was
    cdef ssize_t moved
    v = behind(v, &n, skip, &was)
    if n == 0:
        return 0
    moved = file_copy(s.file, s.base, at, v, n, most, own, out)
    v[0] = was
    return moved


cdef ssize_t flush(Encrypted *s) noexcept nogil:
    cdef ssize_t n
    while s.out_left:
        n = send(s.channel.fd, s.base + OUT_AT - RECORD_HEAD_BYTES + s.out_from, s.out_left,
                 MSG_DONTWAIT | MSG_NOSIGNAL)
        if n < 0:
            return -last_errno()
        s.out_from += n
        s.out_left -= n
    return 0


cdef ssize_t send_some(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef Encrypted *s = <Encrypted *>c
    cdef ssize_t total = 0, moved
    while True:
        if s.out_left == 0:
            moved = copy(s, OUT_AT, v, n, total, RECORD_BYTES, own, True)
            if moved > 0:
                s.out_taken = moved
                moved = encrypt_record(&s.out, s.base + OUT_AT - RECORD_HEAD_BYTES, <u32>s.out_taken)
                if moved == 0:
                    s.out_from = 0
                    s.out_left = RECORD_HEAD_BYTES + s.out_taken + TAG_BYTES
            if s.out_left == 0:
                return total if total else moved
        moved = flush(s)
        if moved < 0:
            return total if total else moved
        total += s.out_taken


cdef u64 whole_record(Encrypted *s) noexcept nogil:
    """How many bytes of text the next record has, if all of it has come; or more than any has."""
    cdef u64 have = s.cipher_have - s.cipher_from
    cdef u32 nbytes
    if have < RECORD_HEAD_BYTES:
        return 0
    memcpy(&nbytes, s.cipher + s.cipher_from, RECORD_HEAD_BYTES)
    if nbytes == 0 or nbytes > RECORD_BYTES:
        return RECORD_BYTES + 1
    return nbytes if have >= RECORD_HEAD_BYTES + nbytes + TAG_BYTES else 0


cdef ssize_t failed(Encrypted *s, ssize_t errnum) noexcept nogil:
    if errnum != -EAGAIN and errnum != -EINTR:
        s.failed = errnum
    return errnum


cdef ssize_t open_next(Encrypted *s) noexcept nogil:
    """1, or as `recv`. What has failed fails again: a socket tells of its reset once, and that may be
    behind bytes that are returned first."""
    cdef ssize_t n
    cdef u64 nbytes = whole_record(s)
    if s.failed < 0:
        return s.failed
    while nbytes == 0:
        s.cipher_have -= s.cipher_from
        memmove(s.cipher, s.cipher + s.cipher_from, s.cipher_have)
        s.cipher_from = 0
        n = recv(s.channel.fd, s.cipher + s.cipher_have, CIPHER_ROOM - s.cipher_have, MSG_DONTWAIT)
        if n <= 0:
            return n if n == 0 else failed(s, -last_errno())
        s.cipher_have += n
        nbytes = whole_record(s)
    if nbytes > RECORD_BYTES:
        return failed(s, -EBADMSG)
    n = decrypt_record(&s.into, s.cipher + s.cipher_from, <u32>nbytes, s.base + IN_AT)
    if n < 0:
        return failed(s, n)
    s.cipher_from += RECORD_HEAD_BYTES + nbytes + TAG_BYTES
    s.in_from = 0
    s.in_left = nbytes
    return 1


cdef ssize_t receive(Channel *c, iovec *v, u32 n, bint own) noexcept nogil:
    cdef Encrypted *s = <Encrypted *>c
    cdef ssize_t total = 0, moved
    while True:
        if s.in_left == 0:
            moved = open_next(s)
            if moved <= 0:
                break
        moved = copy(s, IN_AT + s.in_from, v, n, total, s.in_left, own, False)
        if moved <= 0:
            break
        s.in_from += moved
        s.in_left -= moved
        total += moved
    store32(&s.ready, s.in_left != 0 or whole_record(s) != 0)
    return total if total else moved


cdef bint moved(Channel *c, u32 interest) noexcept nogil:
    """Whether there is something to receive that the socket does not show any more."""
    return interest & EPOLLIN != 0 and load32(&(<Encrypted *>c).ready) != 0


# -- making and freeing

cdef void drop(Channel *c) noexcept nogil:
    cdef Encrypted *s = <Encrypted *>c
    crypto.cipher_free(s.out.cipher)  # which may be NULL
    crypto.cipher_free(s.into.cipher)
    if s.base != MAP_FAILED:
        munmap(s.base, FILE_BYTES)
    if s.file >= 0:
        close(s.file)
    free(s.cipher)
    crypto.cleanse(s, sizeof(Encrypted))  # which a compiler does not leave out, as it may memset
    free(s)


cdef ChannelOps PLAIN = socket_ops()
PLAIN.violation = b"an encrypted record that its engine did not send here, or not so"
cdef ChannelOps ENCRYPTED = PLAIN
ENCRYPTED.send = send_some
ENCRYPTED.receive = receive
ENCRYPTED.moved = moved
ENCRYPTED.free = drop


cdef Channel *plain_new(int fd) noexcept nogil:
    return channel_new(&PLAIN, fd, sizeof(Channel))


cdef Channel *encrypted_new(
    int fd, const uint8_t *out, const uint8_t *into, u64 rekey_records, int *errnum
) noexcept nogil:
    cdef Encrypted *s
    errnum[0] = ENOSYS
    if not crypto.is_complete:
        return NULL
    s = <Encrypted *>channel_new(&ENCRYPTED, fd, sizeof(Encrypted))
    s.base = <uint8_t *>MAP_FAILED
    s.file = memfd_create(b"te-encrypted", MFD_CLOEXEC)
    if s.file >= 0 and ftruncate(s.file, FILE_BYTES) == 0:
        s.base = <uint8_t *>mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, s.file, 0)
    errnum[0] = last_errno()
    if s.base == MAP_FAILED:
        drop(&s.channel)
        return NULL
    s.cipher = <uint8_t *>need(CIPHER_ROOM)
    memcpy(s.out.secret, out, SECRET_BYTES)
    memcpy(s.into.secret, into, SECRET_BYTES)
    s.out.rekey_records = s.into.rekey_records = rekey_records if rekey_records else REKEY_RECORDS
    s.out.cipher, s.into.cipher = crypto.cipher_new(), crypto.cipher_new()
    errnum[0] = ENOMEM
    if s.out.cipher == NULL or s.into.cipher == NULL or not (
        new_key(&s.out, True) and new_key(&s.into, False)
    ):
        drop(&s.channel)
        return NULL
    errnum[0] = 0
    return &s.channel

# SPDX-License-Identifier: Apache-2.0
# Encrypted records: what goes through a TCP socket when an engine encrypts. The stream of frames is cut
# into records, each encrypted and authenticated by itself (AES-256-GCM, NIST SP 800-38D, by
# OpenSSL's libcrypto, which is looked for at run time):
#
#     plaintext bytes u32, 1 to RECORD_BYTES; ciphertext, as many bytes; tag, 16 bytes
#
# all little-endian. The length is authenticated with the rest, and the number of the record is the
# nonce: a record that was changed, repeated, left out or sent the other way is refused. Each
# direction of each connection has a secret of its own, and from it a key for REKEY_RECORDS records
# (256 GiB; RFC 8446, 5.5 allows 380 GB), then the next one. No byte of a record reaches memory of
# the application before its tag has been found good.
#
# One thread at a time uses an Encrypted, but for `encrypted_ready`.

from libc.stdint cimport uint8_t
from te.core.posix cimport iovec
from te.core.sync cimport load32, u32, u64

cdef enum:
    SECRET_BYTES = 32
    RECORD_BYTES = 64 << 10
    RECORD_HEAD_BYTES = 4
    TAG_BYTES = 16
    CIPHER_ROOM = 2 * (4 + (64 << 10) + 16)

cdef struct Direction:
    void *cipher  # EVP_CIPHER_CTX
    uint8_t secret[32]
    u64 number  # of the next record, since the key was new
    u64 rekey_records

cdef struct Encrypted:
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

# For the secrets of what goes out and of what comes in, SECRET_BYTES each. NULL and an errno: ENOSYS
# without libcrypto.
cdef Encrypted *encrypted_new(
    const uint8_t *out, const uint8_t *into, u64 rekey_records, int *errnum) noexcept nogil
cdef void encrypted_free(Encrypted *s) noexcept nogil

# As `channel_send`, `channel_land` and `channel_receive`; -EBADMSG for a record that is not good. Of
# bytes that are not returned as sent the next call must offer the same again.
cdef ssize_t encrypted_send(Encrypted *s, int fd, iovec *v, u32 n, bint own) noexcept nogil
cdef ssize_t encrypted_receive(Encrypted *s, int fd, iovec *v, u32 n, bint own) noexcept nogil


cdef inline bint encrypted_ready(Encrypted *s) noexcept nogil:
    """Whether there is something to receive that the socket does not show any more. Any thread."""
    return load32(&s.ready) != 0

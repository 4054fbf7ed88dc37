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
# Where the kernel has made the records, the channel is a socket to us.

from libc.stdint cimport uint8_t
from te.core.channels cimport Channel
from te.core.sync cimport u64

cdef enum:
    SECRET_BYTES = 32

# The channel of a TCP connection whose bytes go as they are, or that the kernel encrypts.
cdef Channel *plain_new(int fd) noexcept nogil
# Of one whose records are made here, with the secrets of what goes out and of what comes in,
# SECRET_BYTES each; a new key after so many records (0: REKEY_RECORDS). NULL and an errno: ENOSYS
# without libcrypto.
cdef Channel *encrypted_new(
    int fd, const uint8_t *out, const uint8_t *into, u64 rekey_records, int *errnum
) noexcept nogil

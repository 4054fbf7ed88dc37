# SPDX-License-Identifier: Apache-2.0
def has_libcrypto() -> bool:
    """Whether OpenSSL's libcrypto is there, so that this process can encrypt."""

# SPDX-License-Identifier: Apache-2.0
# Connections by rdma_cm(7): the only way for devices of the iWARP family.

cdef VContext *cm_context(bytes name) except? NULL:
    """The context that librdmacm has opened for a device: queue pairs of its connections belong to
    that one. NULL if it has none."""
    cdef int n = 0, i
    cdef VContext **contexts
    cdef VContext *found = NULL
    load_cm()
    contexts = lib.cm_get_devices(&n)
    if contexts == NULL:
        fail("rdma_get_devices", last_errno())
    for i in range(n):
        if <bytes>(<VDevice *>contexts[i].device).name == name:
            found = contexts[i]
    lib.cm_free_devices(contexts)
    return found

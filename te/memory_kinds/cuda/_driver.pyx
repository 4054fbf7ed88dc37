# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
# SPDX-License-Identifier: Apache-2.0

from libc.errno cimport EINVAL, EIO, ENOMEM, ENOSYS, EOPNOTSUPP

cdef extern from "<dlfcn.h>" nogil:
    void *dlopen(const char *name, int flags)
    void *dlsym(void *library, const char *name)
    enum: RTLD_NOW, RTLD_NOLOAD

LIBRARY = "libcuda.so.1"
cdef enum:
    PCI_ADDRESS_BYTES = 64


cdef int errno_of(CUresult error) noexcept nogil:
    if error == CUDA_ERROR_OUT_OF_MEMORY:
        return ENOMEM
    if error == CUDA_ERROR_NOT_SUPPORTED:
        return EOPNOTSUPP
    return EINVAL if error == CUDA_ERROR_INVALID_VALUE else EIO


cdef class Driver:
    cdef str name_of(self, CUresult error):
        cdef const char *name = NULL
        if self.functions.cuGetErrorName(error, &name) or name == NULL:
            return f"CUDA error {error}"
        return name.decode()

    def ordinal_of(self, unsigned long long address):
        cdef CUpointer_attribute wanted[3]
        # As wide as the widest; the driver writes 4 bytes of each.
        cdef unsigned long long kind = 0, is_managed = 0, ordinal = 0
        cdef void *found[3]
        wanted[0], found[0] = CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &kind
        wanted[1], found[1] = CU_POINTER_ATTRIBUTE_IS_MANAGED, &is_managed
        wanted[2], found[2] = CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &ordinal
        # Of an address that it does not know it writes null values. An error: nobody has initialised it.
        if self.functions.cuPointerGetAttributes(3, wanted, found, address):
            return None
        return None if kind != CU_MEMORYTYPE_DEVICE or is_managed else <int>ordinal

    def pci_address(self, int ordinal):
        cdef char text[PCI_ADDRESS_BYTES]
        cdef CUdevice device
        if self.functions.cuDeviceGet(&device, ordinal) or self.functions.cuDeviceGetPCIBusId(
            text, PCI_ADDRESS_BYTES, device
        ):
            return ""
        return text.decode().lower()

    cdef int attribute(self, unsigned which, int ordinal):
        """0 of one that the driver does not know."""
        cdef CUdevice device
        cdef int value = 0
        if self.functions.cuDeviceGet(&device, ordinal) or self.functions.cuDeviceGetAttribute(
            &value, which, device
        ):
            return 0
        return value

    def shows_writes(self, int ordinal):
        cdef int order = self.attribute(
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, ordinal)
        return order >= <int>CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER

    def flushes_writes(self, int ordinal):
        cdef int options = self.attribute(
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, ordinal)
        return options & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST != 0

    def dma_buf(self, unsigned long long address, size_t nbytes):
        cdef int fd = -1
        cdef CUresult error
        if self.functions.cuMemGetHandleForAddressRange == NULL:
            raise OSError(ENOSYS, f"{LIBRARY} has no cuMemGetHandleForAddressRange")
        error = self.functions.cuMemGetHandleForAddressRange(
            &fd, address, nbytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0)
        if error:
            text = f"cuMemGetHandleForAddressRange of {nbytes} bytes at {address:#x}"
            raise OSError(errno_of(error), f"{text}: {self.name_of(error)}")
        return fd


def find():
    cdef GetProcAddress get
    cdef const char *missing
    cdef void *library
    cdef Driver driver
    library = dlopen(LIBRARY.encode(), RTLD_NOW | RTLD_NOLOAD)
    if library == NULL:
        return None
    get = <GetProcAddress>dlsym(library, b"cuGetProcAddress")
    if get == NULL:
        raise RuntimeError(f"{LIBRARY} is older than CUDA 11.3: it has no cuGetProcAddress")
    driver = Driver.__new__(Driver)
    missing = functions_find(&driver.functions, get)
    if missing != NULL:
        raise RuntimeError(f"{LIBRARY} has no {missing.decode()}")
    return driver

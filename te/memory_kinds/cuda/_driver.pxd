# SPDX-License-Identifier: Apache-2.0
# CUDA's driver, where the process has loaded it; what its functions are is said in abi.h.

from libc.stdint cimport uint64_t

cdef extern from "memory_kinds/cuda/abi.h" nogil:
    ctypedef unsigned CUresult
    ctypedef unsigned CUpointer_attribute
    ctypedef unsigned CUstreamCaptureMode
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef unsigned long long CUmemGenericAllocationHandle
    ctypedef struct CUctx_st:
        pass
    ctypedef struct CUstream_st:
        pass
    ctypedef struct CUevent_st:
        pass
    ctypedef CUctx_st *CUcontext
    ctypedef CUstream_st *CUstream
    ctypedef CUevent_st *CUevent
    ctypedef struct CUmemcpyAttributes:
        unsigned srcAccessOrder
        unsigned flags
    ctypedef struct CUmemLocation:
        unsigned type
        int id
    ctypedef struct CUmemAccessDesc:
        CUmemLocation location
        unsigned flags
    ctypedef struct CUipcMemHandle:
        char reserved[64]
    enum:
        CUDA_SUCCESS
        CUDA_ERROR_INVALID_VALUE
        CUDA_ERROR_OUT_OF_MEMORY
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
        CUDA_ERROR_NOT_READY
        CUDA_ERROR_NOT_SUPPORTED
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        CU_POINTER_ATTRIBUTE_IS_MANAGED
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        CU_MEMORYTYPE_DEVICE
        CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        CU_STREAM_CAPTURE_MODE_RELAXED
        CU_STREAM_NON_BLOCKING
        CU_EVENT_DISABLE_TIMING
        CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
        CU_MEMHOSTREGISTER_PORTABLE
        CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        CU_MEM_LOCATION_TYPE_DEVICE
        CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
        CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
        CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
    ctypedef CUresult (*GetProcAddress)(const char *, void **, int, uint64_t) noexcept nogil
    ctypedef struct Functions:
        CUresult (*cuGetErrorName)(CUresult, const char **) noexcept nogil
        CUresult (*cuDeviceGet)(CUdevice *, int) noexcept nogil
        CUresult (*cuDeviceGetAttribute)(int *, unsigned, CUdevice) noexcept nogil
        CUresult (*cuFlushGPUDirectRDMAWrites)(unsigned, unsigned) noexcept nogil
        CUresult (*cuDeviceGetPCIBusId)(char *, int, CUdevice) noexcept nogil
        CUresult (*cuDevicePrimaryCtxGetState)(CUdevice, unsigned *, int *) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *, CUdevice) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRelease)(CUdevice) noexcept nogil
        CUresult (*cuCtxPushCurrent)(CUcontext) noexcept nogil
        CUresult (*cuCtxPopCurrent)(CUcontext *) noexcept nogil
        CUresult (*cuThreadExchangeStreamCaptureMode)(CUstreamCaptureMode *) noexcept nogil
        CUresult (*cuPointerGetAttributes)(
            unsigned, CUpointer_attribute *, void **, CUdeviceptr) noexcept nogil
        CUresult (*cuMemGetAddressRange)(CUdeviceptr *, size_t *, CUdeviceptr) noexcept nogil
        CUresult (*cuMemHostRegister)(void *, size_t, unsigned) noexcept nogil
        CUresult (*cuMemHostUnregister)(void *) noexcept nogil
        CUresult (*cuStreamCreate)(CUstream *, unsigned) noexcept nogil
        CUresult (*cuStreamQuery)(CUstream) noexcept nogil
        CUresult (*cuStreamDestroy)(CUstream) noexcept nogil
        CUresult (*cuEventCreate)(CUevent *, unsigned) noexcept nogil
        CUresult (*cuEventRecord)(CUevent, CUstream) noexcept nogil
        CUresult (*cuEventQuery)(CUevent) noexcept nogil
        CUresult (*cuEventDestroy)(CUevent) noexcept nogil
        CUresult (*cuMemcpyAsync)(CUdeviceptr, CUdeviceptr, size_t, CUstream) noexcept nogil
        CUresult (*cuIpcGetMemHandle)(CUipcMemHandle *, CUdeviceptr) noexcept nogil
        CUresult (*cuIpcOpenMemHandle)(CUdeviceptr *, CUipcMemHandle, unsigned) noexcept nogil
        CUresult (*cuIpcCloseMemHandle)(CUdeviceptr) noexcept nogil
        CUresult (*cuMemRetainAllocationHandle)(
            CUmemGenericAllocationHandle *, void *) noexcept nogil
        CUresult (*cuMemRelease)(CUmemGenericAllocationHandle) noexcept nogil
        CUresult (*cuMemExportToShareableHandle)(
            void *, CUmemGenericAllocationHandle, unsigned, unsigned long long) noexcept nogil
        CUresult (*cuMemImportFromShareableHandle)(
            CUmemGenericAllocationHandle *, void *, unsigned) noexcept nogil
        CUresult (*cuMemAddressReserve)(
            CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long) noexcept nogil
        CUresult (*cuMemAddressFree)(CUdeviceptr, size_t) noexcept nogil
        CUresult (*cuMemMap)(
            CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle,
            unsigned long long) noexcept nogil
        CUresult (*cuMemUnmap)(CUdeviceptr, size_t) noexcept nogil
        CUresult (*cuMemSetAccess)(
            CUdeviceptr, size_t, const CUmemAccessDesc *, size_t) noexcept nogil
        CUresult (*cuMemGetHandleForAddressRange)(
            void *, CUdeviceptr, size_t, unsigned, unsigned long long) noexcept nogil
        CUresult (*cuMemcpyBatchAsync_12080)(
            CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
            size_t *, CUstream) noexcept nogil
        CUresult (*cuMemcpyBatchAsync_13000)(
            CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,
            CUstream) noexcept nogil
    const char *functions_find(Functions *f, GetProcAddress find)

cdef class Driver:
    cdef Functions functions
    cdef int attribute(self, unsigned which, int ordinal)
    # Of an error: "CUDA_ERROR_OUT_OF_MEMORY".
    cdef str name_of(self, CUresult error)

# What an error of the driver is to those who know errno(3) alone.
cdef int errno_of(CUresult error) noexcept nogil

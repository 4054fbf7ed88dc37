/* SPDX-License-Identifier: Apache-2.0
 * The part of CUDA's driver API that te uses, under NVIDIA's names and declared here so that the package
 * builds without CUDA. Types, constants, and the signature of each function in the version that is asked
 * for: tests/testbed compares all of it with NVIDIA's cuda.h and cudaTypedefs.h.
 * Source: the CUDA Driver API Reference Manual, 12.9 and 13.0. */
#ifndef TE_CUDA_ABI_H
#define TE_CUDA_ABI_H

#include <stddef.h>
#include <stdint.h>

/* gcc takes an enum without negative values for an unsigned int, also in prototypes. */
typedef unsigned CUresult, CUpointer_attribute, CUstreamCaptureMode, CUmemRangeHandleType;
typedef unsigned CUmemAllocationHandleType, CUdevice_attribute;
typedef unsigned CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr, CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;

typedef struct {
    unsigned type;
    int id;
} CUmemLocation;

typedef struct {
    unsigned srcAccessOrder;
    CUmemLocation srcLocHint, dstLocHint;
    unsigned flags;
} CUmemcpyAttributes;
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "CUmemcpyAttributes");

typedef struct {
    CUmemLocation location;
    unsigned flags;
} CUmemAccessDesc;
_Static_assert(sizeof(CUmemAccessDesc) == 12, "CUmemAccessDesc");

typedef struct {
    char reserved[64];
} CUipcMemHandle;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2,
    CU_STREAM_NON_BLOCKING = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE = 1,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS = 117,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST = 1,
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118,
    CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER = 100,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX = 0,
    CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER = 100,
};

/* NEED(name, version, parameters): without one of these there is no CUDA memory here. MAY: NULL where
 * the driver is older; the name to ask for, and the one by which two versions of it are told apart. */
#define CUDA_FUNCTIONS(NEED, MAY)                                                                    \
    NEED(cuGetErrorName, 6000, (CUresult, const char **))                                            \
    NEED(cuDeviceGet, 2000, (CUdevice *, int))                                                       \
    NEED(cuDeviceGetAttribute, 2000, (int *, CUdevice_attribute, CUdevice))                          \
    NEED(cuFlushGPUDirectRDMAWrites, 11030,                                                          \
        (CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope))                         \
    NEED(cuDeviceGetPCIBusId, 4010, (char *, int, CUdevice))                                         \
    NEED(cuDevicePrimaryCtxGetState, 7000, (CUdevice, unsigned *, int *))                            \
    NEED(cuDevicePrimaryCtxRetain, 7000, (CUcontext *, CUdevice))                                    \
    NEED(cuDevicePrimaryCtxRelease, 11000, (CUdevice))                                               \
    NEED(cuCtxPushCurrent, 4000, (CUcontext))                                                        \
    NEED(cuCtxPopCurrent, 4000, (CUcontext *))                                                       \
    NEED(cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode *))                          \
    NEED(cuPointerGetAttributes, 7000, (unsigned, CUpointer_attribute *, void **, CUdeviceptr))      \
    NEED(cuMemGetAddressRange, 3020, (CUdeviceptr *, size_t *, CUdeviceptr))                         \
    NEED(cuMemHostRegister, 6050, (void *, size_t, unsigned))                                        \
    NEED(cuMemHostUnregister, 4000, (void *))                                                        \
    NEED(cuStreamCreate, 2000, (CUstream *, unsigned))                                               \
    NEED(cuStreamQuery, 2000, (CUstream))                                                            \
    NEED(cuStreamDestroy, 4000, (CUstream))                                                          \
    NEED(cuEventCreate, 2000, (CUevent *, unsigned))                                                 \
    NEED(cuEventRecord, 2000, (CUevent, CUstream))                                                   \
    NEED(cuEventQuery, 2000, (CUevent))                                                              \
    NEED(cuEventDestroy, 4000, (CUevent))                                                            \
    NEED(cuMemcpyAsync, 4000, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                          \
    NEED(cuIpcGetMemHandle, 4010, (CUipcMemHandle *, CUdeviceptr))                                   \
    NEED(cuIpcOpenMemHandle, 11000, (CUdeviceptr *, CUipcMemHandle, unsigned))                       \
    NEED(cuIpcCloseMemHandle, 4010, (CUdeviceptr))                                                   \
    NEED(cuMemRetainAllocationHandle, 11000, (CUmemGenericAllocationHandle *, void *))               \
    NEED(cuMemRelease, 10020, (CUmemGenericAllocationHandle))                                        \
    NEED(cuMemExportToShareableHandle, 10020,                                                        \
        (void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType, unsigned long long))       \
    NEED(cuMemImportFromShareableHandle, 10020,                                                      \
        (CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType))                         \
    NEED(cuMemAddressReserve, 10020,                                                                 \
        (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                            \
    NEED(cuMemAddressFree, 10020, (CUdeviceptr, size_t))                                             \
    NEED(cuMemMap, 10020,                                                                            \
        (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long))             \
    NEED(cuMemUnmap, 10020, (CUdeviceptr, size_t))                                                   \
    NEED(cuMemSetAccess, 10020, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t))              \
    MAY(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange, 11070,                         \
        (void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long))                     \
    MAY(cuMemcpyBatchAsync_12080, cuMemcpyBatchAsync, 12080,                                         \
        (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,     \
         size_t *, CUstream))                                                                        \
    MAY(cuMemcpyBatchAsync_13000, cuMemcpyBatchAsync, 13000,                                         \
        (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t,     \
         CUstream))

/* In the form of CUDA 11.3, which every later driver has, too. */
typedef CUresult (*GetProcAddress)(const char *name, void **found, int version, uint64_t flags);

typedef struct {
#define NEED(name, version, parameters) CUresult(*name) parameters;
#define MAY(member, name, version, parameters) CUresult(*member) parameters;
    CUDA_FUNCTIONS(NEED, MAY)
#undef NEED
#undef MAY
} Functions;

/* Finds them; the name of the first that is needed and is not there, or NULL. */
static inline const char *functions_find(Functions *f, GetProcAddress find) {
    void *found;
#define NEED(name, version, parameters)                                                              \
    if (find(#name, &found, version, 0) || found == NULL)                                            \
        return #name;                                                                                \
    f->name = (CUresult(*) parameters)found;
#define MAY(member, name, version, parameters)                                                       \
    if (find(#name, &found, version, 0))                                                             \
        found = NULL;                                                                                \
    f->member = (CUresult(*) parameters)found;
    CUDA_FUNCTIONS(NEED, MAY)
#undef NEED
#undef MAY
    return NULL;
}

#endif

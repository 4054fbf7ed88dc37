/* SPDX-License-Identifier: Apache-2.0
 * Which functions there are since which version of CUDA, for cuGetProcAddress. */
#include "stand_in.h"

#include <string.h>

typedef struct {
    const char *name;
    int since;
    void *function;
} Function;

/* Of one name the newest first. */
static const Function FUNCTIONS[] = {
    {"cuInit", 2000, cuInit},
    {"cuDriverGetVersion", 2020, cuDriverGetVersion},
    {"cuGetProcAddress", 12000, cuGetProcAddress_v2},
    {"cuGetProcAddress", 11030, cuGetProcAddress},
    {"cuGetErrorName", 6000, cuGetErrorName},
    {"cuDeviceGet", 2000, cuDeviceGet},
    {"cuDeviceGetCount", 2000, cuDeviceGetCount},
    {"cuDeviceGetName", 2000, cuDeviceGetName},
    {"cuDeviceGetAttribute", 2000, cuDeviceGetAttribute},
    {"cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId},
    {"cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2},
    {"cuDeviceCanAccessPeer", 4000, cuDeviceCanAccessPeer},
    {"cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain},
    {"cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2},
    {"cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState},
    {"cuCtxSetCurrent", 4000, cuCtxSetCurrent},
    {"cuCtxGetCurrent", 4000, cuCtxGetCurrent},
    {"cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2},
    {"cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2},
    {"cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode},
    {"cuPointerGetAttribute", 4000, cuPointerGetAttribute},
    {"cuPointerGetAttributes", 7000, cuPointerGetAttributes},
    {"cuMemAlloc", 3020, cuMemAlloc_v2},
    {"cuMemFree", 3020, cuMemFree_v2},
    {"cuMemGetInfo", 3020, cuMemGetInfo_v2},
    {"cuMemAllocManaged", 6000, cuMemAllocManaged},
    {"cuMemAllocAsync", 11020, cuMemAllocAsync},
    {"cuMemFreeAsync", 11020, cuMemFreeAsync},
    {"cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2},
    {"cuMemGetHandleForAddressRange", 11070, cuMemGetHandleForAddressRange},
    {"cuMemHostAlloc", 2020, cuMemHostAlloc},
    {"cuMemFreeHost", 2000, cuMemFreeHost},
    {"cuMemHostRegister", 6050, cuMemHostRegister_v2},
    {"cuMemHostUnregister", 4000, cuMemHostUnregister},
    {"cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2},
    {"cuStreamCreate", 2000, cuStreamCreate},
    {"cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority},
    {"cuStreamDestroy", 4000, cuStreamDestroy_v2},
    {"cuStreamQuery", 2000, cuStreamQuery},
    {"cuStreamSynchronize", 2000, cuStreamSynchronize},
    {"cuStreamWaitEvent", 3020, cuStreamWaitEvent},
    {"cuEventCreate", 2000, cuEventCreate},
    {"cuEventRecord", 2000, cuEventRecord},
    {"cuEventQuery", 2000, cuEventQuery},
    {"cuEventSynchronize", 2000, cuEventSynchronize},
    {"cuEventDestroy", 4000, cuEventDestroy_v2},
    {"cuMemcpyAsync", 4000, cuMemcpyAsync},
    {"cuMemcpyBatchAsync", 13000, cuMemcpyBatchAsync_v2},
    {"cuMemcpyBatchAsync", 12080, cuMemcpyBatchAsync},
    {"cuFlushGPUDirectRDMAWrites", 11030, cuFlushGPUDirectRDMAWrites},
    {"cuIpcGetMemHandle", 4010, cuIpcGetMemHandle},
    {"cuIpcOpenMemHandle", 11000, cuIpcOpenMemHandle_v2},
    {"cuIpcCloseMemHandle", 4010, cuIpcCloseMemHandle},
    {"cuMemCreate", 10020, cuMemCreate},
    {"cuMemRelease", 10020, cuMemRelease},
    {"cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle},
    {"cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity},
    {"cuMemAddressReserve", 10020, cuMemAddressReserve},
    {"cuMemAddressFree", 10020, cuMemAddressFree},
    {"cuMemMap", 10020, cuMemMap},
    {"cuMemUnmap", 10020, cuMemUnmap},
    {"cuMemSetAccess", 10020, cuMemSetAccess},
    {"cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle},
    {"cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle},
};

void *find_function(const char *name, int version) {
    for (size_t i = 0; i < sizeof FUNCTIONS / sizeof *FUNCTIONS; i++)
        if (strcmp(FUNCTIONS[i].name, name) == 0 && FUNCTIONS[i].since <= version)
            return FUNCTIONS[i].function;
    return NULL;
}

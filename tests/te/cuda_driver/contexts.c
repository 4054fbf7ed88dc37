/* SPDX-License-Identifier: Apache-2.0
 * The driver itself, its devices, and the context of each thread. */
#include "stand_in.h"

#include <stdio.h>
#include <string.h>

enum { STACK_MAX = 16, HANDLE_STEP = 10 };

static bool is_initialised;
static struct CUctx_st primary[DEVICES];
static __thread CUcontext stack[STACK_MAX];
static __thread int depth;
static __thread CUstreamCaptureMode capture_mode;

CUcontext current(void) { return depth ? stack[depth - 1] : NULL; }

/* Not the ordinal itself: who takes one for the other is found. */
CUdevice device_of(int ordinal) { return ordinal * HANDLE_STEP; }

int ordinal_of(CUdevice device) {
    bool is_one = device >= 0 && device % HANDLE_STEP == 0 && device / HANDLE_STEP < DEVICES;
    return is_one ? device / HANDLE_STEP : -1;
}

CUresult enter(const char *name, unsigned flags) {
    pthread_mutex_lock(&lock);
    CUresult fault = count_call(name, flags);
    if (!is_initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags & NEVER_FAILS)
        return CUDA_SUCCESS;
    if (broken)
        return broken;
    if (flags & NEEDS_CONTEXT && (current() == NULL || current()->retained == 0))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (flags & ENDS_CAPTURE && is_capturing && capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        capture_is_dead = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return fault;
}

CUresult leave(CUresult result) {
    pthread_mutex_unlock(&lock);
    return result;
}

CUresult cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    is_initialised = true;
    return leave(flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}

CUresult cuDriverGetVersion(int *version) {
    pthread_mutex_lock(&lock);
    *version = driver_version;
    return leave(CUDA_SUCCESS);
}

CUresult cuGetProcAddress(const char *name, void **found, int version, cuuint64_t flags) {
    pthread_mutex_lock(&lock);
    *found = NULL;
    if (flags || version > driver_version)
        return leave(CUDA_ERROR_INVALID_VALUE);
    *found = find_function(name, version);
    return leave(CUDA_SUCCESS);
}

CUresult cuGetProcAddress_v2(
    const char *name, void **found, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *status) {
    CUresult result = cuGetProcAddress(name, found, version, flags);
    if (status)
        *status = (CUdriverProcAddressQueryResult)(*found ? 0 : 1);
    return result;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
#define NAME(code)                                                                                   \
    case code:                                                                                       \
        *name = #code;                                                                               \
        return CUDA_SUCCESS;
    switch ((unsigned)error) {
        NAME(CUDA_SUCCESS)
        NAME(CUDA_ERROR_INVALID_VALUE)
        NAME(CUDA_ERROR_OUT_OF_MEMORY)
        NAME(CUDA_ERROR_NOT_INITIALIZED)
        NAME(CUDA_ERROR_INVALID_DEVICE)
        NAME(CUDA_ERROR_INVALID_CONTEXT)
        NAME(CUDA_ERROR_ALREADY_MAPPED)
        NAME(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        NAME(CUDA_ERROR_INVALID_HANDLE)
        NAME(CUDA_ERROR_NOT_READY)
        NAME(CUDA_ERROR_ILLEGAL_ADDRESS)
        NAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        NAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
        NAME(CUDA_ERROR_NOT_SUPPORTED)
        NAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
    default:
        *name = NULL;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* -- devices */

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    CUresult r = enter("cuDeviceGet", 0);
    if (r == 0 && (ordinal < 0 || ordinal >= DEVICES))
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0)
        *device = device_of(ordinal);
    return leave(r);
}

CUresult cuDeviceGetCount(int *count) {
    CUresult r = enter("cuDeviceGetCount", 0);
    *count = DEVICES;
    return leave(r);
}

CUresult cuDeviceGetName(char *text, int nbytes, CUdevice device) {
    CUresult r = enter("cuDeviceGetName", 0);
    if (r == 0 && ordinal_of(device) < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0)
        snprintf(text, (size_t)nbytes, "stand-in without a GPU");
    return leave(r);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    CUresult r = enter("cuDeviceGetAttribute", 0);
    if (r == 0 && ordinal_of(device) < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    switch ((unsigned)attribute) {
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        *value = 3;
        break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
        *value = 1;
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
        *value = can_flush_writes;
        break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
        *value = writes_ordering;
        break;
    default:
        r = CUDA_ERROR_INVALID_VALUE;
    }
    return leave(r);
}

CUresult cuFlushGPUDirectRDMAWrites(
    CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
    CUresult r = enter("cuFlushGPUDirectRDMAWrites", NEEDS_CONTEXT);
    if (r == 0 && (target != 0 || scope != 100))
        r = CUDA_ERROR_INVALID_VALUE;
    return leave(r);
}

CUresult cuDeviceGetPCIBusId(char *text, int nbytes, CUdevice device) {
    CUresult r = enter("cuDeviceGetPCIBusId", 0);
    int ordinal = ordinal_of(device);
    if (r == 0 && ordinal < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0 && snprintf(text, (size_t)nbytes, "0000:%02X:00.0", 0x36 + ordinal) >= nbytes)
        r = CUDA_ERROR_INVALID_VALUE;
    return leave(r);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device) {
    CUresult r = enter("cuDeviceGetUuid", 0);
    if (r == 0 && ordinal_of(device) < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0)
        memset(uuid->bytes, 'a' + ordinal_of(device), sizeof uuid->bytes);
    return leave(r);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer) {
    CUresult r = enter("cuDeviceCanAccessPeer", 0);
    if (r == 0 && (ordinal_of(device) < 0 || ordinal_of(peer) < 0))
        r = CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer;
    return leave(r);
}

/* -- contexts */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    CUresult r = enter("cuDevicePrimaryCtxRetain", 0);
    int ordinal = ordinal_of(device);
    if (r == 0 && ordinal < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0) {
        primary[ordinal].ordinal = ordinal;
        primary[ordinal].retained++;
        *context = &primary[ordinal];
    }
    return leave(r);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
    CUresult r = enter("cuDevicePrimaryCtxRelease", NEVER_FAILS);
    int ordinal = ordinal_of(device);
    if (r == 0 && (ordinal < 0 || primary[ordinal].retained == 0))
        r = CUDA_ERROR_INVALID_CONTEXT;
    if (r == 0)
        primary[ordinal].retained--;
    return leave(r);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
    CUresult r = enter("cuDevicePrimaryCtxGetState", 0);
    int ordinal = ordinal_of(device);
    if (r == 0 && ordinal < 0)
        r = CUDA_ERROR_INVALID_DEVICE;
    if (r == 0) {
        *flags = 0;
        *is_active = primary[ordinal].retained > 0;
    }
    return leave(r);
}

int fake_retained(int ordinal);
int fake_retained(int ordinal) {
    pthread_mutex_lock(&lock);
    int n = primary[ordinal].retained;
    pthread_mutex_unlock(&lock);
    return n;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    CUresult r = enter("cuCtxSetCurrent", NEVER_FAILS);
    if (r == 0 && depth == 0)
        depth = 1;
    if (r == 0)
        stack[depth - 1] = context;
    if (r == 0 && context == NULL)
        depth--;
    return leave(r);
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    CUresult r = enter("cuCtxGetCurrent", NEVER_FAILS);
    *context = current();
    return leave(r);
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
    CUresult r = enter("cuCtxPushCurrent", 0);
    if (r == 0 && (context == NULL || depth == STACK_MAX))
        r = CUDA_ERROR_INVALID_VALUE;
    if (r == 0)
        stack[depth++] = context;
    return leave(r);
}

CUresult cuCtxPopCurrent_v2(CUcontext *context) {
    CUresult r = enter("cuCtxPopCurrent", NEVER_FAILS);
    if (r == 0 && depth == 0)
        r = CUDA_ERROR_INVALID_CONTEXT;
    if (r == 0) {
        depth--;
        if (context)
            *context = stack[depth];
    }
    return leave(r);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    CUresult r = enter("cuThreadExchangeStreamCaptureMode", NEVER_FAILS);
    CUstreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return leave(r);
}

// A GPU that does nothing: what it says of itself, and its memory. Loaded before CUDA's runtime, this stands in for the
// runtime, the driver and cuBLAS. Everything above them is genuine: torch's allocator, dispatch, autograd, workspaces.
//
// Kernels return at once (nothing.cpp). Memory is counted as a GPU counts it, and lies in pages that the system only
// provides once they are written to. So tensors hold zeros, or whatever was copied to them or left there.
//
// Environment variables: NULL_NAME, NULL_MEMORY (bytes), NULL_CAPABILITY (as in 8.0), NULL_PROCESSORS, and NULL_ASC=1
// for addresses that ascend; without it they come as the system gives them, which usually descend. As with CUDA, an empty
// CUDA_VISIBLE_DEVICES hides the GPU.

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "forked.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr size_t kPage = 2 << 20;
constexpr size_t kContext = 600ull << 20;           // what a context takes on a GPU, before the first tensor
constexpr size_t kLargestCopy = 64 << 20;           // larger ones would fill the machine's memory
constexpr size_t kFirstAddress = 0x100000000000ull;  // of those that ascend; Linux maps nothing there by itself

using Clock = std::chrono::steady_clock;

struct Device {
  std::string name = "NVIDIA H200 (null)";
  size_t memory = 150754820096;
  int major = 9;
  int minor = 0;
  int processors = 132;
  bool ascending = false;

  size_t used = kContext;
  size_t next_address = kFirstAddress;
  unsigned long long next_pages = 1;
  std::map<void*, size_t> allocations;
  std::map<unsigned long long, size_t> pages;
  std::set<const void*> pinned;
  cudaError_t last_error = cudaSuccess;
  std::mutex mutex;

  Device() {
    if (const char* text = std::getenv("NULL_NAME")) {
      name = std::string(text).substr(0, 255);
    }
    if (const char* text = std::getenv("NULL_MEMORY")) {
      memory = std::strtoull(text, nullptr, 10);
    }
    if (const char* text = std::getenv("NULL_CAPABILITY")) {
      char* rest = nullptr;
      major = static_cast<int>(std::strtol(text, &rest, 10));
      minor = *rest == '.' ? std::atoi(rest + 1) : 0;
    }
    if (const char* text = std::getenv("NULL_PROCESSORS")) {
      processors = std::atoi(text);
    }
    if (const char* text = std::getenv("NULL_ASC")) {
      ascending = std::string(text) == "1";
    }
  }
};

// Never destroyed: torch still frees memory and events while the process ends.
Device& device() {
  static Device* const only = new Device;
  return *only;
}

cudaError_t failed(cudaError_t error) {
  device().last_error = error;
  return error;
}

size_t inPages(size_t size) {
  return (size + kPage - 1) / kPage * kPage;
}

// Addresses for `size` bytes, or null. The caller holds the mutex.
void* addresses(size_t size) {
  void* wanted = nullptr;
  if (device().ascending) {
    wanted = reinterpret_cast<void*>(device().next_address);
    device().next_address += inPages(size) + kPage;
  }
  void* const found =
      mmap(wanted, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : found;
}

// The most shared memory that a block may ask for; kernels of attention choose their tiles by it.
int sharedMemory() {
  const int capability = 10 * device().major + device().minor;
  if (capability < 75) {
    return 96 << 10;
  }
  if (capability < 80) {
    return 64 << 10;
  }
  if (capability == 80 || capability == 87) {
    return 163 << 10;
  }
  if (capability < 90 || capability >= 120) {
    return 99 << 10;
  }
  return 227 << 10;
}

bool isDeviceToDevice(cudaMemcpyKind kind) {
  return kind == cudaMemcpyDeviceToDevice;
}

void copy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  if (!isDeviceToDevice(kind) && size <= kLargestCopy) {
    std::memcpy(to, from, size);
  }
  if (kind == cudaMemcpyDeviceToHost && size == 1) {
    *static_cast<char*>(to) = 1;  // a truth value that is read back: what is asked of numbers holds
  }
}

// The driver's functions for expandable segments: addresses, and pages that are laid under them.

CUresult reserveAddresses(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  const std::lock_guard<std::mutex> guard(device().mutex);
  *address = reinterpret_cast<CUdeviceptr>(addresses(size));
  return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult freeAddresses(CUdeviceptr address, size_t size) {
  munmap(reinterpret_cast<void*>(address), size);
  return CUDA_SUCCESS;
}

CUresult createPages(CUmemGenericAllocationHandle* pages, size_t size, const CUmemAllocationProp*, unsigned long long) {
  const std::lock_guard<std::mutex> guard(device().mutex);
  if (device().used + size > device().memory) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  device().used += size;
  *pages = device().next_pages++;
  device().pages[*pages] = size;
  return CUDA_SUCCESS;
}

CUresult releasePages(CUmemGenericAllocationHandle pages) {
  const std::lock_guard<std::mutex> guard(device().mutex);
  const auto found = device().pages.find(pages);
  if (found == device().pages.end()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  device().used -= found->second;
  device().pages.erase(found);
  return CUDA_SUCCESS;
}

CUresult unmapPages(CUdeviceptr address, size_t size) {
  madvise(reinterpret_cast<void*>(address), size, MADV_DONTNEED);
  return CUDA_SUCCESS;
}

CUresult pageSize(size_t* size, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *size = kPage;
  return CUDA_SUCCESS;
}

CUresult nothingToDo() {
  return CUDA_SUCCESS;
}

}  // namespace

// A driver refuses each of these in a forked process, but for errors and versions.
#define REFUSE_FORKED                             \
  if (forked()) {                                 \
    return failed(cudaErrorInitializationError); \
  }

extern "C" {

// What the device says of itself

cudaError_t cudaGetDeviceCount(int* count) {
  REFUSE_FORKED
  static const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  *count = visible && !*visible ? 0 : 1;
  return *count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* index) {
  REFUSE_FORKED
  *index = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int index) {
  REFUSE_FORKED
  return index == 0 ? cudaSuccess : failed(cudaErrorInvalidDevice);
}

cudaError_t cudaGetLastError() {
  const cudaError_t error = device().last_error;
  device().last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  return device().last_error;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  REFUSE_FORKED
  static const std::map<cudaDeviceAttr, int> known = {
      {cudaDevAttrComputeCapabilityMajor, device().major},
      {cudaDevAttrComputeCapabilityMinor, device().minor},
      {cudaDevAttrMultiProcessorCount, device().processors},
      {cudaDevAttrWarpSize, 32},
      {cudaDevAttrMaxThreadsPerBlock, 1024},
      {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxGridDimX, 2147483647},
      {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535},
      {cudaDevAttrMaxSharedMemoryPerBlock, 48 << 10},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, sharedMemory()},
      {cudaDevAttrMaxSharedMemoryPerMultiprocessor, sharedMemory() + 1024},
  };
  const auto found = known.find(attribute);
  *value = found == known.end() ? 0 : found->second;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int index) {
  REFUSE_FORKED
  if (index != 0) {
    return failed(cudaErrorInvalidDevice);
  }
  *properties = {};
  std::strcpy(properties->name, device().name.c_str());
  properties->major = device().major;
  properties->minor = device().minor;
  properties->totalGlobalMem = device().memory;
  properties->multiProcessorCount = device().processors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = sharedMemory();
  properties->sharedMemPerMultiprocessor = sharedMemory() + 1024;
  properties->regsPerBlock = 65536;
  properties->regsPerMultiprocessor = 65536;
  properties->l2CacheSize = 60 << 20;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = 1;
  properties->concurrentKernels = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int) {
  REFUSE_FORKED
  std::strncpy(text, "0000:00:00.0", size);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  REFUSE_FORKED
  if (least) {
    *least = 0;
  }
  if (greatest) {
    *greatest = -5;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  REFUSE_FORKED
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  REFUSE_FORKED
  *attributes = {};
  attributes->binaryVersion = 10 * device().major + device().minor;
  attributes->ptxVersion = attributes->binaryVersion;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->maxDynamicSharedSizeBytes = 48 << 10;
  return cudaSuccess;
}

// Its memory

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  *total = device().memory;
  *free_bytes = device().memory - std::min(device().used, device().memory);
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t size) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  const size_t rounded = inPages(size);
  void* const found = device().used + rounded > device().memory ? nullptr : addresses(rounded);
  if (!found) {
    return failed(cudaErrorMemoryAllocation);
  }
  device().used += rounded;
  device().allocations[found] = rounded;
  *address = found;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  const auto found = device().allocations.find(address);
  if (found == device().allocations.end()) {
    return address ? failed(cudaErrorInvalidValue) : cudaSuccess;
  }
  device().used -= found->second;
  munmap(address, found->second);
  device().allocations.erase(found);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  *address = std::malloc(size);
  device().pinned.insert(*address);
  return *address ? cudaSuccess : failed(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* address) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  device().pinned.erase(address);
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  REFUSE_FORKED
  const std::lock_guard<std::mutex> guard(device().mutex);
  *attributes = {};
  attributes->type = device().pinned.count(address) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind kind) {
  REFUSE_FORKED
  copy(to, from, size, kind);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind kind, cudaStream_t) {
  REFUSE_FORKED
  copy(to, from, size, kind);
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  REFUSE_FORKED
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserveAddresses)},
      {"cuMemAddressFree", reinterpret_cast<void*>(freeAddresses)},
      {"cuMemCreate", reinterpret_cast<void*>(createPages)},
      {"cuMemRelease", reinterpret_cast<void*>(releasePages)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmapPages)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(pageSize)},
      {"cuGetErrorString", reinterpret_cast<void*>(cuGetErrorString)},
  };
  const auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(nothingToDo) : found->second;
  if (result) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "an error of the null GPU";
  return CUDA_SUCCESS;
}

// Streams are one, and always done; an event is the host's clock when it is recorded, since nothing runs later.

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  REFUSE_FORKED
  *stream = static_cast<cudaStream_t>(std::malloc(1));
  return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  REFUSE_FORKED
  return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  REFUSE_FORKED
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  REFUSE_FORKED
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) {
  REFUSE_FORKED
  function(data);
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  REFUSE_FORKED
  *event = reinterpret_cast<cudaEvent_t>(new Clock::time_point);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  REFUSE_FORKED
  return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  REFUSE_FORKED
  delete reinterpret_cast<Clock::time_point*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t, unsigned) {
  REFUSE_FORKED
  *reinterpret_cast<Clock::time_point*>(event) = Clock::now();
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  REFUSE_FORKED
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  REFUSE_FORKED
  const auto passed = *reinterpret_cast<Clock::time_point*>(end) - *reinterpret_cast<Clock::time_point*>(start);
  *milliseconds = std::chrono::duration<float, std::milli>(passed).count();
  return cudaSuccess;
}

}  // extern "C"

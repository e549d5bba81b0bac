// torch's own caching allocator over a driver that is not there. It needs no GPU: what it would ask of CUDA is answered
// here, and the addresses that it hands out are never touched. Reads lines "a NAME BYTES" (allocate), "f NAME" (free)
// and "e" (empty the cache); after each writes requested, allocated and reserved bytes, retries, calls of the driver,
// and 1 if it was out of memory. The arguments are the GPU's memory in bytes, and "descending" where each segment is to
// lie below the one before it.

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/PeerToPeerAccess.h>
#include <cuda.h>

#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <string>

namespace {

constexpr size_t kPage = 2 << 20;
constexpr size_t kLargestPage = 1ull << 30;
size_t capacity = 1ull << 50;
size_t used = 0;
size_t next_address = 1ull << 45;
bool descending = false;
CUmemGenericAllocationHandle next_handle = 1;
std::map<size_t, size_t> allocations;
std::map<CUmemGenericAllocationHandle, size_t> handles;

CUresult reserveAddresses(CUdeviceptr* address, size_t size, size_t, CUdeviceptr, unsigned long long) {
  next_address = (next_address + kLargestPage - 1) / kLargestPage * kLargestPage;
  *address = next_address;
  next_address += size;
  return CUDA_SUCCESS;
}

CUresult createPages(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*, unsigned long long) {
  if (used + size > capacity) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  used += size;
  handles[next_handle] = size;
  *handle = next_handle++;
  return CUDA_SUCCESS;
}

CUresult releasePages(CUmemGenericAllocationHandle handle) {
  used -= handles.at(handle);
  handles.erase(handle);
  return CUDA_SUCCESS;
}

CUresult errorString(CUresult, const char** words) {
  *words = "an error of the driver that is not there";
  return CUDA_SUCCESS;
}

CUresult nothingToDo() {
  return CUDA_SUCCESS;
}

} // namespace

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) { *count = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { *version = 13000; return cudaSuccess; }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *total = capacity;
  *free = capacity - used;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof(*properties));
  properties->totalGlobalMem = capacity;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, size_t size) {
  if (used + size > capacity) {
    return cudaErrorMemoryAllocation;
  }
  used += size;
  size_t pages = (size + kPage - 1) / kPage * kPage;
  size_t placed = descending ? next_address - pages : next_address;
  allocations[placed] = size;
  *address = reinterpret_cast<void*>(placed);
  next_address = descending ? placed : placed + pages;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  used -= allocations.at(reinterpret_cast<size_t>(address));
  allocations.erase(reinterpret_cast<size_t>(address));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char* name, void** function, unsigned int, unsigned long long, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> known = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserveAddresses)},
      {"cuMemCreate", reinterpret_cast<void*>(createPages)},
      {"cuMemRelease", reinterpret_cast<void*>(releasePages)},
      {"cuGetErrorString", reinterpret_cast<void*>(errorString)}};
  auto found = known.find(name);
  *function = found == known.end() ? reinterpret_cast<void*>(nothingToDo) : found->second;
  if (result) {
    *result = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

} // extern "C"

namespace c10::cuda {
bool get_fabric_access(c10::DeviceIndex) { return false; } // would ask the management library
} // namespace c10::cuda

int main(int count, char** arguments) {
  namespace allocator = c10::cuda::CUDACachingAllocator;
  capacity = std::stoull(arguments[1]);
  descending = count > 2 && std::string(arguments[2]) == "descending";
  c10::cuda::detail::init_p2p_access_cache(1);
  allocator::init(1);
  std::map<long, void*> live;
  std::string action;
  while (std::cin >> action) {
    long name = 0;
    size_t size = 0;
    bool failed = false;
    if (action == "a") {
      std::cin >> name >> size;
      try {
        live[name] = allocator::raw_alloc(size);
      } catch (const c10::OutOfMemoryError&) {
        failed = true;
        live.erase(name);
      }
    } else if (action == "f") {
      std::cin >> name;
      if (live.count(name)) {
        allocator::raw_delete(live[name]);
        live.erase(name);
      }
    } else {
      allocator::emptyCache();
    }
    auto stats = allocator::getDeviceStats(0);
    printf("%ld %ld %ld %ld %ld %d\n", stats.requested_bytes[0].current, stats.allocated_bytes[0].current,
           stats.reserved_bytes[0].current, stats.num_alloc_retries, stats.num_device_alloc, failed);
  }
}

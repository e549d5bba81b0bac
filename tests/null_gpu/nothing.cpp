// What needs no answer but "done", by name: CUDA's kernels, copies and synchronizations, cuBLAS's products, the driver's
// modules. No header of CUDA is included, so none of these needs its arguments: a C function may ignore all of them.
// What torch asks for and is not here goes to CUDA's own library, which says that there is no driver.

#include "forked.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define DONE(name)                  \
  int name() {                      \
    return forked() ? kRefused : 0; \
  }

extern "C" {

// The runtime

DONE(__cudaLaunchKernel)
DONE(cudaDeviceEnablePeerAccess)
DONE(cudaDeviceSynchronize)
DONE(cudaEventQuery)
DONE(cudaEventSynchronize)
DONE(cudaFuncSetAttribute)
DONE(cudaHostRegister)
DONE(cudaHostUnregister)
DONE(cudaLaunchKernel)
DONE(cudaLaunchKernelExC)
DONE(cudaMemcpyPeerAsync)
DONE(cudaMemcpyToSymbol)
DONE(cudaMemset)
DONE(cudaMemsetAsync)
DONE(cudaStreamAddCallback)
DONE(cudaStreamDestroy)
DONE(cudaStreamQuery)
DONE(cudaStreamSynchronize)
DONE(cudaStreamWaitEvent)
DONE(cudaThreadExchangeStreamCaptureMode)

int __cudaGetKernel(void** kernel, void* function) {
  *kernel = function;
  return 0;
}

int cudaGetSymbolAddress(void** address, const void*) {
  static char symbol[4096];
  *address = symbol;
  return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks) {
  *blocks = 2;
  return 0;
}

int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks) {
  *blocks = 2;
  return 0;
}

int cudaStreamGetCaptureInfo(void*, int* status) {
  *status = 0;  // not capturing
  return 0;
}

// torch's own question whether GPUs share memory over a fabric, which it would ask of a library of the driver's
bool _ZN3c104cuda17get_fabric_accessEa() {
  return false;
}

// The driver, which torch looks up by name when a graph of autograd ends

int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return 0;
}

int cuCtxGetCurrent(void** context) {
  static char only;
  *context = &only;
  return 0;
}

DONE(cuCtxSetCurrent)
DONE(cuFuncGetAttribute)
DONE(cuFuncSetAttribute)
DONE(cuFuncSetCacheConfig)
DONE(cuInit)
DONE(cuLaunchCooperativeKernel)
DONE(cuLaunchKernel)
DONE(cuLinkAddData_v2)
DONE(cuLinkComplete)
DONE(cuLinkCreate_v2)
DONE(cuModuleGetFunction)
DONE(cuModuleLoad)
DONE(cuModuleLoadData)
DONE(cuModuleLoadDataEx)
DONE(cuModuleUnload)
DONE(cuOccupancyMaxActiveBlocksPerMultiprocessor)
DONE(cuPointerGetAttribute)
DONE(cuTensorMapEncodeTiled)

// cuBLAS

int cublasCreate_v2(void** handle) {
  *handle = std::calloc(1, 4096);
  return 0;
}

int cublasDestroy_v2(void* handle) {
  std::free(handle);
  return 0;
}

int cublasGetMathMode(void*, int* mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(void*, int* mode) {
  *mode = 0;
  return 0;
}

DONE(cublasDotEx)
DONE(cublasGemmEx)
DONE(cublasGemmStridedBatchedEx)
DONE(cublasSdot_v2)
DONE(cublasSetMathMode)
DONE(cublasSetPointerMode_v2)
DONE(cublasSetStream_v2)
DONE(cublasSetWorkspace_v2)
DONE(cublasSgemm_v2)
DONE(cublasSgemmEx)
DONE(cublasSgemmStridedBatched)
DONE(cublasSgemv_v2)

// cuBLASLt

size_t cublasLtGetVersion() {
  return 130000;
}

int cublasLtMatmulDescCreate(void** description) {
  return cublasCreate_v2(description);
}

int cublasLtMatmulDescDestroy(void* description) {
  return cublasDestroy_v2(description);
}

int cublasLtMatmulPreferenceCreate(void** preference) {
  return cublasCreate_v2(preference);
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
  return cublasDestroy_v2(preference);
}

int cublasLtMatrixLayoutCreate(void** layout) {
  return cublasCreate_v2(layout);
}

int cublasLtMatrixLayoutDestroy(void* layout) {
  return cublasDestroy_v2(layout);
}

DONE(cublasLtMatmul)
DONE(cublasLtMatmulDescSetAttribute)
DONE(cublasLtMatmulPreferenceSetAttribute)
DONE(cublasLtMatrixLayoutSetAttribute)

// cublasLtMatmulHeuristicResult_t: an algorithm of 64 bytes, its workspace in bytes, a status, and what nobody reads.
struct Algorithm {
  uint64_t data[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
};

int cublasLtMatmulAlgoGetHeuristic(
    void*, void*, void*, void*, void*, void*, void*, int, Algorithm* found, int* count) {
  std::memset(found, 0, sizeof(Algorithm));
  *count = 1;
  return 0;
}

}  // extern "C"

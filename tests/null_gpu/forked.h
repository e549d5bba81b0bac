// CUDA cannot be used in a process that was forked from one that has used it: a driver refuses its calls, with error 3
// (cudaErrorInitializationError, or CUDA_ERROR_NOT_INITIALIZED). torch.cuda.is_available() is enough of a use.

#pragma once

#include <unistd.h>

constexpr int kRefused = 3;

// Whether this process was forked from the one that called this first.
inline bool forked() {
  static const pid_t first = getpid();
  return getpid() != first;
}

// A thread a row: what a row reads and writes fits a few cache lines, and there are few rows.
#include "apply_records.h"

namespace graphed_sampling {
namespace {

constexpr int kThreads = 32;  // so that rows spread over multiprocessors

__global__ void __launch_bounds__(kThreads) apply_records_kernel(ApplyArguments arguments) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < arguments.rows) apply_record(arguments, row);
}

}  // namespace

cudaError_t launch_apply_records(const ApplyArguments& arguments, cudaStream_t stream) {
  if (arguments.rows == 0) return cudaSuccess;
  const auto blocks = static_cast<unsigned>((arguments.rows + kThreads - 1) / kThreads);
  apply_records_kernel<<<blocks, kThreads, 0, stream>>>(arguments);
  return cudaGetLastError();
}

}  // namespace graphed_sampling

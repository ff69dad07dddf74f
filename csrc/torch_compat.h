// The only file that includes torch: headers of its stable ABI, so that one library serves every
// torch >= 2.10. Not to be included by a .cu file.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

// Weak: a torch without CUDA does not have it, and the library must load there for its CPU
// functions. It is null then; `current_cuda_stream` is the only caller and checks.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace graphed_sampling {

using Tensor = torch::stable::Tensor;
using DeviceGuard = torch::stable::accelerator::DeviceGuard;
using torch::headeronly::ScalarType;

// The stream that torch has made current on the device, as a cudaStream_t.
inline void* current_cuda_stream(int32_t device_index) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "this torch is built without CUDA");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  return stream;
}

}  // namespace graphed_sampling

// Signals from a stream to a descriptor: an eventfd is written once the stream has come so far. The
// schemas are in graphed_sampling/ops.py. All of it is for streams of CUDA; there is no tensor in
// the arguments, so the dispatcher has no device to choose by.
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "torch_compat.h"

namespace graphed_sampling {
namespace {

// No Python and no lock in here: the callback must not wait for the GIL, and CUDA runs callbacks
// one after the other. The descriptor itself travels as the pointer, so that nothing has to be
// freed.
void CUDART_CB write_descriptor(void* descriptor) {
  const uint64_t one = 1;
  // It fails only where the counter is full or the descriptor is gone: nobody waits then.
  [[maybe_unused]] const ssize_t written =
      write(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)), &one, sizeof(one));
}

void CUDART_CB close_descriptor(void* descriptor) {
  close(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)));
}

void* as_pointer(int64_t descriptor) { return reinterpret_cast<void*>(intptr_t{descriptor}); }

// A stream beside each stream that was ever signalled from: a callback in line with kernels would
// hold them up, and one side stream for all would let signals wait for each other. Torch's own
// streams come from a pool and could be a stream that somebody computes on. Past the limit streams
// share, which costs order and no correctness. They live as long as the process.
cudaStream_t side_stream(int32_t device, cudaStream_t stream) {
  constexpr size_t kLimit = 256;
  static std::mutex mutex;
  static std::map<std::pair<int32_t, cudaStream_t>, cudaStream_t> sides;
  struct Made {
    std::vector<cudaStream_t> streams;
    size_t shared = 0;  // how often one was given away again
  };
  static std::map<int32_t, Made> by_device;
  const std::lock_guard<std::mutex> lock(mutex);
  cudaStream_t& side = sides[{device, stream}];
  if (side == nullptr) {
    Made& made = by_device[device];
    if (made.streams.size() < kLimit) {
      cudaStream_t fresh = nullptr;
      const cudaError_t error = cudaStreamCreateWithFlags(&fresh, cudaStreamNonBlocking);
      STD_TORCH_CHECK(error == cudaSuccess, "signal_fd: ", cudaGetErrorString(error));
      made.streams.push_back(fresh);
      side = fresh;
    } else {
      side = made.streams[made.shared++ % kLimit];
    }
  }
  return side;
}

// Write 1 to the eventfd `fd` once `event`, which was recorded on `stream`, has passed. Handles of
// stream and event as integers. The stream itself goes on at once.
void signal_fd(int64_t device, int64_t stream, int64_t event, int64_t fd) {
  const DeviceGuard guard(static_cast<int32_t>(device));
  const cudaStream_t side =
      side_stream(static_cast<int32_t>(device), reinterpret_cast<cudaStream_t>(stream));
  cudaError_t error = cudaStreamWaitEvent(side, reinterpret_cast<cudaEvent_t>(event), 0);
  if (error == cudaSuccess) {
    error = cudaLaunchHostFunc(side, write_descriptor, as_pointer(fd));
  }
  STD_TORCH_CHECK(error == cudaSuccess, "signal_fd: ", cudaGetErrorString(error));
}

// The same as a node of the graph that `stream` captures: each replay writes once. The node hangs
// on what was captured so far, and nothing hangs on it, so that later kernels do not wait. The
// graph keeps a descriptor of its own, which goes with it.
void capture_signal_fd(int64_t stream, int64_t fd) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* dependencies = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
#if CUDART_VERSION >= 13000
  cudaError_t error = cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status,
                                               nullptr, &graph, &dependencies, &edges, &count);
#else
  cudaError_t error = cudaStreamGetCaptureInfo_v3(reinterpret_cast<cudaStream_t>(stream), &status,
                                                  nullptr, &graph, &dependencies, &edges, &count);
#endif
  STD_TORCH_CHECK(error == cudaSuccess, "capture_signal_fd: ", cudaGetErrorString(error));
  STD_TORCH_CHECK(status == cudaStreamCaptureStatusActive,
                  "capture_signal_fd: the stream does not capture");
  const int own = fcntl(static_cast<int>(fd), F_DUPFD_CLOEXEC, 0);
  STD_TORCH_CHECK(own >= 0, "capture_signal_fd: fd is not a descriptor that can be copied");
  cudaUserObject_t owner = nullptr;
  error = cudaUserObjectCreate(&owner, as_pointer(own), close_descriptor, 1,
                               cudaUserObjectNoDestructorSync);
  if (error != cudaSuccess) {
    close(own);
  } else {
    error = cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove);
    if (error != cudaSuccess) {
      cudaUserObjectRelease(owner, 1);  // which closes the descriptor
    }
  }
  if (error == cudaSuccess) {
    cudaHostNodeParams node_params = {};
    node_params.fn = write_descriptor;
    node_params.userData = as_pointer(own);
    cudaGraphNode_t node = nullptr;
    error = cudaGraphAddHostNode(&node, graph, dependencies, count, &node_params);
  }
  STD_TORCH_CHECK(error == cudaSuccess, "capture_signal_fd: ", cudaGetErrorString(error));
}

}  // namespace
}  // namespace graphed_sampling

STABLE_TORCH_LIBRARY_IMPL(graphed_sampling, CompositeExplicitAutograd, library) {
  library.impl("signal_fd", TORCH_BOX(&graphed_sampling::signal_fd));
  library.impl("capture_signal_fd", TORCH_BOX(&graphed_sampling::capture_signal_fd));
}

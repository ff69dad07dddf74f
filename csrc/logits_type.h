// The types of logits that kernels take.
#pragma once

namespace graphed_sampling {

enum class LogitsType { kFloat32, kBFloat16, kFloat16 };

}  // namespace graphed_sampling

#include "simd_plain.h"

#include "isa.h"

namespace kvtailor {

constexpr Kernels plain_kernels = kernels_called("plain");

}  // namespace kvtailor

#include "simd_avx2.h"

#include "isa.h"

namespace kvtailor {

constexpr Kernels avx2_kernels = kernels_called("avx2");

}  // namespace kvtailor

#include "simd_avx512.h"

#include "isa.h"

namespace kvtailor {

constexpr Kernels avx512_kernels = kernels_called("avx512");

}  // namespace kvtailor

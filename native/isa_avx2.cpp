#include <type_traits>

#include "simd_avx2.h"
#include "channels.h"
#include "combine.h"
#include "many.h"
#include "pack.h"

namespace kvtailor {

const Kernels avx2_kernels = {
    "avx2", attend_rows, scores_of_few, add_mass, start_sums, pack_tokens, unpack_tokens, rotate_rows,
    peak_of, scores_on_channels, combine_group,
};

}  // namespace kvtailor

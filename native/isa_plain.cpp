#include <type_traits>

#include "simd_plain.h"
#include "channels.h"
#include "combine.h"
#include "many.h"
#include "pack.h"

namespace kvtailor {

const Kernels plain_kernels = {
    "plain", attend_rows, scores_of_few, add_mass, start_sums, pack_tokens, unpack_tokens, rotate_rows,
    peak_of, scores_on_channels, combine_group,
};

}  // namespace kvtailor

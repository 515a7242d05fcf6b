// The kernels of one instruction set: that of the vectors that are included before.
#pragma once

#include "channels.h"
#include "combine.h"
#include "many.h"
#include "pack.h"

namespace kvtailor {
namespace {

// A constant, so that nothing runs before the processor has been asked what it can do.
constexpr Kernels kernels_called(const char* name) {
    return {name,          attend_rows, scores_of_few, add_mass,           start_sums,   pack_tokens,
            unpack_tokens, rotate_rows, peak_of,       scores_on_channels, combine_group};
}

}  // namespace
}  // namespace kvtailor

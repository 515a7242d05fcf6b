// The largest of many scores.
#pragma once

#include <cstdint>

namespace kvtailor {

struct TopJob {
    const float* scores;  // (rows, n)
    std::int64_t rows, row_stride, n, k;
    std::int64_t* out;    // (rows, k)
    std::int64_t out_stride;
};

// Writes the positions of each row's k largest scores, ascending; of equal scores the first are taken. False where a
// score is not a number.
bool topk(const TopJob& job, int threads);

}  // namespace kvtailor

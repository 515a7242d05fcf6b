// What attention found, written to the tensors that a call was given.
#pragma once

#include <cmath>
#include <limits>
#include <optional>
#include <vector>

#include "arrays.h"
#include "dispatch.h"
#include "half.h"

namespace kvtailor {

[[noreturn]] inline void refuse_numbers() {
    refuse("attention: a query or key is not a finite number, or a logit is too large for one");
}

// The place of row `number`, counted over all axes but the last.
inline std::int64_t row_place(const Array& array, std::int64_t number) {
    std::int64_t place = 0;
    for (std::size_t axis = array.ndim() - 1; axis-- > 0;) {
        const std::int64_t size = static_cast<std::int64_t>(array.shape(axis));
        place += number % size * array.stride(axis);
        number /= size;
    }
    return place;
}

// The rows of all tasks in their order: weighted values to `out`, log-sum-exp without sinks to `lse`, a contiguous one.
inline void write_attention(const std::vector<Task>& tasks, const std::vector<Result>& results, const Array& out,
                            const std::optional<Array>& lse) {
    const Dtype dtype = dtype_of("out", out);
    const std::int64_t dim = static_cast<std::int64_t>(out.shape(out.ndim() - 1));
    std::int64_t number = 0;
    for (std::size_t t = 0; t < tasks.size(); ++t)
        for (int row = 0; row < tasks[t].query.total; ++row, ++number) {
            const float total = results[t].sum[row];
            if (!std::isfinite(total)) refuse_numbers();
            const float factor = total > 0 ? 1 / sum_with_sink(tasks[t], results[t], row) : 0;
            const std::int64_t place = row_place(out, number);
            const float* acc = results[t].acc.data() + row * dim;
            for (std::int64_t c = 0; c < dim; ++c) put_number(dtype, out.data(), place + c, acc[c] * factor);
            if (lse)
                static_cast<float*>(lse->data())[number] =
                    total > 0 ? results[t].most[row] + std::log(total) : -std::numeric_limits<float>::infinity();
        }
}

}  // namespace kvtailor

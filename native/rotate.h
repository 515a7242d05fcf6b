// The Hadamard transform over a head, orthonormal, in blocks of the largest power of two that divides it.
#pragma once

#include <cmath>

#include "numbers.h"

namespace kvtailor {
namespace {

// The steps of span W and more, by two at a time.
inline void wide_butterflies(float* y, int block) {
    int span = W;
    for (; 4 * span <= block; span *= 4)
        for (int i = 0; i < block; i += 4 * span)
            for (float* p = y + i; p < y + i + span; p += W) {
                const F a = load(p), b = load(p + span), c = load(p + 2 * span), d = load(p + 3 * span);
                const F ab = a + b, a_b = a - b, cd = c + d, c_d = c - d;
                store(p, ab + cd);
                store(p + span, a_b + c_d);
                store(p + 2 * span, ab - cd);
                store(p + 3 * span, a_b - c_d);
            }
    if (span < block)
        for (float* p = y; p < y + span; p += W) {
            const F even = load(p), odd = load(p + span);
            store(p, even + odd);
            store(p + span, even - odd);
        }
}

inline void rotate_row(float* x, int dim) {
    const int block = dim & -dim;
    for (int i = 0; i < dim; i += W) store(x + i, butterflies(load(x + i)));
    for (int start = 0; start < dim; start += block) wide_butterflies(x + start, block);
    const F scale = set(static_cast<float>(1 / std::sqrt(static_cast<double>(block))));
    for (int i = 0; i < dim; i += W) store(x + i, load(x + i) * scale);
}

inline void rotate_rows(float* rows, std::int64_t count, int dim) {
    for (std::int64_t row = 0; row < count; ++row) rotate_row(rows + row * dim, dim);
}

}  // namespace
}  // namespace kvtailor

// Numbers of any kind as fp32 vectors, and functions of vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "half.h"

namespace kvtailor {
namespace {

struct Single {
    using Number = float;
    static F read(const Number* p) { return load(p); }
};
struct Half {
    using Number = std::uint16_t;
    static F read(const Number* p) { return load_half(p); }
};
struct Brain {
    using Number = std::uint16_t;
    static F read(const Number* p) { return load_brain(p); }
};

// Calls `run` with the kind of numbers that a dtype stands for.
template <class Run>
inline void with_kind(Dtype dtype, Run run) {
    switch (dtype) {
        case Dtype::f32: return run(Single{});
        case Dtype::f16: return run(Half{});
        case Dtype::bf16: return run(Brain{});
    }
}

inline F load_scale(Dtype dtype, const std::uint16_t* p) { return dtype == Dtype::f16 ? load_half(p) : load_brain(p); }

// The row of a token, or the one that an index has at its place.
template <class Kind>
inline const typename Kind::Number* row_of(const Rows& rows, const std::int64_t* index, std::int64_t token) {
    return static_cast<const typename Kind::Number*>(rows.data) + (index ? index[token] : token) * rows.stride;
}

template <class Kind>
inline void read_row(const typename Kind::Number* row, int dim, float* out) {
    for (int c = 0; c < dim; c += W) store(out + c, Kind::read(row + c));
}

// exp for x <= 0, to 2e-7; 0 below -87.
inline F exp_down(F x) {
    const F clamped = max(x, set(-87.0f));
    const F n = round(clamped * set(1.44269504f));
    F r = fma(n, set(-0.693359375f), clamped);
    r = fma(n, set(2.12194440e-4f), r);
    F p = set(1.9875691500e-4f);
    p = fma(p, r, set(1.3981999507e-3f));
    p = fma(p, r, set(8.3334519073e-3f));
    p = fma(p, r, set(4.1665795894e-2f));
    p = fma(p, r, set(1.6666665459e-1f));
    p = fma(p, r, set(5.0000001201e-1f));
    p = fma(p, r * r, r + set(1.0f));
    return where_greater(x, set(-87.0f), p * power_of_two(n), set(0.0f));
}

inline float greatest_of(const float* p, int count) {
    F most = load(p);
    for (int i = W; i < count; i += W) most = max(most, load(p + i));
    return greatest(most);
}

inline float sum_of(const float* p, int count) {
    F total = set(0);
    for (int i = 0; i < count; i += W) total = total + load(p + i);
    return sum(total);
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

}  // namespace
}  // namespace kvtailor

// Sixteen numbers at a time: AVX-512 with VNNI.
#pragma once

#ifdef KVTAILOR_EMULATE_AVX512
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/f16c.h>

#include "simde_gaps.h"
#else
#include <immintrin.h>
#endif

#include <cstdint>

#include "core.h"

namespace kvtailor {
namespace {

constexpr int W = 16;  // fp32 numbers, or outputs of a register of codes

struct F {
    __m512 v;
};

inline F set(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F abs(F a) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff)))};
}
inline F round(F a) { return {_mm512_cvtepi32_ps(_mm512_cvtps_epi32(a.v))}; }
inline F floor(F a) {
    const __m512 near = _mm512_cvtepi32_ps(_mm512_cvtps_epi32(a.v));
    const __mmask16 above = _mm512_cmp_ps_mask(near, a.v, _CMP_GT_OQ);
    return {_mm512_mask_sub_ps(near, above, near, _mm512_set1_ps(1.0f))};
}
// a where x > y, else b.
inline F where_greater(F x, F y, F a, F b) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, y.v, _CMP_GT_OQ), b.v, a.v)};
}

inline F load_half(const std::uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline F load_brain(const std::uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

inline __m256 low_half(F a) { return _mm512_castps512_ps256(a.v); }
inline __m256 high_half(F a) { return _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1)); }

inline float sum(F a) {
    const __m256 y = _mm256_add_ps(low_half(a), high_half(a));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float greatest(F a) {
    const __m256 y = _mm256_max_ps(low_half(a), high_half(a));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// The sums of four vectors.
inline void sum4(F a, F b, F c, F d, float* out) {
    const __m256 p = _mm256_add_ps(low_half(a), high_half(a)), q = _mm256_add_ps(low_half(b), high_half(b));
    const __m256 r = _mm256_add_ps(low_half(c), high_half(c)), s = _mm256_add_ps(low_half(d), high_half(d));
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(p, q), _mm256_hadd_ps(r, s));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// 2^n for whole n in -126 ... 127.
inline F power_of_two(F n) {
    const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}

// W whole numbers in 0 ... 255, or -128 ... 127, as bytes.
inline void store_bytes(std::uint8_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}
inline void store_words(std::int16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x.v)));
}

// A register of codes: W outputs of four codes each.
struct Bytes {
    __m512i v;
};

inline Bytes load_codes(const std::uint8_t* p) { return {_mm512_loadu_si512(p)}; }

template <int SHIFT, int BITS>
inline Bytes slot(Bytes line) {
    if (BITS == 8) return line;
    const __m512i shifted = SHIFT ? _mm512_srli_epi16(line.v, SHIFT) : line.v;
    return {_mm512_and_si512(shifted, _mm512_set1_epi8((1 << BITS) - 1))};
}

// Keeps a sum in its register: reordered sums spill.
inline void hold(__m512i& sum) {
#ifndef KVTAILOR_EMULATE_AVX512
    __asm__("" : "+v"(sum));
#endif
}

// Sums of products in 32 bits.
struct Sum {
    __m512i v;
};

inline Sum no_sum() { return {_mm512_setzero_si512()}; }

template <bool VALUES>
inline void add(Sum& sum, Bytes codes, std::int32_t weights) {
    const __m512i w = _mm512_set1_epi32(weights);
    sum.v = VALUES ? _mm512_dpbusd_epi32(sum.v, w, codes.v) : _mm512_dpbusd_epi32(sum.v, codes.v, w);
    hold(sum.v);
}

// Quads of codes whose products fit into a sum.
template <int BITS, bool VALUES>
constexpr int quads_that_fit() {
    return 1 << 14;
}

using Wide = Sum;

inline Wide no_wide() { return no_sum(); }
inline void flush(Wide& wide, Sum& sum) { wide.v = sum.v; }  // a sum goes on where it stands
inline F numbers(Wide wide) { return {_mm512_cvtepi32_ps(wide.v)}; }

constexpr bool WIDE_WEIGHTS = false;
constexpr float VALUE_OFFSET = 128;  // what is taken from 8-bit codes of values before they are multiplied

inline Bytes centred(Bytes codes) { return {_mm512_xor_si512(codes.v, _mm512_set1_epi8(static_cast<char>(0x80)))}; }

// Never used: weights are not wide here.
using WideSum = Sum;
inline WideSum no_wide_sum() { return no_sum(); }
inline void add_wide(WideSum&, Bytes, std::int64_t) {}

// Tiles of W outputs that are summed at once for `rows` rows in `passes` passes: what the registers hold.
template <int ROWS, int PASSES>
constexpr int tiles_at_once() {
    return ROWS * PASSES > 4 ? 2 : 4;
}

// For packing, unpacking and retrieval.

inline F root(F a) { return {_mm512_sqrt_ps(a.v)}; }

// The Hadamard transform of W numbers, not scaled.
inline F butterflies(F a) {
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 x = a.v;
    for (int span = 1; span < W; span *= 2) {
        const __m512i mate = _mm512_xor_si512(lanes, _mm512_set1_epi32(span));
        const __mmask16 odd = _mm512_cmpgt_epi32_mask(lanes, mate);
        const __m512 swapped = _mm512_permutexvar_ps(mate, x);
        x = _mm512_mask_sub_ps(_mm512_add_ps(swapped, x), odd, swapped, x);
    }
    return {x};
}

// Rounded down to 16 bits; what is too large for them must not come here.
inline void store_half_down(std::uint16_t* p, F x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
}
inline void store_brain_down(std::uint16_t* p, F x) {
    const __m512i bits = _mm512_castps_si512(x.v);
    const __m512i carry = _mm512_srli_epi32(_mm512_srai_epi32(bits, 31), 16);  // more of a negative number is less
    const __m512i down = _mm512_srli_epi32(_mm512_add_epi32(bits, carry), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(down));
}

// W words of 32 bits that codes are pushed into, the last one lowest.
struct Words {
    __m512i v;
};

inline Words no_words() { return {_mm512_setzero_si512()}; }
template <int BITS>
inline void push(Words& words, F code) {
    words.v = _mm512_or_si512(_mm512_slli_epi32(words.v, BITS), _mm512_cvtps_epi32(code.v));
}
inline void store_lines(std::uint8_t* p, Words words) { _mm512_storeu_si512(p, words.v); }

// Bits `shift` and up, below `mask`, of W words of 32 bits.
inline F load_field(const std::uint8_t* p, int shift, int mask) {
    const __m512i shifted = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
    return {_mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)))};
}
inline F load_unsigned(const std::uint8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline F load_signed(const std::int8_t* p) {
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

// Rows become columns.
inline void transpose(F (&rows)[W]) {
    __m512 pairs[W], fours[W];
    for (int i = 0; i < W; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < W; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0b01000100);
            fours[i + 2 * j + 1] = _mm512_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0b11101110);
        }
    for (int i = 0; i < 4; ++i) {  // 4 x 4 quarters of four numbers
        const __m512 a = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0b10001000);
        const __m512 b = _mm512_shuffle_f32x4(fours[i], fours[i + 4], 0b11011101);
        const __m512 c = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0b10001000);
        const __m512 d = _mm512_shuffle_f32x4(fours[i + 8], fours[i + 12], 0b11011101);
        rows[i].v = _mm512_shuffle_f32x4(a, c, 0b10001000);
        rows[i + 4].v = _mm512_shuffle_f32x4(b, d, 0b10001000);
        rows[i + 8].v = _mm512_shuffle_f32x4(a, c, 0b11011101);
        rows[i + 12].v = _mm512_shuffle_f32x4(b, d, 0b11011101);
    }
}

}  // namespace
}  // namespace kvtailor

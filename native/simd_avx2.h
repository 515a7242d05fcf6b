// Eight numbers at a time: AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core.h"

namespace kvtailor {
namespace {

constexpr int W = 8;  // fp32 numbers, or outputs of a register of codes

struct F {
    __m256 v;
};

inline F set(float x) { return {_mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm256_storeu_ps(p, x.v); }
inline F operator+(F a, F b) { return {_mm256_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm256_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.v, b.v)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline F round(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F floor(F a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)}; }
// a where x > y, else b.
inline F where_greater(F x, F y, F a, F b) {
    return {_mm256_blendv_ps(b.v, a.v, _mm256_cmp_ps(x.v, y.v, _CMP_GT_OQ))};
}

inline F load_half(const std::uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline F load_brain(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

inline float sum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float greatest(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
// The sums of four vectors.
inline void sum4(F a, F b, F c, F d, float* out) {
    const __m256 x = _mm256_hadd_ps(_mm256_hadd_ps(a.v, b.v), _mm256_hadd_ps(c.v, d.v));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)));
}

// 2^n for whole n in -126 ... 127.
inline F power_of_two(F n) {
    const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}

// W whole numbers in 0 ... 255, or -128 ... 127, as bytes.
inline void store_bytes(std::uint8_t* p, F x) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    const __m128i bytes = _mm_packus_epi16(_mm_and_si128(words, _mm_set1_epi16(255)), _mm_setzero_si128());
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), bytes);
}
inline void store_words(std::int16_t* p, F x) {
    const __m256i whole = _mm256_cvtps_epi32(x.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), words);
}

// A register of codes: W outputs of four codes each.
struct Bytes {
    __m256i v;
};

inline Bytes load_codes(const std::uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }

template <int SHIFT, int BITS>
inline Bytes slot(Bytes line) {
    const __m256i shifted = SHIFT ? _mm256_srli_epi16(line.v, SHIFT) : line.v;
    return {_mm256_and_si256(shifted, _mm256_set1_epi8((1 << BITS) - 1))};
}

// Keeps a sum in its register: reordered sums spill.
inline void hold(__m256i& sum) { __asm__("" : "+x"(sum)); }

// Sums of products in 16 bits: few enough fit that they are widened in time.
struct Sum {
    __m256i v;
};

inline Sum no_sum() { return {_mm256_setzero_si256()}; }

template <bool VALUES>
inline void add(Sum& sum, Bytes codes, std::int32_t weights) {
    const __m256i w = _mm256_set1_epi32(weights);
    const __m256i products = VALUES ? _mm256_maddubs_epi16(w, codes.v) : _mm256_maddubs_epi16(codes.v, w);
    sum.v = _mm256_add_epi16(sum.v, products);
    hold(sum.v);
}

// Quads of codes whose products fit into a sum.
template <int BITS, bool VALUES>
constexpr int quads_that_fit() {
    return 32767 / (2 * ((1 << BITS) - 1) * (VALUES ? 255 : 127));
}

struct Wide {
    __m256i v;
};

inline Wide no_wide() { return {_mm256_setzero_si256()}; }
inline void flush(Wide& wide, Sum& sum) {
    wide.v = _mm256_add_epi32(wide.v, _mm256_madd_epi16(sum.v, _mm256_set1_epi16(1)));
    sum.v = _mm256_setzero_si256();
}
inline F numbers(Wide wide) { return {_mm256_cvtepi32_ps(wide.v)}; }

// 8-bit codes times 8-bit weights do not fit into 16 bits, so their weights have 16 bits and their sums 32.
constexpr bool WIDE_WEIGHTS = true;
constexpr float VALUE_OFFSET = 0;  // what is taken from 8-bit codes of values before they are multiplied

inline Bytes centred(Bytes codes) { return codes; }

struct WideSum {
    __m256i even, odd;  // outputs 0-3 and 4-7, two partial sums each
};

inline WideSum no_wide_sum() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline void add_wide(WideSum& sum, Bytes codes, std::int64_t weights) {
    const __m256i w = _mm256_set1_epi64x(weights);
    const __m256i low = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(codes.v));
    const __m256i high = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(codes.v, 1));
    sum.even = _mm256_add_epi32(sum.even, _mm256_madd_epi16(low, w));
    sum.odd = _mm256_add_epi32(sum.odd, _mm256_madd_epi16(high, w));
    hold(sum.even);
    hold(sum.odd);
}
inline F numbers(WideSum sum) {
    const __m256i pairs = _mm256_hadd_epi32(sum.even, sum.odd);  // outputs 0 1 4 5 | 2 3 6 7
    return {_mm256_cvtepi32_ps(_mm256_permute4x64_epi64(pairs, 0b11011000))};
}

// Tiles of W outputs that are summed at once for `rows` rows in `passes` passes: what the registers hold.
template <int ROWS, int PASSES>
constexpr int tiles_at_once() {
    return ROWS * PASSES > 4 ? 1 : ROWS * PASSES > 2 ? 2 : 4;
}

// For packing, unpacking and retrieval.

inline F root(F a) { return {_mm256_sqrt_ps(a.v)}; }

// The Hadamard transform of W numbers, not scaled.
inline F butterflies(F a) {
    const __m256 zero = _mm256_setzero_ps(), minus = _mm256_set1_ps(-0.0f);
    __m256 x = a.v;
    x = _mm256_add_ps(_mm256_permute_ps(x, 0b10110001), _mm256_xor_ps(x, _mm256_blend_ps(zero, minus, 0b10101010)));
    x = _mm256_add_ps(_mm256_permute_ps(x, 0b01001110), _mm256_xor_ps(x, _mm256_blend_ps(zero, minus, 0b11001100)));
    return {_mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, _mm256_blend_ps(zero, minus, 0b11110000)))};
}

// Rounded down to 16 bits; what is too large for them must not come here.
inline void store_half_down(std::uint16_t* p, F x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
}
inline void store_brain_down(std::uint16_t* p, F x) {
    const __m256i bits = _mm256_castps_si256(x.v);
    const __m256i carry = _mm256_srli_epi32(_mm256_srai_epi32(bits, 31), 16);  // more of a negative number is less
    const __m256i down = _mm256_srli_epi32(_mm256_add_epi32(bits, carry), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packus_epi32(_mm256_castsi256_si128(down),
                                                                     _mm256_extracti128_si256(down, 1)));
}

// W words of 32 bits that codes are pushed into, the last one lowest.
struct Words {
    __m256i v;
};

inline Words no_words() { return {_mm256_setzero_si256()}; }
template <int BITS>
inline void push(Words& words, F code) {
    words.v = _mm256_or_si256(_mm256_slli_epi32(words.v, BITS), _mm256_cvtps_epi32(code.v));
}
inline void store_lines(std::uint8_t* p, Words words) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words.v);
}

// Bits `shift` and up, below `mask`, of W words of 32 bits.
inline F load_field(const std::uint8_t* p, int shift, int mask) {
    const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    const __m256i shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128(shift));
    return {_mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask)))};
}
inline F load_unsigned(const std::uint8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline F load_signed(const std::int8_t* p) {
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}

// Rows become columns.
inline void transpose(F (&rows)[W]) {
    __m256 pairs[W], fours[W];
    for (int i = 0; i < W; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i].v, rows[i + 1].v);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i].v, rows[i + 1].v);
    }
    for (int i = 0; i < W; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0b01000100);
            fours[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + 2 + j], 0b11101110);
        }
    for (int i = 0; i < 4; ++i) {
        rows[i].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4].v = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}

}  // namespace
}  // namespace kvtailor

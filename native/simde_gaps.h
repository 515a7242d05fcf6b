// What the AVX-512 kernels use and SIMDe 0.7.4 lacks, in halves of 256 bits. Included after SIMDe, whose names it continues.
#pragma once

#include <cstring>

namespace kvtailor {
namespace {
namespace gaps {

union Numbers {
    __m512 all;
    __m256 half[2];
};

union Whole {
    __m512i all;
    __m256i half[2];
    int lane[16];
};

inline __m512 cvtph_ps(__m256i a) {
    Numbers out;
    out.half[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
    out.half[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
    return out.all;
}

template <int ROUNDING>
inline __m256i cvtps_ph(__m512 a) {
    Numbers in;
    in.all = a;
    return _mm256_set_m128i(_mm256_cvtps_ph(in.half[1], ROUNDING), _mm256_cvtps_ph(in.half[0], ROUNDING));
}

inline __m512 cvtepi32_ps(__m512i a) {
    Whole in;
    in.all = a;
    Numbers out;
    for (int i = 0; i < 2; i++) out.half[i] = _mm256_cvtepi32_ps(in.half[i]);
    return out.all;
}

inline __m512i cvtps_epi32(__m512 a) {
    Numbers in;
    in.all = a;
    Whole out;
    for (int i = 0; i < 2; i++) out.half[i] = _mm256_cvtps_epi32(in.half[i]);
    return out.all;
}

inline __m512i cvtepu16_epi32(__m256i a) {
    Whole out;
    out.half[0] = _mm256_cvtepu16_epi32(_mm256_castsi256_si128(a));
    out.half[1] = _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1));
    return out.all;
}

inline __m512i cvtepu8_epi32(__m128i a) {
    Whole out;
    out.half[0] = _mm256_cvtepu8_epi32(a);
    out.half[1] = _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8));
    return out.all;
}

inline __m512i cvtepi8_epi32(__m128i a) {
    Whole out;
    out.half[0] = _mm256_cvtepi8_epi32(a);
    out.half[1] = _mm256_cvtepi8_epi32(_mm_srli_si128(a, 8));
    return out.all;
}

template <int CHOICE>
inline __m512 shuffle_f32x4(__m512 a, __m512 b) {
    float from[2][16], to[16];
    std::memcpy(from[0], &a, sizeof(a));
    std::memcpy(from[1], &b, sizeof(b));
    for (int i = 0; i < 4; i++) std::memcpy(to + 4 * i, from[i / 2] + 4 * (CHOICE >> (2 * i) & 3), 16);
    __m512 out;
    std::memcpy(&out, to, sizeof(out));
    return out;
}

template <int COUNT>
inline __m512i srai_epi32(__m512i a) {
    Whole out;
    out.all = a;
    for (__m256i& half : out.half) half = _mm256_srai_epi32(half, COUNT);
    return out.all;
}

// The low bits of each lane.
template <typename Narrow, typename Register>
inline Register narrowed(__m512i a) {
    Whole in;
    in.all = a;
    Narrow lane[16];
    for (int i = 0; i < 16; i++) lane[i] = static_cast<Narrow>(in.lane[i]);
    Register out;
    static_assert(sizeof(out) == sizeof(lane), "sixteen lanes fill the register");
    std::memcpy(&out, lane, sizeof(out));
    return out;
}

}  // namespace gaps
}  // namespace
}  // namespace kvtailor

// Macros, because the compiler's own header declares these names for processors that have AVX-512.
#define _mm512_cvtph_ps(a) kvtailor::gaps::cvtph_ps(a)
#define _mm512_cvtps_ph(a, rounding) kvtailor::gaps::cvtps_ph<(rounding) & 7>(a)
#define _mm512_cvtepi32_ps(a) kvtailor::gaps::cvtepi32_ps(a)
#define _mm512_cvtps_epi32(a) kvtailor::gaps::cvtps_epi32(a)
#define _mm512_cvtepu16_epi32(a) kvtailor::gaps::cvtepu16_epi32(a)
#define _mm512_cvtepu8_epi32(a) kvtailor::gaps::cvtepu8_epi32(a)
#define _mm512_cvtepi8_epi32(a) kvtailor::gaps::cvtepi8_epi32(a)
#define _mm512_shuffle_f32x4(a, b, choice) kvtailor::gaps::shuffle_f32x4<(choice)>(a, b)
#define _mm512_srai_epi32(a, count) kvtailor::gaps::srai_epi32<(count)>(a)
#define _mm512_cvtepi32_epi8(a) kvtailor::gaps::narrowed<unsigned char, __m128i>(a)
#define _mm512_cvtepi32_epi16(a) kvtailor::gaps::narrowed<unsigned short, __m256i>(a)

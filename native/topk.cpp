#include "topk.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <vector>

#include "dispatch.h"
#include "half.h"

namespace kvtailor {
namespace {

constexpr int LANES = 16;
constexpr std::int64_t MOST_BLOCK = 64;
constexpr std::int64_t PEAKS_PER_RESULT = 4;  // blocks for each, so that few scores lie above the k-th peak

// Four scores, in what every processor of a kind has for them.
typedef float Four __attribute__((vector_size(16)));
typedef std::int32_t FourWhole __attribute__((vector_size(16)));
constexpr int AT_ONCE = LANES / 4;

// The greatest score of every block of `size`, a multiple of LANES; false where a score is not a number.
bool find_peaks(const float* scores, std::int64_t size, std::vector<float>& peaks) {
    FourWhole unordered[AT_ONCE] = {};
    for (float& peak : peaks) {
        Four most[AT_ONCE];
        std::memcpy(most, scores, sizeof most);
        for (const float* end = scores + size; scores < end; scores += LANES) {
            Four x[AT_ONCE];
            std::memcpy(x, scores, sizeof x);
            for (int i = 0; i < AT_ONCE; ++i) {
                most[i] = most[i] > x[i] ? most[i] : x[i];
                unordered[i] |= x[i] != x[i];
            }
        }
        for (int width = AT_ONCE / 2; width > 0; width /= 2)
            for (int i = 0; i < width; ++i) most[i] = most[i] > most[i + width] ? most[i] : most[i + width];
        peak = std::max(std::max(most[0][0], most[0][1]), std::max(most[0][2], most[0][3]));
    }
    for (int i = 1; i < AT_ONCE; ++i) unordered[0] |= unordered[i];
    return !(unordered[0][0] | unordered[0][1] | unordered[0][2] | unordered[0][3]);
}

// Whole numbers in the order of scores; both zeros are one.
std::uint32_t key_of(float x) {
    const std::uint32_t bits = bits_of(x + 0.0f);
    return bits & 0x80000000 ? ~bits : bits | 0x80000000;
}
float score_of(std::uint32_t key) { return float_of(key & 0x80000000 ? key & 0x7fffffff : ~key); }

// The k-th largest score: digit by digit, those that agree with it so far are kept.
float kth_largest(const float* scores, std::int64_t count, std::int64_t k) {
    constexpr int DIGIT = 11;
    std::vector<std::uint32_t> keys(count);
    for (std::int64_t i = 0; i < count; ++i) keys[i] = key_of(scores[i]);
    for (int shift : {32 - DIGIT, 32 - 2 * DIGIT, 0}) {
        std::int64_t holds[1 << DIGIT] = {};
        const std::uint32_t mask = (1 << (shift == 0 ? 32 - 2 * DIGIT : DIGIT)) - 1;
        for (std::int64_t i = 0; i < count; ++i) ++holds[(keys[i] >> shift) & mask];
        std::uint32_t digit = mask;
        for (; k > holds[digit]; --digit) k -= holds[digit];
        std::int64_t kept = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            keys[kept] = keys[i];
            kept += ((keys[i] >> shift) & mask) == digit;
        }
        count = kept;
    }
    return score_of(keys[0]);
}

// Writes the positions of the k largest of `count` scores: their own places where no positions are given.
void take_largest(const float* scores, const std::int64_t* positions, std::int64_t count, std::int64_t k,
                  std::int64_t* out) {
    const float last = kth_largest(scores, count, k);
    std::int64_t equal = k;  // to be taken of those that equal the last
    for (std::int64_t i = 0; i < count; ++i) equal -= scores[i] > last;
    for (std::int64_t i = 0; i < count; ++i)
        if (scores[i] > last || (scores[i] == last && equal-- > 0)) *out++ = positions ? positions[i] : i;
}

// Scores that may be among the largest, in the order of their positions.
struct Candidates {
    std::vector<float> scores;
    std::vector<std::int64_t> positions;
    std::int64_t count = 0;

    // Adds those between two positions that are no less than `least`.
    void add(const float* row, std::int64_t begin, std::int64_t end, float least) {
        const std::size_t wanted = count + (end - begin) + 1;
        if (scores.size() < wanted) {
            scores.resize(2 * wanted);
            positions.resize(2 * wanted);
        }
        std::int64_t place = count;
        for (std::int64_t i = begin; i < end; ++i) {
            scores[place] = row[i];
            positions[place] = i;
            place += row[i] >= least;
        }
        count = place;
    }
};

bool top_of_row(const float* scores, std::int64_t n, std::int64_t k, std::int64_t* out) {
    std::int64_t size = MOST_BLOCK;
    while (size > LANES && n / size < PEAKS_PER_RESULT * k) size /= 2;
    std::vector<float> peaks(n / size);
    if (!find_peaks(scores, size, peaks)) return false;
    const std::int64_t blocks = static_cast<std::int64_t>(peaks.size()), rest = blocks * size;
    for (std::int64_t i = rest; i < n; ++i)
        if (scores[i] != scores[i]) return false;
    if (blocks < PEAKS_PER_RESULT * k) {
        take_largest(scores, nullptr, n, k, out);
        return true;
    }
    const float least = kth_largest(peaks.data(), blocks, k);
    Candidates found;
    for (std::int64_t b = 0; b < blocks; ++b)
        if (peaks[b] >= least) found.add(scores, b * size, (b + 1) * size, least);
    found.add(scores, rest, n, least);
    take_largest(found.scores.data(), found.positions.data(), found.count, k, out);
    return true;
}

}  // namespace

bool topk(const TopJob& job, int threads) {
    std::atomic<bool> numbers{true};
    const double scores = static_cast<double>(job.rows) * static_cast<double>(job.n);
    run_all(job.rows, threads_for(scores, LEAST_NUMBERS, threads), [&](std::int64_t row) {
        if (!top_of_row(job.scores + row * job.row_stride, job.n, job.k, job.out + row * job.out_stride))
            numbers = false;
    });
    return numbers;
}

}  // namespace kvtailor

// What the kernels are given: plain pointers and sizes, checked by the binding before they get here.
#pragma once

#include <cstdint>

namespace kvtailor {

constexpr int BLOCK = 64;      // tokens of a packed block, and tokens attended at a time
constexpr int MOST_DIM = 256;  // channels of a head that the kernels' buffers are made for
constexpr int MOST_ROWS = 16;  // queries of a KV head that are attended on the codes; more go through fp32 blocks
constexpr float HIDDEN = -1e30f;

enum class Dtype : std::uint8_t { f32, f16, bf16 };

// One head's codes, in lines of 64 bytes (see dot.h).
struct Codes {
    int bits = 0;              // 1, 2, 3, 4 or 8
    int dim = 0;               // channels
    int group = 0;             // channels (token axis) or tokens (channel axis) that share a scale
    bool per_channel = false;  // axis of the scales
    Dtype scale_dtype = Dtype::f16;
    const std::uint8_t* planes[2] = {nullptr, nullptr};  // 3 bits: 2 low bits, then 1 high bit
    std::int64_t plane_bytes[2] = {0, 0};                // of one block
    const std::uint16_t* scale = nullptr;                // per block: (groups, 64), or (64 / group, dim)
    const std::uint16_t* zero = nullptr;
    int scales = 0;                         // numbers in `scale` per block
    int outlier_count = 0;                  // channels kept exactly
    const std::int16_t* outlier_channels = nullptr;  // (m,)
    const void* outliers = nullptr;                  // (tokens, m)
    Dtype outlier_dtype = Dtype::f32;
    bool rotated = false;
};

// Rows of numbers.
struct Rows {
    const void* data = nullptr;
    std::int64_t stride = 0;  // numbers from one row to the next
    Dtype dtype = Dtype::f32;
};

// Tokens of one head that lie together in one form.
struct Piece {
    std::int64_t length = 0;
    bool packed = false;
    Rows keys, values;
    const std::int64_t* index = nullptr;  // rows that are picked; null: all, in order
    Codes key_codes, value_codes;
    const std::int32_t* positions = nullptr;  // slots; null: first, first + 1, ...
    std::int64_t first = 0;

    std::int64_t slot(std::int64_t token) const { return positions ? positions[token] : first + token; }
    std::int64_t blocks() const { return (length + BLOCK - 1) / BLOCK; }
};

// How logits are weighed.
struct Weigh {
    float softcap = 0;          // 0: none
    bool causal = false;        // a query sees no slot after its own
    std::int64_t window = 0;    // 0: none
    std::int64_t first = 0;     // slot of the first query
    const std::uint8_t* mask = nullptr;  // nonzero: visible
    const float* bias = nullptr;
    std::int64_t mask_head = 0, mask_query = 0, mask_slot = 0;  // strides
    std::int64_t bias_head = 0, bias_query = 0, bias_slot = 0;

    bool changes() const { return softcap != 0 || causal || window != 0 || mask || bias; }
};

// The queries of one KV head, fp32, already multiplied by the scale: row = group * count + query.
struct Query {
    const float* rows = nullptr;  // (heads of the group * count, key_dim)
    int heads = 1;
    int count = 1;
    int first_row = 0;  // place of rows[0] among all rows of the head
    int total = 1;      // rows here
    int key_dim = 0;
    int value_dim = 0;
    int key_passes = 2;    // int8 numbers that stand for one of a query: 1 or 2
    int value_passes = 1;  // the same for a weight
    Weigh weigh;

    int head_of(int row) const { return (first_row + row) / count; }
    int query_of(int row) const { return (first_row + row) % count; }
};

// Softmax state and weighted values of each row.
struct Partial {
    float* most;  // (total,)
    float* sum;   // (total,)
    float* acc;   // (total, value_dim)
};

// A stretch of blocks, counted over all pieces.
struct Stretch {
    const Piece* pieces;
    int count;
    std::int64_t begin, end;
};

enum class Levels : std::uint8_t { minmax, centroid, fit };

struct PackJob {
    Rows from;            // (tokens, dim)
    std::int64_t tokens;  // whole blocks
    Levels levels;
    bool values;          // lines of values, else of keys
    Codes out;            // planes, scale and zero are written to
};

// Scores on some channels: keys lie channel by channel, the queries' numbers in these channels are scaled.
struct ChannelJob {
    const float* query;  // (rows, channels)
    int rows, channels;
    const void* keys;    // (channels, tokens)
    std::int64_t key_stride;
    Dtype dtype;
    bool whole;          // int8, whatever dtype says
    std::int64_t tokens;
    float* out;          // (rows, tokens)
    std::int64_t out_stride;
};

enum class Combine : std::uint8_t { max, sum, softmax };

// One score for each token out of those of several queries.
struct CombineJob {
    const float* scores;  // (rows, tokens)
    std::int64_t row_stride;
    int rows;
    std::int64_t tokens;
    Combine how;
    float* out;           // (tokens,)
};

struct Kernels {
    const char* name;
    void (*attend)(const Query&, const Stretch&, Partial&);
    // (total, tokens) logits, weighed; tokens counted over the pieces; `row_stride` numbers from row to row. False
    // where one is not finite.
    bool (*scores)(const Query&, const Stretch&, float* out, std::int64_t row_stride);
    // Adds exp(logit - lse[row]) over the rows of each head of the group: out (heads, tokens).
    void (*mass)(const Query&, const Stretch&, const float* lse, float* out, std::int64_t head_stride);
    // log-sum-exp of each row, as `most` and `sum`.
    void (*sums)(const Query&, const Stretch&, Partial&);
    // False, with some blocks unwritten, where a number is not finite.
    bool (*pack)(const PackJob&);
    // fp32 numbers of the blocks, in the stored basis: out (tokens, dim).
    void (*unpack)(const Codes&, bool values, std::int64_t tokens, float* out);
    // Rotates `count` rows of `dim` numbers in place.
    void (*rotate)(float* rows, std::int64_t count, int dim);
    // Largest absolute number of (tokens, dim), rotated first if asked to; not a number where one is not finite.
    float (*peak)(const Rows&, std::int64_t tokens, int dim, bool rotated);
    void (*channel_scores)(const ChannelJob&);
    // False where a score is not a number.
    bool (*combine)(const CombineJob&);
};

#ifdef KVTAILOR_X86
extern const Kernels avx512_kernels;
extern const Kernels avx2_kernels;
#endif
extern const Kernels plain_kernels;

}  // namespace kvtailor

// Which kernels run, and how work is spread over threads.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "core.h"

namespace kvtailor {

// Names of the instruction sets that this processor has kernels for, best first.
std::vector<std::string> instruction_sets();

// The kernels of a name; null where this processor cannot run them.
const Kernels* kernels_named(const std::string& name);

// Work below which one thread is faster.
constexpr double LEAST_LOGITS = 4e4;   // of attention: tokens times rows
constexpr double LEAST_NUMBERS = 1e6;  // packed, read back, or scores looked through

// The threads to take for some work out of those that a call may have.
int threads_for(double work, double least, int threads);

// The queries of one KV head of one sequence, and what they look at.
struct Task {
    std::vector<float> rows;  // (heads of the group * count, key_dim), times the scale
    std::vector<Piece> pieces;
    std::vector<float> sinks; // a logit without a value for each head of the group, or empty
    Query query;              // of all rows
    std::int64_t tokens = 0;  // over all pieces

    std::int64_t blocks() const {
        std::int64_t total = 0;
        for (const Piece& piece : pieces) total += piece.blocks();
        return total;
    }
};

struct Result {
    std::vector<float> most, sum, acc;
};

// Sum of a row's weights relative to its greatest logit, the sink's among them.
float sum_with_sink(const Task& task, const Result& state, int row);

// Softmax state, without sinks, and weighted values of every task's rows.
std::vector<Result> attend(const Kernels& kernels, const std::vector<Task>& tasks, int threads);

// Weighed logits of every task: (rows, row_stride) at outs[task], HIDDEN behind the task's tokens. False where one is
// not finite.
bool scores(const Kernels& kernels, const std::vector<Task>& tasks, const std::vector<float*>& outs,
            std::int64_t row_stride, int threads);

// The attention that each token gets, summed over queries: (heads of the group, head_stride) at outs[task], added.
// False, with nothing added, where a logit is not finite.
bool mass(const Kernels& kernels, const std::vector<Task>& tasks, const std::vector<float*>& outs,
          std::int64_t head_stride, int threads);

// False where a number is not finite.
bool pack(const Kernels& kernels, const std::vector<PackJob>& jobs, int threads);

// Calls run(i) for i below count, on some threads.
void run_all(std::int64_t count, int threads, const std::function<void(std::int64_t)>& run);

}  // namespace kvtailor

#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>

namespace kvtailor {

namespace {

constexpr int MOST_THREADS = 1024;
constexpr std::int64_t LEAST_BLOCKS = 16;   // of a stretch that a thread takes
constexpr int QUERIES_AT_ONCE = 256;        // of a long prompt that share a block in fp32

struct Candidate {
    const Kernels* kernels;
    bool runs;
};

std::vector<Candidate> candidates() {
    std::vector<Candidate> found;
#ifdef KVTAILOR_X86
#ifdef KVTAILOR_EMULATE_AVX512
    found.push_back({&avx512_kernels, true});
#else
    found.push_back({&avx512_kernels,
                     __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                         __builtin_cpu_supports("avx512vnni")});
#endif
    found.push_back({&avx2_kernels, __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                                        __builtin_cpu_supports("f16c")});
#endif
    found.push_back({&plain_kernels, true});
    return found;
}

// Runs each(i) for i below count on some threads; an exception of one is thrown once all are done.
template <class Each>
void spread(std::int64_t count, int threads, Each each) {
#ifdef _OPENMP
    const int taken = static_cast<int>(std::min<std::int64_t>(count, threads));
    if (taken > 1) {
        std::exception_ptr error;
#pragma omp parallel for schedule(dynamic) num_threads(taken)
        for (std::int64_t i = 0; i < count; ++i) {
            try {
                each(i);
            } catch (...) {
#pragma omp critical
                error = std::current_exception();
            }
        }
        if (error) std::rethrow_exception(error);
        return;
    }
#endif
    for (std::int64_t i = 0; i < count; ++i) each(i);
}

// Some rows of a task over a stretch of its blocks.
struct Unit {
    std::size_t task;
    int first_row, rows;
    std::int64_t begin, end;
};

// A task in units: a long prompt's rows head by head, some at a time, where they may be cut; stretches are cut where
// there are fewer tasks than threads want.
void add_units(std::vector<Unit>& units, const std::vector<Task>& tasks, std::size_t t, int threads, bool cut_rows) {
    const Query& query = tasks[t].query;
    const std::int64_t blocks = tasks[t].blocks();
    if (blocks == 0) return;
    const bool many = query.total > MOST_ROWS;
    const int step = !many || !cut_rows                    ? query.total
                     : query.count >= QUERIES_AT_ONCE / 4 ? std::min(query.count, QUERIES_AT_ONCE)
                                                          : query.total;
    std::int64_t stretches = 1;
    if (!many && threads > 1) {
        const std::int64_t count = static_cast<std::int64_t>(tasks.size());
        stretches = std::clamp<std::int64_t>(blocks / LEAST_BLOCKS, 1, (4 * threads + count - 1) / count);
    }
    const int span = step < query.total ? query.count : query.total;  // rows of one head, or all
    for (int head = 0; head < query.total; head += span)
        for (int row = 0; row < span; row += step)
            for (std::int64_t s = 0; s < stretches; ++s)
                units.push_back({t, head + row, std::min(step, span - row), blocks * s / stretches,
                                 blocks * (s + 1) / stretches});
}

std::vector<Unit> units_of(const std::vector<Task>& tasks, int threads, bool cut_rows) {
    std::vector<Unit> units;
    for (std::size_t t = 0; t < tasks.size(); ++t) add_units(units, tasks, t, threads, cut_rows);
    return units;
}

Query part_of(const Task& task, const Unit& unit) {
    Query query = task.query;
    query.rows = task.rows.data() + static_cast<std::int64_t>(unit.first_row) * query.key_dim;
    query.first_row = unit.first_row;
    query.total = unit.rows;
    return query;
}

Stretch stretch_of(const Task& task, const Unit& unit) {
    return {task.pieces.data(), static_cast<int>(task.pieces.size()), unit.begin, unit.end};
}

// Adds one softmax state to another.
void merge_row(float& most, float& sum, float* acc, float other_most, float other_sum, const float* other_acc,
               int dim) {
    if (other_most > most) {
        const float shrink = std::exp(most - other_most);
        sum *= shrink;
        for (int c = 0; c < dim; ++c) acc[c] *= shrink;
        most = other_most;
    }
    const float factor = std::exp(other_most - most);
    sum += factor * other_sum;
    for (int c = 0; c < dim; ++c) acc[c] += factor * other_acc[c];
}

double logits_of(const std::vector<Task>& tasks) {
    double logits = 0;
    for (const Task& task : tasks) logits += static_cast<double>(task.tokens) * task.query.total;
    return logits;
}

std::vector<Result> run_states(const Kernels& kernels, const std::vector<Task>& tasks, int threads, bool values) {
    const std::vector<Unit> units = units_of(tasks, threads, true);
    std::vector<Result> parts(units.size()), results(tasks.size());
    spread(static_cast<std::int64_t>(units.size()), threads, [&](std::int64_t u) {
        const Unit& unit = units[u];
        const Task& task = tasks[unit.task];
        Result& part = parts[u];
        part.most.resize(unit.rows);
        part.sum.resize(unit.rows);
        if (values) part.acc.resize(static_cast<std::size_t>(unit.rows) * task.query.value_dim);
        Partial partial{part.most.data(), part.sum.data(), part.acc.data()};
        (values ? kernels.attend : kernels.sums)(part_of(task, unit), stretch_of(task, unit), partial);
    });
    for (std::size_t t = 0; t < tasks.size(); ++t) {
        results[t].most.assign(tasks[t].query.total, HIDDEN);
        results[t].sum.assign(tasks[t].query.total, 0.0f);
        if (values) results[t].acc.assign(static_cast<std::size_t>(tasks[t].query.total) * tasks[t].query.value_dim, 0);
    }
    for (std::size_t u = 0; u < units.size(); ++u) {
        const Unit& unit = units[u];
        Result& result = results[unit.task];
        const int dim = values ? tasks[unit.task].query.value_dim : 0;
        for (int r = 0; r < unit.rows; ++r)
            merge_row(result.most[unit.first_row + r], result.sum[unit.first_row + r],
                      result.acc.data() + static_cast<std::int64_t>(unit.first_row + r) * dim, parts[u].most[r],
                      parts[u].sum[r], parts[u].acc.data() + static_cast<std::int64_t>(r) * dim, dim);
    }
    return results;
}

}  // namespace

int threads_for(double work, double least, int threads) {
    return work < least ? 1 : std::clamp(threads, 1, MOST_THREADS);
}

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Candidate& candidate : candidates())
        if (candidate.runs) names.push_back(candidate.kernels->name);
    return names;
}

const Kernels* kernels_named(const std::string& name) {
    for (const Candidate& candidate : candidates())
        if (candidate.runs && name == candidate.kernels->name) return candidate.kernels;
    return nullptr;
}

float sum_with_sink(const Task& task, const Result& state, int row) {
    if (task.sinks.empty()) return state.sum[row];
    return state.sum[row] + std::exp(task.sinks[task.query.head_of(row)] - state.most[row]);
}

std::vector<Result> attend(const Kernels& kernels, const std::vector<Task>& tasks, int threads) {
    return run_states(kernels, tasks, threads_for(logits_of(tasks), LEAST_LOGITS, threads), true);
}

bool scores(const Kernels& kernels, const std::vector<Task>& tasks, const std::vector<float*>& outs,
            std::int64_t row_stride, int threads) {
    threads = threads_for(logits_of(tasks), LEAST_LOGITS, threads);
    std::vector<Unit> units;
    for (const Unit& unit : units_of(tasks, threads, false))
        for (int row = 0; row < unit.rows; row += MOST_ROWS)
            units.push_back({unit.task, row, std::min(MOST_ROWS, unit.rows - row), unit.begin, unit.end});
    for (std::size_t t = 0; t < tasks.size(); ++t)
        for (std::int64_t row = 0; row < tasks[t].query.total; ++row)
            std::fill(outs[t] + row * row_stride + tasks[t].tokens, outs[t] + (row + 1) * row_stride, HIDDEN);
    std::atomic<bool> finite{true};
    spread(static_cast<std::int64_t>(units.size()), threads, [&](std::int64_t u) {
        const Unit& unit = units[u];
        if (!kernels.scores(part_of(tasks[unit.task], unit), stretch_of(tasks[unit.task], unit),
                            outs[unit.task] + unit.first_row * row_stride, row_stride))
            finite = false;
    });
    return finite;
}

bool mass(const Kernels& kernels, const std::vector<Task>& tasks, const std::vector<float*>& outs,
          std::int64_t head_stride, int threads) {
    threads = threads_for(logits_of(tasks), LEAST_LOGITS, threads);
    const std::vector<Result> states = run_states(kernels, tasks, threads, false);
    for (const Result& state : states)
        for (const float sum : state.sum)
            if (!std::isfinite(sum)) return false;
    // Units of one task would add to the same sums, so threads share tasks, not rows.
    spread(static_cast<std::int64_t>(tasks.size()), threads, [&](std::int64_t t) {
        const Task& task = tasks[t];
        if (task.pieces.empty()) return;
        std::vector<float> lse(task.query.total);
        for (int r = 0; r < task.query.total; ++r)
            lse[r] = states[t].sum[r] == 0 ? HIDDEN : states[t].most[r] + std::log(sum_with_sink(task, states[t], r));
        std::vector<Unit> units;
        add_units(units, tasks, t, 1, true);
        for (const Unit& unit : units)
            kernels.mass(part_of(task, unit), stretch_of(task, unit), lse.data() + unit.first_row, outs[t],
                         head_stride);
    });
    return true;
}

bool pack(const Kernels& kernels, const std::vector<PackJob>& jobs, int threads) {
    double numbers = 0;
    for (const PackJob& job : jobs) numbers += static_cast<double>(job.tokens) * job.out.dim;
    std::atomic<bool> finite{true};
    spread(static_cast<std::int64_t>(jobs.size()), threads_for(numbers, LEAST_NUMBERS, threads), [&](std::int64_t j) {
        if (!kernels.pack(jobs[j])) finite = false;
    });
    return finite;
}

void run_all(std::int64_t count, int threads, const std::function<void(std::int64_t)>& run) {
    spread(count, threads, run);
}

}  // namespace kvtailor

// Attention over a paged cache, for rows that decode and for parts of prompts alike: 64 keys at a
// time are packed, multiplied by the queries that share them, and their softmax is carried on.

#pragma once

#include "tile.h"

namespace {

constexpr Int kKeys = 64;        // keys that are packed at a time
constexpr Int kQueryRows = 96;   // query rows (tokens × heads of a KV head) that share them
constexpr Int kSplitKeys = 256;  // a context is not divided into less

template <class T>
struct Paged {  // one layer's cache, and the rows' blocks in it
    const T *keys, *values;
    const int32_t* tables;
    Int width, block_size, kv_heads, group, head_dim;
    float scale;

    Int columns() const { return (head_dim + kColumns - 1) / kColumns * kColumns; }
};

// Some tokens of a row and some KV heads, with keys [begin, end) of the row's context.
struct Task {
    Int row, kv_head, kv_heads, token, tokens, position, begin, end;
    Int part, parts;  // of a context that several tasks divide; only rows with one token
    Int partial;      // where this part's result goes, and the first of its `parts` neighbours
};

std::vector<Task> plan(const Int* starts, const int32_t* lengths, Int rows, Int kv_heads, Int group,
                       int threads, Int& partials) {
    std::vector<Task> tasks;
    Int most = std::max<Int>(1, kQueryRows / group);
    Int wanted = std::max<Int>(1, 4 * threads / (rows * kv_heads));
    // Heads of a token lie side by side: where there are rows enough for all threads, one thread
    // takes all heads of a row, and reads on where it was.
    Int together = rows >= 4 * threads ? kv_heads : 1;
    partials = 0;
    for (Int row = 0; row < rows; ++row) {
        Int first = starts[row], stop = starts[row + 1], length = lengths[row], parts = 1;
        if (stop - first == 1)
            parts = std::min(wanted, std::max<Int>(1, length / kSplitKeys));
        for (Int token = first; token < stop; token += most)
            for (Int head = 0, heads = stop - first == 1 ? together : 1; head < kv_heads;
                 head += heads) {
                Int tokens = std::min(most, stop - token), position = length - (stop - token);
                Int visible = position + tokens;
                for (Int part = 0; part < parts; ++part)
                    tasks.push_back({row, head, heads, token, tokens, position,
                                     visible * part / parts, visible * (part + 1) / parts, part,
                                     parts, partials + part});
                if (parts > 1) partials += parts;
            }
    }
    std::stable_sort(tasks.begin(), tasks.end(), [](const Task& a, const Task& b) {
        return a.tokens * (a.end - a.begin) > b.tokens * (b.end - b.begin);  // the longest first
    });
    return tasks;
}

template <class T>
struct Workspace {  // of one thread
    T *q, *keys, *values, *weights;
    float *scores, *out, *peak, *sum;

    Workspace(const Paged<T>& paged, const Task& task) {
        static thread_local std::vector<T> narrow_memory;
        static thread_local std::vector<float> wide_memory;
        Int rows = task.kv_heads * task.tokens * paged.group, columns = paged.columns();
        q = grown(narrow_memory, rows * (paged.head_dim + kKeys) + 2 * kKeys * columns);
        weights = q + rows * paged.head_dim;
        keys = weights + rows * kKeys;
        values = keys + kKeys * columns;
        scores = grown(wide_memory, rows * (kKeys + columns + 2));
        out = scores + rows * kKeys;
        peak = out + rows * columns;
        sum = peak + rows;
    }
};

// Packs rows of K as columns: [head_dim / kStep][32 keys][kStep] for each 32 keys. The rows at
// `then` are wanted next: heads lie apart, the processor does not guess such steps by itself, and
// it drops requests that come faster than memory answers; so each row that is read asks for one.
template <class T>
void pack_keys(const T* base, const Int* offsets, Int count, const Int*, Int dim, T* packed) {
    constexpr int step = kStep<T>;
    for (Int key = 0; key < (count + 31) / 32 * 32; ++key) {
        T* to = packed + key / 32 * 32 * dim + key % 32 * step;
        for (Int i = 0; i < dim; ++i)
            to[i / step * 32 * step + i % step] = key < count ? base[offsets[key] + i] : T{};
    }
}

// Packs rows of V as they multiply weights: [keys / kStep][32 columns][kStep] for each 32 columns.
template <class T>
void pack_values(const T* base, const Int* offsets, Int count, const Int*, Int dim, T* packed) {
    constexpr int step = kStep<T>;
    Int columns = (dim + 31) / 32 * 32;
    for (Int key = 0; key < (count + 1) / 2 * 2; ++key)
        for (Int i = 0; i < columns; ++i)
            packed[i / 32 * 32 * kKeys + key / step * 32 * step + i % 32 * step + key % step] =
                key < count && i < dim ? base[offsets[key] + i] : T{};
}

#if FAST_BF16
inline __m512i load_part(const bf16* from, Int count) {
    return _mm512_maskz_loadu_epi16(count >= 32 ? ~0u : (1u << count) - 1, from);
}

// A 16 × 16 transposition of pairs: first within 128-bit lanes, then of the lanes.
inline void transpose_pairs(__m512i r[16]) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            u[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            u[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int j = 0; j < 4; ++j) {
        __m512i even0 = _mm512_shuffle_i32x4(u[j], u[4 + j], 0x88);
        __m512i even1 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0x88);
        __m512i odd0 = _mm512_shuffle_i32x4(u[j], u[4 + j], 0xdd);
        __m512i odd1 = _mm512_shuffle_i32x4(u[8 + j], u[12 + j], 0xdd);
        r[j] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        r[4 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        r[12 + j] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
}

template <>
void pack_keys<bf16>(const bf16* base, const Int* offsets, Int count, const Int* then, Int dim,
                     bf16* packed) {
    for (Int key = 0; key < (count + 31) / 32 * 32; key += 16)
        for (Int i = 0; i < dim; i += 32) {
            __m512i r[16];
            for (Int j = 0; j < 16; ++j) {
                r[j] = key + j < count ? load_part(base + offsets[key + j] + i, dim - i)
                                       : _mm512_setzero_si512();
                __builtin_prefetch(base + then[key + j] + i, 0, 2);
            }
            transpose_pairs(r);
            bf16* to = packed + key / 32 * 32 * dim + i * 32 + key % 32 * 2;
            for (Int j = 0; j < std::min<Int>(16, (dim - i) / 2); ++j)
                _mm512_storeu_si512(to + j * 64, r[j]);
        }
}

template <>
void pack_values<bf16>(const bf16* base, const Int* offsets, Int count, const Int* then, Int dim,
                       bf16* packed) {
    alignas(64) uint16_t order[64];  // column 0 of both rows, column 1 of both, …
    for (int i = 0; i < 64; ++i) order[i] = uint16_t(i / 2 + i % 2 * 32);
    __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (Int key = 0; key < count; key += 2)
        for (Int i = 0; i < dim; i += 32) {
            __m512i a = load_part(base + offsets[key] + i, dim - i), b = _mm512_setzero_si512();
            if (key + 1 < count) b = load_part(base + offsets[key + 1] + i, dim - i);
            __builtin_prefetch(base + then[key] + i, 0, 2);
            __builtin_prefetch(base + then[key + 1] + i, 0, 2);
            bf16* to = packed + i * kKeys + key * 32;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
        }
}
#endif

// One row's softmax over `count` further scores: their weights, and what it has so far rescaled.
// The loops go over all 64 places, so that they are a few vectors without a remainder.
template <class T>
void soften(float* scores, Int count, float scale, T* weights, float* out, Int columns, float& peak,
            float& sum) {
    for (Int i = count; i < kKeys; ++i) scores[i] = -1e30f;
    float largest = peak / scale, added = 0;
#pragma omp simd reduction(max : largest)
    for (Int i = 0; i < kKeys; ++i) largest = std::max(largest, scores[i]);
    largest *= scale;
#pragma omp simd reduction(+ : added)
    for (Int i = 0; i < kKeys; ++i) {
        scores[i] = fast_exp(scores[i] * scale - largest);
        added += scores[i];
    }
#pragma omp simd
    for (Int i = 0; i < kKeys; ++i) weights[i] = narrow<T>(scores[i]);
    float kept = fast_exp(peak - largest);
    if (largest > peak)
#pragma omp simd
        for (Int i = 0; i < columns; ++i) out[i] *= kept;
    sum = sum * kept + added;
    peak = largest;
}

// Where the tokens from `first` on are in the cache, up to 64 of them; returns how many.
template <class T>
Int locate(const Paged<T>& paged, const Task& task, Int first, Int* offsets) {
    const int32_t* table = paged.tables + task.row * paged.width;
    Int count = std::min(kKeys, task.end - first);
    Int block = first / paged.block_size, in = first % paged.block_size;
    for (Int i = 0; i < count; ++i) {
        Int slot = table[block] * paged.block_size + in;
        offsets[i] = (slot * paged.kv_heads + task.kv_head) * paged.head_dim;
        if (++in == paged.block_size) in = 0, ++block;
    }
    return count;
}

// Attention of the queries in work.q [kv_heads × tokens × group][head_dim]: work.out, not yet
// divided by work.sum. Reads of the cache what [begin, end) holds, and nothing else: the rest may
// be anything. `next` is what this thread does then.
template <class T>
void attend(const Paged<T>& paged, const Task& task, const Task* next, Workspace<T>& work) {
    Int rows = task.tokens * paged.group, dim = paged.head_dim, columns = paged.columns();
    std::fill_n(work.out, task.kv_heads * rows * columns, 0.0f);
    std::fill_n(work.peak, task.kv_heads * rows, -1e30f);
    std::fill_n(work.sum, task.kv_heads * rows, 0.0f);
    Int here[kKeys], then[kKeys] = {}, count = locate(paged, task, task.begin, here);
    for (Int first = task.begin; first < task.end; first += kKeys) {
        const Task* after = first + kKeys < task.end ? &task : next;
        Int coming = 0;
        if (after)
            coming = locate(paged, *after, after == &task ? first + kKeys : next->begin, then);
        for (Int head = 0; head < task.kv_heads; ++head) {
            Int from = head * dim, base = head * rows;
            pack_keys(paged.keys + from, here, count, then, dim, work.keys);
            pack_values(paged.values + from, here, count, then, dim, work.values);
            for_row_blocks<T>(rows, [&](Int row, Tile<T> multiply, Int) {
                for (Int key = 0; key < count; key += 32)
                    multiply(work.q + (base + row) * dim, dim, work.keys + key * dim,
                             dim / kStep<T>, work.scores + row * kKeys + key, kKeys, false,
                             (const char*)work.keys);
            });
            for (Int row = 0; row < rows; ++row) {
                Int visible = task.position + row / paged.group + 1 - first;
                soften(work.scores + row * kKeys, std::clamp<Int>(visible, 0, count), paged.scale,
                       work.weights + row * kKeys, work.out + (base + row) * columns, columns,
                       work.peak[base + row], work.sum[base + row]);
            }
            for_row_blocks<T>(rows, [&](Int row, Tile<T> multiply, Int) {
                for (Int column = 0; column < columns; column += 32)
                    multiply(work.weights + row * kKeys, kKeys, work.values + column * kKeys,
                             (count + kStep<T> - 1) / kStep<T>,
                             work.out + (base + row) * columns + column, columns, true,
                             (const char*)work.values);
            });
        }
        std::copy_n(then, coming, here);
        count = coming;
    }
}

// Where results go: out[token][head][head_dim], or a partial [group][head_dim + peak, sum].
template <class T>
void store(const Paged<T>& paged, const Task& task, const Workspace<T>& work, T* out,
           Int out_stride, float* partials) {
    Int dim = paged.head_dim, group = paged.group;
    for (Int row = 0; row < task.kv_heads * task.tokens * group; ++row) {
        const float* from = work.out + row * paged.columns();
        if (task.parts > 1) {
            float* to = partials + (task.partial * group + row) * (dim + 2);
            std::copy_n(from, dim, to);
            to[dim] = work.peak[row], to[dim + 1] = work.sum[row];
            continue;
        }
        Int token = task.token + row / group % task.tokens;
        Int head = task.kv_head + row / group / task.tokens;
        T* to = out + token * out_stride + (head * group + row % group) * dim;
        float factor = 1.0f / work.sum[row];
#pragma omp simd
        for (Int i = 0; i < dim; ++i) to[i] = narrow<T>(from[i] * factor);
    }
}

// Joins the parts of a divided context; called for the first of them.
template <class T>
void join(const Paged<T>& paged, const Task& task, const float* partials, T* out, Int out_stride) {
    Int dim = paged.head_dim, group = paged.group;
    for (Int row = 0; row < group; ++row) {
        const float* first = partials + (task.partial * group + row) * (dim + 2);
        Int stride = group * (dim + 2);
        float peak = -INFINITY, sum = 0;
        for (Int p = 0; p < task.parts; ++p) peak = std::max(peak, first[p * stride + dim]);
        for (Int p = 0; p < task.parts; ++p)
            sum += fast_exp(first[p * stride + dim] - peak) * first[p * stride + dim + 1];
        T* to = out + task.token * out_stride + (task.kv_head * group + row) * dim;
        for (Int i = 0; i < dim; ++i) {
            float total = 0;
            for (Int p = 0; p < task.parts; ++p)
                total += fast_exp(first[p * stride + dim] - peak) * first[p * stride + i];
            to[i] = narrow<T>(total / sum);
        }
    }
}

// All threads of a team call this together, on q [tokens][heads × head_dim].
template <class T>
void run_tasks(const Paged<T>& paged, const std::vector<Task>& tasks, const T* q, Int q_stride,
               T* out, Int out_stride, float* partials, bool divided, Barrier& barrier, int thread,
               int threads) {
    Int size = paged.group * paged.head_dim;
    for (size_t i = thread; i < tasks.size(); i += threads) {
        const Task& task = tasks[i];
        Workspace<T> work(paged, task);
        for (Int head = 0; head < task.kv_heads; ++head)
            for (Int token = 0; token < task.tokens; ++token)
                std::copy_n(q + (task.token + token) * q_stride + (task.kv_head + head) * size, size,
                            work.q + (head * task.tokens + token) * size);
        attend(paged, task, i + threads < tasks.size() ? &tasks[i + threads] : nullptr, work);
        store(paged, task, work, out, out_stride, partials);
    }
    barrier.wait(threads);
    if (!divided) return;
    for (size_t i = thread; i < tasks.size(); i += threads)
        if (tasks[i].parts > 1 && tasks[i].part == 0)
            join(paged, tasks[i], partials, out, out_stride);
    barrier.wait(threads);
}

}  // namespace

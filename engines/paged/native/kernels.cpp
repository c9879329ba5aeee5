// The hot operations of the paged decoder on a CPU: plain functions on pointers and sizes.
//
// Built by build.py, called through ctypes by library.py, checked against ops.py and attention/.
// float and bfloat16 share one text: all arithmetic is in fp32, and a value is rounded where it is
// stored. Matrix products and attention stand on one routine, `tile`: up to 12 rows times 32
// columns in registers, over operands "packed" so that a step down the shared dimension is one
// load. With AVX512-BF16 a step takes two bf16 values at once; elsewhere the same code is two fp32
// multiply-adds.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <omp.h>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define FAST_BF16 1
#else
#define FAST_BF16 0
#endif

namespace {

using Int = int64_t;

// ---- numbers ------------------------------------------------------------------------------------

struct bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline float wide(float x) { return x; }
inline float wide(bf16 x) { return bits_as<float>(uint32_t(x.bits) << 16); }

template <class T>
T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline bf16 narrow<bf16>(float x) {  // to nearest, ties to even; a NaN stays one
    uint32_t word = bits_as<uint32_t>(x);
    uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    return {uint16_t(x == x ? rounded : 0x7fc0)};
}

// Within 2 ulp; written so that a loop around it becomes vector code, which std::exp does not.
inline float fast_exp(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest integer below
    float shifted = x * 1.44269504f + magic;
    float n = shifted - magic;
    float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 0.166666657f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    int32_t power = bits_as<int32_t>(shifted) - bits_as<int32_t>(magic);
    return p * bits_as<float>((power + 127) << 23);
}

inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

// ---- tile: rows × 32 columns --------------------------------------------------------------------

constexpr int kColumns = 32;
constexpr int kTileRows = 12;  // 24 accumulators, 2 weights and a broadcast: 27 of 32 registers

template <class T>
constexpr int kStep = 1;  // values of the shared dimension that lie side by side when packed
template <>
constexpr int kStep<bf16> = 2;

typedef float Lanes __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <class V>
inline V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class T>
struct Operand;
template <>
struct Operand<float> {
    using Vector = Lanes;
    static Lanes add_product(Lanes sum, Lanes w, const float* x) { return sum + w * *x; }
};
template <>
struct Operand<bf16> {
    using Vector = Words;
    static Lanes add_product(Lanes sum, Words w, const bf16* x) {
        uint32_t pair;
        std::memcpy(&pair, x, sizeof pair);
#if FAST_BF16
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(pair));
#else
        sum += (Lanes)(w << 16) * bits_as<float>(pair << 16);
        return sum + (Lanes)(w & 0xffff0000u) * bits_as<float>(pair & 0xffff0000u);
#endif
    }
};

// out[m][0..32) (+)= Σ over steps of x[m] · w, w packed [steps][32][kStep]. `ahead` is memory that
// is wanted next: one cache line of it is asked for at each step.
template <class T, int M>
void tile(const T* x, Int x_stride, const T* w, Int steps, float* out, Int out_stride,
          bool accumulate, const char* ahead) {
    using Vector = typename Operand<T>::Vector;
    Lanes sum[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
        for (int half = 0; half < 2; ++half)
            sum[m][half] = accumulate ? load<Lanes>(out + m * out_stride + 16 * half) : Lanes{};
    }
    for (Int step = 0; step < steps; ++step) {
        Vector first = load<Vector>(w), second = load<Vector>(w + kColumns * kStep<T> / 2);
        __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            sum[m][0] = Operand<T>::add_product(sum[m][0], first, x + m * x_stride);
            sum[m][1] = Operand<T>::add_product(sum[m][1], second, x + m * x_stride);
        }
        x += kStep<T>;
        w += kColumns * kStep<T>;
        ahead += 64;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m)
        for (int half = 0; half < 2; ++half)
            std::memcpy(out + m * out_stride + 16 * half, &sum[m][half], sizeof(Lanes));
}

template <class T>
using Tile = void (*)(const T*, Int, const T*, Int, float*, Int, bool, const char*);

template <class T, int... M>
Tile<T> tile_of(int rows, std::integer_sequence<int, M...>) {
    static const Tile<T> table[] = {tile<T, M + 1>...};
    return table[rows - 1];
}

// Calls use(first row, rows, the tile for so many) for equal blocks of at most 12 rows.
template <class T, class Use>
void for_row_blocks(Int rows, Use use) {
    Int blocks = (rows + kTileRows - 1) / kTileRows;
    for (Int block = 0; block < blocks; ++block) {
        Int begin = rows * block / blocks, end = rows * (block + 1) / blocks;
        int count = int(end - begin);
        use(begin, count, tile_of<T>(count, std::make_integer_sequence<int, kTileRows>{}), block);
    }
}

struct Range {
    Int begin, end;
};
inline Range share(Int count, int thread, int threads) {
    return {count * thread / threads, count * (thread + 1) / threads};
}

// Memory of a thread that lives as long as it: grown, never given back, so that no step allocates.
template <class V>
V* grown(std::vector<V>& memory, Int count) {
    if (Int(memory.size()) < count) memory.resize(count);
    return memory.data();
}

// ---- elementwise --------------------------------------------------------------------------------

template <class T>
void norm_row(const T* x, const T* weight, Int size, float epsilon, T* out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (Int i = 0; i < size; ++i) squares += wide(x[i]) * wide(x[i]);
    float scale = 1.0f / std::sqrt(squares / float(size) + epsilon);
#pragma omp simd
    for (Int i = 0; i < size; ++i)
        out[i] = narrow<T>(wide(weight[i]) * wide(narrow<T>(wide(x[i]) * scale)));
}

template <class T>
void add_row(const T* x, T* residual, Int size) {
#pragma omp simd
    for (Int i = 0; i < size; ++i) residual[i] = narrow<T>(wide(residual[i]) + wide(x[i]));
}

// Turns the first half of a head against its second; out may be x.
template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, Int half, T* out) {
#pragma omp simd
    for (Int i = 0; i < half; ++i) {
        float a = wide(x[i]), b = wide(x[i + half]);
        out[i] = narrow<T>(a * cos[i] - b * sin[i]);
        out[i + half] = narrow<T>(b * cos[i] + a * sin[i]);
    }
}

struct Best {
    float value;
    Int index;
};

// Keeps the first of the largest: only a larger one replaces it.
template <class T>
void update_best(const T* x, Int count, Int offset, Best& best) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (Int i = 0; i < count; ++i) largest = std::max(largest, wide(x[i]));
    if (!(largest > best.value)) return;
    Int i = 0;
    while (wide(x[i]) != largest) ++i;
    best = {largest, offset + i};
}

// ---- attention over a paged cache ---------------------------------------------------------------

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

// Some tokens of a row and one KV head, with keys [begin, end) of the row's context.
struct Task {
    Int row, kv_head, token, tokens, position, begin, end;
    Int part, parts;  // of a context that several tasks divide; only rows with one token
    Int partial;      // where this part's result goes, and the first of its `parts` neighbours
};

std::vector<Task> plan(const Int* starts, const int32_t* lengths, Int rows, Int kv_heads, Int group,
                       int threads, Int& partials) {
    std::vector<Task> tasks;
    Int most = std::max<Int>(1, kQueryRows / group);
    Int wanted = std::max<Int>(1, 4 * threads / (rows * kv_heads));
    partials = 0;
    for (Int row = 0; row < rows; ++row) {
        Int first = starts ? starts[row] : row, stop = starts ? starts[row + 1] : row + 1;
        Int length = lengths[row], parts = 1;
        if (stop - first == 1)
            parts = std::min(wanted, std::max<Int>(1, length / kSplitKeys));
        for (Int token = first; token < stop; token += most)
            for (Int head = 0; head < kv_heads; ++head) {
                Int tokens = std::min(most, stop - token), position = length - (stop - token);
                Int visible = position + tokens;
                for (Int part = 0; part < parts; ++part)
                    tasks.push_back({row, head, token, tokens, position, visible * part / parts,
                                     visible * (part + 1) / parts, part, parts,
                                     partials + part});
                if (parts > 1) partials += parts;
            }
    }
    return tasks;
}

template <class T>
struct Workspace {  // of one thread
    T *q, *keys, *values, *weights;
    float *scores, *out, *peak, *sum;

    Workspace(const Paged<T>& paged, Int tokens) {
        static thread_local std::vector<T> narrow_memory;
        static thread_local std::vector<float> wide_memory;
        Int rows = tokens * paged.group, columns = paged.columns();
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

// Packs rows of K as columns: [head_dim / kStep][32 keys][kStep] for each 32 keys.
template <class T>
void pack_keys(const T* base, const Int* offsets, Int count, Int dim, T* packed) {
    constexpr int step = kStep<T>;
    for (Int key = 0; key < (count + 31) / 32 * 32; ++key) {
        T* to = packed + key / 32 * 32 * dim + key % 32 * step;
        for (Int i = 0; i < dim; ++i)
            to[i / step * 32 * step + i % step] = key < count ? base[offsets[key] + i] : T{};
    }
}

// Packs rows of V as they multiply weights: [keys / kStep][32 columns][kStep] for each 32 columns.
template <class T>
void pack_values(const T* base, const Int* offsets, Int count, Int dim, T* packed) {
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
void pack_keys<bf16>(const bf16* base, const Int* offsets, Int count, Int dim, bf16* packed) {
    for (Int key = 0; key < (count + 31) / 32 * 32; key += 16)
        for (Int i = 0; i < dim; i += 32) {
            __m512i r[16];
            for (Int j = 0; j < 16; ++j)
                r[j] = key + j < count ? load_part(base + offsets[key + j] + i, dim - i)
                                       : _mm512_setzero_si512();
            transpose_pairs(r);
            bf16* to = packed + key / 32 * 32 * dim + i * 32 + key % 32 * 2;
            for (Int j = 0; j < std::min<Int>(16, (dim - i) / 2); ++j)
                _mm512_storeu_si512(to + j * 64, r[j]);
        }
}

template <>
void pack_values<bf16>(const bf16* base, const Int* offsets, Int count, Int dim, bf16* packed) {
    alignas(64) uint16_t order[64];  // column 0 of both rows, column 1 of both, …
    for (int i = 0; i < 64; ++i) order[i] = uint16_t(i / 2 + i % 2 * 32);
    __m512i low = _mm512_load_si512(order), high = _mm512_load_si512(order + 32);
    for (Int key = 0; key < count; key += 2)
        for (Int i = 0; i < dim; i += 32) {
            __m512i a = load_part(base + offsets[key] + i, dim - i), b = _mm512_setzero_si512();
            if (key + 1 < count) b = load_part(base + offsets[key + 1] + i, dim - i);
            bf16* to = packed + i * kKeys + key * 32;
            _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + 32, _mm512_permutex2var_epi16(a, high, b));
        }
}
#endif

// One row's softmax over `count` further scores: its weights, and what it has so far rescaled.
template <class T>
void soften(float* scores, Int count, float scale, T* weights, float* out, Int columns, float& peak,
            float& sum) {
    float largest = peak, added = 0;
#pragma omp simd reduction(max : largest)
    for (Int i = 0; i < count; ++i) largest = std::max(largest, scores[i] * scale);
#pragma omp simd reduction(+ : added)
    for (Int i = 0; i < count; ++i) {
        float weight = fast_exp(scores[i] * scale - largest);
        weights[i] = narrow<T>(weight);
        added += weight;
    }
    for (Int i = count; i < kKeys; ++i) weights[i] = T{};
    float kept = fast_exp(peak - largest);
    if (largest > peak)
#pragma omp simd
        for (Int i = 0; i < columns; ++i) out[i] *= kept;
    sum = sum * kept + added;
    peak = largest;
}

// Attention of the queries in work.q [tokens × group][head_dim]: work.out, not yet divided by
// work.sum. Reads of the cache what [begin, end) holds, and nothing else: the rest may be anything.
template <class T>
void attend(const Paged<T>& paged, const Task& task, Workspace<T>& work) {
    Int rows = task.tokens * paged.group, dim = paged.head_dim, columns = paged.columns();
    std::fill_n(work.out, rows * columns, 0.0f);
    std::fill_n(work.peak, rows, -1e30f);
    std::fill_n(work.sum, rows, 0.0f);
    const int32_t* table = paged.tables + task.row * paged.width;
    Int offsets[kKeys];
    for (Int first = task.begin; first < task.end; first += kKeys) {
        Int count = std::min(kKeys, task.end - first);
        for (Int i = 0, block = first / paged.block_size, in = first % paged.block_size; i < count;
             ++i) {
            Int slot = table[block] * paged.block_size + in;
            offsets[i] = (slot * paged.kv_heads + task.kv_head) * dim;
            if (++in == paged.block_size) in = 0, ++block;
        }
        pack_keys(paged.keys, offsets, count, dim, work.keys);
        pack_values(paged.values, offsets, count, dim, work.values);
        for_row_blocks<T>(rows, [&](Int row, int, Tile<T> multiply, Int) {
            for (Int key = 0; key < count; key += 32)
                multiply(work.q + row * dim, dim, work.keys + key * dim, dim / kStep<T>,
                         work.scores + row * kKeys + key, kKeys, false, (const char*)work.keys);
        });
        for (Int row = 0; row < rows; ++row) {
            Int visible = task.position + row / paged.group + 1 - first;
            soften(work.scores + row * kKeys, std::clamp<Int>(visible, 0, count), paged.scale,
                   work.weights + row * kKeys, work.out + row * columns, columns, work.peak[row],
                   work.sum[row]);
        }
        for_row_blocks<T>(rows, [&](Int row, int, Tile<T> multiply, Int) {
            for (Int column = 0; column < columns; column += 32)
                multiply(work.weights + row * kKeys, kKeys, work.values + column * kKeys,
                         (count + kStep<T> - 1) / kStep<T>, work.out + row * columns + column,
                         columns, true, (const char*)work.values);
        });
    }
}

// Where results go: out[token][head][head_dim], or a partial [group][head_dim + peak, sum].
template <class T>
void store(const Paged<T>& paged, const Task& task, const Workspace<T>& work, T* out,
           Int out_stride, float* partials) {
    Int dim = paged.head_dim, group = paged.group;
    for (Int row = 0; row < task.tokens * group; ++row) {
        const float* from = work.out + row * paged.columns();
        if (task.parts > 1) {
            float* to = partials + (task.partial * group + row) * (dim + 2);
            std::copy_n(from, dim, to);
            to[dim] = work.peak[row], to[dim + 1] = work.sum[row];
            continue;
        }
        T* to = out + (task.token + row / group) * out_stride +
                (task.kv_head * group + row % group) * dim;
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

// All threads of a team call this together; `query` fills work.q for a task.
template <class T, class Query>
void run_tasks(const Paged<T>& paged, const std::vector<Task>& tasks, T* out, Int out_stride,
               float* partials, bool divided, Query query) {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < tasks.size(); ++i) {
        Workspace<T> work(paged, tasks[i].tokens);
        query(tasks[i], work);
        attend(paged, tasks[i], work);
        store(paged, tasks[i], work, out, out_stride, partials);
    }
    if (!divided) return;
#pragma omp for schedule(static)
    for (size_t i = 0; i < tasks.size(); ++i)
        if (tasks[i].parts > 1 && tasks[i].part == 0) join(paged, tasks[i], partials, out, out_stride);
}

// ---- matrix products on packed weights ----------------------------------------------------------

// Mirrored in step.py. packed: [ceil(n / 32)][k / 2][32][2], zeros behind n; bias: [n] or null.
struct Matrix {
    const bf16* packed;
    const bf16* bias;
    Int n, k;

    Int groups() const { return (n + kColumns - 1) / kColumns; }
};

// out[rows][32] = x · one group of columns. While it is multiplied by the first and second block
// of rows, the group that follows is fetched: else memory would idle through the later blocks.
inline void multiply_group(const Matrix& w, Int group, const bf16* x, Int x_stride, Int rows,
                           float* out) {
    const bf16* packed = w.packed + group * w.k * kColumns;
    const char* next = (const char*)(packed + w.k * kColumns);
    for_row_blocks<bf16>(rows, [&](Int row, int, Tile<bf16> multiply, Int block) {
        const char* ahead = block < 2 ? next + block * w.k * kColumns : (const char*)packed;
        multiply(x + row * x_stride, x_stride, packed, w.k / 2, out + row * kColumns, kColumns,
                 false, ahead);
    });
    if (!w.bias) return;
    for (Int row = 0; row < rows; ++row)
        for (Int i = 0; i < std::min<Int>(kColumns, w.n - group * kColumns); ++i)
            out[row * kColumns + i] += wide(w.bias[group * kColumns + i]);
}

inline float* columns_memory(Int rows) {
    static thread_local std::vector<float> memory;
    return grown(memory, 2 * rows * kColumns);
}

// This thread's part of y = x · wᵀ + bias.
void multiply(const Matrix& w, const bf16* x, Int x_stride, Int rows, bf16* y, Int y_stride,
              int thread, int threads) {
    float* out = columns_memory(rows);
    Range mine = share(w.groups(), thread, threads);
    for (Int group = mine.begin; group < mine.end; ++group) {
        multiply_group(w, group, x, x_stride, rows, out);
        Int count = std::min<Int>(kColumns, w.n - group * kColumns);
        for (Int row = 0; row < rows; ++row) {
            bf16* to = y + row * y_stride + group * kColumns;
#pragma omp simd
            for (Int i = 0; i < count; ++i) to[i] = narrow<bf16>(out[row * kColumns + i]);
        }
    }
}

// This thread's part of y = silu(x · gateᵀ) · (x · upᵀ).
void multiply_gated(const Matrix& gate, const Matrix& up, const bf16* x, Int x_stride, Int rows,
                    bf16* y, Int y_stride, int thread, int threads) {
    float* gates = columns_memory(rows);
    float* ups = gates + rows * kColumns;
    Range mine = share(gate.groups(), thread, threads);
    for (Int group = mine.begin; group < mine.end; ++group) {
        multiply_group(gate, group, x, x_stride, rows, gates);
        multiply_group(up, group, x, x_stride, rows, ups);
        Int count = std::min<Int>(kColumns, gate.n - group * kColumns);
        for (Int row = 0; row < rows; ++row) {
            bf16* to = y + row * y_stride + group * kColumns;
            const float *a = gates + row * kColumns, *b = ups + row * kColumns;
#pragma omp simd
            for (Int i = 0; i < count; ++i) to[i] = narrow<bf16>(silu(a[i]) * b[i]);
        }
    }
}

// This thread's best of x · wᵀ for each row. Logits are rounded as they would be if they were
// stored, so that what ties there ties here.
void multiply_argmax(const Matrix& w, const bf16* x, Int x_stride, Int rows, Best* best, int thread,
                     int threads) {
    float* out = columns_memory(rows);
    Range mine = share(w.groups(), thread, threads);
    for (Int row = 0; row < rows; ++row) best[row] = {-INFINITY, 0};
    for (Int group = mine.begin; group < mine.end; ++group) {
        multiply_group(w, group, x, x_stride, rows, out);
        Int count = std::min<Int>(kColumns, w.n - group * kColumns);
        for (Int row = 0; row < rows; ++row) {
            float* logits = out + row * kColumns;
            for (Int i = 0; i < kColumns; ++i) logits[i] = wide(narrow<bf16>(logits[i]));
            update_best(logits, count, group * kColumns, best[row]);
        }
    }
}

// ---- a decode step ------------------------------------------------------------------------------

// Mirrored in step.py, as is Model.
struct Layer {
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm may be null
    Matrix qkv[3], out, gate, up, down;                    // qkv: one matrix, or three
    Int qkv_parts;
};

struct Model {
    const Layer* layers;
    const bf16 *embedding, *norm;
    const float *cos, *sin;
    bf16 *keys, *values;
    Matrix head;
    Int num_layers, hidden, heads, kv_heads, head_dim, mlp, context, num_blocks, block_size;
    float epsilon, scale;
};

struct Rows {
    Int count;
    const Int *ids, *positions, *slots;
    const int32_t *tables, *lengths;
    Int width;
};

// What the threads of a step share. Row strides are a cache line longer than a row: rows that are a
// power of two apart would fall into the same few places of the first-level cache.
struct Shared {
    Int hidden_stride, heads_stride, qkv_stride, mlp_stride;
    bf16 *residual, *x, *y, *attended, *qkv, *act;
    float* partials;
    std::vector<Task> tasks;
    bool divided;

    Shared(const Model& model, const Rows& rows, int threads) {
        static thread_local std::vector<bf16> narrow_memory;
        static thread_local std::vector<float> wide_memory;
        Int query = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        hidden_stride = model.hidden + 32, heads_stride = query + 32;
        qkv_stride = query + 2 * kv + 32, mlp_stride = model.mlp + 32;
        Int row = 3 * hidden_stride + heads_stride + qkv_stride + mlp_stride;
        residual = grown(narrow_memory, rows.count * row);
        x = residual + rows.count * hidden_stride;
        y = x + rows.count * hidden_stride;
        attended = y + rows.count * hidden_stride;
        qkv = attended + rows.count * heads_stride;
        act = qkv + rows.count * qkv_stride;
        Int count, group = model.heads / model.kv_heads;
        tasks = plan(nullptr, rows.lengths, rows.count, model.kv_heads, group, threads, count);
        divided = count > 0;
        partials = grown(wide_memory, count * group * (model.head_dim + 2));
    }
};

// Attention of a layer: the task that reads a row's last key writes it first.
void attend_layer(const Model& model, const Layer& layer, Int place, const Rows& rows, Shared& s) {
    Int dim = model.head_dim, half = dim / 2, group = model.heads / model.kv_heads;
    Int layer_size = model.num_blocks * model.block_size * model.kv_heads * dim;
    bf16* keys = model.keys + place * layer_size;
    bf16* values = model.values + place * layer_size;
    Paged<bf16> paged{keys,           values, rows.tables, rows.width,  model.block_size,
                      model.kv_heads, group,  dim,         model.scale};
    run_tasks(paged, s.tasks, s.attended, s.heads_stride, s.partials, s.divided,
              [&](const Task& task, Workspace<bf16>& work) {
        const float* cos = model.cos + rows.positions[task.row] * half;
        const float* sin = model.sin + rows.positions[task.row] * half;
        auto turn = [&](const bf16* head, const bf16* norm, bf16* to) {
            if (norm) norm_row(head, norm, dim, model.epsilon, to);
            rotate_head(norm ? to : head, cos, sin, half, to);
        };
        const bf16* q = s.qkv + task.row * s.qkv_stride + task.kv_head * group * dim;
        for (Int i = 0; i < group; ++i) turn(q + i * dim, layer.q_norm, work.q + i * dim);
        if (task.part + 1 < task.parts) return;
        const bf16* k = s.qkv + task.row * s.qkv_stride + (model.heads + task.kv_head) * dim;
        Int to = (rows.slots[task.row] * model.kv_heads + task.kv_head) * dim;
        turn(k, layer.k_norm, keys + to);
        std::copy_n(k + model.kv_heads * dim, dim, values + to);
    });
}

void run_layer(const Model& model, Int place, const Rows& rows, Shared& s, int thread, int threads) {
    const Layer& layer = model.layers[place];
    Range mine = share(rows.count, thread, threads);
    for (Int row = mine.begin; row < mine.end; ++row) {
        bf16* residual = s.residual + row * s.hidden_stride;
        if (place == 0)
            std::copy_n(model.embedding + rows.ids[row] * model.hidden, model.hidden, residual);
        else
            add_row(s.y + row * s.hidden_stride, residual, model.hidden);
        norm_row(residual, layer.input_norm, model.hidden, model.epsilon,
                 s.x + row * s.hidden_stride);
    }
#pragma omp barrier
    for (Int part = 0, column = 0; part < layer.qkv_parts; column += layer.qkv[part++].n)
        multiply(layer.qkv[part], s.x, s.hidden_stride, rows.count, s.qkv + column, s.qkv_stride,
                 thread, threads);
#pragma omp barrier
    attend_layer(model, layer, place, rows, s);  // ends with a barrier
    multiply(layer.out, s.attended, s.heads_stride, rows.count, s.y, s.hidden_stride, thread,
             threads);
#pragma omp barrier
    for (Int row = mine.begin; row < mine.end; ++row) {
        bf16* residual = s.residual + row * s.hidden_stride;
        add_row(s.y + row * s.hidden_stride, residual, model.hidden);
        norm_row(residual, layer.post_norm, model.hidden, model.epsilon,
                 s.x + row * s.hidden_stride);
    }
#pragma omp barrier
    multiply_gated(layer.gate, layer.up, s.x, s.hidden_stride, rows.count, s.act, s.mlp_stride,
                   thread, threads);
#pragma omp barrier
    multiply(layer.down, s.act, s.mlp_stride, rows.count, s.y, s.hidden_stride, thread, threads);
#pragma omp barrier
}

// Whether all that the rows name is there: memory outside of it must not be touched.
bool valid(const Model& model, const Rows& rows) {
    auto in = [](Int value, Int count) { return value >= 0 && value < count; };
    for (Int row = 0; row < rows.count; ++row) {
        if (!in(rows.ids[row], model.head.n) || !in(rows.positions[row], model.context) ||
            !in(rows.slots[row], model.num_blocks * model.block_size))
            return false;
        for (Int block = 0; block * model.block_size < rows.lengths[row]; ++block)
            if (block >= rows.width || !in(rows.tables[row * rows.width + block], model.num_blocks))
                return false;
    }
    return true;
}

void run_step(const Model& model, const Rows& rows, int threads, Int* next, bf16* hidden) {
    Shared s(model, rows, threads);
    std::vector<Best> best(next ? rows.count * threads : 0);
#pragma omp parallel num_threads(threads)
    {
        int thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (Int place = 0; place < model.num_layers; ++place)
            run_layer(model, place, rows, s, thread, team);
        Range mine = share(rows.count, thread, team);
        for (Int row = mine.begin; row < mine.end; ++row) {
            bf16* residual = s.residual + row * s.hidden_stride;
            add_row(s.y + row * s.hidden_stride, residual, model.hidden);
            norm_row(residual, model.norm, model.hidden, model.epsilon,
                     next ? s.x + row * s.hidden_stride : hidden + row * model.hidden);
        }
        if (next) {
#pragma omp barrier
            multiply_argmax(model.head, s.x, s.hidden_stride, rows.count,
                            best.data() + thread * rows.count, thread, team);
#pragma omp barrier
            for (Int row = mine.begin; row < mine.end; ++row) {  // threads hold ascending columns
                Best first = best[row];
                for (int other = 1; other < team; ++other)
                    if (best[other * rows.count + row].value > first.value)
                        first = best[other * rows.count + row];
                next[row] = first.index;
            }
        }
    }
}

// ---- what both precisions export ----------------------------------------------------------------

constexpr Int kSmall = 1 << 14;  // values below which a second thread costs more than it brings

template <class T>
void rms_norm(const T* x, Int x_stride, const T* weight, Int rows, Int heads, Int size,
              float epsilon, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * size > kSmall)
    for (Int row = 0; row < rows; ++row)
        for (Int head = 0; head < heads; ++head)
            norm_row(x + row * x_stride + head * size, weight, size, epsilon,
                     out + (row * heads + head) * size);
}

template <class T>
void add_rms_norm(const T* x, Int x_stride, T* residual, Int residual_stride, const T* weight,
                  Int rows, Int size, float epsilon, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSmall)
    for (Int row = 0; row < rows; ++row) {
        add_row(x + row * x_stride, residual + row * residual_stride, size);
        norm_row(residual + row * residual_stride, weight, size, epsilon, out + row * size);
    }
}

template <class T>
void silu_mul(const T* gate, Int gate_stride, const T* up, Int up_stride, Int rows, Int size, T* out,
              int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSmall)
    for (Int row = 0; row < rows; ++row) {
        const T *a = gate + row * gate_stride, *b = up + row * up_stride;
#pragma omp simd
        for (Int i = 0; i < size; ++i) out[row * size + i] = narrow<T>(silu(wide(a[i])) * wide(b[i]));
    }
}

// x [rows, heads, dim] turned into out: a token's heads lie at its row, or at its slot.
template <class T>
void rotate(const T* x, Int x_stride, const float* cos, const float* sin, const Int* slots, Int rows,
            Int heads, Int dim, T* out, Int out_stride, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * heads * dim > kSmall)
    for (Int row = 0; row < rows; ++row)
        for (Int head = 0; head < heads; ++head)
            rotate_head(x + row * x_stride + head * dim, cos + row * (dim / 2),
                        sin + row * (dim / 2), dim / 2,
                        out + (slots ? slots[row] : row) * out_stride + head * dim);
}

template <class T>
void scatter(const T* x, Int x_stride, const Int* slots, Int rows, Int size, T* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSmall)
    for (Int row = 0; row < rows; ++row)
        std::copy_n(x + row * x_stride, size, out + slots[row] * size);
}

template <class T>
void argmax(const T* x, Int x_stride, Int rows, Int size, Int* out, int threads) {
#pragma omp parallel for num_threads(threads) if (rows * size > kSmall)
    for (Int row = 0; row < rows; ++row) {
        Best best{-INFINITY, 0};
        for (Int i = 0; i < size; i += 1024)
            update_best(x + row * x_stride + i, std::min<Int>(1024, size - i), i, best);
        out[row] = best.index;
    }
}

template <class T>
void attention(const T* q, Int q_stride, const T* keys, const T* values, const int32_t* tables,
               Int width, Int block_size, const Int* starts, const int32_t* lengths, Int rows,
               Int heads, Int kv_heads, Int dim, float scale, T* out, int threads) {
    Int group = heads / kv_heads, count;
    Paged<T> paged{keys, values, tables, width, block_size, kv_heads, group, dim, scale};
    std::vector<Task> tasks = plan(starts, lengths, rows, kv_heads, group, threads, count);
    std::vector<float> partials(count * group * (dim + 2));
#pragma omp parallel num_threads(threads)
    run_tasks(paged, tasks, out, heads * dim, partials.data(), count > 0,
              [&](const Task& task, Workspace<T>& work) {
        for (Int token = 0; token < task.tokens; ++token)
            std::copy_n(q + (task.token + token) * q_stride + task.kv_head * group * dim,
                        group * dim, work.q + token * group * dim);
    });
}

}  // namespace

extern "C" {

// One table for each precision, in the order of library.py's TABLE.
#define TABLE(T)                                                                                   \
    {(void*)rms_norm<T>, (void*)add_rms_norm<T>, (void*)silu_mul<T>, (void*)rotate<T>,             \
     (void*)scatter<T>,  (void*)argmax<T>,       (void*)attention<T>}
extern void* const float_kernels[];
extern void* const bf16_kernels[];
void* const float_kernels[] = TABLE(float);
void* const bf16_kernels[] = TABLE(bf16);

// 1 where bf16 products use AVX512-BF16, 0 where they are fp32 arithmetic.
int has_fast_bf16() { return FAST_BF16; }

Int packed_size(Int n, Int k) { return (n + kColumns - 1) / kColumns * kColumns * k; }

void pack_matrix(const bf16* weight, Int n, Int k, bf16* packed, int threads) {
#pragma omp parallel for num_threads(threads)
    for (Int group = 0; group < (n + kColumns - 1) / kColumns; ++group)
        for (Int i = 0; i < k; ++i)
            for (Int column = 0; column < kColumns; ++column) {
                Int row = group * kColumns + column;
                packed[group * k * kColumns + i / 2 * 64 + column * 2 + i % 2] =
                    row < n ? weight[row * k + i] : bf16{};
            }
}

void multiply_packed(const Matrix* w, const bf16* x, Int x_stride, Int rows, bf16* y, Int y_stride,
                     int threads) {
    constexpr Int most = 8 * kTileRows;  // so many rows of x stay in the second-level cache
#pragma omp parallel num_threads(threads)
    for (Int row = 0; row < rows; row += most)
        multiply(*w, x + row * x_stride, x_stride, std::min(most, rows - row), y + row * y_stride,
                 y_stride, omp_get_thread_num(), omp_get_num_threads());
}

// One token for each row. `next` [rows] takes the next ids; where it is null, `hidden`
// [rows, hidden] takes what the head would multiply. Returns 0, and does nothing, for rows that
// name what is not there.
int decode_step(const Model* model, const Rows* rows, int threads, Int* next, bf16* hidden) {
    if (!valid(*model, *rows)) return 0;
    run_step(*model, *rows, threads, next, hidden);
    return 1;
}

}  // extern "C"

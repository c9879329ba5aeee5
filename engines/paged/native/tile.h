// Numbers, the routine that all products stand on, and what is done to one row at a time.
//
// float and bfloat16 share one text: all arithmetic is in fp32, and a value is rounded where it is
// stored. `tile` multiplies up to 12 rows by 32 columns in registers, over operands "packed" so that
// a step down the shared dimension is one load. With AVX512-BF16 a step takes two bf16 values at
// once; elsewhere the same code is two fp32 multiply-adds.

#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

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
    float bounded = std::min(std::max(x, -87.0f), 88.0f);
    const float magic = 12582912.0f;  // 1.5 · 2^23: adding it leaves the nearest integer below
    float shifted = bounded * 1.44269504f + magic;
    float n = shifted - magic;
    float r = (bounded - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    float p = 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345205e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 0.166666657f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.0f;
    int32_t power = bits_as<int32_t>(shifted) - bits_as<int32_t>(magic);
    float value = p * bits_as<float>((power + 127) << 23);
    return x < -87.0f ? 0.0f : value;
}

inline float silu(float x) { return x / (1.0f + fast_exp(-x)); }

// ---- tile: rows × 32 columns --------------------------------------------------------------------

constexpr int kColumns = 32;
// As many as leave all sums in registers. Of 32 that hold 16 floats each, 12 rows take 24, the
// weights 2 and a broadcast 1.
#ifdef __AVX512F__
constexpr int kTileRows = 12;
#else
constexpr int kTileRows = 2;
#endif
constexpr Int kChunk = 96;  // rows of x that stay in the second-level cache with some weights

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

// Calls use(first row, the tile for its rows, block) for blocks of rows, as equal as can be.
template <class T, class Use>
void for_row_blocks(Int rows, Use use) {
    Int blocks = (rows + kTileRows - 1) / kTileRows;
    for (Int block = 0; block < blocks; ++block) {
        Int begin = rows * block / blocks, end = rows * (block + 1) / blocks;
        std::make_integer_sequence<int, kTileRows> counts;
        use(begin, tile_of<T>(int(end - begin), counts), block);
    }
}

// Where the threads of a team wait for each other. They spin for some microseconds and then sleep:
// OpenMP's own barrier spins for milliseconds, which is ruinous where another process wants the
// processor that the last thread needs.
class Barrier {
  public:
    void wait(int threads) {
        int now = round_.load();
        if (arrived_.fetch_add(1) + 1 == threads) {
            arrived_.store(0);
            round_.fetch_add(1);
            if (sleepers_.load() > 0)
                syscall(SYS_futex, &round_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
            return;
        }
        for (int spin = 0; spin < kSpins; ++spin) {
            if (round_.load(std::memory_order_acquire) != now) return;
#ifdef __x86_64__
            __builtin_ia32_pause();
#endif
        }
        sleepers_.fetch_add(1);  // before the kernel looks at round_ once more: no wake is missed
        while (round_.load() == now)
            syscall(SYS_futex, &round_, FUTEX_WAIT_PRIVATE, now, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1);
    }

  private:
    static constexpr int kSpins = 2000;
    std::atomic<int> round_{0}, arrived_{0}, sleepers_{0};
};

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

}  // namespace

// The hot operations of the paged decoder on a CPU: plain functions on pointers and sizes.
//
// Built by build.py, called through ctypes by library.py, checked against ops.py and attention/.

#include <omp.h>

#include "attention.h"

namespace {

// ---- matrix products on packed weights ----------------------------------------------------------

// Mirrored in library.py. packed: [ceil(n / 32)][k / 2][32][2], zeros behind n; bias: [n] or null.
struct Matrix {
    const bf16* packed;
    const bf16* bias;
    Int n, k;

    Int groups() const { return (n + kColumns - 1) / kColumns; }
};

// out[rows][32] = x · one group of columns + bias. While it is multiplied by the first and second
// block of rows, the group that follows is fetched: else memory would idle through later blocks.
void multiply_group(const Matrix& w, Int group, const bf16* x, Int x_stride, Int rows, float* out) {
    const bf16* packed = w.packed + group * w.k * kColumns;
    const char* next = (const char*)(packed + w.k * kColumns);
    for_row_blocks<bf16>(rows, [&](Int row, Tile<bf16> multiply, Int block) {
        const char* ahead = block < 2 ? next + block * w.k * kColumns : (const char*)packed;
        multiply(x + row * x_stride, x_stride, packed, w.k / 2, out + row * kColumns, kColumns,
                 false, ahead);
    });
    if (!w.bias) return;
    for (Int row = 0; row < rows; ++row)
        for (Int i = 0; i < std::min<Int>(kColumns, w.n - group * kColumns); ++i)
            out[row * kColumns + i] += wide(w.bias[group * kColumns + i]);
}

// Calls use(first row, rows, group, first column, columns) for this thread's share of a product:
// all groups of columns for some rows, then for the next.
template <class Use>
void for_share(const Matrix& w, Int rows, int thread, int threads, Use use) {
    Range mine = share((rows + kChunk - 1) / kChunk * w.groups(), thread, threads);
    for (Int unit = mine.begin; unit < mine.end; ++unit) {
        Int row = unit / w.groups() * kChunk, group = unit % w.groups(), column = group * kColumns;
        use(row, std::min(kChunk, rows - row), group, column, std::min<Int>(kColumns, w.n - column));
    }
}

// This thread's part of y = x · wᵀ + bias.
void multiply(const Matrix& w, const bf16* x, Int x_stride, Int rows, bf16* y, Int y_stride,
              int thread, int threads) {
    alignas(64) float out[kChunk * kColumns];
    for_share(w, rows, thread, threads, [&](Int row, Int count, Int group, Int column, Int columns) {
        multiply_group(w, group, x + row * x_stride, x_stride, count, out);
        for (Int r = 0; r < count; ++r) {
            bf16* to = y + (row + r) * y_stride + column;
#pragma omp simd
            for (Int i = 0; i < columns; ++i) to[i] = narrow<bf16>(out[r * kColumns + i]);
        }
    });
}

// This thread's part of y = silu(x · gateᵀ) · (x · upᵀ).
void multiply_gated(const Matrix& gate, const Matrix& up, const bf16* x, Int x_stride, Int rows,
                    bf16* y, Int y_stride, int thread, int threads) {
    alignas(64) float gates[kChunk * kColumns], ups[kChunk * kColumns];
    for_share(gate, rows, thread, threads,
              [&](Int row, Int count, Int group, Int column, Int columns) {
        multiply_group(gate, group, x + row * x_stride, x_stride, count, gates);
        multiply_group(up, group, x + row * x_stride, x_stride, count, ups);
        for (Int r = 0; r < count; ++r) {
            bf16* to = y + (row + r) * y_stride + column;
            const float *a = gates + r * kColumns, *b = ups + r * kColumns;
#pragma omp simd
            for (Int i = 0; i < columns; ++i) to[i] = narrow<bf16>(silu(a[i]) * b[i]);
        }
    });
}

// This thread's best of x · wᵀ for each row. Logits are rounded as they would be if they were
// stored, so that what ties there ties here.
void multiply_argmax(const Matrix& w, const bf16* x, Int x_stride, Int rows, Best* best, int thread,
                     int threads) {
    alignas(64) float out[kChunk * kColumns];
    std::fill_n(best, rows, Best{-INFINITY, 0});
    for_share(w, rows, thread, threads, [&](Int row, Int count, Int group, Int column, Int columns) {
        multiply_group(w, group, x + row * x_stride, x_stride, count, out);
        for (Int r = 0; r < count; ++r) {
            float* logits = out + r * kColumns;
#pragma omp simd
            for (Int i = 0; i < kColumns; ++i) logits[i] = wide(narrow<bf16>(logits[i]));
            update_best(logits, columns, column, best[row + r]);
        }
    });
}

// ---- a whole pass -------------------------------------------------------------------------------

// Mirrored in library.py, as are Model and Pass.
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

    Int group() const { return heads / kv_heads; }
};

struct Pass {  // batch.py says what they mean
    Int tokens, rows, asked, width;
    const Int *ids, *positions, *slots, *starts, *last;
    const int32_t *tables, *lengths;
};

// Whether all that a pass names is there: memory outside of it must not be touched.
bool valid(const Model& model, const Pass& pass) {
    auto in = [](Int value, Int count) { return value >= 0 && value < count; };
    for (Int i = 0; i < pass.tokens; ++i)
        if (!in(pass.ids[i], model.head.n) || !in(pass.positions[i], model.context) ||
            !in(pass.slots[i], model.num_blocks * model.block_size))
            return false;
    for (Int row = 0; row < pass.rows; ++row) {
        if (!in(pass.starts[row + 1] - pass.starts[row] - 1, pass.lengths[row])) return false;
        for (Int block = 0; block * model.block_size < pass.lengths[row]; ++block)
            if (block >= pass.width ||
                !in(pass.tables[row * pass.width + block], model.num_blocks))
                return false;
    }
    for (Int i = 0; i < pass.asked; ++i)
        if (!in(pass.last[i], pass.tokens)) return false;
    return pass.starts[0] == 0 && pass.starts[pass.rows] == pass.tokens;
}

// What the threads share during a pass. Rows are a cache line further apart than they are long: a
// power of two apart they would fall into the same few places of the first-level cache.
struct Shared {
    Int hidden_stride, heads_stride, qkv_stride, mlp_stride;
    bf16 *residual, *x, *y, *attended, *qkv, *act;
    float* partials;
    std::vector<Task> tasks;
    bool divided;
    Barrier barrier;

    Shared(const Model& model, const Pass& pass, int threads) {
        static thread_local std::vector<bf16> narrow_memory;
        static thread_local std::vector<float> wide_memory;
        Int query = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        hidden_stride = model.hidden + 32, heads_stride = query + 32;
        qkv_stride = query + 2 * kv + 32, mlp_stride = model.mlp + 32;
        Int row = 3 * hidden_stride + heads_stride + qkv_stride + mlp_stride;
        residual = grown(narrow_memory, pass.tokens * row);
        x = residual + pass.tokens * hidden_stride;
        y = x + pass.tokens * hidden_stride;
        attended = y + pass.tokens * hidden_stride;
        qkv = attended + pass.tokens * heads_stride;
        act = qkv + pass.tokens * qkv_stride;
        Int count;
        tasks = plan(pass.starts, pass.lengths, pass.rows, model.kv_heads, model.group(), threads,
                     count);
        divided = count > 0;
        partials = grown(wide_memory, count * model.group() * (model.head_dim + 2));
    }
};

// Turns a token's queries where they are, and its keys into the cache.
void rotate_token(const Model& model, const Layer& layer, const Pass& pass, Int token, bf16* qkv,
                  bf16* keys, bf16* values) {
    Int dim = model.head_dim, kv_size = model.kv_heads * dim;
    const float* cos = model.cos + pass.positions[token] * (dim / 2);
    const float* sin = model.sin + pass.positions[token] * (dim / 2);
    auto turn = [&](const bf16* head, const bf16* norm, bf16* to) {
        if (norm) norm_row(head, norm, dim, model.epsilon, to);
        rotate_head(norm ? to : head, cos, sin, dim / 2, to);
    };
    for (Int head = 0; head < model.heads; ++head)
        turn(qkv + head * dim, layer.q_norm, qkv + head * dim);
    const bf16* k = qkv + model.heads * dim;
    for (Int head = 0; head < model.kv_heads; ++head)
        turn(k + head * dim, layer.k_norm, keys + pass.slots[token] * kv_size + head * dim);
    std::copy_n(k + kv_size, kv_size, values + pass.slots[token] * kv_size);
}

void run_layer(const Model& model, Int place, const Pass& pass, Shared& s, int thread,
               int threads) {
    const Layer& layer = model.layers[place];
    Int dim = model.head_dim, tokens = pass.tokens, hidden = model.hidden;
    Int layer_size = model.num_blocks * model.block_size * model.kv_heads * dim;
    bf16 *keys = model.keys + place * layer_size, *values = model.values + place * layer_size;
    Range mine = share(tokens, thread, threads);
    for (Int token = mine.begin; token < mine.end; ++token) {
        bf16* residual = s.residual + token * s.hidden_stride;
        if (place == 0)
            std::copy_n(model.embedding + pass.ids[token] * hidden, hidden, residual);
        else
            add_row(s.y + token * s.hidden_stride, residual, hidden);
        norm_row(residual, layer.input_norm, hidden, model.epsilon, s.x + token * s.hidden_stride);
    }
    s.barrier.wait(threads);
    for (Int part = 0, column = 0; part < layer.qkv_parts; column += layer.qkv[part++].n)
        multiply(layer.qkv[part], s.x, s.hidden_stride, tokens, s.qkv + column, s.qkv_stride,
                 thread, threads);
    s.barrier.wait(threads);
    for (Int token = mine.begin; token < mine.end; ++token)
        rotate_token(model, layer, pass, token, s.qkv + token * s.qkv_stride, keys, values);
    s.barrier.wait(threads);
    Paged<bf16> paged{keys,           values,        pass.tables, pass.width, model.block_size,
                      model.kv_heads, model.group(), dim,         model.scale};
    run_tasks(paged, s.tasks, s.qkv, s.qkv_stride, s.attended, s.heads_stride, s.partials,
              s.divided, s.barrier, thread, threads);
    multiply(layer.out, s.attended, s.heads_stride, tokens, s.y, s.hidden_stride, thread, threads);
    s.barrier.wait(threads);
    for (Int token = mine.begin; token < mine.end; ++token) {
        bf16* residual = s.residual + token * s.hidden_stride;
        add_row(s.y + token * s.hidden_stride, residual, hidden);
        norm_row(residual, layer.post_norm, hidden, model.epsilon, s.x + token * s.hidden_stride);
    }
    s.barrier.wait(threads);
    multiply_gated(layer.gate, layer.up, s.x, s.hidden_stride, tokens, s.act, s.mlp_stride, thread,
                   threads);
    s.barrier.wait(threads);
    multiply(layer.down, s.act, s.mlp_stride, tokens, s.y, s.hidden_stride, thread, threads);
    s.barrier.wait(threads);
}

// From the last layer's result to ids, or to hidden states, of the tokens that are asked for.
void finish(const Model& model, const Pass& pass, Shared& s, Best* best, Int* next, bf16* hidden,
            int thread, int threads) {
    Range mine = share(pass.asked, thread, threads);
    for (Int i = mine.begin; i < mine.end; ++i) {
        bf16* residual = s.residual + pass.last[i] * s.hidden_stride;
        add_row(s.y + pass.last[i] * s.hidden_stride, residual, model.hidden);
        norm_row(residual, model.norm, model.hidden, model.epsilon,
                 next ? s.x + i * s.hidden_stride : hidden + i * model.hidden);
    }
    if (!next) return;
    s.barrier.wait(threads);
    multiply_argmax(model.head, s.x, s.hidden_stride, pass.asked, best + thread * pass.asked,
                    thread, threads);
    s.barrier.wait(threads);
    for (Int i = mine.begin; i < mine.end; ++i) {  // later threads hold later columns
        Best first = best[i];
        for (int other = 1; other < threads; ++other)
            if (best[other * pass.asked + i].value > first.value)
                first = best[other * pass.asked + i];
        next[i] = first.index;
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
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    run_tasks(paged, tasks, q, q_stride, out, heads * dim, partials.data(), count > 0, barrier,
              omp_get_thread_num(), omp_get_num_threads());
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
#pragma omp parallel num_threads(threads)
    multiply(*w, x, x_stride, rows, y, y_stride, omp_get_thread_num(), omp_get_num_threads());
}

// A pass from ids to ids. `next` [asked] takes the ids that follow; where it is null, `hidden`
// [asked, hidden] takes what the head would multiply. Returns 0, and does nothing, for a pass that
// names what is not there.
int run_pass(const Model* model, const Pass* pass, int threads, Int* next, bf16* hidden) {
    if (!valid(*model, *pass)) return 0;
    Shared shared(*model, *pass, threads);
    std::vector<Best> best(next ? pass->asked * threads : 0);
#pragma omp parallel num_threads(threads)
    {
        int thread = omp_get_thread_num(), team = omp_get_num_threads();
        for (Int place = 0; place < model->num_layers; ++place)
            run_layer(*model, place, *pass, shared, thread, team);
        finish(*model, *pass, shared, best.data(), next, hidden, thread, team);
    }
    return 1;
}

}  // extern "C"

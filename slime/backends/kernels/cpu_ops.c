/* What lies between the matrix products of a transformer layer, forward and backward, float32.
 *
 * Each reads and writes its tensors once. Threads take equal blocks of rows, and sums over rows are
 * added up in the order of the blocks: the same numbers at every run with the same number of threads.
 */

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "float_math.h"

/* Of y = w x r with r = 1 / rms(x): grad_x = r w g - x r^3 sum(w g x) / size, grad_w += g x r. */
static inline void norm_gradient(const float *restrict x, const float *restrict weight,
                                 const float *restrict grad, long size, float inverse,
                                 float *restrict grad_x, float *restrict grad_weight) {
    float along = 0.0f;
    for (long i = 0; i < size; i++) along += weight[i] * grad[i] * x[i];
    along *= inverse * inverse / size;
    for (long i = 0; i < size; i++) {
        grad_x[i] = inverse * (weight[i] * grad[i] - x[i] * along);
        grad_weight[i] += grad[i] * x[i] * inverse;
    }
}

static void add_up(const float *parts, long count, long size, float *total) {
    memset(total, 0, size * sizeof(float));
    for (long p = 0; p < count; p++)
        for (long i = 0; i < size; i++) total[i] += parts[p * size + i];
}

/* sum = x + delta; out = weight * sum / rms(sum). Without delta there is no sum to write. */
void add_rms_norm(const float *x, const float *delta, const float *weight, float *sum, float *out,
                  long rows, long size, float eps) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *h = x + r * size;
        float *o = out + r * size;
        if (delta) {
            const float *d = delta + r * size;
            float *s = sum + r * size;
            for (long i = 0; i < size; i++) s[i] = h[i] + d[i];
            h = s;
        }
        float inverse = inverse_rms(h, size, eps);
        for (long i = 0; i < size; i++) o[i] = h[i] * inverse * weight[i];
    }
}

/* grad_sum, where it is given, is what reaches the sum by another way. */
void add_rms_norm_backward(const float *sum, const float *weight, const float *grad,
                           const float *grad_sum, float *grad_x, float *grad_weight, long rows,
                           long size, float eps) {
    long threads = omp_get_max_threads();
    float *parts = calloc(threads * size, sizeof(float));
#pragma omp parallel num_threads(threads)
    {
        float *part = parts + omp_get_thread_num() * size;
#pragma omp for schedule(static)
        for (long r = 0; r < rows; r++) {
            const float *x = sum + r * size;
            float *gx = grad_x + r * size;
            norm_gradient(x, weight, grad + r * size, size, inverse_rms(x, size, eps), gx, part);
            if (grad_sum) {
                const float *gs = grad_sum + r * size;
                for (long i = 0; i < size; i++) gx[i] += gs[i];
            }
        }
    }
    add_up(parts, threads, size, grad_weight);
    free(parts);
}

/* out = silu(gate) * up; a row holds gate, then up */
void silu_mul(const float *gate_up, float *out, long rows, long size) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *restrict gate = gate_up + r * 2 * size, *restrict up = gate + size;
        float *restrict o = out + r * size;
        for (long i = 0; i < size; i++) o[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

void silu_mul_backward(const float *gate_up, const float *grad, float *grad_gate_up, long rows,
                       long size) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const float *restrict gate = gate_up + r * 2 * size, *restrict up = gate + size;
        const float *restrict g = grad + r * size;
        float *restrict grad_gate = grad_gate_up + r * 2 * size, *restrict grad_up = grad_gate + size;
        for (long i = 0; i < size; i++) {
            float sigmoid = 1.0f / (1.0f + exp_fast(-gate[i]));
            grad_gate[i] = g[i] * up[i] * sigmoid * (1.0f + gate[i] * (1.0f - sigmoid));
            grad_up[i] = g[i] * gate[i] * sigmoid;
        }
    }
}

/* Heads of one token: out = rotation of (weight * x / rms(x)), or of x without a weight. */
static inline void turn_heads(const float *restrict x, const float *restrict weight, float eps,
                              const float *restrict cosine, const float *restrict sine, long heads,
                              long dim, float *restrict normed, float *restrict out) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim, out += dim) {
        const float *y = x;
        if (weight) {
            float inverse = inverse_rms(x, dim, eps);
            for (long i = 0; i < dim; i++) normed[i] = x[i] * inverse * weight[i];
            y = normed;
        }
        for (long i = 0; i < half; i++) {
            out[i] = y[i] * cosine[i] - y[i + half] * sine[i];
            out[i + half] = y[i + half] * cosine[i + half] + y[i] * sine[i + half];
        }
    }
}

static inline void turn_heads_back(const float *restrict x, const float *restrict weight, float eps,
                                   const float *restrict cosine, const float *restrict sine,
                                   const float *restrict grad, long heads, long dim,
                                   float *restrict turned, float *restrict grad_x,
                                   float *restrict grad_weight) {
    long half = dim / 2;
    for (long h = 0; h < heads; h++, x += dim, grad += dim, grad_x += dim) {
        float *to = weight ? turned : grad_x;
        for (long i = 0; i < half; i++) {
            to[i] = grad[i] * cosine[i] + grad[i + half] * sine[i + half];
            to[i + half] = grad[i + half] * cosine[i + half] - grad[i] * sine[i];
        }
        if (weight)
            norm_gradient(x, weight, turned, dim, inverse_rms(x, dim, eps), grad_x, grad_weight);
    }
}

/* Rows of query | key | value heads become three tensors, queries and keys normed and rotated.
 *
 * Position p of them is of token gather[p]; padding repeats a token. */
void split_heads(const float *qkv, const int64_t *gather, long positions, long query_heads,
                 long key_heads, long dim, const float *cosines, const float *sines,
                 const float *query_norm, const float *key_norm, float eps, float *queries,
                 float *keys, float *values) {
    long query_size = query_heads * dim, key_size = key_heads * dim;
    long stride = query_size + 2 * key_size;
#pragma omp parallel
    {
        float normed[dim];
#pragma omp for schedule(static)
        for (long p = 0; p < positions; p++) {
            long t = gather ? gather[p] : p;
            const float *x = qkv + t * stride, *cosine = cosines + t * dim, *sine = sines + t * dim;
            float *q = queries + p * query_size, *k = keys + p * key_size, *v = values + p * key_size;
            turn_heads(x, query_norm, eps, cosine, sine, query_heads, dim, normed, q);
            turn_heads(x + query_size, key_norm, eps, cosine, sine, key_heads, dim, normed, k);
            memcpy(v, x + query_size + key_size, key_size * sizeof(float));
        }
    }
}

/* No gradient comes back from padding, which no token looks at and whose output is dropped. */
void split_heads_backward(const float *qkv, const int64_t *scatter, long tokens, long query_heads,
                          long key_heads, long dim, const float *cosines, const float *sines,
                          const float *query_norm, const float *key_norm, float eps,
                          const float *grad_queries, const float *grad_keys,
                          const float *grad_values, float *grad_qkv, float *grad_query_norm,
                          float *grad_key_norm) {
    long query_size = query_heads * dim, key_size = key_heads * dim;
    long stride = query_size + 2 * key_size, threads = omp_get_max_threads();
    float *query_parts = calloc(threads * dim, sizeof(float));
    float *key_parts = calloc(threads * dim, sizeof(float));
#pragma omp parallel num_threads(threads)
    {
        float turned[dim];
        long thread = omp_get_thread_num();
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) {
            long p = scatter ? scatter[t] : t;
            const float *x = qkv + t * stride, *cosine = cosines + t * dim, *sine = sines + t * dim;
            float *g = grad_qkv + t * stride;
            turn_heads_back(x, query_norm, eps, cosine, sine, grad_queries + p * query_size,
                            query_heads, dim, turned, g, query_parts + thread * dim);
            turn_heads_back(x + query_size, key_norm, eps, cosine, sine, grad_keys + p * key_size,
                            key_heads, dim, turned, g + query_size, key_parts + thread * dim);
            memcpy(g + query_size + key_size, grad_values + p * key_size, key_size * sizeof(float));
        }
    }
    if (query_norm) add_up(query_parts, threads, dim, grad_query_norm);
    if (key_norm) add_up(key_parts, threads, dim, grad_key_norm);
    free(query_parts);
    free(key_parts);
}

/* out[r] = rows[index[r]]; where `back` is given and back[index[r]] is not r, zero */
void take_rows(const float *rows, const int64_t *index, const int64_t *back, long count, long size,
               float *out) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < count; r++) {
        if (back && back[index[r]] != r)
            memset(out + r * size, 0, size * sizeof(float));
        else
            memcpy(out + r * size, rows + index[r] * size, size * sizeof(float));
    }
}

/* Kernels of the fast forward on a CPU, float32, one token per row of a matrix.
 *
 * No token's result depends on the other tokens of the call. Position p of page table row r is stored in
 * page page_table[r * width + p / page_size].
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MIN_PARALLEL 8192 /* elements from which on several threads are faster */
#define CHUNK 256 /* vocabulary entries summed up at a time */

static inline float exp_fast(float x) {
    /* 2^n * e^r with |r| <= ln(2)/2; within 2 units in the last place, 0 below -87 */
    x = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}

static inline float inverse_rms(const float *x, long size, float eps) {
    float sum = 0.0f;
    for (long i = 0; i < size; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / size + eps);
}

/* hidden += delta (if there is one); out = weight * hidden / rms(hidden) */
void add_rms_norm(float *hidden, const float *delta, const float *weight, float *out, long tokens,
                  long size, float eps, float plus) {
#pragma omp parallel for if (tokens * size > MIN_PARALLEL)
    for (long t = 0; t < tokens; t++) {
        float *h = hidden + t * size, *o = out + t * size;
        if (delta) {
            const float *d = delta + t * size;
            for (long i = 0; i < size; i++) h[i] += d[i];
        }
        float scale = inverse_rms(h, size, eps);
        for (long i = 0; i < size; i++) o[i] = h[i] * scale * (weight[i] + plus);
    }
}

static inline void norm_and_rotate(float *x, const float *weight, float eps, const float *cosine,
                                   const float *sine, long dim) {
    long half = dim / 2;
    if (weight) {
        float scale = inverse_rms(x, dim, eps);
        for (long i = 0; i < dim; i++) x[i] = x[i] * scale * weight[i];
    }
    for (long i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cosine[i] - b * sine[i];
        x[i + half] = b * cosine[i + half] + a * sine[i + half];
    }
}

/* Apply QK norm (if there are weights) and RoPE to queries and keys in place; store keys and values. */
void rope_store(float *qkv, long tokens, long query_heads, long key_heads, long dim,
                const float *cosines, const float *sines, const float *query_norm,
                const float *key_norm, float eps, const int32_t *angles, const int32_t *positions,
                const int32_t *rows, const int32_t *page_table, long width, long page_size,
                float *keys, float *values) {
    long stride = (query_heads + 2 * key_heads) * dim, size = key_heads * dim;
#pragma omp parallel for if (tokens * stride > MIN_PARALLEL)
    for (long t = 0; t < tokens; t++) {
        long position = positions[t];
        const float *cosine = cosines + angles[t] * dim, *sine = sines + angles[t] * dim;
        float *query = qkv + t * stride, *key = query + query_heads * dim, *value = key + size;
        for (long h = 0; h < query_heads; h++)
            norm_and_rotate(query + h * dim, query_norm, eps, cosine, sine, dim);
        for (long h = 0; h < key_heads; h++)
            norm_and_rotate(key + h * dim, key_norm, eps, cosine, sine, dim);
        long page = page_table[rows[t] * width + position / page_size];
        long slot = (page * page_size + position % page_size) * size;
        memcpy(keys + slot, key, size * sizeof(float));
        memcpy(values + slot, value, size * sizeof(float));
    }
}

/* out += B(A(x) * scale) for tokens with an adapter (slot >= 0), for `parts` linears side by side in a
 * row of `columns`. a is [slots, parts * most, depth], b [slots, most, columns], ranks [slots, parts]. */
void add_lora(float *out, const float *x, const float *a, const float *b, const float *scales,
              const int32_t *slots, const int32_t *ranks, const long *widths, long parts,
              long columns, long most, long depth, long tokens) {
#pragma omp parallel for if (tokens * depth * most > MIN_PARALLEL)
    for (long t = 0; t < tokens; t++) {
        long slot = slots[t];
        if (slot < 0) continue;
        const float *input = x + t * depth, *expand = b + slot * columns * most;
        float low[most], *o = out + t * columns;
        for (long p = 0; p < parts; o += widths[p], expand += widths[p], p++) {
            long rank = ranks[slot * parts + p];
            if (!rank) continue;
            for (long r = 0; r < rank; r++) {
                const float *shrink = a + ((slot * parts + p) * most + r) * depth;
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (long i = 0; i < depth; i++) sum += input[i] * shrink[i];
                low[r] = sum * scales[slot];
            }
            for (long r = 0; r < rank; r++) {
                const float *column = expand + r * columns;
#pragma omp simd
                for (long c = 0; c < widths[p]; c++) o[c] += low[r] * column[c];
            }
        }
    }
}

/* Attention of `heads` adjacent key heads, each with the `group` query heads that share it (GQA), over
 * positions first..last of a row. All heads of a token are read before the next token. */
static inline __attribute__((always_inline)) void attend_heads(
    const float *restrict queries, long heads, const long group, const long dim,
    const int32_t *restrict pages, long page_size, long stride, const float *restrict keys,
    const float *restrict values, long first, long last, float scale, float *restrict scores,
    long stride_scores, float *restrict out) {
    long count = last - first + 1;
    for (long page = first / page_size, start = page * page_size; start <= last;
         page++, start += page_size) {
        const float *key = keys + pages[page] * page_size * stride;
        long low = start > first ? start : first, high = start + page_size - 1;
        high = high < last ? high : last;
        for (long p = low; p <= high; p++) {
            const float *k = key + (p - start) * stride;
            for (long h = 0; h < heads; h++) {
                for (long g = 0; g < group; g++) {
                    const float *q = queries + (h * group + g) * dim;
                    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                    for (long i = 0; i < dim; i++) sum += q[i] * k[h * dim + i];
                    scores[(h * group + g) * stride_scores + p - first] = sum * scale;
                }
            }
        }
    }
    for (long h = 0; h < heads * group; h++) {
        float *s = scores + h * stride_scores, most = s[0], sum = 0.0f;
#pragma omp simd reduction(max : most)
        for (long i = 0; i < count; i++) most = s[i] > most ? s[i] : most;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < count; i++) {
            s[i] = exp_fast(s[i] - most);
            sum += s[i];
        }
        float inverse = 1.0f / sum;
#pragma omp simd
        for (long i = 0; i < count; i++) s[i] *= inverse;
    }
    for (long i = 0; i < heads * group * dim; i++) out[i] = 0.0f;
    for (long page = first / page_size, start = page * page_size; start <= last;
         page++, start += page_size) {
        const float *value = values + pages[page] * page_size * stride;
        long low = start > first ? start : first, high = start + page_size - 1;
        high = high < last ? high : last;
        for (long p = low; p <= high; p++) {
            const float *v = value + (p - start) * stride;
            for (long h = 0; h < heads; h++) {
                for (long g = 0; g < group; g++) {
                    float weight = scores[(h * group + g) * stride_scores + p - first];
                    float *o = out + (h * group + g) * dim;
#pragma omp simd
                    for (long i = 0; i < dim; i++) o[i] += weight * v[h * dim + i];
                }
            }
        }
    }
}

/* Causal attention of each token over its row, over at most `window` positions if that is > 0. */
void attend(const float *qkv, long tokens, long query_heads, long key_heads, long dim,
            const int32_t *positions, const int32_t *rows, const int32_t *page_table, long width,
            long page_size, const float *keys, const float *values, float scale, long window,
            float *out) {
    long qkv_stride = (query_heads + 2 * key_heads) * dim, stride = key_heads * dim;
    long group = query_heads / key_heads, longest = 0;
    for (long t = 0; t < tokens; t++) longest = positions[t] > longest ? positions[t] : longest;
    long stride_scores = (longest + 16) / 16 * 16;
    long heads = tokens < 16 ? 1 : key_heads; /* per work item: with few tokens, threads split the heads */
    long items = key_heads / heads; /* per token */
#pragma omp parallel
    {
        float *scores = aligned_alloc(64, heads * group * stride_scores * sizeof(float));
#pragma omp for schedule(dynamic, 2)
        for (long item = 0; item < tokens * items; item++) {
            long t = item / items, head = item % items * heads, last = positions[t];
            long first = window > 0 && last >= window ? last - window + 1 : 0;
            const float *q = qkv + t * qkv_stride + head * group * dim;
            const int32_t *pages = page_table + rows[t] * width;
            const float *k = keys + head * dim, *v = values + head * dim;
            float *o = out + (t * query_heads + head * group) * dim;
#define CASE(g, d)                                                                                 \
    if (group == g && dim == d) {                                                                  \
        attend_heads(q, heads, g, d, pages, page_size, stride, k, v, first, last, scale, scores,   \
                     stride_scores, o);                                                                     \
        continue;                                                                                  \
    }
            CASE(2, 16) CASE(2, 32) CASE(2, 64) CASE(2, 128)
            CASE(1, 32) CASE(1, 64) CASE(1, 128) CASE(3, 64) CASE(4, 64) CASE(4, 128) CASE(8, 128)
            attend_heads(q, heads, group, dim, pages, page_size, stride, k, v, first, last, scale,
                         scores, stride_scores, o);
        }
        free(scores);
    }
}

/* out = silu(gate) * up; a row holds gate, then up */
void silu_mul(const float *gate_up, float *out, long tokens, long size) {
#pragma omp parallel for if (tokens * size > MIN_PARALLEL)
    for (long t = 0; t < tokens; t++) {
        const float *gate = gate_up + t * 2 * size, *up = gate + size;
        float *o = out + t * size;
        for (long i = 0; i < size; i++) o[i] = gate[i] / (1.0f + exp_fast(-gate[i])) * up[i];
    }
}

/* Sample one token per row: the argmax if `uniform` is negative, else the first whose cumulative weight
 * exceeds uniform * total. Its log-prob is that of softmax(logits / temperature). A row of `forbidden` (which
 * may be NULL) lists up to `width` tokens that are not sampled but count in that softmax, padded with -1. */
void sample_tokens(const float *logits, long rows, long vocab, const float *temperatures,
          const double *uniforms, const int32_t *forbidden, long width, int32_t *tokens,
          float *log_probs) {
    long chunks = (vocab + CHUNK - 1) / CHUNK;
#pragma omp parallel if (rows * vocab > MIN_PARALLEL)
    {
        double *sums = malloc(chunks * sizeof(double));
        float *open = forbidden ? malloc(vocab * sizeof(float)) : NULL;
#pragma omp for
        for (long r = 0; r < rows; r++) {
            const float *all = logits + r * vocab, *x = all;
            if (forbidden) {
                x = memcpy(open, all, vocab * sizeof(float));
                for (long i = 0; i < width; i++) {
                    int32_t b = forbidden[r * width + i];
                    if (b >= 0 && b < vocab) open[b] = -INFINITY;
                }
            }
            float inverse = 1.0f / temperatures[r], most = x[0];
            for (long i = 1; i < vocab; i++) most = x[i] > most ? x[i] : most;
            double total = 0.0, forbidden_sum = 0.0;
            for (long c = 0; c < chunks; c++) {
                long end = (c + 1) * CHUNK < vocab ? (c + 1) * CHUNK : vocab;
                float sum = 0.0f;
                for (long i = c * CHUNK; i < end; i++) sum += exp_fast((x[i] - most) * inverse);
                sums[c] = sum;
                total += sum;
            }
            for (long i = 0; i < (forbidden ? width : 0); i++) {
                int32_t b = forbidden[r * width + i];
                if (b >= 0 && b < vocab) forbidden_sum += exp((double)((all[b] - most) * inverse));
            }
            long token = vocab - 1;
            if (uniforms[r] < 0.0) {
                for (token = 0; token < vocab - 1 && x[token] != most; token++) {}
            } else {
                double target = uniforms[r] * total, before = 0.0;
                long c = 0;
                while (c < chunks - 1 && before + sums[c] <= target) before += sums[c++];
                long end = (c + 1) * CHUNK < vocab ? (c + 1) * CHUNK : vocab;
                long i = token = c * CHUNK; /* the most probable, if rounding leaves none */
                for (; i < end && before <= target; i++) {
                    if (x[i] > x[token]) token = i;
                    if (x[i] != -INFINITY) before += exp_fast((x[i] - most) * inverse);
                }
                if (before > target) token = i - 1;
            }
            tokens[r] = token;
            log_probs[r] = (x[token] - most) * inverse - (float)log(total + forbidden_sum);
        }
        free(sums);
        free(open);
    }
}

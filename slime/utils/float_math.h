/* Small pieces that C files of kernels share, float32. */

#include <math.h>
#include <stdint.h>

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

/* Vectors of LANES floats at one level, and what all kernels do with them. Included once a level by each_level.h.

   Everything is a static inline function with the level in its name; the #defines below let subjects say the bare one. */
#ifndef CHARONIA_SIMD_NAMES
#define CHARONIA_SIMD_NAMES
#define vf AT(vf)
#define vi AT(vi)
#define vu AT(vu)
#define vf_all AT(vf_all)
#define vf_load AT(vf_load)
#define vf_store AT(vf_store)
#define vf_fma AT(vf_fma)
#define vf_max AT(vf_max)
#define vf_min AT(vf_min)
#define vf_sum AT(vf_sum)
#define vf_most AT(vf_most)
#define vf_exp2 AT(vf_exp2)
#define vf_sigmoid AT(vf_sigmoid)
#define vf_silu AT(vf_silu)
#define vf_tanh AT(vf_tanh)
#define vf_gelu AT(vf_gelu)
#define vf_erf_gelu AT(vf_erf_gelu)
#define vf_quick_gelu AT(vf_quick_gelu)
#define vi_narrow AT(vi_narrow)
#define vi_nearest AT(vi_nearest)
#define vi_load_u16 AT(vi_load_u16)
#define vf_get AT(vf_get)
#define vf_put AT(vf_put)
#define vf_get_some AT(vf_get_some)
#define vf_put_some AT(vf_put_some)
#define vf_as AT(vf_as)
#define vf_rounded AT(vf_rounded)

#define INLINE static inline __attribute__((always_inline, unused))

/* What an element is stored as; library.DTYPES has the same numbers. */
enum kind { F32, BF16, S8 };

#define KIND_BYTES(kind) ((kind) == F32 ? 4 : (kind) == BF16 ? 2 : 1)
#endif

typedef float vf __attribute__((vector_size(4 * LANES), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), may_alias));
typedef uint32_t vu __attribute__((vector_size(4 * LANES), may_alias));

INLINE vf vf_all(float x) { return x - (vf){0}; }

INLINE vf vf_load(const float *from)
{
    vf x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void vf_store(float *to, vf x) { memcpy(to, &x, sizeof x); }

/* a * b + c; rounded once wherever the machine can. */
INLINE vf vf_fma(vf a, vf b, vf c)
{
#if LANES == 16
    return _mm512_fmadd_ps(a, b, c);
#elif LANES == 8
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

/* The larger, or the smaller, of each two; b where either is NaN. */
#if LANES == 16
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
#elif LANES == 8
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm256_min_ps(a, b); }
#else
INLINE vf vf_max(vf a, vf b) { return (vf)(((a > b) & (vi)a) | (~(a > b) & (vi)b)); }
INLINE vf vf_min(vf a, vf b) { return (vf)(((a < b) & (vi)a) | (~(a < b) & (vi)b)); }
#endif

/* The sum of all lanes, and the largest: halves on halves, so always in the same order. */
#define FOLD_LANES(x, fold)                                \
    float lanes[LANES];                                    \
    vf_store(lanes, x);                                    \
    for (int half = LANES / 2; half; half /= 2)            \
        for (int i = 0; i < half; i++)                     \
            lanes[i] = fold(lanes[i], lanes[i + half]);    \
    return lanes[0]
#define SUM_OF(a, b) ((a) + (b))
#define MOST_OF(a, b) ((a) > (b) ? (a) : (b))

INLINE float vf_sum(vf x) { FOLD_LANES(x, SUM_OF); }

INLINE float vf_most(vf x) { FOLD_LANES(x, MOST_OF); }

/* The nearest whole number, for |x| < 2^22. */
INLINE vi vi_nearest(vf x)
{
#if LANES == 16
    return (vi)_mm512_cvtps_epi32(x);
#elif LANES == 8
    return (vi)_mm256_cvtps_epi32(x);
#elif defined(__aarch64__)
    return vcvtnq_s32_f32(x);
#else
    return (vi)(x + 12582912.0f) - 0x4B400000; /* 1.5 * 2^23: the mantissa's last bits are the number */
#endif
}

/* 2^x, within 2 units in the last place; 0 below 2^-126, at most 2^127; NaN stays. */
INLINE vf vf_exp2(vf x)
{
    vf bounded = vf_max(vf_all(-127.0f), vf_min(vf_all(127.0f), x));
    vi whole = vi_nearest(bounded);
    vf rest = bounded - __builtin_convertvector(whole, vf);
    vf power = vf_fma(vf_all(0.0001534581242594868f), rest, vf_all(0.0013399930903688073f));
    power = vf_fma(power, rest, vf_all(0.009618489071726799f));
    power = vf_fma(power, rest, vf_all(0.05550328642129898f));
    power = vf_fma(power, rest, vf_all(0.24022646248340607f));
    power = vf_fma(power, rest, vf_all(0.6931471824645996f));
    power = vf_fma(power, rest, vf_all(1.0f));
    return power * (vf)((whole + 127) << 23);
}

#define LOG2E 1.44269504088896341f

INLINE vf vf_sigmoid(vf x) { return 1.0f / (1.0f + vf_exp2(x * -LOG2E)); }

INLINE vf vf_silu(vf x) { return x / (1.0f + vf_exp2(x * -LOG2E)); }

/* x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), without the cancellation (arXiv 1606.08415). */
INLINE vf vf_gelu(vf x)
{
    vf inner = x * vf_fma(x * x, vf_all(0.044715f), vf_all(1.0f));
    return x / (1.0f + vf_exp2(inner * (-2.0f * LOG2E * 0.7978845608028654f)));
}

/* x / 2 (1 + erf(x / sqrt(2))) out of erfc, whose fraction is within 1.2e-7 everywhere (Numerical Recipes 6.2): so
   nothing cancels where x is far below zero. */
INLINE vf vf_erf_gelu(vf x)
{
    vf size = vf_max(x, -x), z = size * 0.7071067811865476f, t = 1.0f / vf_fma(z, vf_all(0.5f), vf_all(1.0f));
    vf power = vf_fma(vf_all(0.17087277f), t, vf_all(-0.82215223f));
    power = vf_fma(power, t, vf_all(1.48851587f));
    power = vf_fma(power, t, vf_all(-1.13520398f));
    power = vf_fma(power, t, vf_all(0.27886807f));
    power = vf_fma(power, t, vf_all(-0.18628806f));
    power = vf_fma(power, t, vf_all(0.09678418f));
    power = vf_fma(power, t, vf_all(0.37409196f));
    power = vf_fma(power, t, vf_all(1.00002368f));
    power = vf_fma(power, t, vf_all(-1.26551223f));
    return vf_max(x, vf_all(0.0f)) - 0.5f * size * t * vf_exp2((power - z * z) * LOG2E);
}

INLINE vf vf_quick_gelu(vf x) { return x / (1.0f + vf_exp2(x * (-1.702f * LOG2E))); }

/* Good to 1e-7 absolutely, not relatively: near zero it cancels. */
INLINE vf vf_tanh(vf x) { return 1.0f - 2.0f / (vf_exp2(x * (2.0f * LOG2E)) + 1.0f); }

/* LANES numbers of 16 bits, widened. */
INLINE vi vi_load_u16(const uint16_t *from)
{
#if LANES == 16
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (vi)vmovl_u16(vld1_u16(from));
#else
    return (vi){from[0], from[1], from[2], from[3]};
#endif
}

/* Lanes from 0 to 65535, as 16 bits each. */
INLINE void vi_narrow(uint16_t *to, vi x)
{
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)x));
#elif LANES == 8
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x, (__m256i)x), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
#elif defined(__aarch64__)
    vst1_u16(to, vmovn_u32((vu)x));
#else
    for (int i = 0; i < LANES; i++)
        to[i] = (uint16_t)x[i];
#endif
}

/* bfloat16 in the low halves: to nearest, ties to even; NaN stays one. */
INLINE vi vf_rounded(vf x)
{
    vu bits = (vu)x;
    vu rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
    vu broken = (vu)(x != x);
    return (vi)((broken & 0x7FC0) | (~broken & rounded));
}

/* What `x` becomes when it is stored as `kind`. */
INLINE vf vf_as(vf x, int kind) { return kind == F32 ? x : (vf)(vf_rounded(x) << 16); }

/* LANES elements from place `at` of an array of `kind`. */
INLINE vf vf_get(const void *from, long at, int kind)
{
    if (kind == F32)
        return vf_load((const float *)from + at);
    return (vf)(vi_load_u16((const uint16_t *)from + at) << 16);
}

INLINE void vf_put(void *to, long at, vf x, int kind)
{
    if (kind == F32)
        vf_store((float *)to + at, x);
    else
        vi_narrow((uint16_t *)to + at, vf_rounded(x));
}

/* As above, for the first `count` lanes only: nothing else is touched, and lanes behind are 0. */
INLINE vf vf_get_some(const void *from, long at, long count, int kind)
{
    if (count == LANES)
        return vf_get(from, at, kind);
    char part[4 * LANES] = {0};
    memcpy(part, (const char *)from + at * KIND_BYTES(kind), (size_t)(count * KIND_BYTES(kind)));
    return vf_get(part, 0, kind);
}

INLINE void vf_put_some(void *to, long at, vf x, long count, int kind)
{
    if (count == LANES) {
        vf_put(to, at, x, kind);
        return;
    }
    char part[4 * LANES];
    vf_put(part, 0, x, kind);
    memcpy((char *)to + at * KIND_BYTES(kind), part, (size_t)(count * KIND_BYTES(kind)));
}

/* Runs `step`, which says `at` and `count`, over an array of `n`: whole vectors, then what is left. */
#define FOR_VECTORS(n, step)                  \
    do {                                      \
        const long whole_ = (n) - (n) % LANES; \
        for (long at = 0; at < whole_; at += LANES) { \
            enum { count = LANES };           \
            step;                             \
        }                                     \
        if (whole_ < (n)) {                   \
            const long at = whole_, count = (n)-whole_; \
            step;                             \
        }                                     \
    } while (0)

/* Rotary position embedding of some numbers of one head. */
INLINE void AT(rope_some)(const void *x, const float *cos_sin, void *out, long half, long at, long count, int kind)
{
    vf a = vf_get_some(x, at, count, kind), b = vf_get_some(x, half + at, count, kind);
    vf c = vf_get_some(cos_sin, at, count, F32), s = vf_get_some(cos_sin, half + at, count, F32);
    vf_put_some(out, at, vf_fma(a, c, -(b * s)), count, kind);
    vf_put_some(out, half + at, vf_fma(b, c, a * s), count, kind);
}

/* A head of 2 * half numbers, its halves turned against each other by cosines and sines [half each]
   (arXiv 2104.09864). */
static __attribute__((unused)) void AT(rope)(const void *x, const float *cos_sin, void *out, long half, int kind)
{
    if (kind == F32)
        FOR_VECTORS(half, AT(rope_some)(x, cos_sin, out, half, at, count, F32));
    else
        FOR_VECTORS(half, AT(rope_some)(x, cos_sin, out, half, at, count, BF16));
}

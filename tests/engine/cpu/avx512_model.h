/* The instructions of AVX-512 that products use, in plain C, as Intel's guide to its intrinsics describes them: for the
 * kernels of that level where no processor has it. */
#ifndef CHARONIA_AVX512_MODEL_H
#define CHARONIA_AVX512_MODEL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#undef TARGET_AVX512CORE
#undef TARGET_AVX512
#undef TARGET_AVX512BF16
#define TARGET_AVX512CORE
#define TARGET_AVX512
#define TARGET_AVX512BF16
#define REGISTER "+m"

typedef int32_t __m512i __attribute__((vector_size(64), may_alias));
typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef int16_t __m256i __attribute__((vector_size(32), may_alias, aligned(1)));
typedef int16_t Words __attribute__((vector_size(64), may_alias));
typedef int8_t Bytes __attribute__((vector_size(64), may_alias));
typedef __m512i __m512bh;

#define EACH(i, count) for (int i = 0; i < (count); i++)
#define MODEL(Type, name, ...) static inline __attribute__((always_inline)) Type name(__VA_ARGS__)

MODEL(__m256i, _mm256_loadu_si256, const __m256i *from) { return *from; }
MODEL(void, _mm256_storeu_si256, __m256i *to, __m256i x) { *to = x; }
MODEL(__m512i, _mm512_set1_epi32, int32_t one) { return (__m512i){0} + one; }

MODEL(__m512i, _mm512_srli_epi16, __m512i x, int by)
{
    Words words = (Words)x;
    EACH(i, 32) words[i] = (int16_t)((uint16_t)words[i] >> by);
    return (__m512i)words;
}

MODEL(__m512i, _mm512_shuffle_epi8, __m512i table, __m512i places)
{
    const Bytes from = (Bytes)table, at = (Bytes)places;
    Bytes to;
    EACH(i, 64) to[i] = at[i] < 0 ? 0 : from[i / 16 * 16 + at[i] % 16];
    return (__m512i)to;
}

MODEL(__m512, _mm512_fmadd_ps, __m512 a, __m512 b, __m512 c)
{
    EACH(i, 16) c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

/* The second where either is NaN. */
MODEL(__m512, _mm512_max_ps, __m512 a, __m512 b)
{
    EACH(i, 16) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}

MODEL(__m512, _mm512_min_ps, __m512 a, __m512 b)
{
    EACH(i, 16) b[i] = a[i] < b[i] ? a[i] : b[i];
    return b;
}

MODEL(__m512i, _mm512_cvtps_epi32, __m512 x)
{
    __m512i nearest;
    EACH(i, 16) nearest[i] = (int32_t)lrintf(x[i]);
    return nearest;
}

MODEL(__m512i, _mm512_cvtepu16_epi32, __m256i x)
{
    __m512i wide;
    EACH(i, 16) wide[i] = (uint16_t)x[i];
    return wide;
}

MODEL(__m256i, _mm512_cvtepi32_epi16, __m512i x)
{
    __m256i low;
    EACH(i, 16) low[i] = (int16_t)x[i];
    return low;
}

MODEL(__m512, _mm512_cvtph_ps, __m256i halves)
{
    __m512 floats;
    EACH(i, 16) {
        const int size = halves[i] & 0x7fff, exponent = size >> 10, part = size & 0x3ff;
        const float value = exponent == 31 ? (part ? NAN : INFINITY)
                            : exponent     ? ldexpf((float)(1024 + part), exponent - 25)
                                           : ldexpf((float)part, -24);
        floats[i] = halves[i] < 0 ? -value : value;
    }
    return floats;
}

MODEL(__m512i, _mm512_madd_epi16, __m512i a, __m512i b)
{
    const Words x = (Words)a, y = (Words)b;
    EACH(i, 16) a[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
    return a;
}

MODEL(__m512i, _mm512_add_epi16, __m512i a, __m512i b) { return (__m512i)((Words)a + (Words)b); }

MODEL(__m512i, _mm512_cvtepi8_epi16, __m256i bytes)
{
    int8_t from[32];
    Words to;
    memcpy(from, &bytes, sizeof from);
    EACH(i, 32) to[i] = from[i];
    return (__m512i)to;
}

/* Unsigned bytes times signed ones, in pairs whose sums are kept within 16 bits. */
MODEL(__m512i, _mm512_maddubs_epi16, __m512i a, __m512i b)
{
    const Bytes x = (Bytes)a, y = (Bytes)b;
    Words sums;
    EACH(i, 32) {
        const int sum = (uint8_t)x[2 * i] * y[2 * i] + (uint8_t)x[2 * i + 1] * y[2 * i + 1];
        sums[i] = (int16_t)(sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum);
    }
    return (__m512i)sums;
}

/* Unsigned bytes times signed ones. */
MODEL(__m512i, _mm512_dpbusd_epi32, __m512i sums, __m512i a, __m512i b)
{
    const Bytes x = (Bytes)a, y = (Bytes)b;
    EACH(i, 64) sums[i / 4] += (uint8_t)x[i] * y[i];
    return sums;
}

/* Pairs of bf16: first the odd ones, then the even ones, each product fused with its sum. */
MODEL(__m512, _mm512_dpbf16_ps, __m512 sums, __m512bh a, __m512bh b)
{
    const __m512 odd[2] = {(__m512)(a & -65536), (__m512)(b & -65536)}, even[2] = {(__m512)(a << 16), (__m512)(b << 16)};
    return _mm512_fmadd_ps(even[0], even[1], _mm512_fmadd_ps(odd[0], odd[1], sums));
}

#endif

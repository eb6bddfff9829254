#include "parallel_region.h"

static int chosen = -1;

static int best(void)
{
#ifdef CHARONIA_X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return PORTABLE;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl") ||
        !__builtin_cpu_supports("avx512vnni"))
        return AVX2;
    return __builtin_cpu_supports("avx512bf16") ? AVX512BF16 : AVX512;
#else
    return PORTABLE;
#endif
}

EXPORT int charonia_level(void)
{
    if (chosen < 0)
        chosen = best();
    return chosen;
}

/* Use at most `level`; the level that is in use from now on. */
EXPORT int charonia_limit(int level)
{
    int most = best();
    chosen = level < most ? level : most;
    return chosen;
}

/* Threads that a parallel region started here would have. */
EXPORT int charonia_threads(void) { return omp_get_max_threads(); }

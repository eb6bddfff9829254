/* A processor with AVX-512, at the level that a test asks for; those without it have no kernels. */
#include "matmul.h"

static int level = AVX512BF16;

EXPORT int charonia_level(void) { return level; }

EXPORT int charonia_limit(int most) { return level = most; }

const Kernel matmul_portable[KINDS], matmul_avx2[KINDS], matmul_amx[KINDS];

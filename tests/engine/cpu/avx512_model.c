/* A processor with AVX-512, whose other levels have no kernels. */
#include "matmul.h"

EXPORT int charonia_level(void) { return AVX512BF16; }

const Kernel matmul_portable[KINDS], matmul_avx2[KINDS], matmul_amx[KINDS];

/* A processor that promises tile registers, and a system that permits them, unless a test says otherwise. */
#include "matmul.h"

EXPORT int tile_model_promises = 1, tile_model_denies, tile_model_asked;

int tiles_promised(void) { return tile_model_promises; }

int tiles_denied(void)
{
    tile_model_asked++;
    return tile_model_denies;
}

/* Other levels' kernels are the library's own. */
const Kernel matmul_portable[KINDS], matmul_avx2[KINDS], matmul_avx512core[KINDS], matmul_avx512[KINDS];

/* A stand-in libcublasLt, as libcublas: the choice of an algorithm and the product. */
#include <string.h>
#include "standin.h"
static int it; /* what handles point to */
int cublasLtMatmulDescCreate(void **d, int compute, int scale) { *d = &it; return 0; }
int cublasLtMatrixLayoutCreate(void **d, int type, long rows, long columns, long ld) { *d = &it; return 0; }
int cublasLtMatmulPreferenceCreate(void **d) { *d = &it; return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *o, void *a, void *b, void *c, void *d, void *p, int asked,
                                   void *results, int *n) {
    memset(results, 0, 96);
    *n = 1;
    return 0;
}
int cublasLtMatmul(void *h, void *o, const void *alpha, const void *A, void *a, const void *B, void *b,
                   const void *beta, const void *C, void *c, void *D, void *d, const void *algo, void *workspace,
                   size_t n, void *stream) {
    return standin_launch("cublasLtMatmul", stream) ? 13 : 0;
}
int standin_library_launch(const char *name) { return standin_launch(name, 0) ? 13 : 0; }

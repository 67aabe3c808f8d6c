/* A stand-in libcublas: torch's host code around a product runs (handles, workspaces in the caching allocator); the
 * product is kernels.cpp's. build.py adds a launch for each other function.
 */
#include "standin.h"
static int it; /* what handles point to */
static __thread void *stream;
int cublasCreate_v2(void **h) { *h = &it; return 0; }
int cublasSetStream_v2(void *h, void *s) { stream = s; return 0; }
int cublasGetMathMode(void *h, int *m) { *m = 0; return 0; }
int cublasGetPointerMode_v2(void *h, int *m) { *m = 0; return 0; }
int standin_library_launch(const char *name) { return standin_launch(name, stream) ? 13 : 0; } /* 13: execution failed */

/* A stand-in libcuda.so.1: what torch asks the driver beside the runtime.
 *
 * cuInit says that there is no device: libraries that bring a CUDA runtime of their own then give up politely.
 * torch asks for contexts without cuInit. All else is refused: the virtual memory of expandable segments too.
 */
#include "standin.h"

typedef int Result;
enum { OK, NO_DEVICE = 100 };
int cudaGetDevice(int *), cudaRuntimeGetVersion(int *);

Result cuInit(unsigned flags) { return NO_DEVICE; }
Result cuDriverGetVersion(int *v) { return cudaRuntimeGetVersion(v); }
Result cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = standin_has_context(d);
    return OK;
}
Result cuCtxGetCurrent(void **c) {
    int d = 0;
    cudaGetDevice(&d);
    *c = standin_has_context(d) ? (void *)(uintptr_t)(d + 1) : 0;
    return OK;
}
Result cuGetErrorString(Result r, const char **s) {
    *s = r == OK ? "no error" : "operation not supported";
    return OK;
}

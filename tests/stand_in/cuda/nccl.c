/* A stand-in libnccl for one process with several GPUs (nn.DataParallel): broadcast, reduce, all-reduce.
 *
 * The calls of a group are kept until it ends; the i-th call of each rank of a communicator belongs together.
 * Communicators of several processes are refused.
 */
#include <string.h>
#include "standin.h"
typedef struct Comm { struct Comm **all; int n, rank, device, calls; } Comm;
typedef struct { int sums, everyone, root, type, turn; const void *from; void *to; size_t count; Comm *comm; void *stream; } Call;
static __thread Call calls[1024];
static __thread int n_calls, depth;
int cudaSetDevice(int), cudaGetDevice(int *);

int ncclCommInitAll(Comm **comms, int n, const int *devices) {
    Comm **all = calloc(n, sizeof *all);
    for (int i = 0; i < n; i++) { all[i] = comms[i] = malloc(sizeof(Comm)); *all[i] = (Comm){all, n, i, devices ? devices[i] : i, 0}; }
    return 0;
}
int ncclCommDestroy(Comm *c) { return 0; }
int ncclGetVersion(int *v) { *v = 23007; return 0; }
static size_t size_of(int type) { static const int sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2}; return type < 10 ? sizes[type] : 0; }

#define ADD(T) for (size_t i = 0; i < count; i++) ((T *)to)[i] += ((const T *)from)[i]
static int add(void *to, const void *from, size_t count, int type) {
    switch (type) { case 2: ADD(int); return 0; case 4: ADD(int64_t); return 0; case 7: ADD(float); return 0; case 8: ADD(double); return 0; }
    return standin_refuse("ncclReduce of this dtype"), 4;
}
static int finish(Call *c) { /* what this rank gets */
    size_t bytes = c->count * size_of(c->type);
    if (!c->sums || c->everyone || c->comm->rank == c->root) {
        char *sum = calloc(1, bytes);
        for (int i = 0; i < n_calls; i++) {
            Call *o = &calls[i];
            if (o->comm->all != c->comm->all || o->turn != c->turn) continue;
            if (!c->sums && o->comm->rank == c->root) memcpy(sum, o->from, bytes);
            if (c->sums && add(sum, o->from, c->count, c->type)) { free(sum); return 4; }
        }
        c->type = bytes; c->from = sum; /* kept until all have read */
    } else c->from = 0;
    return 0;
}
int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
    int wrong = 0, before = 0;
    if (--depth) return 0;
    Call done[1024]; memcpy(done, calls, sizeof(Call) * n_calls);
    for (int i = 0; i < n_calls && !wrong; i++) wrong = finish(&done[i]);
    cudaGetDevice(&before);
    for (int i = 0; i < n_calls && !wrong; i++) {
        Call *c = &done[i];
        cudaSetDevice(c->comm->device); standin_announce(1);
        wrong = standin_launch(c->sums ? "ncclDevKernel_Reduce" : "ncclDevKernel_Broadcast", c->stream);
        standin_announce(-1);
        if (c->from) { memcpy(c->to, c->from, c->type); free((void *)c->from); }
    }
    cudaSetDevice(before);
    n_calls = 0; return wrong ? 1 : 0;
}
static int later(Call c) {
    if (n_calls == 1024 || !size_of(c.type)) return 4;
    c.turn = c.comm->calls++;
    ncclGroupStart(); calls[n_calls++] = c; return ncclGroupEnd();
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, Comm *c, void *s) { return later((Call){0, 1, root, type, 0, from, to, n, c, s}); }
int ncclBcast(void *p, size_t n, int type, int root, Comm *c, void *s) { return ncclBroadcast(p, p, n, type, root, c, s); }
int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, Comm *c, void *s) {
    return op ? 4 : later((Call){1, 0, root, type, 0, from, to, n, c, s});
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, Comm *c, void *s) {
    return op ? 4 : later((Call){1, 1, 0, type, 0, from, to, n, c, s});
}

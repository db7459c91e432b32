/* A stand-in for the CUDA driver on machines without a GPU: OUR READING of the public driver API, never a GPU run.
 *
 * Compiles with gcc alone. "Device" memory is host memory under another address (bit 60 set), so that code which
 * touches it directly crashes. Nothing that is put on a stream runs before somebody waits for it (stream, event,
 * free, ...), the latest moment a real GPU may choose: a forgotten wait shows as old data, every time.
 * Not covered: kernels, modules, managed memory, peer access, graphs built by hand, the default stream.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef void (*CUhostFn)(void *);

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, CONTEXT_DESTROYED = 709, LAUNCH_FAILED = 719, NOT_PERMITTED = 800, NOT_SUPPORTED = 801,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_ISOLATION = 905, UNKNOWN = 999
};
#define DEVICE_BIT ((uint64_t)1 << 60)
#define API __attribute__((visibility("default")))

enum kind { K_DEVICE = 1, K_HOST = 2 };
enum op_type { O_COPY, O_HOST, O_RECORD, O_WAIT, O_GRAPH };
struct stream; struct event; struct exec;
struct op { enum op_type type; void *dst; const void *src; size_t n; CUhostFn fn; void *arg; struct event *event; struct stream *other; long position; struct exec *exec; };
struct list { struct op *at; size_t n, cap; };
struct stream { int magic; struct list ops; long done, queued; int busy; pthread_t owner, capturer; int capturing, invalid; struct list captured; struct stream *next; };
struct event { int magic, timing, recorded, in_capture; struct stream *stream; long position; struct timespec when; };
struct graph { int magic; struct list ops; };
struct exec { int magic; struct list ops; };
struct block { uint64_t start; size_t n; enum kind kind; int mapped; struct block *next; };
struct context { int magic, device; };
enum { M_STREAM = 0x57, M_EVENT = 0xE7, M_GRAPH = 0x6A, M_EXEC = 0x6E, M_CONTEXT = 0xC7 };

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turn = PTHREAD_COND_INITIALIZER;
static struct block *blocks;
static struct stream *streams;
static struct context contexts[8];
static long references, live_streams, live_events, live_graphs, live_execs, live[3], bytes[3], total_allocs, total_copies, total_launches, peak;
static long s_integrated = 1, s_sm = 87, s_mem_mb = 8192, s_devices = 1, s_limit_mb = 0, s_driver = 12060, initialised, poisoned;
static char fail_call[64]; static long fail_in; static CUresult fail_code;
#define DEPTH 64
static __thread struct context *stack[DEPTH]; static __thread int depth, in_callback, captures_here;

__attribute__((constructor)) static void read_environment(void) {
    const char *v;
    if ((v = getenv("SIMCUDA_INTEGRATED"))) s_integrated = atol(v);
    if ((v = getenv("SIMCUDA_SM"))) s_sm = atol(v);
    if ((v = getenv("SIMCUDA_MEM_MB"))) s_mem_mb = atol(v);
    if ((v = getenv("SIMCUDA_DEVICES"))) s_devices = atol(v);
}
static CUresult injected(const char *call) {
    if (!fail_in || strcmp(call, fail_call)) return OK;
    return --fail_in == 0 ? fail_code : OK;
}
/* Every entry takes the lock; host functions run without it, as a real driver's do on their own thread. */
#define ENTER pthread_mutex_lock(&mu); CUresult r = in_callback ? NOT_PERMITTED : injected(__func__); if (r) goto out
#define READY if (!initialised) { r = NOT_INITIALIZED; goto out; } if (!depth) { r = INVALID_CONTEXT; goto out; } if (poisoned) { r = poisoned; goto out; }
#define NEED(c) if (!(c)) { r = INVALID_VALUE; goto out; }
#define HANDLE(h, m) if (!(h) || (h)->magic != (m)) { r = INVALID_HANDLE; goto out; }
#define LEAVE out: pthread_mutex_unlock(&mu); return r

static void append(struct list *l, struct op o) {
    if (l->n == l->cap) l->at = realloc(l->at, (l->cap = l->cap ? l->cap * 2 : 16) * sizeof *l->at);
    l->at[l->n++] = o;
}
static struct block *find(uint64_t p, size_t n) {
    for (struct block *b = blocks; b; b = b->next) {
        uint64_t start = b->start;
        if (b->kind == K_DEVICE ? p >= start && p - start + n <= b->n
                                : ((p >= start && p - start + n <= b->n) ||
                                   (b->mapped && p >= (start | DEVICE_BIT) && p - (start | DEVICE_BIT) + n <= b->n))) return b;
    }
    return NULL;
}
static void *host_of(uint64_t p) { return (void *)(uintptr_t)(p & ~DEVICE_BIT); }
static CUresult take(uint64_t *out, size_t n, enum kind kind, int mapped) {
    if (!n) return INVALID_VALUE;
    if (s_limit_mb && n > (size_t)s_limit_mb << 20) return OUT_OF_MEMORY;
    if ((size_t)(bytes[K_DEVICE] + (s_integrated ? bytes[K_HOST] : 0)) + (kind == K_DEVICE || s_integrated ? n : 0) > (size_t)s_mem_mb << 20) return OUT_OF_MEMORY;
    void *p; if (posix_memalign(&p, 512, n)) return OUT_OF_MEMORY;
    memset(p, 0xA5, n < 1 << 20 ? n : 1 << 20);   /* real memory is not zero either */
    struct block *b = malloc(sizeof *b);
    *b = (struct block){(uint64_t)(uintptr_t)p | (kind == K_DEVICE ? DEVICE_BIT : 0), n, kind, mapped, blocks};
    blocks = b; live[kind]++; bytes[kind] += n; total_allocs++;
    if (bytes[K_DEVICE] > peak) peak = bytes[K_DEVICE];
    *out = b->start; return OK;
}
static CUresult drop(uint64_t p, enum kind kind) {
    for (struct block **at = &blocks; *at; at = &(*at)->next) {
        struct block *b = *at;
        if (b->start == p && b->kind == kind) {
            *at = b->next; live[kind]--; bytes[kind] -= b->n;
            memset(host_of(p), 0x5A, b->n < 1 << 20 ? b->n : 1 << 20);
            free(host_of(p)); free(b); return OK;
        }
    }
    return INVALID_VALUE;
}

static void drain(struct stream *s, long upto);
static void run(struct op *o) {
    if (o->type == O_COPY) { memmove(o->dst, o->src, o->n); total_copies++; }
    else if (o->type == O_WAIT) { if (o->other && o->other->magic == M_STREAM) drain(o->other, o->position); }
    else if (o->type == O_RECORD) clock_gettime(CLOCK_MONOTONIC, &o->event->when);
    else if (o->type == O_GRAPH) for (size_t i = 0; i < o->exec->ops.n; i++) run(&o->exec->ops.at[i]);
    else if (o->type == O_HOST) {
        pthread_mutex_unlock(&mu); in_callback = 1; o->fn(o->arg); in_callback = 0; pthread_mutex_lock(&mu);
    }
}
static void drain(struct stream *s, long upto) {
    if (s->done >= upto) return;
    if (s->busy && pthread_equal(s->owner, pthread_self())) return;
    while (s->busy) pthread_cond_wait(&turn, &mu);
    s->busy = 1; s->owner = pthread_self();
    while (s->done < upto && s->ops.n) {
        struct op o = s->ops.at[0];
        memmove(s->ops.at, s->ops.at + 1, --s->ops.n * sizeof o);
        run(&o); s->done++;
    }
    s->busy = 0; pthread_cond_broadcast(&turn);
}
static void drain_all(void) { for (struct stream *s = streams; s; s = s->next) if (s->magic == M_STREAM) drain(s, s->queued); }
static CUresult submit(struct stream *s, struct op o) {
    if (s->capturing) {
        if (o.type == O_RECORD || o.type == O_WAIT) return OK;
        append(&s->captured, o);
    } else { append(&s->ops, o); s->queued++; }
    return OK;
}
/* Calls that may not happen in the thread that captures (mode THREAD_LOCAL); they also spoil the capture. */
static int unsafe(void) {
    if (!captures_here) return 0;
    for (struct stream *s = streams; s; s = s->next) if (s->capturing && pthread_equal(s->capturer, pthread_self())) s->invalid = 1;
    return 1;
}
#define SAFE if (unsafe()) { r = CAPTURE_UNSUPPORTED; goto out; }

API CUresult cuInit(unsigned flags) { ENTER; NEED(!flags); if (s_devices < 1) r = NO_DEVICE; else initialised = 1; LEAVE; }
API CUresult cuDriverGetVersion(int *v) { ENTER; NEED(v); *v = s_driver; LEAVE; }
API CUresult cuDeviceGetCount(int *n) { ENTER; NEED(n); if (!initialised) r = NOT_INITIALIZED; else *n = s_devices; LEAVE; }
API CUresult cuDeviceGet(CUdevice *d, int i) { ENTER; NEED(d); if (i < 0 || i >= s_devices) r = INVALID_DEVICE; else *d = i; LEAVE; }
API CUresult cuDeviceGetName(char *t, int n, CUdevice d) { ENTER; NEED(t && n > 0); if (d < 0 || d >= s_devices) r = INVALID_DEVICE; else snprintf(t, n, "simulated SM %ld.%ld (no GPU)", s_sm / 10, s_sm % 10); LEAVE; }
API CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d) { ENTER; NEED(n); (void)d; *n = (size_t)s_mem_mb << 20; LEAVE; }
API CUresult cuDeviceGetAttribute(int *v, int a, CUdevice d) {
    ENTER; NEED(v); if (d < 0 || d >= s_devices) { r = INVALID_DEVICE; goto out; }
    *v = a == 18 ? s_integrated : a == 19 || a == 41 ? 1 : a == 75 ? s_sm / 10 : a == 76 ? s_sm % 10 : 0;
    LEAVE;
}
API CUresult cuDevicePrimaryCtxRetain(struct context **c, CUdevice d) { ENTER; NEED(c); if (!initialised) { r = NOT_INITIALIZED; goto out; } if (d < 0 || d >= s_devices || d > 7) { r = INVALID_DEVICE; goto out; } contexts[d] = (struct context){M_CONTEXT, d}; references++; *c = &contexts[d]; LEAVE; }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d) { ENTER; (void)d; if (!references) r = INVALID_CONTEXT; else references--; LEAVE; }
API CUresult cuCtxPushCurrent_v2(struct context *c) { ENTER; if (!c || c->magic != M_CONTEXT) { r = INVALID_CONTEXT; goto out; } if (!references) { r = CONTEXT_DESTROYED; goto out; } NEED(depth < DEPTH); stack[depth++] = c; LEAVE; }
API CUresult cuCtxPopCurrent_v2(struct context **c) { ENTER; if (!depth) { r = INVALID_CONTEXT; goto out; } depth--; if (c) *c = stack[depth]; LEAVE; }
API CUresult cuCtxGetCurrent(struct context **c) { ENTER; NEED(c); *c = depth ? stack[depth - 1] : NULL; LEAVE; }
API CUresult cuCtxSetCurrent(struct context *c) { ENTER; if (depth) depth--; if (c) stack[depth++] = c; LEAVE; }
API CUresult cuCtxGetDevice(CUdevice *d) { ENTER; NEED(d); READY; *d = stack[depth - 1]->device; LEAVE; }
API CUresult cuCtxGetApiVersion(struct context *c, unsigned *v) { ENTER; (void)c; NEED(v); *v = 3020; LEAVE; }
API CUresult cuCtxSynchronize(void) { ENTER; READY; SAFE; drain_all(); LEAVE; }

API CUresult cuMemGetInfo_v2(size_t *f, size_t *t) { ENTER; READY; NEED(f && t); *t = (size_t)s_mem_mb << 20; *f = *t - bytes[K_DEVICE]; LEAVE; }
API CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n) { ENTER; READY; NEED(p); SAFE; r = take(p, n, K_DEVICE, 0); LEAVE; }
API CUresult cuMemFree_v2(CUdeviceptr p) { ENTER; READY; SAFE; drain_all(); r = drop(p, K_DEVICE); LEAVE; }
API CUresult cuMemHostAlloc(void **p, size_t n, unsigned flags) { ENTER; READY; NEED(p); SAFE; uint64_t at; r = take(&at, n, K_HOST, flags >> 1 & 1); if (!r) *p = host_of(at); LEAVE; }
API CUresult cuMemFreeHost(void *p) { ENTER; READY; SAFE; drain_all(); r = drop((uint64_t)(uintptr_t)p, K_HOST); LEAVE; }
API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned flags) { ENTER; READY; NEED(d && !flags); struct block *b = find((uint64_t)(uintptr_t)p, 1); NEED(b && b->kind == K_HOST && b->mapped); *d = (uint64_t)(uintptr_t)p | DEVICE_BIT; LEAVE; }
static CUresult copy(uint64_t device, void *host, size_t n, struct stream *s, int in) {
    CUresult r = OK; HANDLE(s, M_STREAM); NEED(host && n && device & DEVICE_BIT && find(device, n));
    struct op o = {.type = O_COPY, .dst = in ? host_of(device) : host, .src = in ? host : host_of(device), .n = n};
    r = submit(s, o);
    /* Pageable memory cannot be read later; the driver waits for the copy. */
    if (!r && !s->capturing && !find((uint64_t)(uintptr_t)host, n)) drain(s, s->queued);
out: return r;
}
API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr d, void *h, size_t n, struct stream *s) { ENTER; READY; r = copy(d, h, n, s, 1); LEAVE; }
API CUresult cuMemcpyDtoHAsync_v2(void *h, CUdeviceptr d, size_t n, struct stream *s) { ENTER; READY; r = copy(d, h, n, s, 0); LEAVE; }

API CUresult cuStreamCreate(struct stream **s, unsigned flags) { ENTER; READY; NEED(s && flags < 2); struct stream *x = calloc(1, sizeof *x); x->magic = M_STREAM; x->next = streams; streams = x; live_streams++; *s = x; LEAVE; }
API CUresult cuStreamDestroy_v2(struct stream *s) { ENTER; READY; HANDLE(s, M_STREAM); drain(s, s->queued); s->magic = 0; live_streams--; LEAVE; }
API CUresult cuStreamSynchronize(struct stream *s) { ENTER; READY; HANDLE(s, M_STREAM); if (s->capturing) { s->invalid = 1; r = CAPTURE_UNSUPPORTED; goto out; } SAFE; drain(s, s->queued); if (poisoned) r = poisoned; LEAVE; }
API CUresult cuStreamQuery(struct stream *s) { ENTER; READY; HANDLE(s, M_STREAM); if (s->done < s->queued) r = NOT_READY; LEAVE; }
API CUresult cuStreamWaitEvent(struct stream *s, struct event *e, unsigned flags) {
    ENTER; READY; HANDLE(s, M_STREAM); HANDLE(e, M_EVENT); NEED(!flags);
    if (s->capturing && !e->in_capture) { s->invalid = 1; r = CAPTURE_ISOLATION; goto out; }
    if (e->recorded) r = submit(s, (struct op){.type = O_WAIT, .other = e->stream, .position = e->position});
    LEAVE;
}
API CUresult cuLaunchHostFunc(struct stream *s, CUhostFn fn, void *arg) { ENTER; READY; HANDLE(s, M_STREAM); NEED(fn); r = submit(s, (struct op){.type = O_HOST, .fn = fn, .arg = arg}); LEAVE; }
API CUresult cuEventCreate(struct event **e, unsigned flags) { ENTER; READY; NEED(e); SAFE; *e = calloc(1, sizeof **e); (*e)->magic = M_EVENT; (*e)->timing = !(flags & 2); live_events++; LEAVE; }
API CUresult cuEventDestroy_v2(struct event *e) { ENTER; READY; HANDLE(e, M_EVENT); e->magic = 0; live_events--; LEAVE; }
API CUresult cuEventRecord(struct event *e, struct stream *s) { ENTER; READY; HANDLE(e, M_EVENT); HANDLE(s, M_STREAM); e->in_capture = s->capturing; r = submit(s, (struct op){.type = O_RECORD, .event = e}); if (!s->capturing) { e->recorded = 1; e->stream = s; e->position = s->queued; } LEAVE; }
API CUresult cuEventSynchronize(struct event *e) { ENTER; READY; HANDLE(e, M_EVENT); SAFE; if (e->recorded && e->stream->magic == M_STREAM) drain(e->stream, e->position); if (poisoned) r = poisoned; LEAVE; }
API CUresult cuEventQuery(struct event *e) { ENTER; READY; HANDLE(e, M_EVENT); if (e->recorded && e->stream->magic == M_STREAM && e->stream->done < e->position) r = NOT_READY; LEAVE; }
API CUresult cuEventElapsedTime(float *ms, struct event *a, struct event *b) {
    ENTER; READY; NEED(ms); HANDLE(a, M_EVENT); HANDLE(b, M_EVENT);
    if (!a->timing || !b->timing || !a->recorded || !b->recorded) { r = INVALID_HANDLE; goto out; }
    if (a->stream->done < a->position || b->stream->done < b->position) { r = NOT_READY; goto out; }
    *ms = (b->when.tv_sec - a->when.tv_sec) * 1e3f + (b->when.tv_nsec - a->when.tv_nsec) * 1e-6f;
    LEAVE;
}
API CUresult cuEventElapsedTime_v2(float *ms, struct event *a, struct event *b) { return cuEventElapsedTime(ms, a, b); }

API CUresult cuStreamBeginCapture_v2(struct stream *s, int mode) { ENTER; READY; HANDLE(s, M_STREAM); NEED(mode >= 0 && mode < 3); if (s->capturing) { r = ILLEGAL_STATE; goto out; } s->capturing = 1; s->invalid = 0; s->capturer = pthread_self(); captures_here++; LEAVE; }
API CUresult cuStreamEndCapture(struct stream *s, struct graph **g) {
    pthread_mutex_lock(&mu); CUresult r = OK; READY; HANDLE(s, M_STREAM); NEED(g); if (!s->capturing) { r = ILLEGAL_STATE; goto out; }
    s->capturing = 0; captures_here--; struct list ops = s->captured; s->captured = (struct list){0}; *g = NULL;
    r = injected(__func__);   /* capturing ends in any case */
    if (s->invalid || r) { free(ops.at); r = r ? r : CAPTURE_INVALIDATED; goto out; }
    *g = calloc(1, sizeof **g); (*g)->magic = M_GRAPH; (*g)->ops = ops; live_graphs++;
    LEAVE;
}
API CUresult cuStreamIsCapturing(struct stream *s, int *status) { ENTER; READY; HANDLE(s, M_STREAM); NEED(status); *status = s->capturing ? s->invalid ? 2 : 1 : 0; LEAVE; }
API CUresult cuGraphInstantiateWithFlags(struct exec **x, struct graph *g, unsigned long long flags) { ENTER; READY; HANDLE(g, M_GRAPH); NEED(x && !flags); *x = calloc(1, sizeof **x); (*x)->magic = M_EXEC; for (size_t i = 0; i < g->ops.n; i++) append(&(*x)->ops, g->ops.at[i]); live_execs++; LEAVE; }
API CUresult cuGraphDestroy(struct graph *g) { ENTER; READY; HANDLE(g, M_GRAPH); free(g->ops.at); g->magic = 0; free(g); live_graphs--; LEAVE; }
API CUresult cuGraphLaunch(struct exec *x, struct stream *s) { ENTER; READY; HANDLE(x, M_EXEC); HANDLE(s, M_STREAM); r = submit(s, (struct op){.type = O_GRAPH, .exec = x}); if (!r) total_launches++; LEAVE; }
API CUresult cuGraphExecDestroy(struct exec *x) { ENTER; READY; HANDLE(x, M_EXEC); drain_all(); free(x->ops.at); x->magic = 0; live_execs--; LEAVE; }

static const struct { int code; const char *name; } names[] = {
    {0, "CUDA_SUCCESS"}, {1, "CUDA_ERROR_INVALID_VALUE"}, {2, "CUDA_ERROR_OUT_OF_MEMORY"}, {3, "CUDA_ERROR_NOT_INITIALIZED"},
    {100, "CUDA_ERROR_NO_DEVICE"}, {101, "CUDA_ERROR_INVALID_DEVICE"}, {201, "CUDA_ERROR_INVALID_CONTEXT"}, {400, "CUDA_ERROR_INVALID_HANDLE"},
    {401, "CUDA_ERROR_ILLEGAL_STATE"}, {500, "CUDA_ERROR_NOT_FOUND"}, {600, "CUDA_ERROR_NOT_READY"}, {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {709, "CUDA_ERROR_CONTEXT_IS_DESTROYED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"}, {800, "CUDA_ERROR_NOT_PERMITTED"}, {801, "CUDA_ERROR_NOT_SUPPORTED"},
    {900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"}, {901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"}, {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"}, {999, "CUDA_ERROR_UNKNOWN"}};
API CUresult cuGetErrorName(CUresult code, const char **text) { for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) { *text = names[i].name; return OK; } *text = NULL; return INVALID_VALUE; }
API CUresult cuGetErrorString(CUresult code, const char **text) { return cuGetErrorName(code, text); }

/* cuda-bindings asks for every function by name and version; what is not here is reported as missing. */
API CUresult cuGetProcAddress_v2(const char *name, void **f, int version, uint64_t flags, int *status) {
    (void)version; (void)flags; static void *self; char text[96]; *f = NULL;
    if (!self) { Dl_info i; dladdr((void *)cuInit, &i); self = dlopen(i.dli_fname, RTLD_NOW | RTLD_NOLOAD); }
    if (!strcmp(name, "cuGraphInstantiate")) name = "cuGraphInstantiateWithFlags";
    for (int v = 3; v > 1 && !*f; v--) { snprintf(text, sizeof text, "%s_v%d", name, v); *f = dlsym(self, text); }
    if (!*f) *f = dlsym(self, name);
    if (status) *status = *f ? 0 : 1;
    return *f ? OK : NOT_FOUND;
}
API CUresult cuGetProcAddress(const char *name, void **f, int version, uint64_t flags) { return cuGetProcAddress_v2(name, f, version, flags, NULL); }

/* ---- what tests ask of the stand-in */
API long sim_count(const char *what) {
    pthread_mutex_lock(&mu); long pending = 0, r = -1; for (struct stream *s = streams; s; s = s->next) if (s->magic == M_STREAM) pending += s->queued - s->done;
    const struct { const char *name; long value; } all[] = {
        {"device", live[K_DEVICE]}, {"device_bytes", bytes[K_DEVICE]}, {"host", live[K_HOST]}, {"host_bytes", bytes[K_HOST]}, {"streams", live_streams}, {"events", live_events},
        {"graphs", live_graphs}, {"execs", live_execs}, {"contexts", references}, {"depth", depth}, {"pending", pending},
        {"allocs", total_allocs}, {"copies", total_copies}, {"graph_launches", total_launches}, {"peak_bytes", peak}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) if (!strcmp(all[i].name, what)) r = all[i].value;
    pthread_mutex_unlock(&mu); return r;
}
API int sim_set(const char *what, long value) {
    pthread_mutex_lock(&mu); int r = 0;
    if (!strcmp(what, "integrated")) s_integrated = value;
    else if (!strcmp(what, "sm")) s_sm = value;
    else if (!strcmp(what, "mem_mb")) s_mem_mb = value;
    else if (!strcmp(what, "devices")) s_devices = value;
    else if (!strcmp(what, "limit_mb")) s_limit_mb = value;
    else if (!strcmp(what, "poison")) poisoned = value;
    else r = -1;
    pthread_mutex_unlock(&mu); return r;
}
API void sim_fail(const char *call, long nth, int code) { pthread_mutex_lock(&mu); snprintf(fail_call, sizeof fail_call, "%s", call); fail_in = nth; fail_code = code; pthread_mutex_unlock(&mu); }
/* Bytes usable from a device address on (0: not a device address), and where they really are. */
API size_t sim_resolve(uint64_t p, void **host) { pthread_mutex_lock(&mu); struct block *b = p & DEVICE_BIT ? find(p, 1) : NULL; size_t n = 0; if (b) { *host = host_of(p); n = b->n - (size_t)((p & ~DEVICE_BIT) - (b->start & ~DEVICE_BIT)); } pthread_mutex_unlock(&mu); return n; }

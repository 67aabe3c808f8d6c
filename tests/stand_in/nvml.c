/* A stand-in for libnvidia-ml.so.1: what gpumagic asks of NVML, answered from a text file.
 *
 * STAND_IN_NVML names the file, which is read again when it has changed, so that a test can change
 * the machine while a program looks at it. A line is KEY=VALUE; the last one of a key holds:
 *
 *   gpus=N                    how many GPUs there are (2 if not said; at most 64)
 *   gpu.I.FIELD=VALUE         of GPU I, or gpu.*.FIELD of all of which nothing else is said:
 *     name, uuid, total, used, reserved (bytes), util, memutil (percent), temp (Celsius),
 *     power, limit (milliwatts), clock (MHz), fan (percent), throttle (NVML's bits),
 *     ecc_corrected, ecc_uncorrected, pcie_gen, pcie_width
 *     xid=NUMBER:SERIAL       a critical error, told once for each new text
 *     mig                     how many MIG devices
 *     lost                    1: after its handle was given; 2: no handle is given either
 *     fail                    the code with which it answers everything
 *   gpu.I.compute=PID:BYTES,  the processes of GPU I; likewise graphics and mps; BYTES may be N/A
 *   gpu.I.busy=PID:PERCENT:AGE,  what part of the time they work; AGE in seconds may be left out
 *   gpu.I.migK.compute        those of its MIG device in slot K, from 0
 *   fail.FUNCTION=CODE        that function answers CODE; fail.*=CODE: every one but init
 *   delay.FUNCTION=US         that function takes so many microseconds; delay.* likewise
 *   stall.FUNCTION=SECONDS    it blocks so long, or until the line is taken back with 0; stall.*
 *
 * STAND_IN_NVML_LOG names a file to which each call appends a line: SECONDS FUNCTION.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define GIB (1ULL << 30)
#define MAX_GPUS 64
#define MAX_MIGS 7
#define SLOTS 8192

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    GPU_IS_LOST = 15,
};

/* mig is -1 for a whole GPU. A handle is the address of one of these. */
typedef struct {
    int index;
    int mig;
} device;

typedef struct {
    u64 total, free, used;
} memory_v1;

typedef struct {
    u32 version;
    u64 total, reserved, free, used;
} memory_v2;

typedef struct {
    u32 pid;
    u64 used;
    u32 gpu_instance, compute_instance;
} process_info;

typedef struct {
    const device *of;
    u64 type, data;
    u32 gpu_instance, compute_instance;
} event;

typedef struct {
    unsigned char registered[MAX_GPUS];
} event_set;

static device devices[MAX_GPUS][MAX_MIGS + 1];
static char told[MAX_GPUS][64];
static int initialized = 0;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void nap(double seconds) {
    struct timespec t = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&t, NULL);
}

/* The settings: the file's text, cut into keys and values, found by hash. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct stat last;
static char *text = NULL;
static struct {
    const char *key, *value;
} slots[SLOTS];

static u32 slot_of(const char *key) {
    u32 hash = 2166136261u;
    for (const char *c = key; *c; c++) hash = (hash ^ (unsigned char)*c) * 16777619u;
    hash %= SLOTS;
    while (slots[hash].key && strcmp(slots[hash].key, key)) hash = (hash + 1) % SLOTS;
    return hash;
}

static void read_settings(int file, off_t size) {
    char *rest;
    free(text);
    memset(slots, 0, sizeof slots);
    text = calloc(1, size + 1);
    if (read(file, text, size) < 0) text[0] = 0;
    for (char *line = strtok_r(text, "\r\n", &rest); line; line = strtok_r(NULL, "\r\n", &rest)) {
        char *equals = strchr(line, '=');
        if (!equals) continue;
        *equals = 0;
        u32 slot = slot_of(line);
        slots[slot].key = line;
        slots[slot].value = equals + 1;
    }
}

/* Once per call of NVML, so that one call sees one machine. */
static void refresh(void) {
    const char *path = getenv("STAND_IN_NVML");
    struct stat found;
    int file;
    if (!path || stat(path, &found)) return;
    pthread_mutex_lock(&lock);
    if (found.st_size != last.st_size || found.st_ino != last.st_ino ||
        found.st_mtim.tv_sec != last.st_mtim.tv_sec ||
        found.st_mtim.tv_nsec != last.st_mtim.tv_nsec) {
        file = open(path, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            read_settings(file, found.st_size);
            close(file);
            last = found;
        }
    }
    pthread_mutex_unlock(&lock);
}

/* The value of a key, in a buffer that this thread's next call overwrites; NULL if not there. */
static const char *setting(const char *key) {
    static __thread char value[4096];
    const char *found;
    pthread_mutex_lock(&lock);
    found = slots[slot_of(key)].value;
    if (found) snprintf(value, sizeof value, "%s", found);
    pthread_mutex_unlock(&lock);
    return found ? value : NULL;
}

static const char *text_of(const device *d, const char *field) {
    char key[128];
    const char *found;
    snprintf(key, sizeof key, "gpu.%d.%s", d->index, field);
    found = setting(key);
    if (found) return found;
    snprintf(key, sizeof key, "gpu.*.%s", field);
    return setting(key);
}

static u64 number_of(const device *d, const char *field, u64 otherwise) {
    const char *given = text_of(d, field);
    return given ? strtoull(given, NULL, 10) : otherwise;
}

/* What is said of a function, or of all but init. */
static double said_of(const char *what, const char *function) {
    char key[128];
    const char *found;
    snprintf(key, sizeof key, "%s.%s", what, function);
    found = setting(key);
    if (!found && strncmp(function, "nvmlInit", 8) != 0) {
        snprintf(key, sizeof key, "%s.*", what);
        found = setting(key);
    }
    return found ? atof(found) : 0;
}

static void note(const char *function) {
    static int file = -1;
    const char *path = getenv("STAND_IN_NVML_LOG");
    char line[128];
    int length;
    if (!path) return;
    if (file < 0) file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    length = snprintf(line, sizeof line, "%.6f %s\n", now(), function);
    if (write(file, line, length) < 0) return;
}

static int enter(const char *function, const device *d) {
    double began = now(), pause;
    int code;
    refresh();
    note(function);
    pause = said_of("delay", function) / 1e6;
    if (pause > 0) nap(pause);
    while (now() - began < said_of("stall", function)) {
        nap(0.005);
        refresh();
    }
    code = (int)said_of("fail", function);
    if (code) return code;
    if (strncmp(function, "nvmlInit", 8) == 0) return SUCCESS;
    if (!initialized) return UNINITIALIZED;
    if (d && number_of(d, "lost", 0)) return GPU_IS_LOST;
    return d ? (int)number_of(d, "fail", 0) : SUCCESS;
}

#define ENTER(d)                          \
    do {                                  \
        int code_ = enter(__func__, (d)); \
        if (code_) return code_;          \
    } while (0)

/* What a MIG device does not have. */
#define WHOLE_GPU(d) \
    do { \
        if ((d)->mig >= 0) return NOT_SUPPORTED; \
    } while (0)

static int copy(char *to, u32 size, const char *text) {
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

int nvmlInitWithFlags(u32 flags) {
    int code = enter(__func__, NULL);
    (void)flags;
    if (code) return code;
    for (int i = 0; i < MAX_GPUS; i++)
        for (int k = 0; k <= MAX_MIGS; k++) devices[i][k] = (device){i, k - 1};
    initialized++;
    return SUCCESS;
}

int nvmlShutdown(void) {
    note(__func__);
    if (initialized) initialized--;
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    switch (code) {
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetCudaDriverVersion(int *version) {
    ENTER(NULL);
    *version = 13000;
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *text, u32 size) {
    ENTER(NULL);
    return copy(text, size, "580.159.04");
}

int nvmlDeviceGetCount_v2(u32 *count) {
    const char *given;
    ENTER(NULL);
    given = setting("gpus");
    *count = given ? (u32)atoi(given) : 2;
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(u32 index, device **d) {
    ENTER(NULL);
    if (index >= MAX_GPUS) return INVALID_ARGUMENT;
    if (number_of(&devices[index][0], "lost", 0) == 2) return GPU_IS_LOST;
    *d = &devices[index][0];
    return SUCCESS;
}

int nvmlDeviceGetUUID(device *d, char *text, u32 size) {
    char uuid[96];
    const char *given;
    ENTER(d);
    given = text_of(d, "uuid");
    if (d->mig >= 0)
        snprintf(uuid, sizeof uuid, "MIG-%08x-0000-5000-8000-%012x", 0xabc00000u + d->index, d->mig);
    else if (given)
        snprintf(uuid, sizeof uuid, "%s", given);
    else
        snprintf(uuid, sizeof uuid, "GPU-%08x-0000-4000-8000-%012x", 0xabc00000u + d->index, d->index);
    return copy(text, size, uuid);
}

int nvmlDeviceGetName(device *d, char *text, u32 size) {
    const char *given;
    ENTER(d);
    given = text_of(d, "name");
    if (d->mig >= 0) given = "NVIDIA H100 80GB HBM3 MIG 1g.10gb";
    return copy(text, size, given ? given : "NVIDIA H100 80GB HBM3");
}

static u64 total_of(const device *d) {
    return d->mig >= 0 ? 10 * GIB : number_of(d, "total", 80 * GIB);
}

/* Beside a stand-in CUDA runtime: the processes that use a GPU there (cuda/nvml_more.c). */
__attribute__((weak)) u32 processes_of_cuda(int gpu, process_info *to, u32 room);
#define MAX_PROCESSES 64

static u64 used_of(const device *d) {
    process_info found[MAX_PROCESSES];
    u64 sum = 0;
    if (d->mig >= 0) return GIB;
    if (!processes_of_cuda || text_of(d, "used")) return number_of(d, "used", 2 * GIB);
    for (u32 n = processes_of_cuda(d->index, found, MAX_PROCESSES); n--;) sum += found[n].used;
    return sum;
}

/* As the real one: the older call counts what the driver reserves as used. */
int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *memory) {
    ENTER(d);
    memory->total = total_of(d);
    memory->used = used_of(d) + number_of(d, "reserved", GIB / 2);
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *memory) {
    ENTER(d);
    memory->total = total_of(d);
    memory->used = used_of(d);
    memory->reserved = number_of(d, "reserved", GIB / 2);
    memory->free = memory->total - memory->used - memory->reserved;
    return SUCCESS;
}

int nvmlDeviceGetUtilizationRates(device *d, u32 *rates) {
    ENTER(d);
    WHOLE_GPU(d);
    if (number_of(d, "mig", 0)) return NOT_SUPPORTED;
    rates[0] = (u32)number_of(d, "util", 50);
    rates[1] = (u32)number_of(d, "memutil", 10);
    return SUCCESS;
}

int nvmlDeviceGetTemperature(device *d, int sensor, u32 *celsius) {
    (void)sensor;
    ENTER(d);
    WHOLE_GPU(d);
    *celsius = (u32)number_of(d, "temp", 40);
    return SUCCESS;
}

int nvmlDeviceGetTemperatureThreshold(device *d, int kind, u32 *celsius) {
    (void)kind;
    ENTER(d);
    WHOLE_GPU(d);
    *celsius = 87;
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(device *d, u32 *milliwatts) {
    ENTER(d);
    WHOLE_GPU(d);
    *milliwatts = (u32)number_of(d, "power", 70500);
    return SUCCESS;
}

int nvmlDeviceGetEnforcedPowerLimit(device *d, u32 *milliwatts) {
    ENTER(d);
    WHOLE_GPU(d);
    *milliwatts = (u32)number_of(d, "limit", 700000);
    return SUCCESS;
}

int nvmlDeviceGetClockInfo(device *d, int kind, u32 *megahertz) {
    ENTER(d);
    WHOLE_GPU(d);
    *megahertz = kind == 2 ? 2619 : (u32)number_of(d, "clock", 1980);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksEventReasons(device *d, u64 *bits) {
    ENTER(d);
    WHOLE_GPU(d);
    *bits = number_of(d, "throttle", 1);
    return SUCCESS;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, u64 *bits) {
    ENTER(d);
    WHOLE_GPU(d);
    *bits = number_of(d, "throttle", 1);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(device *d, u32 *current, u32 *pending) {
    ENTER(d);
    *current = *pending = number_of(d, "mig", 0) > 0;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(device *d, u32 *count) {
    ENTER(d);
    *count = MAX_MIGS;
    return SUCCESS;
}

/* Slots are filled from the second one on, so that a reader has to skip an empty one. */
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, u32 slot, device **mig) {
    ENTER(d);
    if (slot == 0 || slot > number_of(d, "mig", 0)) return NOT_FOUND;
    *mig = &devices[d->index][slot];
    return SUCCESS;
}

static int processes(const char *function, device *d, const char *field, u32 *count, process_info *to) {
    int code = enter(function, d);
    const char *rest;
    char of_mig[32];
    u32 room = *count;
    if (code) return code;
    *count = 0;
    snprintf(of_mig, sizeof of_mig, "mig%d.%s", d->mig, field);
    rest = text_of(d, d->mig >= 0 ? of_mig : field);
    while (rest && *rest) {
        char *end;
        u32 pid = (u32)strtoul(rest, &end, 10);
        int known = *end == ':' && end[1] != 'N';
        u64 used = known ? strtoull(end + 1, NULL, 10) : ~0ULL;
        if (to && *count < room) to[*count] = (process_info){pid, used, ~0u, ~0u};
        ++*count;
        rest = strchr(end, ',');
        rest = rest ? rest + 1 : NULL;
    }
    if (processes_of_cuda && d->mig < 0 && !strcmp(field, "compute")) {
        process_info found[MAX_PROCESSES];
        for (u32 n = processes_of_cuda(d->index, found, MAX_PROCESSES); n--; ++*count)
            if (to && *count < room) to[*count] = found[n];
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
}

typedef struct {
    u32 pid;
    u64 time;
    u32 sm, memory, encoder, decoder;
} process_utilization;

int nvmlDeviceGetProcessUtilization(device *d, process_utilization *to, u32 *count, u64 since) {
    ENTER(d);
    WHOLE_GPU(d);
    struct timespec now;
    u32 room = *count;
    const char *rest = text_of(d, "busy");
    clock_gettime(CLOCK_REALTIME, &now);
    u64 time = now.tv_sec * 1000000ULL + now.tv_nsec / 1000;
    *count = 0;
    while (rest && *rest) {
        char *end;
        u32 pid = (u32)strtoul(rest, &end, 10), percent = (u32)strtoul(end + 1, &end, 10);
        /* A sample's age in seconds may follow: drivers are known to answer old ones too. */
        u64 age = *end == ':' ? strtoull(end + 1, &end, 10) : 0;
        if (to && *count < room) to[*count] = (process_utilization){pid, time - age * 1000000, percent, 0, 0, 0};
        ++*count;
        rest = *end == ',' ? end + 1 : NULL;
    }
    (void)since;
    if (!*count) return NOT_FOUND;
    return *count > room || !to ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(function, field)                             \
    int function(device *d, u32 *count, process_info *to) {    \
        return processes(__func__, d, field, count, to);       \
    }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "compute")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "compute")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps")
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps")

int nvmlDeviceGetFanSpeed(device *d, u32 *percent) {
    ENTER(d);
    WHOLE_GPU(d);
    *percent = (u32)number_of(d, "fan", 30);
    return SUCCESS;
}

int nvmlDeviceGetMaxClockInfo(device *d, int kind, u32 *megahertz) {
    ENTER(d);
    WHOLE_GPU(d);
    *megahertz = kind == 2 ? 2619 : 1980;
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkGeneration(device *d, u32 *generation) {
    ENTER(d);
    WHOLE_GPU(d);
    *generation = (u32)number_of(d, "pcie_gen", 5);
    return SUCCESS;
}

int nvmlDeviceGetCurrPcieLinkWidth(device *d, u32 *lanes) {
    ENTER(d);
    WHOLE_GPU(d);
    *lanes = (u32)number_of(d, "pcie_width", 16);
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkGeneration(device *d, u32 *generation) {
    ENTER(d);
    WHOLE_GPU(d);
    *generation = 5;
    return SUCCESS;
}

int nvmlDeviceGetMaxPcieLinkWidth(device *d, u32 *lanes) {
    ENTER(d);
    WHOLE_GPU(d);
    *lanes = 16;
    return SUCCESS;
}

/* As the real one, it watches for 20 ms; nobody should call it. */
int nvmlDeviceGetPcieThroughput(device *d, int kind, u32 *kilobytes) {
    (void)kind;
    ENTER(d);
    WHOLE_GPU(d);
    nap(0.02);
    *kilobytes = 0;
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(device *d, int kind, int counter, u64 *count) {
    (void)counter;
    ENTER(d);
    WHOLE_GPU(d);
    *count = number_of(d, kind ? "ecc_uncorrected" : "ecc_corrected", 0);
    return SUCCESS;
}

int nvmlEventSetCreate(event_set **set) {
    ENTER(NULL);
    *set = calloc(1, sizeof **set);
    return SUCCESS;
}

int nvmlEventSetFree(event_set *set) {
    ENTER(NULL);
    free(set);
    return SUCCESS;
}

int nvmlDeviceRegisterEvents(device *d, u64 types, event_set *set) {
    ENTER(d);
    WHOLE_GPU(d);
    if (types & 0x8) set->registered[d->index] = 1;
    return SUCCESS;
}

/* An error is told before that its GPU is lost, which is what often follows from it. */
int nvmlEventSetWait_v2(event_set *set, event *to, u32 milliseconds) {
    int lost = 0;
    (void)milliseconds;
    ENTER(NULL);
    for (int i = 0; i < MAX_GPUS; i++) {
        const device *d = &devices[i][0];
        const char *given = set->registered[i] ? text_of(d, "xid") : NULL;
        if (given && strcmp(given, told[i])) {
            snprintf(told[i], sizeof told[i], "%s", given);
            *to = (event){d, 0x8, strtoull(given, NULL, 10), ~0u, ~0u};
            return SUCCESS;
        }
        lost |= set->registered[i] && number_of(d, "lost", 0);
    }
    return lost ? GPU_IS_LOST : TIMEOUT;
}

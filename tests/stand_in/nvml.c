/* A stand-in for libnvidia-ml.so.1: what gpumagic asks of NVML, answered from a text file.
 *
 * STAND_IN_NVML names the file, which is read again at every call, so that a test can change the
 * machine while a program looks at it. A line is KEY=VALUE; the last one of a key holds:
 *
 *   gpus=N                    how many GPUs there are (2 if not said)
 *   gpu.I.FIELD=VALUE         name, uuid, total, used, reserved (bytes), util, memutil (percent),
 *                             temp (Celsius), power, limit (milliwatts), clock (MHz), throttle
 *                             (NVML's bits), mig (how many MIG devices), lost (1: after its handle
 *                             was given; 2: no handle is given either)
 *   gpu.I.compute=PID:BYTES,  the processes of GPU I; likewise graphics and mps; BYTES may be N/A
 *   fail.FUNCTION=CODE        that function answers CODE; fail.*=CODE: every one but init
 *
 * STAND_IN_NVML_LOG names a file to which each call appends its name.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GIB (1ULL << 30)
#define MAX_GPUS 16
#define MAX_MIGS 7

typedef unsigned int u32;
typedef unsigned long long u64;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
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

static device devices[MAX_GPUS][MAX_MIGS + 1];
static int initialized = 0;

/* The value of a key in the file, in a buffer that the next call overwrites; NULL if not there. */
static const char *setting(const char *key) {
    static __thread char line[4096];
    static __thread char value[4096];
    const char *path = getenv("STAND_IN_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    size_t length = strlen(key);
    int found = 0;
    if (!file) return NULL;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\r\n")] = 0;
        if (strncmp(line, key, length) == 0 && line[length] == '=') {
            strcpy(value, line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found ? value : NULL;
}

static const char *text_of(const device *d, const char *field) {
    char key[128];
    snprintf(key, sizeof key, "gpu.%d.%s", d->index, field);
    return setting(key);
}

static u64 number_of(const device *d, const char *field, u64 otherwise) {
    const char *text = text_of(d, field);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

static int failure(const char *function) {
    char key[128];
    const char *code;
    snprintf(key, sizeof key, "fail.%s", function);
    code = setting(key);
    if (!code && strncmp(function, "nvmlInit", 8) != 0) code = setting("fail.*");
    return code ? atoi(code) : SUCCESS;
}

static int enter(const char *function, const device *d) {
    const char *log = getenv("STAND_IN_NVML_LOG");
    int code = failure(function);
    if (log) {
        FILE *file = fopen(log, "a");
        if (file) {
            fprintf(file, "%s\n", function);
            fclose(file);
        }
    }
    if (code) return code;
    if (!initialized) return UNINITIALIZED;
    if (d && number_of(d, "lost", 0)) return GPU_IS_LOST;
    return SUCCESS;
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
    int code = failure(__func__);
    (void)flags;
    if (code) return code;
    for (int i = 0; i < MAX_GPUS; i++)
        for (int k = 0; k <= MAX_MIGS; k++) devices[i][k] = (device){i, k - 1};
    initialized++;
    return SUCCESS;
}

int nvmlShutdown(void) {
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

int nvmlSystemGetDriverVersion(char *text, u32 size) {
    ENTER(NULL);
    return copy(text, size, "580.159.04");
}

int nvmlDeviceGetCount_v2(u32 *count) {
    const char *text;
    ENTER(NULL);
    text = setting("gpus");
    *count = text ? (u32)atoi(text) : 2;
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

static u64 used_of(const device *d) {
    return d->mig >= 0 ? GIB : number_of(d, "used", 2 * GIB);
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
    const char *text;
    u32 room = *count;
    if (code) return code;
    *count = 0;
    text = d->mig >= 0 ? NULL : text_of(d, field);
    while (text && *text) {
        char *end;
        u32 pid = (u32)strtoul(text, &end, 10);
        int known = *end == ':' && end[1] != 'N';
        u64 used = known ? strtoull(end + 1, NULL, 10) : ~0ULL;
        if (to && *count < room) to[*count] = (process_info){pid, used, ~0u, ~0u};
        ++*count;
        text = strchr(end, ',');
        text = text ? text + 1 : NULL;
    }
    return *count > room ? INSUFFICIENT_SIZE : SUCCESS;
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

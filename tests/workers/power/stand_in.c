/* A libnvidia-ml.so.1 with as many GPUs as the file $STAND_IN_GPUS holds records. The file is the GPUs' state:
 * limits outlive the process that set them, as real ones do, and a test can turn failures on from outside. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int nvmlReturn_t;
enum { OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15 };
enum { FAIL_PERMISSION = 1, FAIL_LOST = 2, FAIL_NO_ENERGY = 4, FAIL_DRIVER = 8, FAIL_IGNORES_LIMIT = 16,
       FAIL_NO_LIMITS = 32, FAIL_NO_MEMORY = 64 };

struct gpu {
    char uuid[96];
    unsigned int limit_mw, least_mw, most_mw, default_mw, power_mw, fails, sets, reserved;
    unsigned long long energy_mj;
};

static struct gpu *gpus;
static unsigned int count;
static int users;

static nvmlReturn_t usable(struct gpu *gpu) {
    if (!users) return UNINITIALIZED;
    if (gpu < gpus || gpu >= gpus + count) return INVALID_ARGUMENT;
    return gpu->fails & FAIL_LOST ? GPU_IS_LOST : OK;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    if (!gpus) {
        const char *path = getenv("STAND_IN_GPUS");
        struct stat info;
        int file = path ? open(path, O_RDWR) : -1;
        if (file < 0 || fstat(file, &info)) return DRIVER_NOT_LOADED;
        count = info.st_size / sizeof(struct gpu);
        gpus = mmap(NULL, info.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        close(file);
        if (gpus == MAP_FAILED) return DRIVER_NOT_LOADED;
    }
    if (count && gpus[0].fails & FAIL_DRIVER) return DRIVER_NOT_LOADED;
    users++;
    return OK;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

nvmlReturn_t nvmlShutdown(void) {
    if (!users) return UNINITIALIZED;
    users--;
    return OK;
}

const char *nvmlErrorString(nvmlReturn_t result) {
    switch (result) {
        case UNINITIALIZED: return "Uninitialized";
        case NOT_SUPPORTED: return "Not Supported";
        case NO_PERMISSION: return "Insufficient Permissions";
        case NOT_FOUND: return "Not Found";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case GPU_IS_LOST: return "GPU is lost";
        default: return "Invalid Argument";
    }
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *found) {
    if (!users) return UNINITIALIZED;
    *found = count;
    return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, struct gpu **gpu) {
    if (!users) return UNINITIALIZED;
    if (index >= count) return INVALID_ARGUMENT;
    *gpu = gpus + index;
    return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **gpu) {
    if (!users) return UNINITIALIZED;
    for (unsigned int index = 0; index < count; index++)
        if (!strcmp(gpus[index].uuid, uuid)) {
            *gpu = gpus + index;
            return OK;
        }
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetIndex(struct gpu *gpu, unsigned int *index) {
    *index = gpu - gpus;
    return usable(gpu);
}

nvmlReturn_t nvmlDeviceGetName(struct gpu *gpu, char *name, unsigned int length) {
    strncpy(name, "Stand-in A40", length);
    return usable(gpu);
}

nvmlReturn_t nvmlDeviceGetUUID(struct gpu *gpu, char *uuid, unsigned int length) {
    strncpy(uuid, gpu->uuid, length);
    return usable(gpu);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimit(struct gpu *gpu, unsigned int *limit) {
    *limit = gpu->limit_mw;
    return gpu->fails & FAIL_NO_LIMITS ? NOT_SUPPORTED : usable(gpu);
}

nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(struct gpu *gpu, unsigned int *limit) {
    *limit = gpu->default_mw;
    return usable(gpu);
}

nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(struct gpu *gpu, unsigned int *least, unsigned int *most) {
    *least = gpu->least_mw;
    *most = gpu->most_mw;
    return gpu->fails & FAIL_NO_LIMITS ? NOT_SUPPORTED : usable(gpu);
}

nvmlReturn_t nvmlDeviceSetPowerManagementLimit(struct gpu *gpu, unsigned int limit) {
    nvmlReturn_t result = usable(gpu);
    if (result) return result;
    if (gpu->fails & FAIL_PERMISSION) return NO_PERMISSION;
    if (limit < gpu->least_mw || limit > gpu->most_mw) return INVALID_ARGUMENT;
    gpu->sets++;
    if (!(gpu->fails & FAIL_IGNORES_LIMIT)) gpu->limit_mw = limit;
    return OK;
}

struct memory { unsigned long long total, free, used; };

nvmlReturn_t nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory *memory) {
    memory->total = 48ULL << 30;
    memory->free = memory->total;
    memory->used = 0;
    return gpu->fails & FAIL_NO_MEMORY ? NOT_SUPPORTED : usable(gpu);
}

nvmlReturn_t nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned int *power) {
    *power = gpu->power_mw;
    return usable(gpu);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(struct gpu *gpu, unsigned long long *energy) {
    *energy = gpu->energy_mj;
    return gpu->fails & FAIL_NO_ENERGY ? NOT_SUPPORTED : usable(gpu);
}

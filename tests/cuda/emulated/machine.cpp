#include "machine.h"

#include <ucontext.h>

#include <algorithm>
#include <random>
#include <vector>

enum { WARP = 32, BARRIERS = 16, STACK_BYTES = 256 * 1024, LONGEST_PAUSE = 1000, PATIENCE = 4000 };

typedef struct meeting { int count, number; } meeting;
typedef struct fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
} fiber;

alignas(1024) unsigned char memory[MEMORY_BYTES];
index1 threadIdx, blockIdx, gridDim = {1};

static std::vector<fiber> fibers;
static ucontext_t scheduler;
static meeting named[BARRIERS], warps[32];
static four given[32][WARP]; /* by machine_gather */
static long events;               /* arrivals: what shows that threads go on */
static void (*entry)(void);

void machine_fail(const char *why) {
    printf("CTA %u, thread %u: %s\n", blockIdx.x, threadIdx.x, why);
    exit(1);
}

int machine_threads(void) { return (int)fibers.size(); }
void machine_yield(void) { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

static void arrive(meeting *m, int expected) {
    ++events;
    if (++m->count > expected) machine_fail("more arrivals than a barrier has threads");
    if (m->count == expected) m->count = 0, ++m->number;
}
static void meet(meeting *m, int expected) {
    const int number = m->number;
    arrive(m, expected);
    while (m->number == number) machine_yield();
}
void machine_meet_warp(void) { meet(&warps[threadIdx.x / WARP], WARP); }
void machine_arrive(int barrier, int threads) { arrive(&named[barrier], threads); }
void machine_meet(int barrier, int threads) { meet(&named[barrier], threads); }

const four *machine_gather(const uint32_t x[4]) {
    four *const all = given[threadIdx.x / WARP];
    memcpy(all[threadIdx.x % WARP], x, sizeof(four));
    machine_meet_warp();
    return all;
}

static void run_fiber(void) {
    entry();
    fibers[threadIdx.x].done = true;
    machine_yield();
}

void machine_run(int block, int threads, unsigned seed, void (*kernel)(void)) {
    entry = kernel;
    blockIdx.x = (unsigned)block;
    memset(memory, 0xff, MEMORY_BYTES);
    memset(named, 0, sizeof named);
    memset(warps, 0, sizeof warps);
    fibers.resize((size_t)threads);
    for (fiber &f : fibers) {
        f.stack.resize(STACK_BYTES);
        f.done = false;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack.data();
        f.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&f.context, run_fiber, 0);
    }
    std::mt19937 random(seed);
    std::vector<int> order((size_t)threads / WARP);
    for (size_t w = 0; w < order.size(); ++w) order[w] = (int)w;
    std::vector<int> pause(order.size()); /* rounds that a warp stands still: the others go ahead */
    for (int left = threads, idle = 0; left > 0;) {
        const long before = events;
        const int had = left;
        std::shuffle(order.begin(), order.end(), random);
        for (int w : order) {
            int *const rounds = &pause[(size_t)w];
            if (*rounds == 0 && random() % 64 == 0) *rounds = (int)(random() % LONGEST_PAUSE);
            if (*rounds > 0 && (*rounds)--) continue;
            for (int lane = 0; lane < WARP; ++lane) {
                fiber *const f = &fibers[(size_t)(w * WARP + lane)];
                if (f->done) continue;
                threadIdx.x = (unsigned)(w * WARP + lane);
                swapcontext(&scheduler, &f->context);
                left -= f->done;
            }
        }
        idle = events == before && left == had ? idle + 1 : 0;
        if (idle > PATIENCE) machine_fail("threads wait for each other: deadlock");
    }
}

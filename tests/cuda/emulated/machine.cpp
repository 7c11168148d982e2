/* longjmp's check of _FORTIFY_SOURCE knows one stack only. */
#undef _FORTIFY_SOURCE

#include "machine.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

enum {
    WARP = 32,
    BARRIERS = 16,
    STACK_BYTES = 256 * 1024,
    LONGEST_PAUSE = 1000,
    MOST_IDLE_ROUNDS = 100000, /* a CTA may wait for long computations of another one */
    MOST_CTAS = 8,
    COPIERS = 4,
    COPIES = 4096,    /* more than are pending at a time */
    MOST_ROUNDS = 256 /* of a CTA before another one, on average */
};

typedef struct meeting {
    int count, number;
    machine_event ends[2]; /* of meetings with this parity */
} meeting;
typedef struct fiber {
    jmp_buf place;        /* where it goes on */
    ucontext_t start;     /* for the first time */
    const meeting *waits; /* NULL, or for the end of this one's meeting number `number` */
    int number;
    const volatile int8_t *phase; /* NULL, or it waits while this one is `old` */
    int8_t old;
    bool started, done;
    void *context; /* for a race detector */
} fiber;

typedef struct later { /* what machine_later was given */
    std::function<void()> work;
    char *given;
} later;

/* State of a CTA. Each has a host thread of its own. */
alignas(1024) __thread unsigned char memory[MEMORY_BYTES];
__thread index1 threadIdx, blockIdx;
static __thread fiber *fibers, *self;
static __thread int fiber_count;
static __thread jmp_buf scheduler;
static __thread meeting named[BARRIERS], warps[32];
static __thread warp_buffer buffers[32][2];
static thread_local std::mt19937 coins;
static __thread void *scheduler_context, *(*proxies)[PROXIES]; /* of warps */
static __thread bool copies;                                   /* what machine_later was given runs */
static __thread char fenced[32][PROXIES], done_by_proxies[32];

/* State of the cluster. One CTA runs at a time, for some rounds of its warps. */
index1 gridDim = {1};
static unsigned char *memories[MOST_CTAS];
static std::unique_ptr<char[]> stacks[MOST_CTAS][MOST_THREADS]; /* not cleared, and kept for other clusters */
static std::vector<later> pending;
static std::mutex cluster_lock;
static std::condition_variable next_cta[MOST_CTAS];
static int cluster_ctas, running, ctas_left;
static meeting cluster;
static long events; /* arrivals and pending work that was done: without any for many rounds there is a deadlock */
static void (*entry)(void);

/* For a race detector: contexts of threads, of warps' proxies and of what copies for them, which are kept for other
   clusters; what happens before a kernel's start and end, and before a copy. */
static void *contexts[MOST_CTAS][MOST_THREADS], *proxies_of_cta[MOST_CTAS][32][PROXIES], *copiers[COPIERS];
static char start_of_kernel, end_of_kernel, copy_given[COPIES];

static std::vector<void (*)(void)> *preparations(void) {
    static std::vector<void (*)(void)> all;
    return &all;
}
int machine_prepare(void (*work)(void)) {
    preparations()->push_back(work);
    return 0;
}

void machine_fail(const char *why) {
    printf("CTA %u, thread %u: %s\n", blockIdx.x, threadIdx.x, why);
    fflush(stdout);
    _Exit(1);
}

int machine_threads(void) { return fiber_count; }

/* Not swapcontext, which sets the signal mask by a system call: half of the time of an emulated kernel. */
void machine_yield(void) {
    if (_setjmp(self->place)) return;
    races_enter(scheduler_context);
    _longjmp(scheduler, 1);
}
static void resume(fiber *f) {
    self = f;
    if (_setjmp(scheduler)) return;
    races_enter(f->context);
    if (f->started) _longjmp(f->place, 1);
    f->started = true;
    setcontext(&f->start);
}

int machine_coin(void) {
    races_enter(scheduler_context); /* whose coins they are */
    const int coin = (int)(coins() & 1);
    races_enter(self->context);
    return coin;
}

void machine_enter_proxy(int proxy) { races_enter(proxies[threadIdx.x / WARP][proxy]); }
void machine_leave_proxy(void) { races_enter(self->context); }
void machine_release(machine_event *event) {
    races_release(&event->for_threads);
    for (int x = 0; x < PROXIES; ++x) {
        if (!copies) machine_enter_proxy(x); /* a copy is done by a proxy */
        races_release(&event->for_proxies[x]);
    }
    if (!copies) machine_leave_proxy();
}
void machine_acquire(machine_event *event) {
    races_acquire(&event->for_threads);
    for (int x = 0; x < PROXIES; ++x) {
        machine_enter_proxy(x);
        races_acquire(&event->for_proxies[x]);
    }
    machine_leave_proxy();
}
void machine_fence_proxy(int proxy) {
    char *const seen = &fenced[threadIdx.x / WARP][proxy];
    races_release(seen);
    machine_enter_proxy(proxy);
    races_acquire(seen);
    machine_leave_proxy();
}
void machine_wait_for_proxies(void) {
    char *const done = &done_by_proxies[threadIdx.x / WARP];
    for (int x = 0; x < PROXIES; ++x) {
        machine_enter_proxy(x);
        races_release(done);
    }
    machine_leave_proxy();
    races_acquire(done);
}
void machine_proxy_reads(int proxy, const void *from, size_t bytes) {
    machine_enter_proxy(proxy);
    for (size_t at = 0; at < bytes; at += 16) races_read((const char *)from + at);
    machine_leave_proxy();
}
void machine_proxy_writes(int proxy, void *to, size_t bytes) {
    machine_enter_proxy(proxy);
    for (size_t at = 0; at < bytes; at += 16) races_write((char *)to + at);
    machine_leave_proxy();
}

static void arrive(meeting *m, int expected) {
    ++events;
    if (m != &warps[threadIdx.x / WARP])
        machine_release(&m->ends[m->number & 1]);
    else
        races_release(&m->ends[m->number & 1].for_threads); /* lanes have the same proxies */
    if (++m->count > expected) machine_fail("more arrivals than a barrier has threads");
    if (m->count == expected) m->count = 0, ++m->number;
}
static void meet(meeting *m, int expected) {
    fiber *const mine = self;
    mine->number = m->number;
    arrive(m, expected);
    if (m->number == mine->number) {
        mine->waits = m;
        machine_yield(); /* until it has ended */
        mine->waits = NULL;
    }
    if (m != &warps[threadIdx.x / WARP])
        machine_acquire(&m->ends[mine->number & 1]);
    else
        races_acquire(&m->ends[mine->number & 1].for_threads);
}
void machine_meet_warp(void) { meet(&warps[threadIdx.x / WARP], WARP); }
void machine_arrive(int barrier, int threads) { arrive(&named[barrier], threads); }
void machine_meet(int barrier, int threads) { meet(&named[barrier], threads); }
void machine_meet_cluster(void) { meet(&cluster, machine_threads() * cluster_ctas); }

unsigned char *machine_memory(int rank) { return memories[rank]; }
void machine_later(std::function<void()> work) {
    static unsigned count;
    char *const given = &copy_given[count++ % COPIES];
    races_release(given);
    for (int x = 0; x < PROXIES; ++x) {
        machine_enter_proxy(x);
        races_release(given); /* what it has read for this copy */
    }
    races_enter(scheduler_context); /* whose memory `pending` has */
    pending.push_back({std::move(work), given});
    races_enter(self->context);
}

void machine_wait(const volatile int8_t *phase, int8_t old) {
    if (*phase != old) return;
    self->phase = phase, self->old = old;
    machine_yield();
    self->phase = NULL;
}

/* In turns: who fills a buffer again has met all lanes since, after they read it. */
void *machine_warp_buffer(void) {
    const int warp = (int)threadIdx.x / WARP;
    return &buffers[warp][warps[warp].number & 1];
}

static void run_fiber(void) {
    races_acquire(&start_of_kernel);
    entry();
    races_release(&end_of_kernel);
    self->done = true;
    machine_yield();
}
static bool can_go_on(const fiber *f) {
    if (f->done || (f->waits && f->waits->number == f->number)) return false;
    return !f->phase || *f->phase != f->old;
}

/* Does some of what is pending, at random. */
static void do_pending(std::mt19937 *random) {
    for (size_t n = 0; n < pending.size();) {
        if ((*random)() % 16) {
            ++n;
            continue;
        }
        later x = std::move(pending[n]);
        pending.erase(pending.begin() + (long)n);
        races_enter(copiers[(*random)() % COPIERS]);
        races_acquire(x.given);
        copies = true;
        x.work();
        x.work = nullptr; /* its memory is this context's, too */
        copies = false;
        races_release(&end_of_kernel);
        races_enter(scheduler_context);
        ++events;
    }
}

static void pass_on(int rank, int ctas) {
    running = (rank + 1) % ctas;
    next_cta[running].notify_one();
}
/* Waits while the other CTAs run. */
static void run_others(std::unique_lock<std::mutex> *held, int rank, int ctas) {
    pass_on(rank, ctas);
    next_cta[rank].wait(*held, [=] { return running == rank; });
}

/* A function of its own: getcontext may return twice, and its caller's variables would not be safe. */
static __attribute__((noinline)) void make_fiber(fiber *f, int rank, int thread) {
    void **const context = &contexts[rank][thread];
    if (!*context) *context = races_new_context();
    f->context = *context;
    std::unique_ptr<char[]> *const stack = &stacks[rank][thread];
    if (!*stack) stack->reset(new char[STACK_BYTES]);
    getcontext(&f->start);
    f->start.uc_stack.ss_sp = stack->get();
    f->start.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f->start, run_fiber, 0);
}

static void run_cta(int block, int rank, int ctas, int threads, unsigned seed) {
    std::unique_lock<std::mutex> held(cluster_lock);
    next_cta[rank].wait(held, [=] { return running == rank; });
    blockIdx.x = (unsigned)block;
    memories[rank] = memory;
    memset(memory, 0xff, MEMORY_BYTES);
    std::vector<fiber> all((size_t)threads);
    fibers = all.data(), fiber_count = threads;
    for (int n = 0; n < threads; ++n) make_fiber(&all[(size_t)n], rank, n);
    for (void **c = copiers; c < copiers + COPIERS; ++c)
        if (!*c) *c = races_new_context();
    for (void (*work)(void) : *preparations()) work();
    scheduler_context = races_own_context();
    races_release(&start_of_kernel);
    proxies = proxies_of_cta[rank];
    for (int n = 0; n < threads / WARP * PROXIES; ++n) {
        void **const proxy = &proxies[n / PROXIES][n % PROXIES];
        if (!*proxy) *proxy = races_new_context();
        races_enter(*proxy);
        races_acquire(&start_of_kernel);
    }
    races_enter(scheduler_context);
    run_others(&held, rank, ctas);
    std::mt19937 random(seed);
    coins.seed(seed);
    std::vector<int> order((size_t)threads / WARP);
    for (size_t w = 0; w < order.size(); ++w) order[w] = (int)w;
    std::vector<int> pause(order.size()); /* rounds for which a warp does not run */
    long before = events;
    for (int left = threads, idle = 0; ctas_left > 0;) {
        const int had = left;
        std::shuffle(order.begin(), order.end(), random);
        for (int w : order) {
            int *const rounds = &pause[(size_t)w];
            if (*rounds == 0 && random() % 64 == 0) *rounds = (int)(random() % LONGEST_PAUSE);
            if (*rounds > 0 && (*rounds)--) continue;
            for (int lane = 0; lane < WARP; ++lane) {
                fiber *const f = &fibers[(size_t)(w * WARP + lane)];
                if (!can_go_on(f)) continue;
                threadIdx.x = (unsigned)(w * WARP + lane);
                resume(f);
                left -= f->done;
            }
        }
        do_pending(&random);
        if (had > 0 && left == 0) --ctas_left;
        idle = events == before && left == had ? idle + 1 : 0;
        before = events;
        if (idle > MOST_IDLE_ROUNDS) machine_fail("deadlock: threads wait for each other");
        const bool waits = idle > 0 && std::count(pause.begin(), pause.end(), 0) == (long)pause.size();
        if (waits || left == 0 || random() % MOST_ROUNDS == 0) run_others(&held, rank, ctas);
    }
    for (int n = 0; n < threads / WARP * PROXIES; ++n) {
        races_enter(proxies[n / PROXIES][n % PROXIES]);
        races_release(&end_of_kernel);
    }
    races_enter(scheduler_context);
    races_acquire(&end_of_kernel);
    pass_on(rank, ctas);
}

void machine_run(int block, int ctas, int threads, unsigned seed, void (*kernel)(void)) {
    const char *const other = getenv("EMULATED_SEED");
    if (other) seed += 0x10000u * (unsigned)atoi(other);
    entry = kernel;
    running = 0;
    ctas_left = cluster_ctas = ctas;
    std::vector<std::thread> all;
    for (int rank = 0; rank < ctas; ++rank)
        all.emplace_back(run_cta, block + rank, rank, ctas, threads, seed * MOST_CTAS + (unsigned)rank);
    for (std::thread &one : all) one.join();
}

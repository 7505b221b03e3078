// Threads of the kernels for the CPU: the caller's OpenMP, or a team of waiting threads, since
// starting threads would take as long as a small kernel.

#include "runtime.h"

#include <pthread.h>

// glibc 2.34 moved this from libpthread, under a new version. The old one still exists, and makes the
// library load on systems as old as manylinux2014, where Python itself has loaded libpthread.
#if defined(__x86_64__) && defined(__GLIBC__)
__asm__(".symver pthread_create,pthread_create@GLIBC_2.2.5");
#endif

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

enum { SPINS = 2000 };  // tens of microseconds, within which a step usually calls the next kernel

Pool griffin_team = NULL;

EXPORT void griffin_pool(void *gomp_parallel) { griffin_team = (Pool)gomp_parallel; }

static struct {
  pthread_mutex_t lock;
  pthread_cond_t called, left;
  Tasks *tasks;     // current call, open to threads
  int64_t calls;    // number of calls so far
  int64_t started;  // number of threads
  int64_t joined;   // number of threads working on `tasks`
  int in_use;
} team;

static void start_team(void) {
  memset(&team, 0, sizeof team);
  pthread_mutex_init(&team.lock, NULL);
  pthread_cond_init(&team.called, NULL);
  pthread_cond_init(&team.left, NULL);
}

__attribute__((constructor)) static void on_load(void) {
  start_team();
  pthread_atfork(NULL, NULL, start_team);  // a fork has no threads
}

static void *take(void *argument) {
  Tasks *p = argument;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
    if (i >= p->count) return NULL;
    p->work(p->tasks + i * p->size);
  }
}

static void take_all(void *argument) { take(argument); }

static void *wait_for_calls(void *argument) {
  (void)argument;
  for (int64_t seen = 0;;) {
    for (int i = 0; i < SPINS && __atomic_load_n(&team.calls, __ATOMIC_ACQUIRE) == seen; i++) PAUSE();
    pthread_mutex_lock(&team.lock);
    while (team.calls == seen) pthread_cond_wait(&team.called, &team.lock);
    seen = team.calls;
    Tasks *tasks = team.tasks;
    if (tasks) {
      team.joined++;
      pthread_mutex_unlock(&team.lock);
      take(tasks);
      pthread_mutex_lock(&team.lock);
      if (--team.joined == 0) pthread_cond_signal(&team.left);
    }
    pthread_mutex_unlock(&team.lock);
  }
  return NULL;
}

// Takes the team for a call unless it is in use, and starts missing threads as far as possible.
static int enter(Tasks *p) {
  pthread_mutex_lock(&team.lock);
  const int free = !team.in_use;
  if (free) {
    team.in_use = 1;
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (team.started < p->count - 1 &&
           pthread_create(&thread, &detached, wait_for_calls, NULL) == 0)
      team.started++;
    pthread_attr_destroy(&detached);
    team.tasks = p;
    __atomic_store_n(&team.calls, team.calls + 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&team.called);
  }
  pthread_mutex_unlock(&team.lock);
  return free;
}

static void leave(void) {
  pthread_mutex_lock(&team.lock);
  team.tasks = NULL;
  while (team.joined) pthread_cond_wait(&team.left, &team.lock);
  team.in_use = 0;
  pthread_mutex_unlock(&team.lock);
}

void parallel_for(Tasks *p, Pool pool) {
  if (pool && p->count > 1) {
    pool(take_all, p, (unsigned)p->count, 0);
  } else if (p->count > 1 && enter(p)) {
    take(p);
    leave();
  } else {
    take(p);
  }
}

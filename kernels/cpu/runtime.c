// Threads of the kernels for the CPU.

#include "runtime.h"

#include <pthread.h>

Pool griffin_team = NULL;

EXPORT void griffin_pool(void *gomp_parallel) { griffin_team = (Pool)gomp_parallel; }

static void *take(void *argument) {
  Tasks *p = argument;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
    if (i >= p->count) return NULL;
    p->work(p->tasks + i * p->size);
  }
}

static void take_all(void *argument) { take(argument); }

void parallel_for(Tasks *p, Pool team) {
  if (team && p->count > 1) {
    team(take_all, p, (unsigned)p->count, 0);
    return;
  }
  pthread_t others[MOST_THREADS];
  int64_t started = 0;
  while (started < p->count - 1 && pthread_create(&others[started], NULL, take, p) == 0) started++;
  take(p);
  for (int64_t i = 0; i < started; i++) pthread_join(others[i], NULL);
}

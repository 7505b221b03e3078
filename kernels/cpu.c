// Threads of the kernels for the CPU, and what XLA asks of each of them.

#include "cpu.h"

#include <pthread.h>

Pool griffin_team = NULL;
int64_t griffin_threads = 1;

EXPORT void griffin_pool(void *gomp_parallel) { griffin_team = (Pool)gomp_parallel; }

EXPORT void griffin_xla_threads(int64_t threads) { griffin_threads = threads; }

static void *take(void *argument) {
  Parts *p = argument;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&p->next, 1, __ATOMIC_RELAXED);
    if (i >= p->count) return NULL;
    p->work(p->parts + i * p->size);
  }
}

static void take_all(void *argument) { take(argument); }

void share_out(Parts *p, Pool team) {
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

int only_asked(CallFrame *frame) {
  enum { METADATA = 1 };
  Extension *extension = frame->extension_start;
  if (!extension || extension->type != METADATA) return 0;
  Metadata *metadata = ((MetadataExtension *)extension)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 3;
  return 1;
}

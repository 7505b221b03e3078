// XLA's calls of the kernels: number of threads, and version of the interface.

#include "runtime.h"

int64_t griffin_threads = 1;

EXPORT void griffin_xla_threads(int64_t threads) { griffin_threads = threads; }

int is_metadata_query(CallFrame *frame) {
  enum { METADATA = 1 };
  Extension *extension = frame->extension_start;
  if (!extension || extension->type != METADATA) return 0;
  Metadata *metadata = ((MetadataExtension *)extension)->metadata;
  metadata->api_version.major_version = 0;
  metadata->api_version.minor_version = 3;
  return 1;
}

// The RG-LRU and its scan on a CPU, in float32: forward and backward, for PyTorch (ctypes) and JAX
// (XLA's foreign function interface). See cpu_torch.py for the arguments and reference.py for the
// operations.
//
// Columns are independent, so every worker takes blocks of columns and goes through the tokens of all
// segments, a row of a block at a time, with the state of the block in its cache. Loops over columns
// are written for the compiler to vectorise.

#include "../cpu/runtime.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum {
  BLOCK = 272,        // largest number of columns of a block in the gated kernels
  SCAN_BLOCK = 2064,  // the same in the scan, which streams better over long rows
  AHEAD = 4,          // rows between prefetching and reading
  ROWS = 8,           // rows for which the scan keeps the state of 64 columns in registers
  LARGE = 1 << 22,    // elements of an output that exceeds every cache
};

typedef enum { SCAN, SCAN_BACKWARD, GATED, GATED_BACKWARD } Kind;

typedef struct {
  Kind kind;
  int64_t tokens;    // rows of the token arrays, N
  int64_t width;     // columns, D
  int64_t gates;     // blocks of the gates, G; 0 without gates
  int64_t segments;  // S
  int64_t low, high; // range of tokens to read; the gates' products hold only these
  const int32_t *starts, *lengths;  // NULL: S segments of N / S tokens
  const uint8_t *resets;            // NULL: no resets
  const float *a, *x, *input, *recurrent, *input_bias, *recurrent_bias, *decay;
  const float *h0, *h, *dh, *dlast;
  float *out, *last;  // forward; `last` holds the initial states, then the final ones
  float *da, *dx, *dinput, *drecurrent, *ddecay, *dh0;  // backward
} Job;

// ---- arithmetic of one element --------------------------------------------------------------

INLINE float clamp(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// 1 + exp(-x), clamped so that its square is finite.
INLINE float one_and_exp(float x) {
  float scale, rest;
  split_exp(clamp(-x, -40.0f, 40.0f), &scale, &rest);
  return (1.0f + scale) + scale * rest;
}

INLINE float sigmoid(float x) { return 1.0f / one_and_exp(x); }

typedef struct {
  float r, i, a, square;  // gates, decay, 1 - a^2
} Gate;

INLINE Gate gate(float input, float recurrent, float decay) {
  Gate g;
  float scale, rest;
  const float below_r = one_and_exp(recurrent), below_i = one_and_exp(input);
  const float both = 1.0f / (below_r * below_i);  // one division instead of two
  g.r = below_i * both;
  g.i = below_r * both;
  const float log_a = decay * g.r;
  split_exp(log_a < -87.0f ? -87.0f : log_a, &scale, &rest);
  float less = (scale - 1.0f) + scale * rest;  // a - 1, exact where a is near 1
  g.a = 1.0f + less;
  g.square = -less * (1.0f + g.a);
  return g;
}

// ---- one row of a block: n columns of one token ---------------------------------------------

// Writes a row of an output, bypassing the caches if they cannot hold it.
INLINE void store_row(float *RESTRICT out, const float *RESTRICT values, int n, int stream) {
#if defined(__x86_64__)
  if (stream && ((uintptr_t)out & 15) == 0) {
    int c = 0;
    for (; c + 4 <= n; c += 4) _mm_stream_ps(out + c, _mm_loadu_ps(values + c));
    for (; c < n; c++) out[c] = values[c];
    return;
  }
#endif
  (void)stream;
  memcpy(out, values, n * sizeof(float));
}

// Orders writes that bypassed the caches before another thread reads them.
INLINE void store_fence(void) {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

enum { STRIP = 4 };

// Scans rows of n columns, D apart. h: state before and after. `out` may be x.
INLINE void scan_rows(int n, int64_t rows, int64_t D, const uint8_t *resets, const float *RESTRICT a,
                      const float *x, float *RESTRICT h, float *out, int stream) {
  int c = 0;
  for (; c + STRIP * LANES <= n; c += STRIP * LANES) {
    Vector state[STRIP];
    for (int k = 0; k < STRIP; k++) state[k] = *(const Stored *)(h + c + k * LANES);
    for (int64_t t = 0; t < rows; t++) {
      for (int k = 0; k < STRIP; k++) {
        const int64_t at = t * D + c + k * LANES;
        const Vector input = *(const Stored *)(x + at), decay = *(const Stored *)(a + at);
        state[k] = resets && resets[t] ? input : decay * state[k] + input;
      }
      store_row(out + t * D + c, (const float *)state, STRIP * LANES, stream);
    }
    for (int k = 0; k < STRIP; k++) *(Stored *)(h + c + k * LANES) = state[k];
  }
  for (; c < n; c++) {
    for (int64_t t = 0; t < rows; t++) {
      const int64_t at = t * D + c;
      out[at] = h[c] = resets && resets[t] ? x[at] : a[at] * h[c] + x[at];
    }
  }
}

// g: gradient that later steps pass to h_t; on return the gradient for h_{t-1}.
INLINE void scan_row_backward(int n, int reset, const float *RESTRICT a, const float *RESTRICT before,
                              const float *RESTRICT dh, float *RESTRICT g, float *RESTRICT da,
                              float *RESTRICT dx) {
  for (int c = 0; c < n; c++) {
    float total = g[c] + dh[c];
    dx[c] = total;
    da[c] = reset ? 0.0f : total * before[c];
    g[c] = reset ? 0.0f : total * a[c];
  }
}

// Inputs of a row of a gated kernel, from its first column on. Rows of a block are too far apart for
// the hardware prefetcher: the row AHEAD of the current one is prefetched, a line at a time.
typedef struct {
  int reset;
  const float *x, *input, *recurrent, *input_bias, *recurrent_bias, *decay;
  const float *before, *dh;     // backward
  int64_t next, next_product;   // distance to the prefetched row
} Row;

INLINE void prefetch(const Row *r, int c) {
  __builtin_prefetch(r->x + c + r->next);
  __builtin_prefetch(r->input + c + r->next_product);
  __builtin_prefetch(r->recurrent + c + r->next_product);
}

INLINE void gated_columns(int low, int high, const Row *r, float *RESTRICT h) {
  for (int c = low; c < high; c++) {
    const float input = r->input[c] + r->input_bias[c];
    Gate g = gate(input, r->recurrent[c] + r->recurrent_bias[c], r->decay[c]);
    h[c] = g.a * h[c] + __builtin_sqrtf(g.square) * g.i * r->x[c];
  }
}

INLINE void gated_row(int n, const Row *r, float *RESTRICT h) {
  if (r->reset) {
    for (int c = 0; c < n; c++) h[c] = sigmoid(r->input[c] + r->input_bias[c]) * r->x[c];
    return;
  }
  int c = 0;
  for (; c + LANES <= n; c += LANES) {
    prefetch(r, c);
    gated_columns(c, c + LANES, r, h);
  }
  gated_columns(c, n, r, h);
}

INLINE void gated_columns_backward(int low, int high, const Row *r, float *RESTRICT carry,
                                   float *RESTRICT dx, float *RESTRICT dinput,
                                   float *RESTRICT drecurrent, float *RESTRICT ddecay) {
  const float keep = r->reset ? 0.0f : 1.0f;
  for (int c = low; c < high; c++) {
    const float input = r->input[c] + r->input_bias[c], x = r->x[c], decay = r->decay[c];
    Gate g = gate(input, r->recurrent[c] + r->recurrent_bias[c], decay);
    float root = r->reset ? 1.0f : __builtin_sqrtf(g.square), total = carry[c] + r->dh[c];
    float slope = 4.0f * g.square < 1e-6f ? 1e-6f : 4.0f * g.square;  // limits the slope to 1000
    slope = 1.0f / __builtin_sqrtf(slope);
    dx[c] = total * root * g.i;
    dinput[c] = total * root * x * g.i * (1.0f - g.i);
    // d a = total * h_{t-1}; d (1 - a^2) = total * i * x * slope; both through log a = decay * r
    float dlog = keep * (total * r->before[c] - 2.0f * g.a * (total * g.i * x * slope)) * g.a;
    drecurrent[c] = dlog * decay * g.r * (1.0f - g.r);
    ddecay[c] += dlog * g.r;
    carry[c] = keep * total * g.a;
  }
}

INLINE void gated_row_backward(int n, const Row *r, float *RESTRICT carry, float *RESTRICT dx,
                               float *RESTRICT dinput, float *RESTRICT drecurrent,
                               float *RESTRICT ddecay) {
  int c = 0;
  for (; c + LANES <= n; c += LANES) {
    prefetch(r, c);
    __builtin_prefetch(r->before + c + r->next), __builtin_prefetch(r->dh + c + r->next);
    gated_columns_backward(c, c + LANES, r, carry, dx, dinput, drecurrent, ddecay);
  }
  gated_columns_backward(c, n, r, carry, dx, dinput, drecurrent, ddecay);
}

// ---- one block of columns, over all tokens --------------------------------------------------

INLINE int64_t start(const Job *j, int64_t s) {
  return j->starts ? j->starts[s] : s * (j->tokens / j->segments);
}

INLINE int64_t end(const Job *j, int64_t s) {
  return start(j, s) + (j->lengths ? j->lengths[s] : j->tokens / j->segments);
}

INLINE int reset(const Job *j, int64_t t) { return j->resets && j->resets[t]; }

// Position of a gate's product for token t and this column, in [G, tokens, D / G].
INLINE int64_t product(const Job *j, int64_t t, int64_t column) {
  const int64_t size = j->width / j->gates, gate = column / size;
  return (gate * (j->high - j->low) + t - j->low) * size + column - gate * size;
}

// Inputs of token t in the gated kernels, with prefetching `steps` tokens ahead.
INLINE Row row(const Job *j, int64_t t, int64_t column, int64_t steps) {
  const int64_t at = t * j->width + column, of = product(j, t, column);
  return (Row){reset(j, t),
               j->x + at,
               j->input + of,
               j->recurrent + of,
               j->input_bias + column,
               j->recurrent_bias + column,
               j->decay + column,
               NULL,
               NULL,
               steps * j->width,
               steps * (j->width / j->gates)};
}

EVERY_CPU static void forward(const Job *j, int64_t column, int n) {
  const int64_t D = j->width;
  const int stream = j->tokens * D >= LARGE;
  float h[SCAN_BLOCK] __attribute__((aligned(64)));
  int64_t done = j->low;
  for (int64_t s = 0; s <= j->segments; s++) {
    const int more = s < j->segments;
    const int64_t from = more ? limit(start(j, s), done, j->high) : j->high;
    for (int64_t t = done; t < from; t++) memset(j->out + t * D + column, 0, n * sizeof(float));
    if (!more) break;
    done = limit(end(j, s), from, j->high);
    if (done == from) continue;
    memcpy(h, j->last + s * D + column, n * sizeof(float));
    if (j->kind == SCAN) {
      for (int64_t t = from; t < done; t += ROWS) {
        const int64_t at = t * D + column, rows = t + ROWS < done ? ROWS : done - t;
        const uint8_t *resets = j->resets ? j->resets + t : NULL;
        scan_rows(n, rows, D, resets, j->a + at, j->x + at, h, j->out + at, stream);
      }
    } else {
      for (int64_t t = from; t < done; t++) {
        const Row r = row(j, t, column, AHEAD);
        gated_row(n, &r, h);
        store_row(j->out + t * D + column, h, n, stream);
      }
    }
    memcpy(j->last + s * D + column, h, n * sizeof(float));
  }
}

EVERY_CPU static void backward(const Job *j, int64_t column, int n) {
  const int64_t D = j->width;
  const int stream = j->tokens * D >= LARGE;
  float carry[SCAN_BLOCK], da[SCAN_BLOCK], dx[SCAN_BLOCK], dinput[BLOCK], drecurrent[BLOCK];
  const size_t bytes = n * sizeof(float);
  int64_t done = j->tokens;
  if (j->kind == GATED_BACKWARD) memset(j->ddecay + column, 0, bytes);
  for (int64_t s = j->segments - 1; s >= -1; s--) {
    const int more = s >= 0;
    const int64_t from = more ? limit(end(j, s), 0, done) : 0;
    for (int64_t t = from; t < done; t++) {
      memset(j->dx + t * D + column, 0, bytes);
      if (j->kind == SCAN_BACKWARD) {
        memset(j->da + t * D + column, 0, bytes);
      } else {
        memset(j->dinput + product(j, t, column), 0, bytes);
        memset(j->drecurrent + product(j, t, column), 0, bytes);
      }
    }
    if (!more) break;
    done = limit(start(j, s), 0, from);
    memcpy(carry, j->dlast + s * D + column, bytes);
    for (int64_t t = from - 1; t >= done; t--) {
      const int64_t at = t * D + column;
      const float *before = t > done ? j->h + at - D : j->h0 + s * D + column;
      if (j->kind == SCAN_BACKWARD) {
        scan_row_backward(n, reset(j, t), j->a + at, before, j->dh + at, carry, da, dx);
        store_row(j->da + at, da, n, stream);
        store_row(j->dx + at, dx, n, stream);
      } else {
        const int64_t of = product(j, t, column);
        Row r = row(j, t, column, -AHEAD);
        r.before = before, r.dh = j->dh + at;
        gated_row_backward(n, &r, carry, dx, dinput, drecurrent, j->ddecay + column);
        store_row(j->dx + at, dx, n, stream);
        store_row(j->dinput + of, dinput, n, stream);
        store_row(j->drecurrent + of, drecurrent, n, stream);
      }
    }
    memcpy(j->dh0 + s * D + column, carry, bytes);
  }
}

// ---- workers --------------------------------------------------------------------------------

typedef struct {
  const Job *job;
  int64_t first, end;   // range of blocks of columns
  int64_t size, pieces; // columns of a gate, and its number of blocks: no block spans two gates
} Share;

static int64_t edge(const Share *share, int64_t piece) {
  return piece == share->pieces ? share->size : share->size * piece / share->pieces & ~(int64_t)15;
}

static void *work(void *argument) {
  const Share *share = argument;
  const Job *j = share->job;
  for (int64_t b = share->first; b < share->end; b++) {
    const int64_t gate = b / share->pieces, piece = b % share->pieces;
    const int64_t low = edge(share, piece), n = edge(share, piece + 1) - low;
    if (j->kind == SCAN || j->kind == GATED)
      forward(j, gate * share->size + low, (int)n);
    else
      backward(j, gate * share->size + low, (int)n);
  }
  store_fence();
  return NULL;
}

static int64_t ceiling(int64_t a, int64_t b) { return (a + b - 1) / b; }

static void run(const Job *j, int64_t threads, Pool team) {
  // A thread takes tens of microseconds to start, and needs more work than that.
  const int64_t enough = (j->gates ? 1 << 15 : 1 << 18) >> (team ? 2 : 0);
  const int64_t worth = (j->high - j->low) * j->width / enough;
  if (threads > worth) threads = worth;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads < 1) threads = 1;
  Share shares[MAX_THREADS];
  const int64_t gates = j->gates ? j->gates : 1, size = j->width / gates;
  int64_t pieces = ceiling(size, j->gates ? BLOCK - 16 : SCAN_BLOCK - 16);
  if (pieces * gates < threads) pieces = ceiling(threads, gates);
  const int64_t all = gates * pieces;
  for (int64_t i = 0; i < threads; i++) {
    shares[i] = (Share){j, all * i / threads, all * (i + 1) / threads, size, pieces};
  }
  parallel_for(&(Tasks){work, (char *)shares, sizeof *shares, threads, 0}, team);
}

// Reads the arrays of each kind, in order; h may overwrite x. `sizes` is N, D, G, S, low, high.
static void compute(int kind, const int64_t *sizes, void *const *in, void *const *out,
                    int64_t threads, Pool team) {
  Job j = {.kind = (Kind)kind,
           .tokens = sizes[0],
           .width = sizes[1],
           .gates = sizes[2],
           .segments = sizes[3],
           .low = sizes[4],
           .high = sizes[5],
           .starts = in[0],
           .lengths = in[1],
           .resets = in[2]};
  if (j.width == 0) return;
  switch (j.kind) {
    case SCAN:
      j.a = in[3], j.x = in[4];
      j.out = out[0], j.last = out[1];
      break;
    case SCAN_BACKWARD:
      j.a = in[3], j.h0 = in[4], j.h = in[5], j.dh = in[6], j.dlast = in[7];
      j.da = out[0], j.dx = out[1], j.dh0 = out[2];
      break;
    case GATED:
    case GATED_BACKWARD:
      j.x = in[3], j.input = in[4], j.recurrent = in[5];
      j.input_bias = in[6], j.recurrent_bias = in[7], j.decay = in[8];
      if (j.kind == GATED) {
        j.out = out[0], j.last = out[1];
      } else {
        j.h0 = in[9], j.h = in[10], j.dh = in[11], j.dlast = in[12];
        j.dx = out[0], j.dinput = out[1], j.drecurrent = out[2];
        j.ddecay = out[3], j.dh0 = out[4];
      }
      break;
  }
  run(&j, threads, team);
}

EXPORT void griffin_rglru(int kind, const int64_t *sizes, void *const *in, void *const *out,
                          int64_t threads) {
  compute(kind, sizes, in, out, threads, griffin_team);
}

// out = a + x: the lower bound of the scan's time, for benchmarks. n is a multiple of 4.
typedef struct {
  const float *a, *x;
  float *out;
  int64_t n;
} Sum;

EVERY_CPU static void *sum(void *argument) {
  const Sum *s = argument;
  float part[64];
  for (int64_t i = 0; i < s->n; i += 64) {
    const int count = s->n - i < 64 ? (int)(s->n - i) : 64;
    for (int k = 0; k < count; k++) part[k] = s->a[i + k] + s->x[i + k];
    store_row(s->out + i, part, count, s->n >= LARGE / 2);
  }
  store_fence();
  return NULL;
}

EXPORT void griffin_sum(const float *a, const float *x, float *out, int64_t n, int64_t threads) {
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads < 1 || n < 1 << 18) threads = 1;
  Sum shares[MAX_THREADS];
  for (int64_t i = 0; i < threads; i++) {
    const int64_t low = n * i / threads & ~(int64_t)15;
    const int64_t high = i == threads - 1 ? n : n * (i + 1) / threads & ~(int64_t)15;
    shares[i] = (Sum){a + low, x + low, out + low, high - low};
  }
  parallel_for(&(Tasks){sum, (char *)shares, sizeof *shares, threads, 0}, griffin_team);
}

// ---- XLA ------------------------------------------------------------------------------------

// Inputs are those of griffin_rglru, followed by the initial states, which griffin_rglru takes in
// `last`. Token arrays may be [B, T, D]; `resets` is [N].
static void *call(Kind kind, CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  enum { MAX_ARRAYS = 16 };
  void *in[MAX_ARRAYS], *out[MAX_ARRAYS];
  Buffer **arrays = frame->in.values, **results = frame->out.values;
  for (int64_t i = 0; i < frame->in.size; i++) in[i] = arrays[i]->data;
  for (int64_t i = 0; i < frame->out.size; i++) out[i] = results[i]->data;
  const int gated = kind == GATED || kind == GATED_BACKWARD;
  const Buffer *x = arrays[3], *resets = arrays[2];
  const int64_t tokens = resets->dims[0], width = x->dims[x->rank - 1];
  const int64_t sizes[] = {tokens, width,  gated ? arrays[4]->dims[0] : 0,
                           arrays[0]->dims[0], 0, tokens};
  if (kind == SCAN || kind == GATED) {
    memcpy(out[1], in[frame->in.size - 1], sizes[3] * width * sizeof(float));
  }
  compute(kind, sizes, in, out, griffin_threads, NULL);
  return NULL;
}

EXPORT void *griffin_xla_scan(CallFrame *frame) { return call(SCAN, frame); }
EXPORT void *griffin_xla_scan_backward(CallFrame *frame) { return call(SCAN_BACKWARD, frame); }
EXPORT void *griffin_xla_gated(CallFrame *frame) { return call(GATED, frame); }
EXPORT void *griffin_xla_gated_backward(CallFrame *frame) { return call(GATED_BACKWARD, frame); }

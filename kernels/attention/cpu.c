// Causal attention over remembered keys and new ones on a CPU, for PyTorch (ctypes) and JAX (XLA's
// foreign function interface). See reference.py for the operation and cpu_torch.py for the arguments.
// Arrays of 16 bits are read and written as such; all arithmetic is in float32.
//
// Workers take blocks of QUERIES (token, head) pairs of one segment that share the keys of one key
// head, and loop over the keys a few at a time. Queries lie side by side in vectors, so that maxima,
// sums and masks are computed for whole vectors; the softmax is rescaled at each new maximum (Milakov
// and Gimelshein 2018, arXiv:1805.02867). Keys that no query of a block sees are not read.

#include "../cpu/floats.h"

enum { QUERIES = 64, KEYS = 64, MAX_SIZE = 256, ROWS = 6 };

static const float UNSEEN = -1e30f;

typedef struct {
  int64_t tokens, heads, key_heads, size, segments;
  // Key j of segment s, counted from the first new one, is in slot (newest[s] + j) modulo `slots` of
  // row s of `k`: slots are a ring. In packed segments, new keys are rows (starts[s] + j) of `k`, and
  // older ones are in row rows[s] of `old_k`. A slot holds all key heads.
  int64_t slots;
  const int32_t *newest, *starts, *lengths, *max_age, *rows;  // `rows` is null unless packed
  Type type;  // dtype of the arrays below
  const void *q, *k, *v, *old_k, *old_v;
  void *out;
  int64_t next;  // next block
} Job;

typedef struct {
  int32_t low[QUERIES], high[QUERIES];  // range of keys that each query sees
  float maximum[QUERIES], total[QUERIES];  // maximum of the scores so far, sum of their exponentials
  float q[MAX_SIZE * QUERIES], sums[MAX_SIZE * QUERIES], scores[KEYS * QUERIES];
  float k[KEYS * MAX_SIZE], v[KEYS * MAX_SIZE];  // copies of keys and values, if needed
} Block;

// c[i] += sum over l of a[i * row + l * step] * b[l], for LANES columns of b and c.
INLINE void rows_of_product(int rows, int64_t depth, const float *a, int64_t row, int64_t step,
                            const float *b, float *c) {
  Vector sum[ROWS];
  for (int i = 0; i < rows; i++) sum[i] = *(const Stored *)(c + i * QUERIES);
  for (int64_t l = 0; l < depth; l++) {
    const Vector right = *(const Stored *)(b + l * QUERIES);
    for (int i = 0; i < rows; i++) sum[i] += a[i * row + l * step] * right;
  }
  for (int i = 0; i < rows; i++) *(Stored *)(c + i * QUERIES) = sum[i];
}

INLINE void add_product(int width, int64_t rows, int64_t depth, const float *a, int64_t row,
                        int64_t step, const float *b, float *c) {
  for (int at = 0; at < width; at += LANES) {
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS)
      rows_of_product(ROWS, depth, a + i * row, row, step, b + at, c + i * QUERIES + at);
    for (; i + 2 <= rows; i += 2)
      rows_of_product(2, depth, a + i * row, row, step, b + at, c + i * QUERIES + at);
    for (; i < rows; i++)
      rows_of_product(1, depth, a + i * row, row, step, b + at, c + i * QUERIES + at);
  }
}

INLINE float exp_of(float x) {  // x <= 0
  float scale, rest;
  split_exp(x < -87.0f ? -87.0f : x, &scale, &rest);
  return scale + scale * rest;
}

// Copies `count` vectors of `size` numbers, `row` numbers apart from `start` on, to contiguous memory.
INLINE void copy(const void *from, int64_t start, int64_t row, int64_t size, int count, float *to,
                 Type type) {
  const int whole = row == size;  // contiguous already
  for (int i = 0; i < (whole ? 1 : count); i++)
    widen(from, start + i * row, whole ? count * size : size, to + i * size, type);
}

// Adds `count` keys of a head, from key `first` and row `at` on, to a block of `width` queries. Keys
// after the first `straight` ones are at the beginning of the ring.
INLINE void read_keys(const Job *j, Block *b, int width, int64_t head, int32_t first, int count,
                      int straight, const void *keys, const void *values, int64_t at, Type type) {
  int64_t row = j->key_heads * j->size;  // distance between keys
  const int64_t start = at * row + head * j->size;
  const float *k = (const float *)keys + start, *v = (const float *)values + start;
  if (type != FLOAT32 || straight < count) {
    const int64_t rest = start + (straight - j->slots) * row, done = straight * j->size;
    copy(keys, start, row, j->size, straight, b->k, type);
    copy(keys, rest, row, j->size, count - straight, b->k + done, type);
    copy(values, start, row, j->size, straight, b->v, type);
    copy(values, rest, row, j->size, count - straight, b->v + done, type);
    k = b->k, v = b->v, row = j->size;
  }
  memset(b->scores, 0, count * QUERIES * sizeof(float));
  add_product(width, count, j->size, k, row, 1, b->q, b->scores);
  float maximum[QUERIES], rescale[QUERIES];
  memcpy(maximum, b->maximum, sizeof maximum);
  for (int i = 0; i < count; i++) {
    float *s = b->scores + i * QUERIES;
    for (int c = 0; c < width; c++) {
      s[c] = first + i >= b->low[c] && first + i <= b->high[c] ? s[c] : UNSEEN;
      maximum[c] = s[c] > maximum[c] ? s[c] : maximum[c];
    }
  }
  for (int c = 0; c < width; c++) {
    rescale[c] = exp_of(b->maximum[c] - maximum[c]);
    b->maximum[c] = maximum[c];
    b->total[c] *= rescale[c];
  }
  for (int i = 0; i < count; i++) {
    float *s = b->scores + i * QUERIES;
    for (int c = 0; c < width; c++) {
      const float weight = exp_of(s[c] - maximum[c]);
      s[c] = s[c] <= UNSEEN ? 0.0f : weight;
      b->total[c] += s[c];
    }
  }
  for (int64_t d = 0; d < j->size; d++)
    for (int c = 0; c < width; c++) b->sums[d * QUERIES + c] *= rescale[c];
  add_product(width, j->size, count, v, 1, row, b->scores, b->sums);
}

INLINE int64_t start_of(const Job *j, int64_t segment) {
  return limit(j->starts[segment], 0, j->tokens);
}

// Number of tokens to read of a segment: its length, limited by the start of the next segment.
INLINE int64_t length_of(const Job *j, int64_t segment) {
  const int64_t start = start_of(j, segment);
  int64_t end = j->tokens;
  for (int64_t s = segment + 1; s < j->segments; s++) {
    if (j->lengths[s] <= 0 || start_of(j, s) < start) continue;
    end = start_of(j, s);
    break;
  }
  return limit(j->lengths[segment], 0, end - start);
}

// Index of the vector of a query in `q` and `out`: the `number`th query head of a key head.
INLINE int64_t place(const Job *j, int64_t token, int64_t head, int64_t number) {
  return token * j->heads + head * (j->heads / j->key_heads) + number;
}

INLINE void attend(const Job *j, Block *b, int64_t segment, int64_t head, int64_t from, Type type) {
  const int64_t D = j->size, H = j->heads / j->key_heads, start = start_of(j, segment);
  const int64_t left = length_of(j, segment) * H - from;
  const int queries = left < QUERIES ? (int)left : QUERIES;
  const int width = (queries + LANES - 1) / LANES * LANES;
  const float scale = 1.0f / __builtin_sqrtf((float)D);
  int32_t first = 0, last = 0;
  for (int c = 0; c < width; c++) {  // pad with the last query
    const int64_t query = from + (c < queries ? c : queries - 1), token = query / H;
    const int64_t q = place(j, start + token, head, query % H) * D;
    b->high[c] = last = (int32_t)token;
    b->low[c] = (int32_t)token - j->max_age[start + token];
    first = c == 0 || b->low[c] < first ? b->low[c] : first;
    b->maximum[c] = UNSEEN, b->total[c] = 0.0f;
    for (int64_t d = 0; d < D; d++) b->q[d * QUERIES + c] = load_one(j->q, q + d, type) * scale;
  }
  memset(b->sums, 0, D * QUERIES * sizeof(float));
  for (int32_t key = first; key <= last;) {
    const int32_t more = (key < 0 ? 0 : last + 1) - key;
    const int count = more < KEYS ? more : KEYS;
    if (j->rows && key >= 0) {
      read_keys(j, b, width, head, key, count, count, j->k, j->v, start + key, type);
    } else {
      const int64_t row = j->rows ? j->rows[segment] : segment, slot = j->newest[segment] + key;
      const int straight = slot < 0 && slot + count > 0 ? (int)-slot : count;
      const int64_t at = row * j->slots + slot + (slot < 0 ? j->slots : 0);
      read_keys(j, b, width, head, key, count, straight, j->old_k, j->old_v, at, type);
    }
    key += count;
  }
  for (int c = 0; c < queries; c++) {
    const int64_t query = from + c, out = place(j, start + query / H, head, query % H) * D;
    for (int64_t d = 0; d < D; d++)
      store_one(j->out, out + d, b->sums[d * QUERIES + c] / b->total[c], type);
  }
}

// Number of blocks of a segment per key head.
INLINE int64_t blocks(const Job *j, int64_t segment) {
  return (length_of(j, segment) * (j->heads / j->key_heads) + QUERIES - 1) / QUERIES;
}

EVERY_CPU static void *work(void *argument) {
  Job *j = argument;
  Block b;
  int64_t segment = 0, before = 0;
  for (;;) {
    const int64_t i = __atomic_fetch_add(&j->next, 1, __ATOMIC_RELAXED);
    while (segment < j->segments && i >= before + j->key_heads * blocks(j, segment)) {
      before += j->key_heads * blocks(j, segment++);
    }
    if (segment == j->segments) return NULL;
    const int64_t head = (i - before) / blocks(j, segment);
    const int64_t from = (i - before) % blocks(j, segment) * QUERIES;
    if (j->type == FLOAT32) attend(j, &b, segment, head, from, FLOAT32);
    else if (j->type == BFLOAT16) attend(j, &b, segment, head, from, BFLOAT16);
    else attend(j, &b, segment, head, from, FLOAT16);
  }
}

static void run(Job *j, int64_t threads, Pool team) {
  int64_t done = 0, all = 0;
  const int64_t row = j->heads * j->size * (int64_t)bytes_of(j->type);
  for (int64_t s = 0; s <= j->segments; s++) {  // zero the tokens outside all segments
    const int64_t start = s < j->segments ? start_of(j, s) : j->tokens;
    if (start > done) memset((char *)j->out + done * row, 0, (start - done) * row);
    if (s == j->segments) break;
    done = start + length_of(j, s);
    all += j->key_heads * blocks(j, s);
  }
  if (threads > all) threads = all;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  if (threads > 0) parallel_for(&(Tasks){work, (char *)j, 0, threads, 0}, team);
}

EXPORT void griffin_attention(const int64_t *sizes, void *const *in, void *out, int64_t threads) {
  Job j = {.tokens = sizes[0],
           .heads = sizes[1],
           .key_heads = sizes[2],
           .size = sizes[3],
           .segments = sizes[4],
           .slots = sizes[5],
           .type = (Type)sizes[6],
           .newest = in[0],
           .starts = in[1],
           .lengths = in[2],
           .max_age = in[3],
           .rows = in[4],
           .q = in[5],
           .k = in[6],
           .v = in[7],
           .old_k = in[8],
           .old_v = in[9],
           .out = out};
  run(&j, threads, griffin_team);
}

// The arrays are those of griffin_attention, `rows` last; unless packed, keys and values are given
// once, without rows.
EXPORT void *griffin_xla_attention(CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  Buffer **in = frame->in.values;
  const Buffer *starts = in[1], *q = in[4], *k = in[5], *v = in[6];
  const int packed = frame->in.size > 7;
  const Buffer *old_k = packed ? in[7] : k, *old_v = packed ? in[8] : v;
  Job j = {.tokens = q->dims[0],
           .heads = q->dims[1],
           .key_heads = k->dims[packed ? 1 : 2] / q->dims[2],
           .size = q->dims[2],
           .segments = starts->dims[0],
           .slots = old_k->dims[1],
           .newest = in[0]->data,
           .type = type_of(q),
           .starts = starts->data,
           .lengths = in[2]->data,
           .max_age = in[3]->data,
           .rows = packed ? in[9]->data : NULL,
           .q = q->data,
           .k = k->data,
           .v = v->data,
           .old_k = old_k->data,
           .old_v = old_v->data,
           .out = frame->out.values[0]->data};
  run(&j, griffin_threads, NULL);
  return NULL;
}

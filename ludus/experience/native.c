/* Inner loops of the replay: the sum tree (sum_tree.py), slots of items (storage.py), copying rows (reader.py).

   Where this file is not compiled, Python does the same work, with equal results to the bit (tested). Most of the gain
   comes from prefetching memory. The functions are called through ctypes, which releases the GIL; a replay may be used
   by one thread at a time. Indices are checked before anything is read or written. VERSION is a checksum of this file,
   set by the build. */

#include <stdint.h>
#include <string.h>

#define AHEAD 28  /* rows to prefetch before they are copied */
#define CACHE_LINE 64
#define LANES 4
#define LARGEST 1.7976931348623157e308
#define MAX_LEVELS 16
#define FEW_LINES 8 /* cache lines of a row to prefetch; the processor fetches the rest by itself */

typedef double Reals __attribute__((vector_size(16)));
typedef int64_t Integers __attribute__((vector_size(16)));

typedef struct {
    int64_t capacity, width, levels, tops;
    double *flat[MAX_LEVELS]; /* from the leaves up; flat[levels] is the top */
    double *ends;             /* 0, then the running sum over the top */
} Tree;

typedef struct {
    int64_t length, batch;
    const int64_t *now, *oldest; /* by row: time of the last observation, and of the oldest complete one */
} SlotIndex;

typedef struct {
    const char *source;
    char *out;
    int64_t bytes, slots, rows; /* bytes of a row, rows of the source, rows of the output */
} Column;

int64_t ludus_version(void) { return VERSION; }

static void prefetch(const void *from, int64_t bytes) {
    const int64_t most = CACHE_LINE * FEW_LINES;
    for (int64_t i = 0; i < bytes && i < most; i += CACHE_LINE) __builtin_prefetch((const char *)from + i);
    if (bytes > 0 && bytes <= most) __builtin_prefetch((const char *)from + bytes - 1);
}

static inline __attribute__((always_inline)) void sum_blocks(const Tree *t, int64_t n, const int64_t *index,
                                                            const int64_t width) {
    for (int64_t level = 0, size = width; level < t->levels; level++, size *= width) {
        int64_t last = -1;
        for (int64_t i = 0; i < n; i++) {
            const int64_t node = index[i] / size;
            if (node == last) continue;
            const double *block = t->flat[level] + node * width;
            double sum = 0.0;
            for (int64_t j = 0; j < width; j++) sum += block[j];
            t->flat[level + 1][node] = sum;
            last = node;
        }
    }
}

/* Write values and recompute the sums above them; return 1 if an index or a value is invalid. */
int64_t ludus_tree_set(const Tree *t, int64_t n, const int64_t *index, const double *value) {
    for (int64_t i = 0; i < n; i++)
        if (index[i] < 0 || index[i] >= t->capacity || !(value[i] >= 0.0 && value[i] <= LARGEST)) return 1;
    for (int64_t i = 0; i < n; i++) t->flat[0][index[i]] = value[i];
    if (t->width == 16)
        sum_blocks(t, n, index, 16);
    else
        sum_blocks(t, n, index, t->width);
    return 0;
}

/* Compute the running sum over the top; return the sum of all values. */
double ludus_tree_total(const Tree *t) {
    double sum = 0.0;
    for (int64_t i = 0; i < t->tops; i++) t->ends[i + 1] = sum += t->flat[t->levels][i];
    return sum;
}

static double next_below(double x) { /* the largest double below x > 0; 0 for 0 */
    uint64_t bits;
    memcpy(&bits, &x, sizeof x);
    bits -= bits > 0;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Descend one level: from each node to its first child with a running sum above ``rest``, which is then reduced. */
static inline __attribute__((always_inline)) void descend(const Tree *t, int64_t level, int64_t n, double *rest,
                                                         int64_t *node, const int64_t width) {
    for (int64_t first = 0; first < n; first += LANES) {
        const double *block[LANES];
        double sought[LANES];
        Reals running[LANES / 2] = {{0.0}}, before[LANES / 2] = {{0.0}};
        Integers child[LANES / 2] = {{0}};
        for (int64_t k = 0; k < LANES; k++) {
            const int64_t i = first + k < n ? first + k : n - 1;
            const double whole = t->flat[level + 1][node[i]];
            block[k] = t->flat[level] + node[i] * width;
            sought[k] = rest[i] < whole ? rest[i] : next_below(whole);
        }
        for (int64_t j = 0; j < width; j++)
            for (int64_t pair = 0; pair < LANES / 2; pair++) {
                const Reals value = {block[2 * pair][j], block[2 * pair + 1][j]};
                running[pair] += value;
                const Integers passed = running[pair] <= (Reals){sought[2 * pair], sought[2 * pair + 1]};
                child[pair] -= passed;
                before[pair] += (Reals)((Integers)value & passed); /* the running sum before the child */
            }
        for (int64_t k = 0; k < LANES && first + k < n; k++) {
            const int64_t i = first + k;
            rest[i] = sought[k] - before[k / 2][k % 2];
            node[i] = node[i] * width + child[k / 2][k % 2];
            if (level) prefetch(t->flat[level - 1] + node[i] * width, width * (int64_t)sizeof(double));
        }
    }
}

/* Find indices for numbers in [0, 1), and their values; ``rest`` is scratch memory. Sorted numbers are faster. */
int64_t ludus_tree_sample(const Tree *t, int64_t n, const double *uniform, double *rest, int64_t *node, double *value) {
    const double total = t->ends[t->tops];
    for (int64_t i = 0, at = 0; i < n; i++) {
        const double x = uniform[i] * total;
        rest[i] = x < total ? x : next_below(total);
        if (!(rest[i] >= 0.0)) return 1;
        if (rest[i] < t->ends[at]) at = 0;
        while (t->ends[at + 1] <= rest[i]) at++;
        rest[i] -= t->ends[at];
        node[i] = at;
        if (t->levels) prefetch(t->flat[t->levels - 1] + at * t->width, t->width * (int64_t)sizeof(double));
    }
    for (int64_t level = t->levels; level-- > 0;)
        if (t->width == 16)
            descend(t, level, n, rest, node, 16);
        else
            descend(t, level, n, rest, node, t->width);
    for (int64_t i = 0; i < n; i++) value[i] = t->flat[0][node[i]];
    return 0;
}

/* Compute the slots [steps, n] of items and of the steps after them; numbers are time * batch + row. */
void ludus_slots(const SlotIndex *p, int64_t n, int64_t steps, const int64_t *numbers, int64_t *slots) {
    const int64_t batch = p->batch, length = p->length;
    for (int64_t i = 0; i < n; i++) {
        const int64_t time = batch > 1 ? numbers[i] / batch : numbers[i], row = batch > 1 ? numbers[i] % batch : 0;
        int64_t at = time % length;
        for (int64_t step = 0; step < steps; step++) {
            slots[step * n + i] = row * length + at;
            at = at + 1 < length ? at + 1 : 0;
        }
    }
}

/* Draw items by stratified sampling: their numbers, and their priorities over the smallest of them. ``uniform`` is in
   [0, 1), ``scratch`` is memory for 3 n numbers. Return 1 if there is nothing to draw. */
int64_t ludus_draw(const Tree *t, const SlotIndex *p, int64_t n, const double *uniform, double *scratch,
                   int64_t *numbers, float *ratio) {
    double *rest = scratch, *parts = scratch + n, *value = scratch + 2 * n, least = LARGEST;
    const double total = ludus_tree_total(t);
    if (!(total > 0.0 && total <= LARGEST)) return 1;
    for (int64_t i = 0; i < n; i++) parts[i] = ((double)i + uniform[i]) / (double)n;
    if (ludus_tree_sample(t, n, parts, rest, numbers, value)) return 1;
    for (int64_t i = 0; i < n; i++) least = value[i] < least ? value[i] : least;
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = p->batch > 1 ? numbers[i] / p->length : 0, slot = numbers[i] - row * p->length;
        const int64_t behind = (p->now[row] - slot) % p->length;
        numbers[i] = (p->now[row] - (behind < 0 ? behind + p->length : behind)) * p->batch + row;
        ratio[i] = (float)(value[i] / least);
    }
    return 0;
}

/* Set the priorities of items and return the largest; do nothing and return −1 if an item was overwritten or a priority
   is invalid. ``slots`` and ``wide`` are scratch memory for n numbers. */
double ludus_update(const Tree *t, const SlotIndex *p, int64_t n, const int64_t *numbers, const float *value,
                    int64_t *slots, double *wide) {
    double largest = 0.0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t time = p->batch > 1 ? numbers[i] / p->batch : numbers[i];
        if (numbers[i] < 0 || time < p->oldest[numbers[i] - time * p->batch]) return -1.0;
        wide[i] = (double)value[i];
        largest = wide[i] > largest ? wide[i] : largest;
    }
    ludus_slots(p, n, 1, numbers, slots);
    return ludus_tree_set(t, n, slots, wide) ? -1.0 : largest;
}

/* Copy the rows at slots, for every column; return 1 if a slot is outside. A column takes the first ``rows`` slots. */
int64_t ludus_gather(const Column *columns, int64_t count, const int64_t *slots) {
    for (const Column *c = columns; c < columns + count; c++)
        for (int64_t i = 0; i < c->rows; i++)
            if (slots[i] < 0 || slots[i] >= c->slots) return 1;
    for (const Column *c = columns; c < columns + count; c++)
        for (int64_t i = 0; i < c->rows; i++) {
            if (i + AHEAD < c->rows) prefetch(c->source + slots[i + AHEAD] * c->bytes, c->bytes);
            if (c->bytes == 8)
                memcpy(c->out + i * 8, c->source + slots[i] * 8, 8);
            else
                memcpy(c->out + i * c->bytes, c->source + slots[i] * c->bytes, (size_t)c->bytes);
        }
    return 0;
}

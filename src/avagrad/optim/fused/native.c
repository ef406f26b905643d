/* The delayed rule of avagrad/optim/rules.py for a CPU, over the tables of tables.py; and looks at many tensors at once.

   One block of a tensor goes through the first-level cache in chunks. A chunk takes a few short loops instead of one
   long one, so that each choice (decay, rounding, ...) is made outside of a loop, and written once for all others.

   This file includes itself twice, for float and for double. */

#ifndef REAL

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { W, M, V, STEP, NUMEL, GROUP, PLACE, COMPENSATION, FIRST_BLOCK, TENSORS };
enum { LR, BETA1, BETA2, EPS, WEIGHT_DECAY, LOG_BETA1, LOG_BETA2, SEED, NUMBERS };
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { NEAREST, STOCHASTIC, KAHAN };

const char *avagrad_columns(void) {
    return "w m v step numel group place compensation first_block / lr beta1 beta2 eps weight_decay log_beta1 log_beta2 seed";
}

typedef struct {
    int64_t dtype, block, rounding, norm;
    int64_t normalised, decoupled, decays, bias_correction, active_only, maximize, rebuild;
} Flags;

/* What the coordinates of one tensor share in one step. */
typedef struct {
    double moves, started, size, shrink, beta1, beta1_rest, beta2, beta2_rest;
    double eps, weight_decay, inverse_past, inverse_next, unscale, counts, key, unused;
} Shared;

static uint32_t mix(uint32_t h) {
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
}

static Shared prepared(const int64_t *row, int64_t gradient, const double *numbers, const double *totals,
                       const float *grad_scale, const float *found_inf, const Flags *flags) {
    const double *group = numbers + row[GROUP] * NUMBERS;
    float *step = (float *)row[STEP];
    Shared s;
    double past = *step;
    s.moves = gradient != 0 && !(found_inf && *found_inf != 0) && !flags->rebuild;
    double t = past + s.moves; /* the gradients that the next step's rates will have seen */
    double correction1 = 1;
    s.inverse_past = s.inverse_next = s.started = s.counts = 1;
    if (flags->bias_correction) {
        s.inverse_past = 1 / -expm1(fmax(past, 1) * group[LOG_BETA2]);
        s.inverse_next = 1 / -expm1(fmax(t, 1) * group[LOG_BETA2]);
        correction1 = -expm1(fmax(t, 1) * group[LOG_BETA1]);
        s.started = past > 0;
        s.counts = t > 0;
    }
    double gamma = 1;
    if (flags->normalised && totals[0] != 0) {
        gamma = totals[1] / totals[0];
        gamma = flags->norm == 2 ? sqrt(gamma) : gamma;
    }
    s.size = group[LR] * gamma / correction1;
    s.shrink = 1 - group[LR] * group[WEIGHT_DECAY] * s.started;
    s.beta1 = group[BETA1];
    s.beta1_rest = 1 - group[BETA1];
    s.beta2 = group[BETA2];
    s.beta2_rest = 1 - group[BETA2];
    s.eps = group[EPS];
    s.weight_decay = group[WEIGHT_DECAY];
    s.unscale = (grad_scale ? 1.0 / *grad_scale : 1.0) * (flags->maximize ? -1 : 1);
    s.key = mix(mix(mix((uint32_t)group[SEED]) + (uint32_t)t) + (uint32_t)row[PLACE]);
    if (s.moves) *step = (float)t;
    return s;
}

/* --- numbers of 16 bits --- */

static inline uint32_t bits_of(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

static inline float from_bits(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static inline float from_bfloat16(uint16_t h) { return from_bits((uint32_t)h << 16); }

static inline float from_float16(uint16_t h) {
    float x = from_bits((uint32_t)(h & 0x7fff) << 13) * 0x1p112f; /* right for numbers below the normal ones, too */
    x = (h & 0x7c00) == 0x7c00 ? from_bits(0x7f800000u | (uint32_t)(h & 0x3ff) << 13) : x;
    return from_bits(bits_of(x) | (uint32_t)(h & 0x8000) << 16);
}

/* Add half a unit, or random digits, to the digits that are dropped, and drop them. */
static inline uint16_t to_bfloat16(float x, bool nearest, uint32_t random) {
    uint32_t u = bits_of(x);
    uint32_t addend = nearest ? 0x7fff + ((u >> 16) & 1) : random >> 16;
    return x == x ? (u + addend) >> 16 : 0x7fc0;
}

static inline uint16_t to_float16(float x, bool nearest, uint32_t random) {
    uint32_t u = bits_of(x), sign = (u >> 16) & 0x8000;
    float size = from_bits(u & 0x7fffffff);
    bool small = size < 0x1p-14f; /* below the normal numbers the step is that of those just above */
    uint32_t v = bits_of(small ? size + 0x1p-14f : size);
    v += nearest ? 0xfff + ((v >> 13) & 1) : random >> 19;
    v = (v >> 13) - (small ? (113 << 10) : (112 << 10));
    v = small && nearest ? bits_of(size + 0.5f) - bits_of(0.5f) : v; /* rounded once: these are 2^-24 apart */
    v = size < 65536.0f ? v : 0x7c00;
    v = x == x ? v : 0x7e00;
    return (uint16_t)(sign | v);
}

static inline float from_half(uint16_t h, bool bfloat16) { return bfloat16 ? from_bfloat16(h) : from_float16(h); }

static inline uint16_t to_half(float x, bool bfloat16, bool nearest, uint32_t random) {
    return bfloat16 ? to_bfloat16(x, nearest, random) : to_float16(x, nearest, random);
}

#define EACH(n) _Pragma("omp simd") for (int64_t i = 0; i < (n); i++)
#define CHUNK 192

#define REAL float
#define SQRT sqrtf
#define IN(name) name##_float
#include "native.c"
#undef REAL
#undef SQRT
#undef IN
#define REAL double
#define SQRT sqrt
#define IN(name) name##_double
#include "native.c"

/* Take the step for tensors `first` to `last`, whose blocks are `first_block` to `last_block`. */
void avagrad_step(const int64_t *tensors, const int64_t *grads, const double *numbers, const double *totals,
                  Shared *shared, const int32_t *blocks, double *sums, const float *grad_scale,
                  const float *found_inf, const Flags *flags, int64_t first, int64_t last, int64_t first_block,
                  int64_t last_block, int threads) {
    for (int64_t i = first; i < last; i++)
        shared[i] = prepared(tensors + i * TENSORS, grads[i], numbers, totals, grad_scale, found_inf, flags);
    #pragma omp parallel for schedule(dynamic) num_threads(threads) if (last_block - first_block > 1 && threads > 1)
    for (int64_t b = first_block; b < last_block; b++) {
        const int64_t i = blocks[b], *row = tensors + i * TENSORS, start = (b - row[FIRST_BLOCK]) * flags->block;
        if (!flags->rebuild && shared[i].moves == 0) continue;
        int64_t n = row[NUMEL] - start < flags->block ? row[NUMEL] - start : flags->block;
        if (flags->dtype == FLOAT64)
            block_double(row, grads[i], start, n, &shared[i], flags, sums + 2 * b);
        else
            block_float(row, grads[i], start, n, &shared[i], flags, sums + 2 * b);
    }
}

/* One after the other, so that tensors that add nothing change nothing. */
void avagrad_add_up(const double *sums, int64_t n, double *totals) {
    totals[0] = totals[1] = 0;
    for (int64_t b = 0; b < n; b++) {
        totals[0] += sums[2 * b];
        totals[1] += sums[2 * b + 1];
    }
}

/* --- looks: is everything where the tables say it is, and where are the gradients? --- */

/* Functions of torch and Python, found by name. To torch a tensor is the address of an at::Tensor, which is nothing but
   the address of a TensorImpl: so a column of these serves. */
typedef struct {
    int32_t (*data_ptr)(const void *, void **);
    int32_t (*sizes)(const void *, int64_t **);
    int32_t (*strides)(const void *, int64_t **);
    int32_t (*dim)(const void *, int64_t *);
    int32_t (*dtype)(const void *, int32_t *);
    int32_t (*layout)(const void *, int32_t *);
    int32_t (*is_defined)(const void *, bool *);
    void *(*grad)(const void *); /* of a TensorImpl */
    bool (*is_neg)(const void *);
    bool (*is_conj)(const void *);
    void (*bump_version)(const void *);
    int (*dict_next)(void *, intptr_t *, void **, void **);
    void *(*list_item)(void *, intptr_t);
    int64_t impl_at;    /* where a Python object has the address of its TensorImpl, */
    int64_t storage_at; /* that the address of its StorageImpl, */
    int64_t data_at;    /* and that the address of its memory */
} Functions;

enum { OBJECT, IMPL, STORAGE, ADDRESS, OF_TENSOR }; /* of a parameter; then these: */
enum { DTYPE = OF_TENSOR, LAYOUT, DICT, OF_PARAMETER }; /* then for each tensor of its state the first ones, and: */
enum { KEY = OF_TENSOR, OF_STATE };
enum { AS_IT_WAS, HAS_CHANGED, HAS_AN_ODD_GRADIENT };

/* Compare with a recorded layout: dim, sizes, strides. The stride of a single element means nothing in a gradient. */
static bool is_laid_out(const Functions *f, const void *tensor, const int64_t *layout, bool strictly) {
    int64_t dim, *sizes, *strides;
    if (f->dim(tensor, &dim) || dim != layout[0]) return false;
    if (f->sizes(tensor, &sizes) || f->strides(tensor, &strides)) return false;
    const int64_t *want_sizes = layout + 1, *want_strides = layout + 1 + dim;
    for (int64_t i = 0; i < dim; i++)
        if (sizes[i] != want_sizes[i] || ((strictly || sizes[i] > 1) && strides[i] != want_strides[i])) return false;
    return true;
}

static bool is_empty(const int64_t *layout) {
    for (int64_t i = 0; i < layout[0]; i++)
        if (layout[1 + i] == 0) return true;
    return false;
}

static int64_t at(int64_t address, int64_t offset) { return *(const int64_t *)(address + offset); }

/* Tell whether a parameter is still the same tensor (it may be given another's TensorImpl) in the same memory. */
static bool is_where_it_was(const Functions *f, const int64_t *tensor) {
    void *data;
    if (at(tensor[OBJECT], f->impl_at) != tensor[IMPL]) return false;
    return f->data_ptr(tensor + IMPL, &data) == 0 && (int64_t)data == tensor[ADDRESS];
}

/* Tell whether a state has the same tensors under our keys, in the same memory; other keys are the user's. */
static bool has_its_tensors(const Functions *f, void *dict, const int64_t *states, const int64_t *end) {
    intptr_t place = 0;
    void *key, *value;
    int64_t missing = 0;
    for (const int64_t *s = states; s < end; s += OF_STATE) missing += s[KEY] != 0;
    while (f->dict_next(dict, &place, &key, &value))
        for (const int64_t *s = states; s < end; s += OF_STATE)
            if ((int64_t)key == s[KEY]) {
                if ((int64_t)value != s[OBJECT] || at(s[IMPL], f->storage_at) != s[STORAGE]) return false;
                if (at(s[STORAGE], f->data_at) != s[ADDRESS]) return false;
                missing--;
            }
    return missing == 0;
}

static void fetch(int64_t address, int64_t lines) {
    for (int64_t line = 0; line < lines; line++) __builtin_prefetch((const char *)address + 64 * line);
}

/* The tensors are many, and each is a few lines of memory that nobody has touched since the last step: have them
   fetched in time. Addresses that are no longer right do no harm here. */
static void fetch_row(const Functions *f, const int64_t *row, int64_t states, int64_t gradient) {
    fetch(row[OBJECT], 1);
    fetch(row[IMPL], 4);
    fetch(row[STORAGE], 1);
    fetch(row[DICT], 1);
    fetch(gradient, 4);
    for (const int64_t *s = row + OF_PARAMETER; states > 0; s += OF_STATE, states--)
        if (s[KEY]) {
            fetch(s[IMPL] + f->storage_at, 1);
            fetch(s[STORAGE] + f->data_at, 1);
        }
}

/* Look at n parameters, their states and their gradients. Leave the address of each gradient, 0 for none, and tell
   autograd that the parameters that have one are about to be written to. `seen` keeps where the gradients' TensorImpls
   are: the next ones are often there, too. */
int avagrad_look(const Functions *f, const int64_t *rows, int64_t n, int64_t states, const int64_t *layouts,
                 int64_t *addresses, int64_t *seen) {
    const int64_t width = OF_PARAMETER + states * OF_STATE, ahead = 8;
    int result = AS_IT_WAS;
    for (int64_t r = 0; r < n; r++) {
        const int64_t *row = rows + r * width, *layout = layouts + row[LAYOUT], *of_state = row + OF_PARAMETER;
        if (r + ahead < n) fetch_row(f, row + ahead * width, states, seen[r + ahead]);
        if (r + 4 < n) fetch(at(row[4 * width + DICT], 4 * sizeof(void *)), 3); /* a dict's keys and values */
        bool defined, odd;
        int32_t sparse = 1, dtype = 0;
        if (!is_where_it_was(f, row) || !is_laid_out(f, row + IMPL, layout, true)) return HAS_CHANGED;
        if (f->dtype(row + IMPL, &dtype) || dtype != row[DTYPE]) return HAS_CHANGED;
        if (!has_its_tensors(f, (void *)row[DICT], of_state, row + width)) return HAS_CHANGED;
        const void *g = f->grad((const void *)row[IMPL]);
        void *data = 0;
        addresses[r] = 0;
        if (f->is_defined(g, &defined) || !defined) continue;
        odd = f->layout(g, &sparse) || sparse || f->dtype(g, &dtype) || dtype != row[DTYPE];
        odd = odd || !is_laid_out(f, g, layout, false) || f->is_neg(g) || f->is_conj(g) || f->data_ptr(g, &data);
        if (odd || (!data && !is_empty(layout))) result = HAS_AN_ODD_GRADIENT;
        addresses[r] = data ? (int64_t)data : 1; /* an empty gradient is nowhere, and is counted all the same */
        seen[r] = *(const int64_t *)g;
        f->bump_version(row + IMPL);
    }
    return result;
}

/* Tell whether the first n items of a list are these objects. */
bool avagrad_lists(const Functions *f, void *list, const int64_t *objects, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if ((int64_t)f->list_item(list, i) != objects[i]) return false;
    return true;
}

/* Tell whether a dict holds n keys and values, which are these objects in this order. */
bool avagrad_holds(const Functions *f, void *dict, const int64_t *objects, int64_t n) {
    intptr_t place = 0;
    void *key, *value;
    for (; f->dict_next(dict, &place, &key, &value); n--, objects += 2)
        if (n == 0 || (int64_t)key != objects[0] || (int64_t)value != objects[1]) return false;
    return n == 0;
}

#else /* --- in float and in double --- */

/* Sum up eta^p for the next step. A chunk is short enough for a sum in its own precision; a block is not. */
static void IN(sum_of_powers)(const REAL *v, int64_t n, const Shared *s, const Flags *flags, double *sums) {
    const REAL inverse = s->inverse_next, eps = s->eps;
    REAL total = 0, live = n;
    if (flags->active_only) {
        const bool squared = flags->norm == 2;
        live = 0;
        _Pragma("omp simd reduction(+ : total, live)") for (int64_t i = 0; i < n; i++) {
            REAL eta = 1 / (SQRT(v[i] * inverse) + eps);
            total += v[i] == 0 ? 0 : eta * (squared ? eta : 1);
            live += v[i] == 0 ? 0 : 1;
        }
    } else if (flags->norm == 2) {
        _Pragma("omp simd reduction(+ : total)") for (int64_t i = 0; i < n; i++) {
            REAL eta = 1 / (SQRT(v[i] * inverse) + eps);
            total += eta * eta;
        }
    } else {
        _Pragma("omp simd reduction(+ : total)") for (int64_t i = 0; i < n; i++)
            total += 1 / (SQRT(v[i] * inverse) + eps);
    }
    sums[0] += total * s->counts;
    sums[1] += live * s->counts;
}

/* Move n coordinates whose parameter and gradient are in `w` and `g`. */
static void IN(move)(REAL *restrict w, REAL *restrict g, REAL *restrict m, REAL *restrict v, int64_t n,
                     const Shared *s, const Flags *flags) {
    const REAL beta1 = s->beta1, beta1_rest = s->beta1_rest, beta2 = s->beta2, beta2_rest = s->beta2_rest;
    const REAL eps = s->eps, inverse = s->inverse_past, size = s->size, shrink = s->shrink, decay = s->weight_decay;
    if (flags->decays && flags->decoupled) {
        EACH(n) w[i] *= shrink;
    } else if (flags->decays && flags->active_only) {
        EACH(n) g[i] = v[i] == 0 && g[i] == 0 ? g[i] : g[i] + decay * w[i];
    } else if (flags->decays) {
        EACH(n) g[i] += decay * w[i];
    }
    EACH(n) m[i] = beta1 * m[i] + beta1_rest * g[i];
    if (s->started && flags->active_only) {
        EACH(n) w[i] -= v[i] == 0 ? 0 : size / (SQRT(v[i] * inverse) + eps) * m[i];
    } else if (s->started) {
        EACH(n) w[i] -= size / (SQRT(v[i] * inverse) + eps) * m[i];
    }
    EACH(n) v[i] = beta2 * v[i] + beta2_rest * g[i] * g[i];
}

static void IN(block)(const int64_t *row, int64_t gradient, int64_t start, int64_t n, const Shared *s,
                      const Flags *flags, double *sums) {
    REAL *v = (REAL *)row[V] + start, *m = (REAL *)row[M] + start;
    sums[0] = sums[1] = 0;
    for (int64_t from = 0; from < n; from += CHUNK, v += CHUNK, m += CHUNK) {
        const int64_t many = n - from < CHUNK ? n - from : CHUNK, at = start + from;
        if (!flags->rebuild) {
            const REAL unscale = s->unscale;
            REAL w_here[CHUNK], g_here[CHUNK];
            if (flags->dtype == FLOAT32 || flags->dtype == FLOAT64) {
                const REAL *given = (REAL *)gradient + at;
                EACH(many) g_here[i] = given[i] * unscale;
                IN(move)((REAL *)row[W] + at, g_here, m, v, many, s, flags);
            } else {
                const bool bf = flags->dtype == BFLOAT16;
                const uint32_t key = (uint32_t)s->key;
                const uint16_t *given = (uint16_t *)gradient + at;
                uint16_t *w = (uint16_t *)row[W] + at, *rest = (uint16_t *)row[COMPENSATION] + at;
                EACH(many) g_here[i] = from_half(given[i], bf) * unscale;
                EACH(many) w_here[i] = from_half(w[i], bf);
                if (flags->rounding == KAHAN) EACH(many) w_here[i] += from_half(rest[i], bf);
                IN(move)(w_here, g_here, m, v, many, s, flags);
                if (flags->rounding == STOCHASTIC) {
                    EACH(many) w[i] = to_half(w_here[i], bf, false, mix(key + (uint32_t)(at + i) * 0x9e3779b9u));
                } else {
                    EACH(many) w[i] = to_half(w_here[i], bf, true, 0);
                }
                if (flags->rounding == KAHAN) {
                    EACH(many) w_here[i] -= from_half(w[i], bf);
                    EACH(many) rest[i] = to_half(w_here[i] == w_here[i] ? w_here[i] : 0, bf, true, 0);
                }
            }
        }
        if (flags->normalised) IN(sum_of_powers)(v, many, s, flags, sums);
    }
}

#endif

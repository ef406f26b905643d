/* The delayed rule of avagrad/optim/rules.py for a CPU, over the tables of fused.py.

   A block of a tensor is moved in chunks. `move` is one loop over a chunk: it reads g, m, v, w once, writes m, v, w, and
   adds up the norm of the next step. What few need (16-bit numbers, decay in the gradient, a scaled gradient) takes a
   loop of its own before it, over a copy of the chunk in the L1 cache.

   This file includes itself twice, for float and for double. */

#ifndef REAL

#include <Python.h>

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { W, M, V, STEP, NUMEL, GROUP, PARAM_ID, COMPENSATION, FIRST_BLOCK, SEED, COLUMNS };
enum { LR, BETA1, BETA2, EPS, WEIGHT_DECAY, CLIP_UPDATE, CLIP_MOMENT, NUMBERS };
enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 };
enum { NEAREST, STOCHASTIC, KAHAN };

typedef struct {
    int64_t dtype, block, rounding, rebuild, counts;
    /* As rules.Flags; norm 0: gamma is 1. */
    int64_t norm, decoupled, decays, bias_correction, active_only, maximize, norm_of_step, clips_update, clips_moment;
} Flags;

/* What the coordinates of one tensor share in one step. */
typedef struct {
    double moves, started, size, shrink, beta1, beta1_rest, beta2, beta2_rest;
    double eps, weight_decay, inverse_before, unscale, counts, key;
    double clip_update, clip_moment;
    double next_scale, next_eps, undo; /* power() is of large * x; undo = large^-p */
} Shared;
_Static_assert(sizeof(Shared) == 19 * sizeof(double), "their number is SHARED of fused.py");

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
    double steps = *step;
    s.moves = gradient != 0 && !(found_inf && *found_inf != 0) && !flags->rebuild;
    double t = steps + s.moves; /* the number of gradients before the next step */
    double correction1 = 1, inverse_next = 1;
    s.inverse_before = s.started = s.counts = 1;
    if (flags->bias_correction) {
        const double log_beta1 = log(fmax(group[BETA1], 1e-300)), log_beta2 = log(fmax(group[BETA2], 1e-300));
        s.inverse_before = 1 / -expm1(fmax(steps, 1) * log_beta2);
        inverse_next = 1 / -expm1(fmax(t, 1) * log_beta2);
        correction1 = -expm1(fmax(t, 1) * log_beta1);
        s.started = steps > 0;
        s.counts = t > 0;
    }
    double gamma = 1;
    if (flags->norm && totals && totals[0] != 0) {
        gamma = totals[1] / totals[0];
        gamma = flags->norm == 2 ? sqrt(gamma) : gamma;
    }
    s.size = group[LR] * gamma / correction1;
    s.shrink = flags->decays && flags->decoupled ? 1 - group[LR] * group[WEIGHT_DECAY] * s.started : 1;
    s.beta1 = group[BETA1];
    s.beta1_rest = 1 - group[BETA1];
    s.beta2 = group[BETA2];
    s.beta2_rest = 1 - group[BETA2];
    s.eps = group[EPS];
    s.weight_decay = group[WEIGHT_DECAY];
    s.clip_update = flags->clips_update ? group[CLIP_UPDATE] * correction1 : INFINITY; /* for the uncorrected moment */
    s.clip_moment = flags->clips_moment ? group[CLIP_MOMENT] : INFINITY;
    s.next_scale = sqrt(inverse_next);
    s.next_eps = group[EPS];
    s.undo = 1;
    if (flags->norm_of_step) { /* eta r is about r / eps where eps is large: its square is too small for a float */
        const double large = fmax(1, group[EPS]);
        s.next_eps /= s.next_scale * large;
        s.next_scale = 1 / large;
        s.undo = flags->norm == 2 ? 1 / (large * large) : 1 / large;
    }
    s.unscale = (grad_scale ? 1.0 / *grad_scale : 1.0) * (flags->maximize ? -1 : 1);
    s.key = mix(mix(mix((uint32_t)row[SEED]) + (uint32_t)t) + (uint32_t)row[PARAM_ID]);
    if (s.moves && flags->counts) *step = (float)t;
    return s;
}

/* --- 16-bit numbers --- */

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
    float x = from_bits((uint32_t)(h & 0x7fff) << 13) * 0x1p112f; /* also right for subnormal numbers */
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
    bool small = size < 0x1p-14f; /* subnormal numbers have the spacing of the smallest normal ones */
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
#define CHUNK 512

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

static void go_over(const int64_t *tensors, const int64_t *grads, const Shared *shared, const int32_t *blocks,
                    double *sums, int64_t gradient, int64_t first, int64_t last, int threads, const Flags *flags) {
    #pragma omp parallel for schedule(guided) num_threads(threads) if (last - first > 1 && threads > 1)
    for (int64_t b = first; b < last; b++) {
        const int64_t i = blocks[b], *row = tensors + i * COLUMNS, start = (b - row[FIRST_BLOCK]) * flags->block;
        if (!flags->rebuild && shared[i].moves == 0) continue;
        const int64_t n = row[NUMEL] - start < flags->block ? row[NUMEL] - start : flags->block;
        const int64_t g = gradient ? gradient : grads[i];
        if (flags->dtype == FLOAT64)
            block_double(row, g, start, n, &shared[i], flags, sums + 2 * b);
        else
            block_float(row, g, start, n, &shared[i], flags, sums + 2 * b);
    }
}

/* --- the module, with one function --- */

enum { TENSORS, GRADS, SHARED, BLOCKS, SUMS, GROUPS, TOTALS, SCALE, FOUND_INF, /* addresses */
       GRADIENT, COUNT, FIRST, LAST, THREADS, FLAGS };

/* step(): integers in the order above, then the fields of Flags. */
static PyObject *step(PyObject *module, PyObject *args) {
    int64_t a[FLAGS + sizeof(Flags) / sizeof(int64_t)];
    if (PyTuple_Size(args) != (Py_ssize_t)(sizeof a / sizeof *a))
        return PyErr_Format(PyExc_TypeError, "step() takes %zd numbers, but got %zd.",
                            (Py_ssize_t)(sizeof a / sizeof *a), PyTuple_Size(args));
    for (size_t i = 0; i < sizeof a / sizeof *a; i++) {
        PyObject *x = PyTuple_GetItem(args, (Py_ssize_t)i);
        a[i] = x ? PyLong_AsLongLong(x) : 0;
        if (PyErr_Occurred()) return NULL;
    }
    Flags flags;
    memcpy(&flags, a + FLAGS, sizeof flags);
    const int64_t *tensors = (int64_t *)a[TENSORS], *grads = (int64_t *)a[GRADS];
    Shared *shared = (Shared *)a[SHARED];
    Py_BEGIN_ALLOW_THREADS
    if (a[FIRST] < a[LAST])
        go_over(tensors, grads, shared, (int32_t *)a[BLOCKS], (double *)a[SUMS], a[GRADIENT], a[FIRST], a[LAST],
                (int)a[THREADS], &flags);
    else if (a[GROUPS])
        for (int64_t i = 0; i < a[COUNT]; i++)
            shared[i] = prepared(tensors + i * COLUMNS, grads[i], (double *)a[GROUPS], (double *)a[TOTALS],
                                 (float *)a[SCALE], (float *)a[FOUND_INF], &flags);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {{"step", step, METH_VARARGS, "Take a step over tables of addresses."}, {0}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, NAME, NULL, -1, methods};

PyMODINIT_FUNC INIT(void) { return PyModule_Create(&definition); }

#else /* --- for float and for double --- */

static inline REAL IN(clamped)(REAL x, REAL most) {
    x = most < x ? most : x; /* one instruction each, and a NaN stays NaN */
    return -most > x ? -most : x;
}

/* eta^p for the next step, or (eta r)^p. */
static inline __attribute__((always_inline)) REAL IN(power)(REAL v, REAL scale, REAL eps, int norm, bool norm_of_step) {
    const REAL root = SQRT(v), x = (norm_of_step ? root : 1) / (root * scale + eps);
    return norm == 2 ? x * x : x;
}

/* Move n coordinates, unless `rebuild`, and add up the powers for the next norm. The last arguments are constants at
   each call, so that each combination gets its own loop; other choices are numbers (a clip of infinity is none). A
   chunk is short enough for a sum in its own precision. */
static inline __attribute__((always_inline)) void IN(move)(
    REAL *restrict w, const REAL *restrict g, REAL *restrict m, REAL *restrict v, int64_t n, const Shared *s,
    double *sums, bool rebuild, int norm, bool active_only, bool norm_of_step, bool clips_moment) {
    const REAL beta1 = s->beta1, beta1_rest = s->beta1_rest, beta2 = s->beta2, beta2_rest = s->beta2_rest;
    const REAL eps = s->eps, inverse = s->inverse_before, size = s->size, shrink = s->shrink;
    const REAL c = s->clip_update, k = s->clip_moment, largest = norm_of_step ? 1e18 : INFINITY; /* rules.LARGEST */
    const REAL next_scale = s->next_scale, next_eps = s->next_eps;
    const bool started = s->started != 0;
    REAL total = 0, active = 0;
    _Pragma("omp simd reduction(+ : total, active)") for (int64_t i = 0; i < n; i++) {
        REAL next = v[i];
        if (!rebuild) {
            const REAL r = SQRT(v[i] * inverse);
            REAL x = IN(clamped)(g[i], largest);
            if (clips_moment) x = IN(clamped)(x, k * r + (r > 0 ? 0 : largest)); /* a sum: compilers split a choice */
            const REAL moment = beta1 * m[i] + beta1_rest * x;
            const REAL rate = size * (!active_only || v[i] != 0 ? 1 : 0) / (r + eps);
            const REAL change = rate * IN(clamped)(moment, c * r); /* infinity * 0 is NaN, a bound that bounds nothing */
            w[i] = w[i] * shrink - (started ? change : 0);
            m[i] = moment;
            v[i] = next = beta2 * v[i] + beta2_rest * x * x;
        }
        const bool counts = !active_only || next != 0;
        if (norm) total += counts ? IN(power)(next, next_scale, next_eps, norm, norm_of_step) : 0;
        active += counts ? 1 : 0;
    }
    sums[0] += total * s->undo * s->counts;
    sums[1] += active * s->counts;
}

static void IN(move_by_flags)(REAL *w, const REAL *g, REAL *m, REAL *v, int64_t n, const Shared *s, double *sums,
                              const Flags *flags) {
#define MOVE(...) \
    if (flags->rebuild) IN(move)(w, g, m, v, n, s, sums, true, __VA_ARGS__); \
    else IN(move)(w, g, m, v, n, s, sums, false, __VA_ARGS__)
    const bool squared = flags->norm == 2, clips = flags->clips_moment, active_only = flags->active_only;
    if (flags->norm_of_step && clips && squared) { MOVE(2, true, true, true); } /* AvaStep is active_only */
    else if (flags->norm_of_step && clips) { MOVE(1, true, true, true); }
    else if (flags->norm_of_step && squared) { MOVE(2, true, true, false); }
    else if (flags->norm_of_step) { MOVE(1, true, true, false); }
    else if (active_only && squared) { MOVE(2, true, false, false); }
    else if (active_only && flags->norm == 1) { MOVE(1, true, false, false); }
    else if (active_only) { MOVE(0, true, false, false); }
    else if (squared) { MOVE(2, false, false, false); }
    else if (flags->norm == 1) { MOVE(1, false, false, false); }
    else { MOVE(0, false, false, false); }
#undef MOVE
}

/* Write the parameters from `from` back as 16-bit numbers. */
static void IN(store)(const int64_t *row, int64_t at, REAL *from, int64_t n, const Shared *s, const Flags *flags) {
    const bool bf = flags->dtype == BFLOAT16;
    const uint32_t key = (uint32_t)s->key;
    uint16_t *w = (uint16_t *)row[W] + at;
    if (flags->rounding == STOCHASTIC) {
        EACH(n) w[i] = to_half(from[i], bf, false, mix(key + (uint32_t)(at + i) * 0x9e3779b9u));
    } else {
        EACH(n) w[i] = to_half(from[i], bf, true, 0);
    }
    if (flags->rounding == KAHAN) {
        uint16_t *rest = (uint16_t *)row[COMPENSATION] + at;
        EACH(n) from[i] -= from_half(w[i], bf);
        EACH(n) rest[i] = to_half(from[i] - from[i] == 0 ? from[i] : 0, bf, true, 0); /* w may have overflowed */
    }
}

static void IN(block)(const int64_t *row, int64_t gradient, int64_t start, int64_t n, const Shared *s,
                      const Flags *flags, double *sums) {
    const bool is_half = flags->dtype == BFLOAT16 || flags->dtype == FLOAT16, bf = flags->dtype == BFLOAT16;
    const bool adds_decay = flags->decays && !flags->decoupled;
    const REAL unscale = s->unscale, decay = s->weight_decay;
    sums[0] = sums[1] = 0;
    for (int64_t at = start; at < start + n; at += CHUNK) {
        const int64_t left = start + n - at, many = left < CHUNK ? left : CHUNK;
        REAL *m = (REAL *)row[M] + at, *v = (REAL *)row[V] + at, w_here[CHUNK], g_here[CHUNK];
        if (flags->rebuild) {
            IN(move_by_flags)(NULL, NULL, m, v, many, s, sums, flags);
            continue;
        }
        REAL *w = is_half ? w_here : (REAL *)row[W] + at, *g = is_half ? g_here : (REAL *)gradient + at;
        if (is_half) {
            const uint16_t *halves = (uint16_t *)row[W] + at, *gradients = (uint16_t *)gradient + at;
            EACH(many) g[i] = from_half(gradients[i], bf);
            EACH(many) w[i] = from_half(halves[i], bf);
            if (flags->rounding == KAHAN) {
                const uint16_t *rest = (uint16_t *)row[COMPENSATION] + at;
                EACH(many) w[i] += from_half(rest[i], bf);
            }
        }
        if (unscale != 1 || adds_decay) { /* never written to the gradient itself */
            EACH(many) g_here[i] = g[i] * unscale;
            g = g_here;
        }
        if (adds_decay && flags->active_only) {
            EACH(many) g[i] = v[i] == 0 && g[i] == 0 ? g[i] : g[i] + decay * w[i];
        } else if (adds_decay) {
            EACH(many) g[i] += decay * w[i];
        }
        IN(move_by_flags)(w, g, m, v, many, s, sums, flags);
        if (is_half) IN(store)(row, at, w, many, s, flags);
    }
}

#endif

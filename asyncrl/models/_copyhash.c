/* One pass over memory instead of two: bytes are copied and hashed (xxh3-64) while they are in a register.

Owns the type `Hasher`: `update(source, target=None)` takes the next bytes in and, with a target, copies them there; `intdigest()`
is the number that the xxhash package's `xxh3_64` gives for all of them. Python in turns with a copy reads everything twice; here
the target is written past the caches, so that a core moves as many bytes as memory allows and the hash costs nothing.

The algorithm is that of the xxHash specification (xxh3 with seed 0, inputs of more than 240 bytes; shorter ones are refused, as
their formulas are others): 64-byte stripes are added into eight 64-bit lanes, which are scrambled after every 16 stripes; the
last stripe is the input's last 64 bytes, so at most 64 bytes wait here until it is known that more come.

Called by broadcast/copy_hash.py, which does without where this is not built. The interpreter lock is not held while bytes move;
one Hasher is for one thread at a time.
*/

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_AVX2_PATH 1
#include <immintrin.h>
#endif

#define STRIPE 64
#define LANES 8
#define BLOCK_STRIPES 16
#define SHORTEST 241
#define WITHOUT_LOCK 4096 /* bytes; letting go of the interpreter lock for less costs more than it gives */

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
#define SECRET_SCRAMBLE 128 /* where in it the key of a scramble begins */
#define SECRET_LAST 121     /* of the last stripe */
#define SECRET_MERGE 11     /* of the final merge */

#define PRIME32_1 0x9E3779B1U
#define PRIME32_2 0x85EBCA77U
#define PRIME32_3 0xC2B2AE3DU
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MIX 0x165667919E3779F9ULL

typedef struct {
    uint64_t lanes[LANES];
    uint64_t num_bytes;
    size_t num_waiting;         /* bytes in `waiting`, 0 only before the first byte */
    unsigned stripe;            /* next one's place in its block */
    uint8_t waiting[STRIPE];
    uint8_t before[STRIPE];     /* the last stripe that was taken in */
} State;

static uint64_t word_at(const uint8_t *bytes) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    uint64_t word = 0;
    for (int i = 7; i >= 0; i--) word = word << 8 | bytes[i];
    return word;
#else
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
#endif
}

static void add_stripe(uint64_t *lanes, const uint8_t *bytes, const uint8_t *key) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t word = word_at(bytes + 8 * lane);
        uint64_t keyed = word ^ word_at(key + 8 * lane);
        lanes[lane ^ 1] += word;
        lanes[lane] += (keyed & 0xFFFFFFFFU) * (keyed >> 32);
    }
}

static void scramble(uint64_t *lanes) {
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t mixed = lanes[lane] ^ lanes[lane] >> 47 ^ word_at(SECRET + SECRET_SCRAMBLE + 8 * lane);
        lanes[lane] = mixed * PRIME32_1;
    }
}

/* Take in `num_stripes` within one block; with a target, copy them there. */
typedef void (*AddStripes)(uint64_t *lanes, unsigned stripe, const uint8_t *from, uint8_t *to, size_t num_stripes);

static void add_stripes_anywhere(uint64_t *lanes, unsigned stripe, const uint8_t *from, uint8_t *to, size_t num_stripes) {
    for (size_t i = 0; i < num_stripes; i++) add_stripe(lanes, from + STRIPE * i, SECRET + 8 * (stripe + i));
    if (to) memcpy(to, from, STRIPE * num_stripes);
}

#ifdef HAS_AVX2_PATH
#define AHEAD 4096 /* bytes that are asked of memory before they are needed */

__attribute__((target("avx2"))) static inline __m256i with_words(__m256i lanes, __m256i words, const uint8_t *key) {
    __m256i keyed = _mm256_xor_si256(words, _mm256_loadu_si256((const __m256i *)key));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

__attribute__((target("avx2"))) static void add_stripes_avx2(
    uint64_t *lanes, unsigned stripe, const uint8_t *from, uint8_t *to, size_t num_stripes) {
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(lanes + 4));
    const uint8_t *key = SECRET + 8 * stripe;
    int past_caches = (uintptr_t)to % 32 == 0;
    for (size_t i = 0; i < num_stripes; i++, from += STRIPE, key += 8) {
        __m256i first = _mm256_loadu_si256((const __m256i *)from);
        __m256i second = _mm256_loadu_si256((const __m256i *)(from + 32));
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_T0);
        low = with_words(low, first, key);
        high = with_words(high, second, key + 32);
        if (to) {
            if (past_caches) {
                _mm256_stream_si256((__m256i *)to, first);
                _mm256_stream_si256((__m256i *)(to + 32), second);
            } else {
                _mm256_storeu_si256((__m256i *)to, first);
                _mm256_storeu_si256((__m256i *)(to + 32), second);
            }
            to += STRIPE;
        }
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}
#endif

static AddStripes add_stripes = add_stripes_anywhere;

static void take_stripes(State *state, const uint8_t *from, uint8_t *to, size_t num_stripes) {
    while (num_stripes) {
        size_t left_in_block = BLOCK_STRIPES - state->stripe;
        size_t count = num_stripes < left_in_block ? num_stripes : left_in_block;
        add_stripes(state->lanes, state->stripe, from, to, count);
        from += STRIPE * count;
        if (to) to += STRIPE * count;
        num_stripes -= count;
        state->stripe += (unsigned)count;
        if (state->stripe == BLOCK_STRIPES) {
            scramble(state->lanes);
            state->stripe = 0;
        }
    }
    memcpy(state->before, from - STRIPE, STRIPE);
}

static void take(State *state, const uint8_t *from, uint8_t *to, size_t num_bytes) {
    state->num_bytes += num_bytes;
    while (num_bytes) {
        if (state->num_waiting == STRIPE) {
            take_stripes(state, state->waiting, NULL, 1);
            state->num_waiting = 0;
        }
        size_t count;
        if (state->num_waiting == 0 && num_bytes > STRIPE) {
            count = (num_bytes - 1) / STRIPE * STRIPE;
            take_stripes(state, from, to, count / STRIPE);
        } else {
            count = STRIPE - state->num_waiting;
            if (count > num_bytes) count = num_bytes;
            memcpy(state->waiting + state->num_waiting, from, count);
            if (to) memcpy(to, from, count);
            state->num_waiting += count;
        }
        from += count;
        if (to) to += count;
        num_bytes -= count;
    }
#ifdef HAS_AVX2_PATH
    /* What was written past the caches is there for other threads and processes before anybody hears of it. */
    _mm_sfence();
#endif
}

/* The high and the low half of a 128-bit product, folded. */
static uint64_t folded_product(uint64_t a, uint64_t b) {
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
#else
    uint64_t a_low = a & 0xFFFFFFFFU, a_high = a >> 32, b_low = b & 0xFFFFFFFFU, b_high = b >> 32;
    uint64_t low = a_low * b_low, middle = a_high * b_low, cross = (low >> 32) + (middle & 0xFFFFFFFFU) + a_low * b_high;
    return (cross << 32 | (low & 0xFFFFFFFFU)) ^ ((middle >> 32) + (cross >> 32) + a_high * b_high);
#endif
}

static uint64_t digest_of(const State *state) {
    uint64_t lanes[LANES];
    uint8_t last[STRIPE];
    memcpy(lanes, state->lanes, sizeof lanes);
    memcpy(last, state->before + state->num_waiting, STRIPE - state->num_waiting);
    memcpy(last + STRIPE - state->num_waiting, state->waiting, state->num_waiting);
    add_stripe(lanes, last, SECRET + SECRET_LAST);
    uint64_t hash = state->num_bytes * PRIME64_1;
    for (int lane = 0; lane < LANES; lane += 2) {
        const uint8_t *key = SECRET + SECRET_MERGE + 8 * lane;
        hash += folded_product(lanes[lane] ^ word_at(key), lanes[lane + 1] ^ word_at(key + 8));
    }
    hash = (hash ^ hash >> 37) * PRIME_MIX;
    return hash ^ hash >> 32;
}

typedef struct {
    PyObject_HEAD
    State state;
    int is_busy; /* some thread is in `update`; read and written with the interpreter lock */
} Hasher;

static PyObject *hasher_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    static const State fresh = {
        .lanes = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1},
    };
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, named, ":Hasher", names)) return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Hasher *self = (Hasher *)allocate(type, 0);
    if (self) {
        self->state = fresh;
        self->is_busy = 0;
    }
    return (PyObject *)self;
}

static void hasher_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *hasher_update(PyObject *self, PyObject *args) {
    PyObject *target_object = Py_None;
    Py_buffer source, target = {0};
    if (!PyArg_ParseTuple(args, "y*|O:update", &source, &target_object)) return NULL;
    if (target_object != Py_None) {
        if (PyObject_GetBuffer(target_object, &target, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS)) {
            PyBuffer_Release(&source);
            return NULL;
        }
        if (target.len != source.len) {
            PyErr_Format(PyExc_ValueError, "the target has %zd bytes, the source %zd: they must be equal", target.len, source.len);
            PyBuffer_Release(&target);
            PyBuffer_Release(&source);
            return NULL;
        }
    }
    Hasher *hasher = (Hasher *)self;
    State *state = &hasher->state;
    if (hasher->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another thread is in this Hasher's update: it is for one thread at a time");
        if (target.obj) PyBuffer_Release(&target);
        PyBuffer_Release(&source);
        return NULL;
    }
    hasher->is_busy = 1;
    if (source.len < WITHOUT_LOCK) {
        take(state, source.buf, target.buf, (size_t)source.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        take(state, source.buf, target.buf, (size_t)source.len);
        Py_END_ALLOW_THREADS
    }
    hasher->is_busy = 0;
    if (target.obj) PyBuffer_Release(&target);
    PyBuffer_Release(&source);
    Py_RETURN_NONE;
}

static PyObject *hasher_intdigest(PyObject *self, PyObject *Py_UNUSED(nothing)) {
    const State *state = &((Hasher *)self)->state;
    if (state->num_bytes < SHORTEST) {
        PyErr_Format(PyExc_ValueError, "only inputs of %d bytes and more are hashed here, this one has %llu", SHORTEST,
                     (unsigned long long)state->num_bytes);
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(digest_of(state));
}

static PyMethodDef hasher_methods[] = {
    {"update", hasher_update, METH_VARARGS, "update(source, target=None): take the next bytes in, and copy them to the target."},
    {"intdigest", hasher_intdigest, METH_NOARGS, "Return xxh3-64 of all bytes; at least SHORTEST of them."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot hasher_slots[] = {
    {Py_tp_new, hasher_new},
    {Py_tp_dealloc, hasher_dealloc},
    {Py_tp_methods, hasher_methods},
    {Py_tp_doc, "xxh3-64 of bytes that are copied on the way; for one thread at a time."},
    {0, NULL},
};

static PyType_Spec hasher_spec = {"asyncrl.models._copyhash.Hasher", sizeof(Hasher), 0, Py_TPFLAGS_DEFAULT, hasher_slots};

static int fill_module(PyObject *module) {
#ifdef HAS_AVX2_PATH
    if (__builtin_cpu_supports("avx2")) add_stripes = add_stripes_avx2;
#endif
    PyObject *type = PyType_FromSpec(&hasher_spec);
    if (!type) return -1;
    int failed = PyModule_AddObjectRef(module, "Hasher", type);
    Py_DECREF(type);
    return failed || PyModule_AddIntConstant(module, "SHORTEST", SHORTEST);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill_module}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT, "_copyhash", "Copy and hash bytes in one pass.", 0, NULL, module_slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__copyhash(void) { return PyModuleDef_Init(&module_definition); }

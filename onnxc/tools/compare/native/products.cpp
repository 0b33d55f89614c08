// A product in float64 of a matrix and one that is widened panel by panel as it is packed. See products.py.

#include "matmul.h"

namespace {

// Rows of B packed into panels of a matrix of K by N, and widened.
void widened(const f64 *b, i64 sk, i64 sn, i64 K, i64 N, i64 p, f64 *packed, f64 *) {
    mm_pack_b(b, sk, sn, K, N, packed - p * MM_NR * K, p, p + 1);
}

void widened(const f32 *b, i64 sk, i64 sn, i64 K, i64 N, i64 p, f64 *packed, f64 *room) {
    f32 *const narrow = (f32 *)room;
    mm_pack_b(b, sk, sn, K, N, narrow - p * MM_NR * K, p, p + 1);
    for (i64 i = 0, n = (p + 1) * MM_NR <= N ? MM_NR * K : mm_last(N) * K; i < n; i++) packed[i] = narrow[i];
}

// c(m, n) = sum over k of a[m * K + k] * b[k * sk + n * sn], rows of c ldc apart. `room`: product_room(K) elements.
template <class T>
void product(const f64 *a, const T *b, i64 sk, i64 sn, f64 *c, i64 ldc, i64 M, i64 N, i64 K, f64 *room) {
    f64 *const scratch = (f64 *)(((u64)room + 63) & ~(u64)63), *const packed = scratch + MM_SCRATCH;
    auto store = [=](i64 m, i64 n, V<f64> v, auto lanes) OX_LAMBDA { stl(c + m * ldc + n, v, lanes); };
    for (i64 p = 0; p < mm_panels(N); p++) {
        widened(b, sk, sn, K, N, p, packed, packed + MM_NR * K);
        matmul_block<f64>(MmRows<f64>{a, K}, MmRight<f64>(packed - p * MM_NR * K), N, K, 0, M, p, p + 1, scratch, store);
    }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT i64 product_room(i64 K) { return 8 + MM_SCRATCH + 2 * MM_NR * K; }
EXPORT void product_f(const f64 *a, const f32 *b, i64 sk, i64 sn, f64 *c, i64 ldc, i64 M, i64 N, i64 K, f64 *room) {
    product(a, b, sk, sn, c, ldc, M, N, K, room);
}
EXPORT void product_d(const f64 *a, const f64 *b, i64 sk, i64 sn, f64 *c, i64 ldc, i64 M, i64 N, i64 K, f64 *room) {
    product(a, b, sk, sn, c, ldc, M, N, K, room);
}

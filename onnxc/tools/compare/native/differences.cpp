// Sums and extremes of the differences of two arrays in float64, in one pass. See sums.py, which says the same in numpy.

#include <cstddef>
#include <cstring>

namespace {

constexpr int LANES = 8;
constexpr ptrdiff_t BLOCK = 4096;  // elements whose sums are added up by themselves, and looked through for the worst
typedef double V __attribute__((vector_size(LANES * 8)));
typedef long long M __attribute__((vector_size(LANES * 8)));

struct Sums {
    double top, total, noise, ours, theirs, scale;
    long long worst, zero_signs;
};

// Up to LANES elements; what is missing is 0.
template <class T> V load(const T *p, ptrdiff_t n) {
    typedef T Narrow __attribute__((vector_size(LANES * sizeof(T))));
    Narrow v = {};
    if (n >= LANES) memcpy(&v, p, sizeof v);
    else memcpy(&v, p, (size_t)n * sizeof(T));
    return __builtin_convertvector(v, V);
}

V magnitude(V v) { return v < 0 ? -v : v; }

V larger(V a, V b) { return a > b ? a : b; }

template <class T> T sum(const T *lanes) {
    T s = 0;
    for (int i = 0; i < LANES; i++) s += lanes[i];
    return s;
}

double sum(V v) { return sum((const double *)&v); }

double largest(V v) {
    double top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
}

template <class A, class B> ptrdiff_t place_of(const A *a, const B *b, double distance) {
    for (ptrdiff_t i = 0; i < BLOCK; i++) {
        const double d = (double)a[i] - (double)b[i];
        if (d == distance || -d == distance) return i;
    }
    return 0;
}

template <class A, class B> void sums(const A *a, const B *b, ptrdiff_t n, Sums *out) {
    V scale = {};
    M signs = {};
    for (ptrdiff_t start = 0; start < n; start += BLOCK) {
        V top = {}, total = {}, noise = {}, ours = {}, theirs = {};
        const ptrdiff_t end = start + BLOCK < n ? start + BLOCK : n;
        for (ptrdiff_t i = start; i < end; i += LANES) {
            const V x = load(a + i, end - i), y = load(b + i, end - i), d = magnitude(x - y);
            top = larger(d, top);
            total += d;
            noise += d * d;
            ours += x * x;
            theirs += y * y;
            scale = larger(magnitude(y), scale);
            signs += (x == 0) & (y == 0) & (((M)x ^ (M)y) >> 63);
        }
        out->total += sum(total);
        out->noise += sum(noise);
        out->ours += sum(ours);
        out->theirs += sum(theirs);
        const double most = largest(top);
        if (most > out->top) {
            out->top = most;
            out->worst = start + place_of(a + start, b + start, most);
        }
    }
    out->scale = largest(scale);
    out->zero_signs = -sum((const long long *)&signs);
}

// NaN where any difference is, else the largest.
template <class A, class B> double gap(const A *a, const B *b, ptrdiff_t n) {
    V top = {}, nothing = {};
    for (ptrdiff_t i = 0; i < n; i += LANES) {
        const V d = magnitude(load(a + i, n - i) - load(b + i, n - i));
        top = larger(d, top);
        nothing += d - d;  // NaN of NaN and of infinities
    }
    const double none = sum(nothing);
    if (none == none) return largest(top);
    for (ptrdiff_t i = 0; i < n; i++) {
        const double d = (double)a[i] - (double)b[i];
        if (d != d) return d;
    }
    return __builtin_inf();
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define OF(A, a, B, b)                                                                                   \
    EXPORT void sums_##a##b(const A *x, const B *y, ptrdiff_t n, Sums *out) { sums(x, y, n, out); }      \
    EXPORT double gap_##a##b(const A *x, const B *y, ptrdiff_t n) { return gap(x, y, n); }

OF(float, f, float, f)
OF(float, f, double, d)
OF(double, d, float, f)
OF(double, d, double, d)

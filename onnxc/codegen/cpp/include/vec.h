// Vectors of ONNXC_VL lanes over any element type, by GCC vector extensions: no header is included,
// because <immintrin.h> alone costs 0.6 s of compile time.
//
// Every kernel works in lanes: all values of a kernel have VL lanes, whatever their element type
// (16 floats are one 512-bit register, 16 int64 are two). Tails load and store the first n lanes only.
#pragma once
#include "element.h"

#ifndef ONNXC_VL
#if defined(__AVX512F__)
#define ONNXC_VL 16
#elif defined(__AVX__)
#define ONNXC_VL 8
#else
#define ONNXC_VL 4
#endif
#endif
static constexpr int VL = ONNXC_VL;
#define OX static inline __attribute__((always_inline))
#define OX_LAMBDA __attribute__((always_inline))
#define OX_PART __attribute__((noinline))
// Templates that depend on no kernel, and are large: the compiler of programs compiles them once, into an object that it
// links to each. ONNXC_APART is then `extern template` in programs and `template` in that object: see machine_code.py.
#ifdef ONNXC_APART
#define OX_APART __attribute__((noinline))
#else
#define OX_APART static __attribute__((noinline))
#endif
#define OX_UNROLL _Pragma("GCC unroll 64")

OX i64 ox_min(i64 a, i64 b) { return a < b ? a : b; }
OX i64 ox_max(i64 a, i64 b) { return a > b ? a : b; }
OX i64 ox_up(i64 a, i64 b) { return (a + b - 1) / b; }                                   // a / b, rounded up
OX i64 ox_cut(i64 x, i64 n, i64 i) { return x / n * i + ox_min(i, x % n); }  // where part i of n of x begins
// Items first..last of those of n parts, which have `count` each and begin at `begin`; returns where they end.
template <class F> OX i64 ox_parts(i64 n, i64 count, i64 begin, i64 first, i64 last, F part) {
  for (i64 k = count > 0 ? ox_max(first - begin, 0) / count : n; k < n && begin + k * count < last; k++)
    part(k, ox_max(first - begin - k * count, 0), ox_min(last - begin - k * count, count));
  return begin + n * count;
}
// Divisors are sizes: where one is zero there are no elements, and the quotient does not matter.
OX i64 ox_div(i64 a, i64 b) { if (b == 0) return 0; i64 q = a / b; return q - (a % b && (a < 0) != (b < 0)); }
// Divides numbers that are not negative by a size that is known at run time: a product where both have 32 bits at most.
// With m = (2^64 + e) / d, e < d, the product n m / 2^64 exceeds n / d by less than n / 2^64, which is less than 1 / d.
struct ox_divisor {
  i64 d;
  u64 m;
  explicit ox_divisor(i64 size) : d(size), m(size > 1 ? ~0ull / (u64)size + 1 : 0) {}
  i64 quotient(i64 n) const {
    if (__builtin_expect(((n | d) >> 32) == 0 && d != 1, 1)) return (i64)((unsigned __int128)m * (u64)n >> 64);
    return d == 1 ? n : n / d;
  }
  i64 rest(i64 n) const { return n - quotient(n) * d; }
};
OX i64 ox_mod(i64 a, i64 b) {
  if (b == 0) return 0;
  i64 r = a % b;
  return r + (r && (r < 0) != (b < 0) ? b : 0);
}

template <class T> struct vec_of {
  typedef T type __attribute__((vector_size(sizeof(T) * VL)));
  typedef T loose __attribute__((vector_size(sizeof(T) * VL), aligned(1), may_alias));
};
template <class T> using V = typename vec_of<T>::type;
typedef V<f32> vf;
typedef V<f64> vd;
typedef V<i32> vi;
typedef V<i64> vl;

// An integer of the same width, signed: the type of a comparison's mask.
template <int B> struct int_of;
template <> struct int_of<1> { typedef i8 s; };
template <> struct int_of<2> { typedef i16 s; };
template <> struct int_of<4> { typedef i32 s; };
template <> struct int_of<8> { typedef i64 s; };
template <class T> using VM = V<typename int_of<sizeof(T)>::s>;

// All lanes set to x. x - 0 is x for every x, -0.0 too, and becomes one broadcast (a loop over the lanes would
// become a chain of inserts).
template <class T> OX V<T> bc(T x) { return x - V<T>{}; }
// sum += a * b, in the register that the sum is in: where a loop over many sums is unrolled, gcc has them change places,
// copies them to do so, and loads operands for each use. With 32 registers it does not.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
#define OX_SUMS_STAY 1
OX void add_product(vf &sum, vf a, vf b) { asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b)); }
#else
#define OX_SUMS_STAY 0
#endif
template <class X> OX void add_product(X &sum, X a, X b) { sum += a * b; }

// A number that a compiler knows nothing about: a product that is not joined with a sum, in which it would not be
// rounded. Vectors that take more than one register are halved.
#if defined(__AVX512F__)
#define OX_REGISTER 64
#define OX_OWN "+v"
#elif defined(__AVX__)
#define OX_REGISTER 32
#define OX_OWN "+x"
#elif defined(__x86_64__)
#define OX_REGISTER 16
#define OX_OWN "+x"
#elif defined(__aarch64__)
#define OX_REGISTER 16
#define OX_OWN "+w"
#else
#define OX_REGISTER 8
#define OX_OWN "+m"
#endif
template <class T, int N> struct part_of { typedef T type __attribute__((vector_size(sizeof(T) * N))); };
template <class T, int N> OX typename part_of<T, N>::type ox_own_n(typename part_of<T, N>::type v) {
  if constexpr (sizeof v > OX_REGISTER && N > 1) {
    struct { typename part_of<T, N / 2>::type lo, hi; } h;
    __builtin_memcpy(&h, &v, sizeof h);
    h.lo = ox_own_n<T, N / 2>(h.lo), h.hi = ox_own_n<T, N / 2>(h.hi);
    __builtin_memcpy(&v, &h, sizeof h);
  } else {
    asm("" : OX_OWN(v));
  }
  return v;
}
OX V<f32> ox_own(V<f32> v) { return ox_own_n<f32, VL>(v); }
OX V<f64> ox_own(V<f64> v) { return ox_own_n<f64, VL>(v); }

// The same bits under another type of the same size.
template <class R, class A> OX R bits(A a) { R r; __builtin_memcpy(&r, &a, sizeof r); return r; }

// 0, 1, ..., VL - 1 as template arguments: shuffles want their positions as constants.
template <int... I> struct lane_list {};
template <int N> struct count_to { typedef lane_list<__integer_pack(N)...> type; };
typedef count_to<VL>::type all_lanes;

// Loads and stores at any alignment; ldn and stn touch the first n lanes only (others read as zero).
template <class T> OX V<T> ld(const T *p) { return *(const typename vec_of<T>::loose *)p; }
template <class T> OX void st(T *p, V<T> v) { *(typename vec_of<T>::loose *)p = v; }
// Fetches for writing what lies `bytes` behind p. Where rows are written a vector at a time by turns, each of these stores
// would wait for a line of its own: nothing foresees so many runs.
OX void ox_ahead(const void *p, i64 bytes) { __builtin_prefetch((const char *)p + bytes, 1, 3); }
// f(FROM), f(FROM + 1), ...: N numbers put together in registers.
template <class T, int FROM, class F, int... I> OX typename part_of<T, sizeof...(I)>::type lanes_of(F f, lane_list<I...>) {
  typedef typename part_of<T, sizeof...(I)>::type all;
  if constexpr (sizeof(all) > OX_REGISTER && sizeof...(I) > 1) {
    typedef typename count_to<sizeof...(I) / 2>::type half;
    struct { typename part_of<T, sizeof...(I) / 2>::type lo, hi; } h;
    h.lo = lanes_of<T, FROM>(f, half{}), h.hi = lanes_of<T, FROM + (int)sizeof...(I) / 2>(f, half{});
    return bits<all>(h);
  } else {
    return all{(T)f(FROM + I)...};
  }
}
// f(lo), ..., f(hi - 1) in their lanes, zero in others. Where these are not all of them, by way of memory: a loop that
// sets lanes of a vector would go there for each of them.
template <class T, class F> OX V<T> some_lanes(int lo, int hi, F f) {
  if (__builtin_constant_p(lo == 0 && hi == VL) && lo == 0 && hi == VL) return lanes_of<T, 0>(f, all_lanes{});
  alignas(64) T r[VL];
  st(r, V<T>{});
  for (int i = lo; i < hi; i++) r[i] = f(i);
  return ld(r);
}
// The same, one lane after the other: for an f that is long, of which a copy for each lane would take minutes to compile.
template <class T, class F> OX V<T> lane_by_lane(int lo, int hi, F f) {
  alignas(64) T r[VL];
  st(r, V<T>{});
#pragma GCC unroll 1
  for (int i = lo; i < hi; i++) r[i] = f(i);
  return ld(r);
}
template <class T> OX V<T> some_of(const T *p, i64 s, int lo, int hi) {
  return some_lanes<T>(lo, hi, [&](int i) OX_LAMBDA { return p[i * s]; });
}

#if defined(__AVX512F__) && ONNXC_VL == 16
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define OX_MASKED_BYTES 1
#else
#define OX_MASKED_BYTES 0
#endif
// The first n bits. Hidden from the optimizer: a load under a mask that it knows may become a load without one
// (where only the masked lanes are used), which reads past the end of the array.
OX u16 lane_mask(int n) {
  u32 m = (1u << n) - 1;
  asm("" : "+r"(m));
  return (u16)m;
}
// Vectors of 16 words of 64 bits are two registers, each with its half of the mask.
typedef f64 v8d __attribute__((vector_size(64)));
struct v8d_pair { v8d lo, hi; };
OX v8d_pair ld_words(const f64 *p, u16 m) {
  return {__builtin_ia32_loadupd512_mask(p, v8d{}, (u8)m), __builtin_ia32_loadupd512_mask(p + 8, v8d{}, (u8)(m >> 8))};
}
OX void st_words(f64 *p, v8d_pair v, u16 m) {
  __builtin_ia32_storeupd512_mask(p, v.lo, (u8)m);
  __builtin_ia32_storeupd512_mask(p + 8, v.hi, (u8)(m >> 8));
}
template <class T> OX V<T> ldn(const T *p, int n) {
  if constexpr (sizeof(T) == 4) {
    return bits<V<T>>(__builtin_ia32_loadups512_mask((const f32 *)p, bits<vf>(vi{}), lane_mask(n)));
  } else if constexpr (sizeof(T) == 8) {
    return bits<V<T>>(ld_words((const f64 *)p, lane_mask(n)));
#if OX_MASKED_BYTES
  } else if constexpr (sizeof(T) == 1) {
    return bits<V<T>>(__builtin_ia32_loaddquqi128_mask((const char *)p, V<char>{}, lane_mask(n)));
  } else if constexpr (sizeof(T) == 2) {
    return bits<V<T>>(__builtin_ia32_loaddquhi256_mask((const i16 *)p, V<i16>{}, lane_mask(n)));
#endif
  } else {
    return some_of(p, 1, 0, n);
  }
}
template <class T> OX void stn(T *p, V<T> v, int n) {
  if constexpr (sizeof(T) == 4) {
    __builtin_ia32_storeups512_mask((f32 *)p, bits<vf>(v), lane_mask(n));
  } else if constexpr (sizeof(T) == 8) {
    st_words((f64 *)p, bits<v8d_pair>(v), lane_mask(n));
#if OX_MASKED_BYTES
  } else if constexpr (sizeof(T) == 1) {
    __builtin_ia32_storedquqi128_mask((char *)p, bits<V<char>>(v), lane_mask(n));
  } else if constexpr (sizeof(T) == 2) {
    __builtin_ia32_storedquhi256_mask((i16 *)p, bits<V<i16>>(v), lane_mask(n));
#endif
  } else {
    for (int i = 0; i < n; i++) p[i] = v[i];
  }
}
#else
#if defined(__AVX__) && ONNXC_VL == 8
// The lanes of 4 or 8 bytes for which the mask is set; words of 64 bits are two registers, each with its half of it.
typedef f64 v4d __attribute__((vector_size(32)));
typedef i64 v4l __attribute__((vector_size(32)));
struct v4d_pair { v4d lo, hi; };
template <class T> OX V<T> ld_masked(const T *p, vi m) {
  if constexpr (sizeof(T) == 4) {
    return bits<V<T>>(__builtin_ia32_maskloadps256((const vf *)p, m));
  } else {
    struct { v4l lo, hi; } w;
    const vl wide = __builtin_convertvector(m, vl);
    __builtin_memcpy(&w, &wide, sizeof w);
    const v4d *const at = (const v4d *)p;
    return bits<V<T>>(v4d_pair{__builtin_ia32_maskloadpd256(at, w.lo), __builtin_ia32_maskloadpd256(at + 1, w.hi)});
  }
}
#endif
template <class T> OX V<T> ldn(const T *p, int n) {
#if defined(__AVX__) && ONNXC_VL == 8
  if constexpr (sizeof(T) >= 4) {
    const vi lane = {0, 1, 2, 3, 4, 5, 6, 7};
    return ld_masked(p, lane < n);
  }
#endif
  return some_of(p, 1, 0, n);
}
template <class T> OX void stn(T *p, V<T> v, int n) { for (int i = 0; i < n; i++) p[i] = v[i]; }
#endif

// Strided load and store of the first n lanes: p[0], p[s], p[2 s], ...
template <class T> OX V<T> lds(const T *p, i64 s, int n) { return some_of(p, s, 0, n); }
template <class T> OX void sts(T *p, V<T> v, i64 s, int n) { for (int i = 0; i < n; i++) p[i * s] = v[i]; }

// The element type of a vector type (V<T> alone cannot be deduced), and the mask that its comparison gives.
template <class A> struct vec_bare { typedef A type; };
template <class A> struct vec_bare<A &> { typedef A type; };
template <class A> using elem = typename vec_bare<decltype((*(A *)0)[0])>::type;
template <class A> using mask_of = VM<elem<A>>;

// A vector as the machine's registers. g++ splits arithmetic on wider vectors (16 doubles are two registers
// of AVX-512) by itself, but compares and selects them lane by lane, which is ten times slower; so those
// two go through v_lt, v_sel, ... wherever the type may be wide.
#if defined(__AVX512F__)
static constexpr int REGISTER = 64;
#elif defined(__AVX__)
static constexpr int REGISTER = 32;
#else
static constexpr int REGISTER = 16;
#endif
template <class A> struct vec_parts {
  static constexpr int size = sizeof(A) < REGISTER ? sizeof(A) : REGISTER, count = sizeof(A) / size;
  typedef elem<A> part __attribute__((vector_size(size)));
  part v[count];
};
// The registers that a vector of T takes (one, or two where T has 8 bytes), and their lanes. What has many vectors at
// work at once, as products do, works on these: g++ would keep the wider vectors in memory.
template <class T> using VR = typename vec_parts<V<T>>::part;
template <class T> static constexpr int VRL = vec_parts<V<T>>::size / sizeof(T);
template <class T> struct reg_loose {
  typedef T type __attribute__((vector_size(vec_parts<V<T>>::size), aligned(1), may_alias));
};
template <class T> OX VR<T> ldr(const T *p) { return *(const typename reg_loose<T>::type *)p; }
template <class T> OX void str(T *p, VR<T> v) { *(typename reg_loose<T>::type *)p = v; }
#define OX_COMPARE(NAME, OP)                                                          \
  template <class A> OX mask_of<A> NAME(A a, A b) {                                   \
    if constexpr (sizeof(A) <= REGISTER) {                                            \
      return a OP b;                                                                  \
    } else {                                                                          \
      vec_parts<A> p = bits<vec_parts<A>>(a), q = bits<vec_parts<A>>(b);                          \
      vec_parts<mask_of<A>> r;                                                            \
      OX_UNROLL for (int i = 0; i < vec_parts<A>::count; i++) r.v[i] = p.v[i] OP q.v[i];  \
      return bits<mask_of<A>>(r);                                                     \
    }                                                                                 \
  }
OX_COMPARE(v_lt, <)
OX_COMPARE(v_le, <=)
OX_COMPARE(v_gt, >)
OX_COMPARE(v_ge, >=)
OX_COMPARE(v_eq, ==)
OX_COMPARE(v_ne, !=)

// select: lanes where the mask is set (all ones) take a.
template <class A> OX A v_sel(mask_of<A> m, A a, A b) {
  if constexpr (sizeof(A) <= REGISTER) {
    return m ? a : b;
  } else {
    vec_parts<mask_of<A>> k = bits<vec_parts<mask_of<A>>>(m);
    vec_parts<A> p = bits<vec_parts<A>>(a), q = bits<vec_parts<A>>(b);
    OX_UNROLL for (int i = 0; i < vec_parts<A>::count; i++) p.v[i] = k.v[i] ? p.v[i] : q.v[i];
    return bits<A>(p);
  }
}
template <class T> OX V<T> sel(VM<T> m, V<T> a, V<T> b) { return v_sel(m, a, b); }

#include "vwidths.h"

// Conversion of every lane. Bytes and 16 bits go through 32 on their way to and from more, and floats.
template <class R, class T> OX V<R> conv(V<T> v) {
  if constexpr (sizeof(T) < 4 && sizeof(R) > sizeof(T)) {
    if constexpr (sizeof(R) == 4 || sizeof(R) == 8) return __builtin_convertvector(widen_lanes<i32, T>(v), V<R>);
    else return (V<R>)widen_lanes<i16, T>(v);
  } else if constexpr (sizeof(R) < 4 && sizeof(T) > sizeof(R)) {
    if constexpr (sizeof(T) > 2) return (V<R>)narrow_lanes<i32, R>(__builtin_convertvector(v, V<i32>));
    else return (V<R>)narrow_lanes<i16, R>((V<i16>)v);
  } else {
    return __builtin_convertvector(v, V<R>);
  }
}

// How many lanes are valid, as a type: Full costs nothing, Part masks. Both convert to int.
struct Full { constexpr operator int() const { return VL; } };
struct Part { int n; constexpr operator int() const { return n; } };
template <class T> OX V<T> ldl(const T *p, Full) { return ld(p); }
template <class T> OX V<T> ldl(const T *p, Part l) { return ldn(p, l.n); }
template <class T> OX void stl(T *p, V<T> v, Full) { st(p, v); }
template <class T> OX void stl(T *p, V<T> v, Part l) { stn(p, v, l.n); }
// The lanes lo <= i < hi alone, of an access whose other lanes lie outside of an array: they read as zero.
struct Range { int lo, hi; constexpr operator int() const { return hi; } };
OX int lane_lo(Full) { return 0; }
OX int lane_lo(Part) { return 0; }
OX int lane_lo(Range r) { return r.lo; }
template <class T> OX V<T> ldl(const T *p, Range r) {
#if defined(__AVX512F__) && ONNXC_VL == 16
  if constexpr (sizeof(T) == 4) {
    const u16 m = lane_mask(r.hi) & (u16)~lane_mask(r.lo);
    return bits<V<T>>(__builtin_ia32_loadups512_mask((const f32 *)p, bits<vf>(vi{}), m));
  } else if constexpr (sizeof(T) == 8) {
    return bits<V<T>>(ld_words((const f64 *)p, lane_mask(r.hi) & (u16)~lane_mask(r.lo)));
  }
#elif defined(__AVX__) && ONNXC_VL == 8
  if constexpr (sizeof(T) >= 4) {
    const vi i = {0, 1, 2, 3, 4, 5, 6, 7};
    return ld_masked(p, (i >= r.lo) & (i < r.hi));
  }
#endif
  return some_of(p, 1, r.lo, r.hi);
}
// The elements from p + from on that a strided vector from p on needs, for its lanes alone.
template <int S, class T> OX V<T> ld_block(const T *p, int from, Full) { return ld(p + from); }
template <int S, class T, class L> OX V<T> ld_block(const T *p, int from, L lanes) {
  const int lo = lane_lo(lanes) * S - from, hi = ((int)lanes - 1) * S + 1 - from;
  return ldl(p + from, Range{lo < 0 ? 0 : lo < VL ? lo : VL, hi < 0 ? 0 : hi < VL ? hi : VL});
}
// p[0], p[S], p[2 S], ... from S loads, none of which reads past the last element.
template <int S, class T, class L, int... I> OX V<T> ld_every(const T *p, L lanes, lane_list<I...>) {
  constexpr int last = (VL - 1) * (S - 1);  // where the last load may begin
  constexpr int second = VL < last ? VL : last;
  V<T> r = __builtin_shufflevector(ld_block<S>(p, 0, lanes), ld_block<S>(p, second, lanes),
                                   (I * S < VL ? I * S : I * S - second < VL ? VL + I * S - second : 0)...);
  if constexpr (S > 2) {
    constexpr int third = 2 * VL < last ? 2 * VL : last;
    r = __builtin_shufflevector(r, ld_block<S>(p, third, lanes),
                                (I * S < 2 * VL || I * S - third >= VL ? I : VL + I * S - third)...);
  }
  if constexpr (S > 3) {
    r = __builtin_shufflevector(r, ld_block<S>(p, last, lanes), (I * S < 3 * VL ? I : VL + I * S - last)...);
  }
  return r;
}
// Shuffles do not help vectors wider than a register, nor parts of vectors whose loads know no masks.
template <class T, class L> OX V<T> lds(const T *p, i64 s, L lanes) {
  if constexpr (sizeof(T) * VL <= REGISTER && (sizeof(T) == 4 || __is_same(L, Full))) {
    if (__builtin_constant_p(s) && s == 2) return ld_every<2>(p, lanes, all_lanes{});
    if (__builtin_constant_p(s) && s == 3) return ld_every<3>(p, lanes, all_lanes{});
    if (__builtin_constant_p(s) && s == 4) return ld_every<4>(p, lanes, all_lanes{});
  }
  return some_of(p, s, lane_lo(lanes), (int)lanes);
}
// p[0], p[0], p[1], p[1], ...: every element N times.
template <int N, class T, class L, int... I> OX V<T> ld_repeat(const T *p, L lanes, lane_list<I...>) {
  const V<T> some = ldl(p, Range{lane_lo(lanes) / N, ((int)lanes + N - 1) / N});
  return __builtin_shufflevector(some, some, (I / N)...);
}
// G vectors whose lanes take turns in memory: v[0][0], v[1][0], ..., v[0][1], v[1][1], ...: part J of them.
template <int J, class T, int G, int... I> OX V<T> turns_of(const V<T> (&v)[G], lane_list<I...>) {
  V<T> r = __builtin_shufflevector(v[0], v[1], (((J * VL + I) % G == 1 ? VL : 0) + (J * VL + I) / G)...);
  if constexpr (G > 2) {
    r = __builtin_shufflevector(r, v[2], ((J * VL + I) % G == 2 ? VL + (J * VL + I) / G : I)...);
  }
  if constexpr (G > 3) {
    r = __builtin_shufflevector(r, v[3], ((J * VL + I) % G == 3 ? VL + (J * VL + I) / G : I)...);
  }
  return r;
}
template <int J, class T, int G> OX void st_parts(T *p, const V<T> (&v)[G], Full lanes) {
  st(p + J * VL, turns_of<J, T>(v, all_lanes{}));
  if constexpr (J + 1 < G) st_parts<J + 1>(p, v, lanes);
}
template <int J, class T, int G> OX void st_parts(T *p, const V<T> (&v)[G], Part lanes) {
  const int left = lanes.n * G - J * VL;
  if (left > 0) stn(p + J * VL, turns_of<J, T>(v, all_lanes{}), left < VL ? left : VL);
  if constexpr (J + 1 < G) st_parts<J + 1>(p, v, lanes);
}
template <class T, class L, class... A> OX void st_turns(T *p, L lanes, V<T> a, A... rest) {
  constexpr int G = 1 + (int)sizeof...(A);
  const V<T> v[G] = {a, rest...};
  if constexpr (sizeof(V<T>) <= REGISTER) {
    st_parts<0, T>(p, v, lanes);
  } else {
    OX_UNROLL for (int k = 0; k < G; k++) sts(p + k, v[k], G, (int)lanes);
  }
}
// A mask that is set in lanes lo <= i < hi.
template <class T, int... I> OX VM<T> range_mask(i64 lo, i64 hi, lane_list<I...>) {
  const vi i = {I...};
  return conv<typename int_of<sizeof(T)>::s, i32>((i >= (i32)lo) & (i < (i32)hi));
}
template <class T> constexpr T ox_least() { return (T)-1 < 0 ? (T)((u64)1 << (sizeof(T) * 8 - 1)) : (T)0; }
template <class T> constexpr T ox_greatest() { return (T)~ox_least<T>(); }
template <class T> OX V<T> ox_lanes() { V<T> r; OX_UNROLL for (int i = 0; i < VL; i++) r[i] = i; return r; }

// Vectors of ONNXC_VL lanes over any element type, by GCC vector extensions: no header is included,
// because <immintrin.h> alone costs 0.6 s of compile time.
//
// Every kernel works in lanes: all values of a kernel have VL lanes, whatever their element type
// (16 floats are one 512-bit register, 16 int64 are two). Tails load and store the first n lanes only.
#pragma once
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

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
#define OX_UNROLL _Pragma("GCC unroll 64")

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

// The same bits under another type of the same size.
template <class R, class A> OX R bits(A a) { R r; __builtin_memcpy(&r, &a, sizeof r); return r; }

// Loads and stores at any alignment; ldn and stn touch the first n lanes only (others read as zero).
template <class T> OX V<T> ld(const T *p) { return *(const typename vec_of<T>::loose *)p; }
template <class T> OX void st(T *p, V<T> v) { *(typename vec_of<T>::loose *)p = v; }
#if defined(__AVX512F__) && ONNXC_VL == 16
// The first n bits. Hidden from the optimizer: a load under a mask that it knows may become a load without one
// (where only the masked lanes are used), which reads past the end of the array.
OX u16 lane_mask(int n) {
  u32 m = (1u << n) - 1;
  asm("" : "+r"(m));
  return (u16)m;
}
template <class T> OX V<T> ldn(const T *p, int n) {
  if constexpr (sizeof(T) == 4) {
    return bits<V<T>>(__builtin_ia32_loadups512_mask((const f32 *)p, bits<vf>(vi{}), lane_mask(n)));
  } else {
    V<T> r = {};
    for (int i = 0; i < n; i++) r[i] = p[i];
    return r;
  }
}
template <class T> OX void stn(T *p, V<T> v, int n) {
  if constexpr (sizeof(T) == 4) {
    __builtin_ia32_storeups512_mask((f32 *)p, bits<vf>(v), lane_mask(n));
  } else {
    for (int i = 0; i < n; i++) p[i] = v[i];
  }
}
#else
template <class T> OX V<T> ldn(const T *p, int n) {
  V<T> r = {};
  for (int i = 0; i < n; i++) r[i] = p[i];
  return r;
}
template <class T> OX void stn(T *p, V<T> v, int n) { for (int i = 0; i < n; i++) p[i] = v[i]; }
#endif

// Strided load and store of the first n lanes: p[0], p[s], p[2 s], ...
template <class T> OX V<T> lds(const T *p, i64 s, int n) {
  V<T> r = {};
  for (int i = 0; i < n; i++) r[i] = p[i * s];
  return r;
}
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

template <class R, class T> OX V<R> conv(V<T> v) { return __builtin_convertvector(v, V<R>); }

#ifndef ONNXC_LANES
#define ONNXC_LANES
// How many lanes are valid, as a type: Full costs nothing, Part masks. Both convert to int.
struct Full { constexpr operator int() const { return VL; } };
struct Part { int n; constexpr operator int() const { return n; } };
template <class T> OX V<T> ldl(const T *p, Full) { return ld(p); }
template <class T> OX V<T> ldl(const T *p, Part l) { return ldn(p, l.n); }
template <class T> OX void stl(T *p, V<T> v, Full) { st(p, v); }
template <class T> OX void stl(T *p, V<T> v, Part l) { stn(p, v, l.n); }
#endif

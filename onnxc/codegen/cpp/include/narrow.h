// Elements that are wider in lanes than in memory: floats of 16 bits and fewer are computed as float, integers of 4
// and 2 bits as bytes. In memory each has a place of its own: 16 bits, or a byte whose upper bits are zero.
#pragma once
#include "vmath.h"

typedef _Float16 ox_f16;
struct ox_half { typedef u16 word; typedef f32 lane; ox_f16 x; };
struct ox_bf16 { typedef u16 word; typedef f32 lane; u16 x; };
OX f32 ox_get(ox_half h) { return (f32)h.x; }
OX f32 ox_get(ox_bf16 h) { u32 b = (u32)h.x << 16; return bits<f32>(b); }
OX void ox_put(ox_half &h, f32 x) { h.x = (ox_f16)x; }
OX void ox_put(ox_bf16 &h, f32 x) {
  u32 b = bits<u32>(x);
  h.x = x != x ? (u16)((b >> 16) | 0x40) : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
// Whole vectors: lanes of 16 bits to floats and back, rounded to the nearest even.
OX vf ox_widen(V<u16> h, const ox_bf16 *) { return bits<vf>(conv<u32, u16>(h) << 16); }
OX V<u16> ox_narrow(vf x, const ox_bf16 *) {
  const V<u32> b = bits<V<u32>>(x), r = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return conv<u16, u32>(v_sel(v_ne(x, x), (b >> 16) | 0x40, r));
}
#if OX_512
OX vf ox_widen(V<u16> h, const ox_half *) {
  return __builtin_ia32_vcvtph2ps512_mask(bits<V<i16>>(h), vf{}, OX_ALL, OX_CUR);
}
OX V<u16> ox_narrow(vf x, const ox_half *) {
  return bits<V<u16>>(__builtin_ia32_vcvtps2ph512_mask(x, OX_CUR, V<i16>{}, OX_ALL));
}
#elif OX_256 && defined(__F16C__)
OX vf ox_widen(V<u16> h, const ox_half *) { return __builtin_ia32_vcvtph2ps256(bits<V<i16>>(h)); }
OX V<u16> ox_narrow(vf x, const ox_half *) { return bits<V<u16>>(__builtin_ia32_vcvtps2ph256(x, 4)); }
#else
OX vf ox_widen(V<u16> h, const ox_half *) {
  vf r;
  for (int i = 0; i < VL; i++) { u16 b = h[i]; r[i] = (f32)bits<ox_f16>(b); }
  return r;
}
OX V<u16> ox_narrow(vf x, const ox_half *) {
  V<u16> r;
  for (int i = 0; i < VL; i++) r[i] = bits<u16>((ox_f16)x[i]);
  return r;
}
#endif

// Floats of E exponent and M mantissa bits (and a sign above them), as ml_dtypes has them. What the largest codes
// mean: infinities and NaN (IEEE), one NaN of either sign (FN), no NaN but in place of -0 (FNUZ), nothing (FINITE).
enum { OX_IEEE, OX_FN, OX_FNUZ, OX_FINITE };
template <class U> struct ox_float_of { typedef f32 type; };
template <> struct ox_float_of<V<u32>> { typedef vf type; };
template <int E, int M, int BIAS, int KIND> struct ox_small {
  typedef u8 word;
  typedef f32 lane;
  u8 x;
  static constexpr u32 SIGN = 1u << (E + M), FIELD = ((1u << E) - 1) << M;
  static constexpr u32 LAST = KIND == OX_IEEE ? FIELD - 1 : KIND == OX_FN ? SIGN - 2 : SIGN - 1;  // the greatest number
  // Both ways on the bits of floats, for a number (U = u32) or a vector of them.
  template <class U> OX U decode(U b) {
    typedef typename ox_float_of<U>::type F;
    const U magnitude = b & (SIGN - 1), none = U{};
    const U scale = none + ((u32)(254 - BIAS) << 23);  // 2^(127 - BIAS): what is denormal becomes a plain float
    U f = bits<U>(bits<F>(magnitude << (23 - M)) * bits<F>(scale));
    if constexpr (KIND == OX_IEEE) f = magnitude > LAST ? (magnitude << (23 - M)) | 0x7f800000u : f;
    if constexpr (KIND == OX_FN) f = magnitude > LAST ? none + 0x7fc00000u : f;
    if constexpr (KIND == OX_FNUZ) f = b == SIGN ? none + 0x7fc00000u : f;
    return f | ((b & SIGN) << (31 - E - M));
  }
  template <class U> OX U encode(U x) {
    typedef typename ox_float_of<U>::type F;
    const U none = U{}, sign = (x >> 31) << (E + M), a = x & 0x7fffffffu;
    // A sum with a number whose last bit is worth as much as that of denormals here rounds to it.
    const U magic = none + ((u32)(127 + 1 - BIAS - M + 23) << 23);
    const U small = bits<U>(bits<F>(a) + bits<F>(magic)) - magic;
    const U plain = ((a + ((1u << (22 - M)) - 1) + ((a >> (23 - M)) & 1u)) >> (23 - M)) - ((u32)(127 - BIAS) << M);
    U r = a < ((u32)(128 - BIAS) << 23) ? small : plain;
    if constexpr (KIND == OX_IEEE) {
      const U payload = (a >> (23 - M)) & ((1u << M) - 1), nan = payload == 0u ? none + (1u << (M - 1)) : payload;
      r = a > 0x7f800000u ? FIELD | nan : r > LAST ? none + FIELD : r;
    }
    if constexpr (KIND == OX_FN) r = r > LAST ? none + (LAST + 1) : r;
    if constexpr (KIND == OX_FINITE) return a > 0x7f800000u ? sign ^ SIGN : (r > LAST ? none + LAST : r) | sign;
    if constexpr (KIND == OX_FNUZ) return r > LAST ? none + SIGN : r == 0u ? none : r | sign;
    return r | sign;
  }
};
typedef ox_small<4, 3, 7, OX_FN> ox_e4m3fn;
typedef ox_small<4, 3, 8, OX_FNUZ> ox_e4m3fnuz;
typedef ox_small<5, 2, 15, OX_IEEE> ox_e5m2;
typedef ox_small<5, 2, 16, OX_FNUZ> ox_e5m2fnuz;
typedef ox_small<2, 1, 1, OX_FINITE> ox_e2m1;
typedef ox_small<2, 3, 1, OX_FINITE> ox_e2m3;
typedef ox_small<3, 2, 3, OX_FINITE> ox_e3m2;
// Powers of two from 2^-127 on, and NaN; what is no positive number becomes NaN.
struct ox_e8m0 {
  typedef u8 word;
  typedef f32 lane;
  u8 x;
  template <class U> OX U decode(U b) {
    const U none = U{};
    return b == 0u ? none + 0x00400000u : b == 255u ? none + 0x7fc00000u : b << 23;
  }
  template <class U> OX U encode(U x) {  // to the nearest, halves up
    const U none = U{}, up = (x + 0x00400000u) >> 23;
    const U tiny = x < 0x00200000u ? none + 255u : x < 0x00600000u ? none : none + 1;  // denormal floats
    return (x - 1u) >= 0x7f7fffffu ? none + 255u : x < 0x00800000u ? tiny : up;
  }
};
#define OX_FLOATS_OF_BYTES(T)                                                                       \
  OX f32 ox_get(T h) { u32 b = h.x; return bits<f32>(T::decode(b)); }                               \
  OX void ox_put(T &h, f32 x) { h.x = (u8)T::encode(bits<u32>(x)); }                                \
  OX vf ox_widen(V<u8> h, const T *) { return bits<vf>(T::decode(conv<u32, u8>(h))); }              \
  OX V<u8> ox_narrow(vf x, const T *) { return conv<u8, u32>(T::encode(bits<V<u32>>(x))); }
OX_FLOATS_OF_BYTES(ox_e4m3fn)
OX_FLOATS_OF_BYTES(ox_e4m3fnuz)
OX_FLOATS_OF_BYTES(ox_e5m2)
OX_FLOATS_OF_BYTES(ox_e5m2fnuz)
OX_FLOATS_OF_BYTES(ox_e2m1)
OX_FLOATS_OF_BYTES(ox_e2m3)
OX_FLOATS_OF_BYTES(ox_e3m2)
OX_FLOATS_OF_BYTES(ox_e8m0)

// Integers of fewer than 8 bits. Lanes are whole bytes, with the sign extended.
template <int B, class L> struct ox_part_of_byte { typedef u8 word; typedef L lane; u8 x; };
typedef ox_part_of_byte<4, i8> ox_int4;
typedef ox_part_of_byte<4, u8> ox_uint4;
typedef ox_part_of_byte<2, i8> ox_int2;
typedef ox_part_of_byte<2, u8> ox_uint2;
template <int B, class L> OX L ox_get(ox_part_of_byte<B, L> h) { return (L)((L)(h.x << (8 - B)) >> (8 - B)); }
template <int B, class L> OX void ox_put(ox_part_of_byte<B, L> &h, L x) { h.x = (u8)x & ((1 << B) - 1); }
template <int B, class L> OX V<L> ox_widen(V<u8> h, const ox_part_of_byte<B, L> *) {
  return bits<V<L>>(h << (8 - B)) >> (8 - B);
}
template <int B, class L> OX V<u8> ox_narrow(V<L> x, const ox_part_of_byte<B, L> *) {
  return bits<V<u8>>(x) & (u8)((1 << B) - 1);
}

template <class H> OX V<typename H::lane> ox_ldnarrow(const H *p, i64 s, int n) {
  return some_lanes<typename H::lane>(0, n, [&](int i) OX_LAMBDA { return ox_get(p[i * s]); });
}
template <class H> OX V<typename H::lane> ox_ldnarrow(const H *p, Full) {
  return ox_widen(ld((const typename H::word *)p), p);
}
template <class H> OX V<typename H::lane> ox_ldnarrow(const H *p, Part l) {
  return ox_widen(ldl((const typename H::word *)p, l), p);
}
template <class H> OX void ox_stnarrow(H *p, V<typename H::lane> v, i64 s, int n) {
  for (int i = 0; i < n; i++) ox_put(p[i * s], (typename H::lane)v[i]);
}
template <class H> OX void ox_stnarrow(H *p, V<typename H::lane> v, Full) {
  st((typename H::word *)p, ox_narrow(v, p));
}
template <class H> OX void ox_stnarrow(H *p, V<typename H::lane> v, Part l) {
  stl((typename H::word *)p, ox_narrow(v, p), l);
}
// The lanes as they are after a way through memory: rounded, or with the upper bits dropped.
template <class H> OX V<typename H::lane> ox_fit(V<typename H::lane> v) { return ox_widen(ox_narrow(v, (H *)0), (H *)0); }
// Doubles as floats from which narrower ones are rounded right: what is lost sets the last bit (rounding to odd), so
// that the second rounding sees on which side of a tie it is.
OX vf ox_odd(vd x) {
  const vf near = conv<f32, f64>(x);
  const vd back = conv<f64, f32>(near), size = bits<vd>(bits<vl>(x) & 0x7fffffffffffffffLL);
  const vd over = bits<vd>(bits<vl>(back) & 0x7fffffffffffffffLL);
  const vi far = conv<i32, i64>(v_gt(over, size)), inexact = conv<i32, i64>(v_ne(back, x)) & conv<i32, i64>(v_eq(x, x));
  return bits<vf>((bits<vi>(near) + far) | (inexact & 1));
}

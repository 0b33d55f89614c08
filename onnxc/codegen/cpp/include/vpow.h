// Powers: of floats, and exact ones of integers.
#pragma once
#include "vlibm.h"
#include "vreduce.h"
#include "vround.h"

// Half the lanes, as doubles: one register of them has the size of a vf.
struct Half {
  typedef f32 f __attribute__((vector_size(2 * VL)));
  typedef f64 d __attribute__((vector_size(4 * VL)));
  typedef u64 u __attribute__((vector_size(4 * VL)));
  struct pair { f lo, hi; };
};

// |x|^y for x finite and not 0 in double precision: 2^(y log2 x), log2 through atanh of (m - 1) / (m + 1).
OX Half::f v_pow_half(Half::f x, Half::f y) {
  const u64 base = 0x3fe8000000000000;  // 3/4
  Half::u b = bits<Half::u>(__builtin_convertvector(x, Half::d)) - (base - (1024ull << 52));
  Half::d e = bits<Half::d>((b >> 52) | 0x4330000000000000) - (0x1p52 + 1024);
  Half::d m = bits<Half::d>((b & 0xfffffffffffff) + base);
  Half::d s = (m - 1.0) / (m + 1.0), t = s * s;
  Half::d p = t * 0.2908749296263974 + 0.31928109452751396;
  p = p * t + 0.41222629688933593;
  p = p * t + 0.5770777540298152;
  p = p * t + 0.9617966948323314;
  p = p * t + 2.88539008177742;
  Half::d z = (p * s + e) * __builtin_convertvector(y, Half::d);
  z = z < -400.0 ? z - z - 400.0 : z;
  z = z > 400.0 ? z - z + 400.0 : z;
  Half::d magic = z - z + 0x1.8p52, k = z + magic, r = z - (k - magic);
  p = r * 0.0001534578412203308 + 0.0013399957589354482;
  p = p * r + 0.009618489262446453;
  p = p * r + 0.05550328711922478;
  p = p * r + 0.2402264688591292;
  p = p * r + 0.6931472057670669;
  p = p * r + 1.0;
  Half::d scale = bits<Half::d>((bits<Half::u>(k) + 1023) << 52);
  return __builtin_convertvector(p * scale, Half::f);
}

// 0.6 ULP, with the special values of C's pow.
OX vf v_pow(vf x, vf y) {
  vf ax = v_abs(x), ay = v_abs(y);
  Half::pair hx = bits<Half::pair>(ax), hy = bits<Half::pair>(y);
  vf r = bits<vf>(Half::pair{v_pow_half(hx.lo, hy.lo), v_pow_half(hx.hi, hy.hi)});
  // Where the logarithm or y is infinite: 0 or infinity, by whether |x| > 1 and y > 0 agree.
  vi edge = (ax == 0.0f) | (ax == F_INF) | (ay == F_INF), grows = (ax > 1.0f) ^ (y < 0.0f);
  r = edge ? (grows ? bc(F_INF) : vf{}) : r;
  vf half = y * 0.5f;
  vi whole = v_trunc(y) == y, odd = whole & (v_trunc(half) != half);
  r = v_or(r, bits<vf>(odd & bits<vi>(v_signbit(x))));
  r = (x < 0.0f) & (x != -F_INF) & (whole == 0) ? bc(__builtin_nanf("")) : r;
  r = (x != x) | (y != y) ? x + y : r;
  vi one = (y == 0.0f) | (x == 1.0f) | ((x == -1.0f) & (ay == F_INF));
  return one ? bc(1.0f) : r;
}
OX_LANES2(pow)
OX vd v_pow(vd x, vd y) { return lanes_pow(x, y); }

// Exact integer power modulo 2^bits by repeated squaring; a negative exponent truncates 1 / a^|b|, so only
// 1 and -1 give a result other than 0.
template <class A> static __attribute__((noinline)) A v_ipow(A a, A b) {
  typedef elem<A> T;
  const A one = bc((T)1);
  A r = one, n = b;
  if constexpr ((T)-1 < 0) {
    const mask_of<A> below = v_lt(b, A{}), unit = v_eq(a, one) | v_eq(a, bc((T)-1));
    r = v_sel(below, v_sel(unit, one, A{}), one);
    n = v_sel(below, b & one, b);
  }
  for (;; a *= a) {
    r = v_sel(v_ne(n & one, A{}), r * a, r);
    n >>= 1;
    u64 words[(sizeof(A) + 7) / 8] = {}, any = 0;
    __builtin_memcpy(words, &n, sizeof n);
    OX_UNROLL for (u64 w : words) any |= w;
    if (!any) return r;
  }
}
template <class A> OX A v_pow(A a, A b) { return v_ipow(a, b); }

// One exponent for all lanes. Squares and cubes are products, as they are where it is a constant.
template <class T> OX V<T> ox_power(V<T> x, V<T> y) {
  if (!ox_any(v_ne(y, bc<T>(2)))) return x * x;
  if (!ox_any(v_ne(y, bc<T>(3)))) return x * x * x;
  return v_pow(x, y);
}

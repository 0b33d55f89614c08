// Inverse trigonometric functions.
#pragma once
#include "vlibm.h"
#include "vsqrt.h"

// 1.9 ULP. atan(x) = pi/2 - atan(1/x) beyond 1.
OX vf v_atan(vf x) {
  vf a = v_abs(x);
  vi far = a > 1.0f;
  vf t = far ? -1.0f / a : a, z = t * t;
  vf p = z * 0.002920688595622778f - 0.016367914155125618f;
  p = p * z + 0.043211836367845535f;
  p = p * z - 0.07552212476730347f;
  p = p * z + 0.10666003823280334f;
  p = p * z - 0.14211055636405945f;
  p = p * z + 0.19993773102760315f;
  p = p * z - 0.33333152532577515f;
  vf r = (p * z) * t + (far ? t - 0x1.777a5cp-25f : t);
  return v_or(far ? 0x1.921fb6p0f + r : r, v_signbit(x));
}
// asin(t) - t for 0 <= t <= 1/2, from t and t^2.
OX vf v_asin_rest(vf t, vf z) {
  vf p = z * 0.04216630756855011f + 0.02417951636016369f;
  p = p * z + 0.04547037556767464f;
  p = p * z + 0.07495297491550446f;
  p = p * z + 0.16666752099990845f;
  return (p * z) * t;
}
// 1.9 ULP. asin(x) = pi/2 - 2 asin(sqrt((1 - x) / 2)) beyond 1/2; NaN beyond 1.
OX vf v_asin(vf x) {
  vf a = v_abs(x);
  vi far = a > 0.5f;
  vf z = far ? 0.5f - 0.5f * a : a * a, t = far ? v_sqrt(z) : a;
  vf rest = v_asin_rest(t, z), high = (0x1.921fb6p0f - 2.0f * t) - (2.0f * rest + 0x1.777a5cp-25f);
  return v_or(far ? high : t + rest, v_signbit(x));
}
// 1.9 ULP. 2 asin(sqrt((1 - x) / 2)) beyond 1/2, pi less that below -1/2, and pi/2 - asin(x) between.
OX vf v_acos(vf x) {
  vf a = v_abs(x);
  vi far = a > 0.5f;
  vf z = far ? 0.5f - 0.5f * a : a * a, t = far ? v_sqrt(z) : a;
  vf rest = v_asin_rest(t, z);
  vf near = 0x1.921fb6p0f - (v_or(t, v_signbit(x)) + (v_or(rest, v_signbit(x)) + 0x1.777a5cp-25f));
  vf high = 2.0f * (t + rest);
  return far ? (x < 0.0f ? 0x1.921fb6p1f - (high + 0x1.777a5cp-24f) : high) : near;
}

OX_LANES(atan) OX_LANES(asin) OX_LANES(acos)
OX vd v_atan(vd x) { return lanes_atan(x); }
OX vd v_asin(vd x) { return lanes_asin(x); }
OX vd v_acos(vd x) { return lanes_acos(x); }

// Floats to integers.
#pragma once
#include "vec.h"

// Float to integer as onnxruntime has it: narrow types take the low bits of an int32, out of range
// gives the least value, and unsigned types subtract the half of their range from what is above it.
template <class R, class T> OX V<R> ox_trunc(V<T> x) {
  if constexpr (sizeof(R) < 4) {
    return conv<R, i32>(conv<i32, T>(x));
  } else if constexpr ((R)-1 < 0) {
    return conv<R, T>(x);
  } else {
    typedef typename int_of<sizeof(R)>::s S;
    constexpr T half = sizeof(R) == 4 ? (T)0x1p31 : (T)0x1p63;
    VM<T> high = v_ge(x, bc<T>(half));
    V<S> r = conv<S, T>(v_sel(high, x - half, x));
    return bits<V<R>>(r ^ (conv<S, typename int_of<sizeof(T)>::s>(high) << (sizeof(S) * 8 - 1)));
  }
}

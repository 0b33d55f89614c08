// Bools as masks of int32 lanes, 0 or -1: what comparisons give, and how bytes hold them.
#pragma once
#include "vec.h"

template <class T> OX vi ox_mask(VM<T> m) { return conv<i32, typename int_of<sizeof(T)>::s>(m); }
template <class T> OX V<T> ox_sel(vi m, V<T> a, V<T> b) {
  return v_sel(conv<typename int_of<sizeof(T)>::s, i32>(m), a, b);
}
template <class T> OX V<T> ox_part(V<T> x, V<T>, Full) { return x; }
template <class T> OX V<T> ox_part(V<T> x, V<T> other, Part l) {
  return v_sel(range_mask<T>(0, l.n, all_lanes{}), x, other);
}
template <class L> OX vi ox_ldbool(const u8 *p, L lanes) {
  return conv<i32, i8>(ldl((const i8 *)p, lanes) != V<i8>{});
}
template <class L> OX void ox_stbool(u8 *p, vi m, L lanes) { stl(p, conv<u8, i32>(m & 1), lanes); }

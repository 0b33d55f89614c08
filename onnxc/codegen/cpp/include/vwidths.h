// Lanes of integers made wider (with their sign, if they have one) and narrower (their low bits), between 8, 16 and 32
// bits. g++ doubles or halves the width of lanes by halves of a vector, and takes more than one step at once lane by
// lane. Where the CPU has an instruction for all of it, this is that instruction. A part of vec.h, which includes it.
#pragma once

#if ONNXC_VL == 16 && defined(__AVX512BW__) && defined(__AVX512VL__)
typedef char bytes_of_16 __attribute__((vector_size(16)));
template <class R, class T> OX V<R> widen_lanes(V<T> v) {
  constexpr bool is_signed = (T)-1 < (T)0;
  constexpr u16 all = (u16)-1;
  if constexpr (sizeof(R) == 2) {
    if constexpr (is_signed) return __builtin_ia32_pmovsxbw256_mask((bytes_of_16)v, V<i16>{}, all);
    else return __builtin_ia32_pmovzxbw256_mask((bytes_of_16)v, V<i16>{}, all);
  } else if constexpr (sizeof(T) == 2) {
    if constexpr (is_signed) return __builtin_ia32_pmovsxwd512_mask((V<i16>)v, V<i32>{}, all);
    else return __builtin_ia32_pmovzxwd512_mask((V<i16>)v, V<i32>{}, all);
  } else {
    if constexpr (is_signed) return __builtin_ia32_pmovsxbd512_mask((bytes_of_16)v, V<i32>{}, all);
    else return __builtin_ia32_pmovzxbd512_mask((bytes_of_16)v, V<i32>{}, all);
  }
}
template <class T, class R> OX V<R> narrow_lanes(V<T> v) {
  constexpr u16 all = (u16)-1;
  if constexpr (sizeof(T) == 2) return (V<R>)__builtin_ia32_pmovwb256_mask(v, bytes_of_16{}, all);
  else if constexpr (sizeof(R) == 2) return (V<R>)__builtin_ia32_pmovdw512_mask(v, V<i16>{}, all);
  else return (V<R>)__builtin_ia32_pmovdb512_mask(v, bytes_of_16{}, all);
}
#elif ONNXC_VL == 8 && defined(__AVX2__)
typedef char bytes_of_16 __attribute__((vector_size(16)));
typedef char bytes_of_32 __attribute__((vector_size(32)));
typedef long long two_longs __attribute__((vector_size(16)));
// Eight bytes as the lower half of a register.
template <class T> OX bytes_of_16 lower_half(T v) { return (bytes_of_16)two_longs{(long long)v, 0}; }
template <class R, class T> OX V<R> widen_lanes(V<T> v) {
  constexpr bool is_signed = (T)-1 < (T)0;
  if constexpr (sizeof(R) == 2) {
    if constexpr (is_signed) return __builtin_ia32_pmovsxbw128(lower_half(v));
    else return __builtin_ia32_pmovzxbw128(lower_half(v));
  } else if constexpr (sizeof(T) == 2) {
    if constexpr (is_signed) return __builtin_ia32_pmovsxwd256((V<i16>)v);
    else return __builtin_ia32_pmovzxwd256((V<i16>)v);
  } else {
    if constexpr (is_signed) return __builtin_ia32_pmovsxbd256(lower_half(v));
    else return __builtin_ia32_pmovzxbd256(lower_half(v));
  }
}
// What stays of each half of a register goes to its front; then the fronts are joined.
template <class T, class R> OX V<R> narrow_lanes(V<T> v) {
  if constexpr (sizeof(T) == 2) {
    const bytes_of_16 low = {0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1};
    return (V<R>)((two_longs)__builtin_ia32_pshufb128((bytes_of_16)v, low))[0];
  } else if constexpr (sizeof(R) == 2) {
    const bytes_of_32 low = {0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1,
                             0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1};
    typedef long long quarters __attribute__((vector_size(32)));
    const quarters x = (quarters)__builtin_ia32_pshufb256((bytes_of_32)v, low);
    return (V<R>)__builtin_shufflevector(x, x, 0, 2);
  } else {
    const bytes_of_32 low = {0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                             0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    const V<i32> x = (V<i32>)__builtin_ia32_pshufb256((bytes_of_32)v, low);
    return (V<R>)((two_longs)__builtin_shufflevector(x, x, 0, 4, 1, 1))[0];
  }
}
#else
template <class R, class T> OX V<R> widen_lanes(V<T> v) {
  if constexpr (sizeof(R) == 4 * sizeof(T)) return __builtin_convertvector(__builtin_convertvector(v, V<i16>), V<R>);
  else return __builtin_convertvector(v, V<R>);
}
template <class T, class R> OX V<R> narrow_lanes(V<T> v) {
  if constexpr (sizeof(T) == 4 * sizeof(R)) return __builtin_convertvector(__builtin_convertvector(v, V<i16>), V<R>);
  else return __builtin_convertvector(v, V<R>);
}
#endif

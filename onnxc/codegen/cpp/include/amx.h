// Intel's matrix registers (AMX): eight of 16 rows by 64 bytes at most, tmm0 to tmm7. Rows and bytes of each are what
// the thread configured last. A process asks Linux for them once. It says no where a thread has a signal stack that is
// too small for them (from then on it refuses such stacks); then vectors do the work.
//
// These are asm statements: gcc's own are no more than that, and their header takes 0.6 s to compile.
#pragma once
#include "vec.h"

#if defined(__AMX_INT8__) && defined(__x86_64__) && defined(__linux__)
#define OX_MATRICES 1
#define OX_MATRIX_LOAD(T, p, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #T ::"r"(p), "r"((i64)(stride)) : "memory")
#define OX_MATRIX_STORE(T, p, stride) \
  asm volatile("tilestored %%tmm" #T ", (%0,%1,1)" ::"r"(p), "r"((i64)(stride)) : "memory")
// c += a b: rows of four uint8 by columns of four int8, exactly, modulo 2^32.
#define OX_MATRIX_DOT(C, A, B) asm volatile("tdpbusd %%tmm" #B ", %%tmm" #A ", %%tmm" #C ::: "memory")
#define OX_MATRIX_RELEASE() asm volatile("tilerelease" ::: "memory")

struct alignas(64) ox_matrices {
  u8 palette, start, unused[14];
  u16 bytes[16];  // of a row
  u8 rows[16];
  OX_LAMBDA void configure() const { asm volatile("ldtilecfg %0" ::"m"(*this) : "memory"); }
};
static inline bool ox_matrices_allowed() {
  static int known;  // 1: yes, 2: no
  int answer = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (answer == 0) {
    i64 rc;  // arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
    asm volatile("syscall" : "=a"(rc) : "0"(158L), "D"(0x1023L), "S"(18L) : "rcx", "r11", "memory");
    __atomic_store_n(&known, answer = rc == 0 ? 1 : 2, __ATOMIC_RELAXED);
  }
  return answer == 1;
}
#else
#define OX_MATRICES 0
#endif

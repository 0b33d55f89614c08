// What stands in front of a user's kernel: names of element types, as docs/custom-operators.md lists them.
#pragma once
#include "element.h"
typedef _Float16 f16;

// The upper half of a float's bits. It reads as a float; what is assigned is rounded to nearest, even.
struct bf16 {
  u16 bits;
  bf16() = default;
  bf16(float x) {
    u32 b;
    __builtin_memcpy(&b, &x, 4);
    bits = x != x ? (u16)((b >> 16) | 0x40) : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
  }
  operator float() const {
    u32 b = (u32)bits << 16;
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
  }
};

// What a kernel returns: `(f(...), ox_none{})` is an int where f gives one, and an ox_none where it gives nothing.
struct ox_none {};
template <class T> static inline int operator,(T code, ox_none) { return (int)code; }
static inline int ox_told(int code) { return code; }
static inline int ox_told(ox_none) { return 0; }

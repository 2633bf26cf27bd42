/*
 * Floating-point environments: the four rounding modes, each with subnormal numbers as they are, flushed when they are
 * results (FTZ), taken as zero when they are operands (DAZ), and both. Without a way to flush there are four.
 */
#ifndef ENVIRONMENT_H
#define ENVIRONMENT_H

#include <fenv.h>
#include <stdint.h>

#if defined(__SSE2__) || defined(_M_X64) || defined(__x86_64__)
#include <xmmintrin.h>
#define ENVIRONMENT_FLUSHES 4u
#define ENVIRONMENT_FTZ 0x8000u
#define ENVIRONMENT_DAZ 0x0040u
#elif defined(__aarch64__) && defined(__GNUC__)
#define ENVIRONMENT_FLUSHES 2u /* one bit flushes results and operands */
#else
#define ENVIRONMENT_FLUSHES 1u
#endif

#define ENVIRONMENTS (4u * ENVIRONMENT_FLUSHES)

/* Number 0 is the usual one: to the nearest, nothing flushed. */
static inline void environment_enter(unsigned number)
{
    static const int rounding[4] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const unsigned flush = number / 4 % ENVIRONMENT_FLUSHES;
    (void)fesetround(rounding[number % 4]);
#if ENVIRONMENT_FLUSHES == 4u
    const unsigned clear = _mm_getcsr() & ~(ENVIRONMENT_FTZ | ENVIRONMENT_DAZ);
    _mm_setcsr(clear | (flush & 1u ? ENVIRONMENT_FTZ : 0u) | (flush & 2u ? ENVIRONMENT_DAZ : 0u));
#elif ENVIRONMENT_FLUSHES == 2u
    uint64_t control;
    __asm__ volatile("mrs %0, fpcr" : "=r"(control));
    control = (control & ~((uint64_t)1 << 24)) | ((uint64_t)flush << 24);
    __asm__ volatile("msr fpcr, %0" : : "r"(control));
#else
    (void)flush;
#endif
}

static inline void environment_leave(void)
{
    environment_enter(0);
}

#endif

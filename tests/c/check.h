/* A tiny frame for C tests: CHECK counts, END prints "N passed, M failed" and gives main's exit status. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>

static unsigned long check_passed = 0;
static unsigned long check_failed = 0;

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (condition) {                                                                                              \
            ++check_passed;                                                                                           \
        } else {                                                                                                      \
            ++check_failed;                                                                                           \
            printf("%s:%d: %s\n", __FILE__, __LINE__, #condition);                                                    \
        }                                                                                                             \
    } while (0)

#define END() (printf("%lu passed, %lu failed\n", check_passed, check_failed), check_failed != 0)

#endif

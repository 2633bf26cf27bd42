/* For programs written against the policy registry's headers: the same names, from this library. */
#include "pb_kvcache.h"

/* What the vector runner and its parts share. A part runs the cases of some kinds. vectors.c has the table of kinds. */
#ifndef VECTORS_H
#define VECTORS_H

#include <stdbool.h>

#include "json.h"
#include "pb_kvcache.h"

/* Run one case: true where the library answers what the case expects. */
typedef bool vectors_run(const json *test);

vectors_run vectors_pyramid_budget; /* vectors_budget.c */
vectors_run vectors_plan;           /* vectors_plan.c */
vectors_run vectors_divide;         /* vectors_divide.c */
vectors_run vectors_policy;         /* vectors_policy.c */
vectors_run vectors_refusal;
vectors_run vectors_stack; /* vectors_stack.c */
vectors_run vectors_stack_refusal;
vectors_run vectors_select; /* vectors_select.c */
vectors_run vectors_compact;
vectors_run vectors_blocks; /* vectors_blocks.c */
vectors_run vectors_hold;   /* vectors_hold.c */
vectors_run vectors_decode_weights;

/* Say why the case failed. Returns false, so that a runner can return it. */
bool vectors_fail(const char *format, ...);

/* Memory for `count` elements of `size` > 0 bytes, never NULL: where there is none the program ends with a message. */
void *vectors_alloc(size_t count, size_t size);

/* Save an object and compare with a call's bytes. Load a call's bytes and compare the status. In vectors_policy.c. */
bool vectors_save(const json *call, size_t bytes,
                  pb_kvcache_status save(const void *object, void *data, size_t capacity), const void *object);
bool vectors_load(const json *call, pb_kvcache_status load(void *object, const void *data, size_t size), void *object);

/* The rows of a JSON array one after the other, each `width` floats; NULL, and why, where a row has another length. */
float *vectors_rows(const json *rows, size_t width);

/* The status that a case names by its constant's end in lower case ("recent_window"); "ok" where there is none. */
pb_kvcache_status vectors_status(const json *name);

#endif

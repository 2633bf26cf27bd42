/*
 * A small JSON reader for the vectors.
 *
 * Written here rather than linked, so that the C build needs nothing but a C compiler: the vectors also run on cross
 * compiled and emulated targets, where a packaged library would have to be built first. It reads all of JSON but \u
 * escapes, and refuses trailing text, nesting over 64 and numbers outside JSON's grammar. Every function that is asked
 * for something that is not there ends the test program with a message.
 */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum json_type { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_type;

typedef struct json json;
struct json {
    json_type type;
    char *key;     /* the member's name where the parent is an object */
    char *text;    /* of a string, or of a number as it is written */
    json *child;   /* the first element or member */
    json *next;    /* the next element or member of the same parent */
    size_t length; /* elements or members */
};

/* The value that `text` holds, or NULL; *error then says at which byte it went wrong. Freed with json_free. */
json *json_parse(const char *text, size_t *error);
json *json_read(const char *path);
void json_free(json *value);

const json *json_get(const json *object, const char *key);  /* the member of this name, or NULL */
const json *json_need(const json *object, const char *key); /* the member of this name */
bool json_is_null(const json *value);                       /* also for NULL */
uint64_t json_u64(const json *value);
uint32_t json_u32(const json *value);
double json_double(const json *value); /* a number, or one of the strings "nan", "inf", "-inf" */
const char *json_string(const json *value);
/* New arrays with the elements of a JSON array, and room for one more, so that they are never NULL. */
uint32_t *json_u32s(const json *array, size_t *count);
float *json_floats(const json *array, size_t *count);

#endif

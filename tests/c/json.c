#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct reader {
    const char *text;
    size_t at;
} reader;

static void *need(void *memory)
{
    if (memory == NULL) {
        fprintf(stderr, "vectors: out of memory\n");
        exit(2);
    }
    return memory;
}

static void space(reader *in)
{
    in->at += strspn(in->text + in->at, " \t\r\n");
}

/* Step over one of these characters. */
static bool one_of(reader *in, const char *characters)
{
    const char c = in->text[in->at];
    if (c == '\0' || strchr(characters, c) == NULL) {
        return false;
    }
    ++in->at;
    return true;
}

static bool digits(reader *in)
{
    const size_t count = strspn(in->text + in->at, "0123456789");
    in->at += count;
    return count > 0;
}

static char *number(reader *in)
{
    const size_t start = in->at;
    bool good;
    one_of(in, "-");
    good = one_of(in, "0") || digits(in);
    if (good && one_of(in, ".")) {
        good = digits(in);
    }
    if (good && one_of(in, "eE")) {
        one_of(in, "+-");
        good = digits(in);
    }
    if (!good) {
        return NULL;
    }
    char *copy = need(calloc(in->at - start + 1, 1));
    memcpy(copy, in->text + start, in->at - start);
    return copy;
}

static char *string(reader *in)
{
    static const char escaped[] = "\"\\/bfnrt";
    static const char meaning[] = "\"\\/\b\f\n\r\t";
    char *out = need(malloc(strlen(in->text + in->at)));
    size_t length = 0;
    ++in->at; /* the opening quote */
    while ((unsigned char)in->text[in->at] >= 0x20) {
        char c = in->text[in->at++];
        if (c == '"') {
            out[length] = '\0';
            return out;
        }
        if (c == '\\') {
            const char *found = in->text[in->at] == '\0' ? NULL : strchr(escaped, in->text[in->at]);
            if (found == NULL) {
                break;
            }
            c = meaning[found - escaped];
            ++in->at;
        }
        out[length++] = c;
    }
    free(out);
    return NULL;
}

static json *value(reader *in, int depth);

/* Elements or members, from after the opening bracket to the closing one. */
static bool children(reader *in, json *parent, const char *close, int depth)
{
    json **link = &parent->child;
    space(in);
    if (one_of(in, close)) {
        return true;
    }
    do {
        char *key = NULL;
        if (parent->type == JSON_OBJECT) {
            space(in);
            key = in->text[in->at] == '"' ? string(in) : NULL;
            space(in);
            if (key == NULL || !one_of(in, ":")) {
                free(key);
                return false;
            }
        }
        json *child = value(in, depth + 1);
        if (child == NULL) {
            free(key);
            return false;
        }
        child->key = key;
        *link = child;
        link = &child->next;
        ++parent->length;
        space(in);
    } while (one_of(in, ","));
    return one_of(in, close);
}

static bool word(reader *in, const char *text)
{
    if (strncmp(in->text + in->at, text, strlen(text)) != 0) {
        return false;
    }
    in->at += strlen(text);
    return true;
}

static json *value(reader *in, int depth)
{
    json *out = need(calloc(1, sizeof *out));
    bool good = depth < 64;
    space(in);
    if (!good) {
        /* too deep */
    } else if (one_of(in, "{")) {
        out->type = JSON_OBJECT;
        good = children(in, out, "}", depth);
    } else if (one_of(in, "[")) {
        out->type = JSON_ARRAY;
        good = children(in, out, "]", depth);
    } else if (in->text[in->at] == '"') {
        out->type = JSON_STRING;
        out->text = string(in);
        good = out->text != NULL;
    } else if (word(in, "true")) {
        out->type = JSON_TRUE;
    } else if (word(in, "false")) {
        out->type = JSON_FALSE;
    } else if (!word(in, "null")) {
        out->type = JSON_NUMBER;
        out->text = number(in);
        good = out->text != NULL;
    }
    if (!good) {
        json_free(out);
        return NULL;
    }
    return out;
}

json *json_parse(const char *text, size_t *error)
{
    reader in = {text, 0};
    json *out = value(&in, 0);
    space(&in);
    *error = in.at;
    if (out != NULL && text[in.at] != '\0') {
        json_free(out);
        return NULL;
    }
    return out;
}

json *json_read(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (file == NULL) {
        fprintf(stderr, "%s: cannot be opened\n", path);
        exit(2);
    }
    size_t length = 0;
    size_t room = 1 << 16;
    char *text = need(malloc(room));
    for (size_t got; (got = fread(text + length, 1, room - length - 1, file)) > 0;) {
        length += got;
        if (length == room - 1) {
            room *= 2;
            text = need(realloc(text, room));
        }
    }
    fclose(file);
    text[length] = '\0';
    size_t error;
    json *out = json_parse(text, &error);
    free(text);
    if (out == NULL) {
        fprintf(stderr, "%s: is not JSON, at byte %zu\n", path, error);
        exit(2);
    }
    return out;
}

void json_free(json *first)
{
    while (first != NULL) {
        json *next = first->next;
        json_free(first->child);
        free(first->key);
        free(first->text);
        free(first);
        first = next;
    }
}

const json *json_get(const json *object, const char *key)
{
    for (const json *child = object->child; child != NULL; child = child->next) {
        if (child->key != NULL && strcmp(child->key, key) == 0) {
            return child;
        }
    }
    return NULL;
}

const json *json_need(const json *object, const char *key)
{
    const json *found = json_get(object, key);
    if (found == NULL) {
        fprintf(stderr, "vectors: a case lacks the member \"%s\"\n", key);
        exit(2);
    }
    return found;
}

/* The value, if it is of this type. */
static const json *of_type(const json *found, json_type type, const char *wanted)
{
    if (found == NULL || found->type != type) {
        fprintf(stderr, "vectors: %s must be %s\n", found != NULL && found->key != NULL ? found->key : "a value",
                wanted);
        exit(2);
    }
    return found;
}

bool json_is_null(const json *found)
{
    return found == NULL || found->type == JSON_NULL;
}

uint64_t json_u64(const json *found)
{
    const char *text = of_type(found, JSON_NUMBER, "a number")->text;
    if (strspn(text, "0123456789") != strlen(text) || strlen(text) > 19) {
        fprintf(stderr, "vectors: %s is not an integer from 0 to 10^19\n", text);
        exit(2);
    }
    return strtoull(text, NULL, 10);
}

uint32_t json_u32(const json *found)
{
    const uint64_t wide = json_u64(found);
    if (wide > UINT32_MAX) {
        fprintf(stderr, "vectors: %s does not fit 32 bits\n", found->text);
        exit(2);
    }
    return (uint32_t)wide;
}

double json_double(const json *found)
{
    if (found != NULL && found->type == JSON_STRING) {
        return strtod(found->text, NULL);
    }
    return strtod(of_type(found, JSON_NUMBER, "a number")->text, NULL);
}

const char *json_string(const json *found)
{
    return of_type(found, JSON_STRING, "a string")->text;
}

uint32_t *json_u32s(const json *array, size_t *count)
{
    uint32_t *out = need(calloc(of_type(array, JSON_ARRAY, "an array")->length + 1, sizeof *out));
    *count = 0;
    for (const json *child = array->child; child != NULL; child = child->next) {
        out[(*count)++] = json_u32(child);
    }
    return out;
}

float *json_floats(const json *array, size_t *count)
{
    float *out = need(calloc(of_type(array, JSON_ARRAY, "an array")->length + 1, sizeof *out));
    *count = 0;
    for (const json *child = array->child; child != NULL; child = child->next) {
        out[(*count)++] = (float)json_double(child);
    }
    return out;
}

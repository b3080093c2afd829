// JSON, as much of it as a request needs: where the value of a key is.
#pragma once
#include "common.h"

static inline const char *skip_space(const char *at, const char *end) {
    while (at < end && strchr(" \t\r\n,:", *at)) at++;
    return at;
}

static inline const char *skip_string(const char *at, const char *end) {
    for (at++; at < end && *at != '"'; at++)
        if (*at == '\\') at++;
    return at + 1;
}

static inline const char *skip_value(const char *at, const char *end) {
    int depth = 0;
    do {
        if (*at == '"') {
            at = skip_string(at, end);
            continue;
        }
        depth += (*at == '[' || *at == '{') - (*at == ']' || *at == '}');
        at++;
    } while (at < end && (depth > 0 || !strchr(",]} \r\n\t", *at)));
    return at < end ? at : end;
}

// The value of `key` in the object that begins at `at`, or NULL.
static inline const char *member(const char *at, const char *end, const char *key) {
    size_t size = strlen(key);
    at = skip_space(at + 1, end);
    while (at < end && *at == '"') {
        const char *name = at + 1;
        const char *value = skip_space(skip_string(at, end), end);
        if (value >= end) break;
        if ((size_t)(end - name) > size && !memcmp(name, key, size) && name[size] == '"') return value;
        at = skip_space(skip_value(value, end), end);
    }
    return NULL;
}

static inline bool is_true(const char *value) { return value && *value == 't'; }

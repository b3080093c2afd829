// What the stand-in for vLLM and its client share.
#pragma once
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 16, EVENTS = 512 };

struct buffer {
    char *data;
    size_t size, capacity;
};

static inline void fail(const char *what) {
    perror(what);
    exit(1);
}

static inline uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static inline void *grown(void *memory, size_t size) {
    memory = realloc(memory, size);
    if (!memory) fail("realloc");
    return memory;
}

static inline void reserve(struct buffer *buffer, size_t more) {
    if (buffer->size + more <= buffer->capacity) return;
    buffer->capacity = 2 * (buffer->size + more);
    buffer->data = grown(buffer->data, buffer->capacity);
}

static inline void put(struct buffer *buffer, const char *data, size_t size) {
    reserve(buffer, size);
    memcpy(buffer->data + buffer->size, data, size);
    buffer->size += size;
}

// One step along a chain of tokens: what comes next depends on all before.
static inline uint64_t chain(uint64_t state, uint64_t token) {
    state = (state ^ token) * 0x9E3779B97F4A7C15ull;
    return state ^ state >> 32;
}

static inline void set_no_delay(int fd) {
    int on = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

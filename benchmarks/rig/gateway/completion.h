// One completion of the stand-in: read from a request, made token by token, written as vLLM 0.32 writes it.
#pragma once
#include "common.h"
#include "json_scan.h"

enum { VOCABULARY = 50000 };

struct record {  // times of CLOCK_MONOTONIC
    uint64_t seed, received_ns, finished_ns;
};

struct completion {
    bool stream, with_logprobs, with_ids, with_usage;
    struct record record;
    uint64_t state;  // of the chain of tokens
    uint32_t max_tokens, prompt_tokens, made, sent;
    uint32_t *tokens;
    uint64_t *logprobs;    // of each token, in 1e-16, without the sign
    struct buffer prompt;  // token ids as they were given, or `null`
};

static inline void read_prompt(struct completion *c, const char *at, const char *end) {
    const char *stop = skip_value(at, end);
    c->prompt.size = c->prompt_tokens = 0;
    if (*at == '"') {  // text: each byte is a token
        for (at++; at < stop - 1; at++, c->prompt_tokens++) c->state = chain(c->state, (unsigned char)*at);
        put(&c->prompt, "null", 4);
        return;
    }
    put(&c->prompt, at, stop - at);
    for (char *next; at < stop; at = next) {
        while (at < stop && (*at < '0' || *at > '9')) at++;
        if (at == stop) break;
        c->state = chain(c->state, strtoull(at, &next, 10));
        c->prompt_tokens++;
    }
}

// False: it is no request for a completion.
static inline bool read_request(struct completion *c, const char *body, const char *end) {
    const char *prompt = member(body, end, "prompt"), *seed = member(body, end, "seed");
    const char *max_tokens = member(body, end, "max_tokens"), *logprobs = member(body, end, "logprobs");
    const char *options = member(body, end, "stream_options");
    if (!prompt || !max_tokens || atoi(max_tokens) < 1) return false;
    c->record = (struct record){.seed = seed ? strtoull(seed, NULL, 10) : 0, .received_ns = now_ns()};
    c->state = chain(0, c->record.seed);
    read_prompt(c, prompt, end);
    c->max_tokens = atoi(max_tokens);
    c->tokens = grown(c->tokens, c->max_tokens * sizeof *c->tokens);
    c->logprobs = grown(c->logprobs, c->max_tokens * sizeof *c->logprobs);
    c->made = c->sent = 0;
    c->stream = is_true(member(body, end, "stream"));
    c->with_logprobs = logprobs && *logprobs != 'n';
    c->with_ids = is_true(member(body, end, "return_token_ids"));
    c->with_usage = options && *options == '{' && is_true(member(options, end, "include_usage"));
    return true;
}

static inline void make_token(struct completion *c) {
    uint32_t token = (c->state >> 16) % VOCABULARY;
    c->logprobs[c->made] = c->state % 30000000000000000ull;
    c->tokens[c->made++] = token;
    c->state = chain(c->state, token);
}

// Writing. printf would cost more than all the rest.

#define PUT(buffer, literal) put(buffer, literal, sizeof(literal) - 1)

static inline void put_number(struct buffer *b, uint64_t number, int width) {
    char digits[20];
    int at = sizeof digits;
    do digits[--at] = '0' + number % 10;
    while ((number /= 10) || (int)sizeof digits - at < width);
    put(b, digits + at, sizeof digits - at);
}

static inline void put_hex(struct buffer *b, uint64_t number, int width) {
    char digits[16];
    int at = sizeof digits;
    do digits[--at] = "0123456789abcdef"[number % 16];
    while ((number /= 16) || (int)sizeof digits - at < width);
    put(b, digits + at, sizeof digits - at);
}

static inline void put_text(struct buffer *b, uint32_t token) {
    PUT(b, " w");
    put_number(b, token, 5);
}

static inline void put_logprob(struct buffer *b, uint64_t logprob) {
    PUT(b, "-");
    put_number(b, logprob / 10000000000000000ull, 1);
    PUT(b, ".");
    put_number(b, logprob % 10000000000000000ull, 16);
}

static inline void put_logprobs(struct buffer *b, const struct completion *c, uint32_t from, uint32_t to) {
    PUT(b, "{\"text_offset\":[");
    for (uint32_t i = from; i < to; i++) put_number(b, 7 * i, 1), PUT(b, ",");
    b->size--, PUT(b, "],\"token_logprobs\":[");
    for (uint32_t i = from; i < to; i++) put_logprob(b, c->logprobs[i]), PUT(b, ",");
    b->size--, PUT(b, "],\"tokens\":[");
    for (uint32_t i = from; i < to; i++) PUT(b, "\""), put_text(b, c->tokens[i]), PUT(b, "\",");
    b->size--, PUT(b, "],\"top_logprobs\":[");
    for (uint32_t i = from; i < to; i++)
        PUT(b, "{\""), put_text(b, c->tokens[i]), PUT(b, "\":"), put_logprob(b, c->logprobs[i]), PUT(b, "},");
    b->size--, PUT(b, "]}");
}

// What an event and a whole answer have in common, for the tokens [from, to); `]}` is left to be written.
static inline void put_choice(struct buffer *b, const struct completion *c, uint32_t from, uint32_t to) {
    PUT(b, "{\"id\":\"cmpl-");
    put_hex(b, c->record.seed, 16), put_hex(b, c->record.received_ns, 16);
    PUT(b, "\",\"object\":\"text_completion\",\"created\":1790000000,\"model\":\"policy\",\"choices\":[");
    if (from == to) return;
    PUT(b, "{\"index\":0,\"text\":\"");
    for (uint32_t i = from; i < to; i++) put_text(b, c->tokens[i]);
    PUT(b, "\",\"logprobs\":");
    if (c->with_logprobs)
        put_logprobs(b, c, from, to);
    else
        PUT(b, "null");
    if (to == c->max_tokens)
        PUT(b, ",\"finish_reason\":\"length\",\"stop_reason\":null,\"prompt_token_ids\":");
    else
        PUT(b, ",\"finish_reason\":null,\"stop_reason\":null,\"prompt_token_ids\":");
    if (from == 0 && c->with_ids)
        put(b, c->prompt.data, c->prompt.size);
    else
        PUT(b, "null");
    if (c->with_ids) {
        PUT(b, ",\"token_ids\":[");
        for (uint32_t i = from; i < to; i++) put_number(b, c->tokens[i], 1), PUT(b, ",");
        b->size--, PUT(b, "]}");
    } else {
        PUT(b, ",\"token_ids\":null}");
    }
}

static inline void put_usage(struct buffer *b, const struct completion *c) {
    PUT(b, ",\"usage\":{\"prompt_tokens\":");
    put_number(b, c->prompt_tokens, 1);
    PUT(b, ",\"total_tokens\":");
    put_number(b, c->prompt_tokens + c->made, 1);
    PUT(b, ",\"completion_tokens\":");
    put_number(b, c->made, 1);
    PUT(b, "}");
}

static inline void put_chunk(struct buffer *b, struct buffer *event) {
    PUT(event, "}\n\n");
    put_hex(b, event->size, 1);
    PUT(b, "\r\n");
    put(b, event->data, event->size);
    PUT(b, "\r\n");
    event->size = 0;
}

// The event with all tokens that were not sent yet; behind the last one the end of the answer.
static inline void put_event(struct buffer *b, struct completion *c) {
    static struct buffer event;
    PUT(&event, "data: ");
    put_choice(&event, c, c->sent, c->made);
    PUT(&event, "]");
    put_chunk(b, &event);
    if (c->made < c->max_tokens) return;
    if (c->with_usage) {
        PUT(&event, "data: ");
        put_choice(&event, c, 0, 0);
        PUT(&event, "]");
        put_usage(&event, c);
        put_chunk(b, &event);
    }
    PUT(b, "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n");
}

// The whole answer as one JSON document, with its HTTP headers.
static inline void put_document(struct buffer *b, struct completion *c) {
    static struct buffer document;
    document.size = 0;
    put_choice(&document, c, 0, c->made);
    PUT(&document, "],\"service_tier\":null,\"system_fingerprint\":null");
    put_usage(&document, c);
    PUT(&document, ",\"kv_transfer_params\":null}");
    PUT(b, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: application/json\r\ncontent-length: ");
    put_number(b, document.size, 1);
    PUT(b, "\r\n\r\n");
    put(b, document.data, document.size);
}

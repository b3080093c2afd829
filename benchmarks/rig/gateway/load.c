// Asks for completions and says what came and when: `load [options] HOST PORT CONNECTIONS FILE`.
//
// FILE holds whole HTTP requests, each behind its size in bytes and a line feed. Every connection sends the next
// one once it has the answer to its last. Answers may be vLLM's events, one JSON document, or lines of JSON that
// each name the `index` of a completion (`--batch N`: one request for N completions).
//
// When all connections stand it prints the time and starts; at the end, for each completion,
//     FINISHED STATUS TOKENS DIGEST BEGUN_NS DONE_NS
// with times of CLOCK_MONOTONIC, DIGEST over the token ids that came, and DONE_NS 0 for one that never ended.
//
//   --deadline-s N  give up after so many seconds (default 60)
#include "common.h"

enum { WAVE = 64 };

struct request {
    const char *data;
    size_t size;
};

struct completion {
    bool finished;
    int status;
    uint32_t tokens;
    uint64_t digest, begun_ns, done_ns;
};

enum framing { HEAD, LENGTH, CHUNK_SIZE, CHUNK, CHUNK_END, UNTIL_CLOSE };

struct connection {
    int fd;
    bool busy;
    size_t request, sent;  // which one, and how much of it
    enum framing framing;
    int status;
    bool closes;
    uint64_t left;  // of the body, or of this chunk
    struct buffer head, line;
};

static struct sockaddr_in server;
static struct request *requests;
static struct completion *completions;
static size_t request_count, completion_count, next_request, answered;
static bool batch;
static int epoll_fd;

static void read_requests(const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat about;
    if (fd < 0 || fstat(fd, &about)) fail(path);
    const char *at = mmap(NULL, about.st_size, PROT_READ, MAP_PRIVATE, fd, 0), *end = at + about.st_size;
    if (at == MAP_FAILED) fail("mmap");
    while (at < end) {
        char *text;
        size_t size = strtoull(at, &text, 10);
        requests = grown(requests, (request_count + 1) * sizeof *requests);
        requests[request_count++] = (struct request){text + 1, size};
        at = text + 1 + size;
    }
}

// One line of an answer: an event, a completion of a batch, or a whole JSON document.
static void hear(struct connection *c, const char *line, size_t size) {
    static const char ids[] = "\"token_ids\":[", reason[] = "\"finish_reason\":\"", index[] = "{\"completion\":{\"index\":";
    size_t which = c->request;
    if (batch) {
        const char *found = memmem(line, size, index, sizeof index - 1);
        if (!found) return;
        which = strtoull(found + sizeof index - 1, NULL, 10);
        if (which >= completion_count) return;
    }
    struct completion *one = &completions[which];
    const char *at = memmem(line, size, ids, sizeof ids - 1), *end = line + size;
    for (at = at ? at + sizeof ids - 1 : end; at < end && *at != ']'; at += *at == ',') {
        uint64_t token = 0;
        for (; at < end && *at >= '0' && *at <= '9'; at++) token = 10 * token + *at - '0';
        if (at < end && *at != ',' && *at != ']') break;
        one->tokens++;
        one->digest = chain(one->digest, token);
    }
    if (c->status == 200 && !one->finished && memmem(line, size, reason, sizeof reason - 1)) {
        one->finished = true;
        one->status = c->status;
        one->done_ns = now_ns();
    }
}

static void hear_body(struct connection *c, const char *data, size_t size) {
    const char *end = data + size, *stop;
    while ((stop = memchr(data, '\n', end - data))) {
        if (c->line.size) {
            put(&c->line, data, stop - data);
            hear(c, c->line.data, c->line.size);
            c->line.size = 0;
        } else if (stop > data) {
            hear(c, data, stop - data);
        }
        data = stop + 1;
    }
    put(&c->line, data, end - data);
}

static void read_head(struct connection *c) {
    put(&c->head, "", 1);  // ends the searches
    c->status = strtol(c->head.data + 9, NULL, 10);
    char *length = strcasestr(c->head.data, "\r\ncontent-length:");
    c->closes = strcasestr(c->head.data, "\r\nconnection: close");
    c->framing = UNTIL_CLOSE;
    if (strcasestr(c->head.data, "\r\ntransfer-encoding: chunked")) {
        c->framing = CHUNK_SIZE;
        c->left = 0;
    } else if (length) {
        c->framing = LENGTH;
        c->left = strtoull(length + 17, NULL, 10);
    }
    c->head.size = 0;
}

// Take what was read. True once the answer is complete.
static bool take(struct connection *c, const char *at, const char *end) {
    for (;;) switch (c->framing) {
            case HEAD:
                for (; at < end; at++) {
                    put(&c->head, at, 1);
                    if (*at == '\n' && c->head.size >= 4 && !memcmp(c->head.data + c->head.size - 4, "\r\n\r\n", 4)) {
                        at++;
                        read_head(c);
                        break;
                    }
                }
                if (c->framing == HEAD) return false;
                if (c->framing == LENGTH && !c->left) return true;
                continue;
            case LENGTH:
            case CHUNK: {
                size_t size = (size_t)(end - at) < c->left ? (size_t)(end - at) : c->left;
                hear_body(c, at, size);
                at += size;
                c->left -= size;
                if (c->left) return false;
                if (c->framing == LENGTH) return true;
                c->framing = CHUNK_END;
                continue;
            }
            case CHUNK_END:
                for (; at < end && *at != '\n'; at++) {}
                if (at == end) return false;
                at++;
                c->framing = CHUNK_SIZE;
                continue;
            case CHUNK_SIZE:
                for (; at < end && *at != '\n'; at++) put(&c->head, at, 1);
                if (at == end) return false;
                at++;
                put(&c->head, "", 1);
                c->left = strtoull(c->head.data, NULL, 16);
                c->head.size = 0;
                if (!c->left) return true;  // nobody sends trailers
                c->framing = CHUNK;
                continue;
            case UNTIL_CLOSE:
                hear_body(c, at, end - at);
                return false;
        }
}

static void watch(struct connection *c, int how, uint32_t events) {
    struct epoll_event wanted = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll_fd, how, c->fd, &wanted)) fail("epoll_ctl");
}

static void open_connection(struct connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0) fail("socket");
    set_no_delay(c->fd);
    if (connect(c->fd, (struct sockaddr *)&server, sizeof server) && errno != EINPROGRESS) fail("connect");
}

static bool send_rest(struct connection *c) {
    struct request *request = &requests[c->request];
    while (c->sent < request->size) {
        ssize_t sent = send(c->fd, request->data + c->sent, request->size - c->sent, MSG_NOSIGNAL);
        if (sent < 0 && (errno == EAGAIN || errno == ENOTCONN)) return true;
        if (sent < 0) return false;
        c->sent += sent;
    }
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
    return true;
}

static void finish(struct connection *c, bool intact);

static void begin(struct connection *c) {
    if (next_request == request_count) {
        watch(c, EPOLL_CTL_MOD, 0);
        return;
    }
    c->busy = true;
    c->request = next_request++;
    c->sent = c->line.size = c->head.size = 0;
    c->framing = HEAD;
    c->status = 0;
    if (batch) {
        for (size_t i = 0; i < completion_count; i++) completions[i].begun_ns = now_ns();
    } else {
        completions[c->request].begun_ns = now_ns();
    }
    watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
    if (!send_rest(c)) finish(c, false);
}

// The answer is complete, or the connection broke: the next one.
static void finish(struct connection *c, bool intact) {
    if (c->line.size) hear(c, c->line.data, c->line.size);
    if (!batch && !completions[c->request].finished) {
        completions[c->request].status = c->status;
        completions[c->request].done_ns = now_ns();
    }
    c->busy = false;
    answered++;
    if (!intact || c->closes) {
        close(c->fd);
        open_connection(c);
        watch(c, EPOLL_CTL_ADD, EPOLLIN);
    }
    begin(c);
}

static void serve(struct connection *c, uint32_t events) {
    static char data[READ_BYTES];
    if (!c->busy) return;
    if (events & EPOLLOUT && !send_rest(c)) {
        finish(c, false);
        return;
    }
    if (!(events & (EPOLLIN | EPOLLERR | EPOLLHUP))) return;
    for (;;) {
        ssize_t got = recv(c->fd, data, sizeof data, 0);
        if (got < 0 && errno == EAGAIN) return;
        if (got <= 0) {
            finish(c, false);
            return;
        }
        if (take(c, data, data + got)) {
            finish(c, true);
            return;
        }
    }
}

// Connect them all before the clock starts, a few at a time: no balancer's backlog is the subject here.
static struct connection *connect_all(size_t count) {
    struct connection *all = calloc(count, sizeof *all);
    if (!all) fail("calloc");
    for (size_t i = 0; i < count; i++) {
        open_connection(&all[i]);
        if ((i + 1) % WAVE && i + 1 < count) continue;
        for (size_t k = i / WAVE * WAVE; k <= i; k++) {
            watch(&all[k], EPOLL_CTL_ADD, EPOLLOUT);
            struct epoll_event event;
            if (epoll_wait(epoll_fd, &event, 1, 20000) != 1 || event.events & (EPOLLERR | EPOLLHUP)) {
                fprintf(stderr, "could not connect\n");
                exit(1);
            }
            watch(&all[k], EPOLL_CTL_MOD, 0);
        }
    }
    return all;
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"deadline-s", required_argument, NULL, 'd'}, {"batch", required_argument, NULL, 'b'}, {0}};
    double deadline_s = 60;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (option) {
            case 'd': deadline_s = atof(optarg); break;
            case 'b': batch = true, completion_count = strtoull(optarg, NULL, 10); break;
            default: return 2;
        }
    if (argc - optind != 4) {
        fprintf(stderr, "usage: load [--deadline-s N] [--batch N] HOST PORT CONNECTIONS FILE\n");
        return 2;
    }
    argv += optind;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    server = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    if (inet_pton(AF_INET, argv[0], &server.sin_addr) != 1) fail("address");
    read_requests(argv[3]);
    if (!batch) completion_count = request_count;
    completions = calloc(completion_count, sizeof *completions);
    if (!completions) fail("calloc");
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    size_t count = strtoull(argv[2], NULL, 10);
    struct connection *all = connect_all(count);

    uint64_t begun_ns = now_ns(), end_ns = begun_ns + (uint64_t)(deadline_s * 1e9);
    printf("%lu\n", begun_ns);
    fflush(stdout);
    for (size_t i = 0; i < count; i++) begin(&all[i]);
    while (answered < request_count) {
        uint64_t now = now_ns();
        if (now >= end_ns) break;
        struct epoll_event events[EVENTS];
        int found = epoll_wait(epoll_fd, events, EVENTS, (int)((end_ns - now) / 1000000) + 1);
        for (int i = 0; i < found; i++) serve(events[i].data.ptr, events[i].events);
    }
    for (size_t i = 0; i < completion_count; i++) {
        struct completion *one = &completions[i];
        printf("%d %d %u %lu %lu %lu\n", one->finished, one->status, one->tokens, one->digest, one->begun_ns,
               one->done_ns);
    }
}

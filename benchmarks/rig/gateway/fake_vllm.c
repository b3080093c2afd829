// A stand-in for vLLM's server that costs next to nothing: `fake_vllm [options] HOST PORT`, one process, one thread.
//
// It answers POST /v1/completions with vLLM's events, or with one JSON answer where `stream` is not asked for. As
// in vLLM's engine, every running request makes one token a step; an event carries the first token alone, then
// `--interval` tokens. A token is a function of the seed and of all tokens before it, so a completion that goes on
// elsewhere from prompt + tokens so far equals the undisturbed one, and a wrong continuation does not (its twin in
// Python: benchmarks/rig/gateway/fakes.py). Boot, policy and bearer token are accepted, whatever they are.
//
//   --step-us N     one step; 0 (the default): a request is answered at once
//   --doubling N    so many requests make a step take twice as long; 0 (the default): none do
//   --interval N    tokens an event (default 1)
//                   both may be changed while it runs: POST /pace {"step_us": N, "interval": N}
//   --stats FILE    `struct stats` below is kept there, readable by others, also after this process was killed
#include "completion.h"

enum { BACKLOG = 4096, RECORDS = 1 << 18 };

struct stats {
    uint64_t requests, finished, aborted;
    uint64_t made, sent;  // tokens; sent: those in events or answers that were written
    struct record records[RECORDS];  // the first `finished` ones
};

struct connection {
    int fd;
    struct buffer in, out;
    size_t out_begin;  // of `out` is written
    bool running;      // `completion` is under way
    size_t place;      // in `running`
    struct completion completion;
};

static uint32_t interval = 1;
static uint64_t step_us, doubling;
static int epoll_fd, timer;
static struct stats *stats;
static struct connection **running;
static size_t running_count, running_capacity;
static struct buffer chunk;  // to be written next

static void drop(struct connection *c);

static void leave_running(struct connection *c) {
    c->running = false;
    running[c->place] = running[--running_count];
    running[c->place]->place = c->place;
}

static void watch(struct connection *c, uint32_t events) {
    struct epoll_event wanted = {.events = events, .data.ptr = c};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &wanted)) fail("epoll_ctl");
}

static bool flush(struct connection *c) {
    while (c->out_begin < c->out.size) {
        ssize_t sent = send(c->fd, c->out.data + c->out_begin, c->out.size - c->out_begin, MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) return true;
        if (sent < 0) return false;
        c->out_begin += sent;
    }
    c->out.size = c->out_begin = 0;
    return true;
}

// Write what is in `chunk`. False: the peer is gone.
static bool write_out(struct connection *c) {
    bool waits = c->out.size > 0;
    put(&c->out, chunk.data, chunk.size);
    chunk.size = 0;
    if (!waits && !flush(c)) return false;
    if (!waits && c->out.size) watch(c, EPOLLIN | EPOLLRDHUP | EPOLLOUT);
    return true;
}

// Tell what was made and not yet sent. False: the peer is gone.
static bool tell(struct connection *c) {
    struct completion *one = &c->completion;
    bool done = one->made == one->max_tokens;
    if (one->stream)
        put_event(&chunk, one);
    else if (done)
        put_document(&chunk, one);
    else
        return true;
    stats->sent += one->made - one->sent;
    one->sent = one->made;
    if (done) {
        leave_running(c);
        one->record.finished_ns = now_ns();
        stats->records[stats->finished++ % RECORDS] = one->record;
    }
    return write_out(c);
}

static bool step(struct connection *c) {
    struct completion *one = &c->completion;
    make_token(one);
    stats->made++;
    bool due = one->made == 1 || (one->made - 1) % interval == 0 || one->made == one->max_tokens;
    return !due || tell(c);
}

static void step_all(void) {
    for (size_t i = 0; i < running_count;) {
        struct connection *c = running[i];
        if (!step(c)) drop(c);
        if (i < running_count && running[i] == c) i++;  // else it left, and another took its place
    }
}

static bool start_completion(struct connection *c, const char *body, const char *end) {
    struct completion *one = &c->completion;
    if (!read_request(one, body, end)) {
        PUT(&chunk, "HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n");
        return write_out(c);
    }
    if (running_count == running_capacity) {
        running_capacity = 2 * running_capacity + 64;
        running = grown(running, running_capacity * sizeof *running);
    }
    c->running = true;
    c->place = running_count;
    running[running_count++] = c;
    stats->requests++;
    if (one->stream)
        PUT(&chunk, "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                    "transfer-encoding: chunked\r\n\r\n");
    if (step_us == 0) {
        for (; one->made < one->max_tokens; stats->made++) make_token(one);
        return tell(c);
    }
    return !one->stream || write_out(c);
}

static void set_timer(void) {
    uint64_t us = doubling ? step_us + step_us * running_count / doubling : step_us;
    struct itimerspec every = {.it_interval = {us / 1000000, us % 1000000 * 1000}};
    every.it_value = every.it_interval;
    if (timerfd_settime(timer, 0, &every, NULL)) fail("timerfd_settime");
}

static void change_pace(const char *body, const char *end) {
    const char *steps = member(body, end, "step_us"), *tokens = member(body, end, "interval");
    if (steps) step_us = strtoull(steps, NULL, 10);
    if (tokens && atoi(tokens) > 0) interval = atoi(tokens);
    set_timer();
}

// Answer one whole request. False: the peer is gone.
static bool answer(struct connection *c, const char *request, const char *body, const char *end) {
    if (!strncmp(request, "POST /v1/completions ", 21)) return start_completion(c, body, end);
    if (!strncmp(request, "POST /pace ", 11))
        change_pace(body, end), PUT(&chunk, "HTTP/1.1 204 No Content\r\n\r\n");
    else if (!strncmp(request, "GET /health", 11))
        PUT(&chunk, "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n");
    else
        PUT(&chunk, "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    return write_out(c);
}

// Take whole requests out of what was read, one at a time. False: the peer is gone.
static bool take_requests(struct connection *c) {
    while (!c->running) {
        char *head_end = memmem(c->in.data, c->in.size, "\r\n\r\n", 4);
        if (!head_end) return true;
        *head_end = 0;  // the search below ends here
        char *length = strcasestr(c->in.data, "\r\ncontent-length:");
        size_t body_size = length ? strtoull(length + 17, NULL, 10) : 0;
        char *body = head_end + 4;
        size_t size = body - c->in.data + body_size;
        *head_end = '\r';
        if (c->in.size < size) return true;
        bool there = answer(c, c->in.data, body, body + body_size);
        memmove(c->in.data, c->in.data + size, c->in.size - size);
        c->in.size -= size;
        if (!there) return false;
    }
    return true;
}

static bool read_in(struct connection *c) {
    for (;;) {
        reserve(&c->in, READ_BYTES);
        ssize_t got = recv(c->fd, c->in.data + c->in.size, READ_BYTES, 0);
        if (got < 0 && errno == EAGAIN) return true;
        if (got <= 0) return false;
        c->in.size += got;
        if (!take_requests(c)) return false;
        if (got < READ_BYTES) return true;
    }
}

static void drop(struct connection *c) {
    if (c->running) {
        leave_running(c);
        stats->aborted++;
    }
    close(c->fd);
    free(c->in.data);
    free(c->out.data);
    free(c->completion.prompt.data);
    free(c->completion.tokens);
    free(c->completion.logprobs);
    free(c);
}

static void serve_connection(struct connection *c, uint32_t events) {
    bool there = !(events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP));
    if (there && events & EPOLLOUT) {
        there = flush(c);
        if (there && !c->out.size) {
            watch(c, EPOLLIN | EPOLLRDHUP);
            there = take_requests(c);
        }
    }
    if (there && events & EPOLLIN) there = read_in(c);
    if (!there) drop(c);
}

static void accept_all(int listener) {
    int fd;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        set_no_delay(fd);
        struct connection *c = grown(NULL, sizeof *c);
        *c = (struct connection){.fd = fd};
        struct epoll_event wanted = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &wanted)) fail("epoll_ctl");
    }
}

static int listen_on(const char *host, int port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1 || bind(fd, (struct sockaddr *)&address, sizeof address))
        fail("bind");
    if (listen(fd, BACKLOG)) fail("listen");
    socklen_t size = sizeof address;
    getsockname(fd, (struct sockaddr *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

static void open_stats(const char *path) {
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600) : -1;
    if (path && (fd < 0 || ftruncate(fd, sizeof *stats))) fail(path);
    stats = mmap(NULL, sizeof *stats, PROT_READ | PROT_WRITE, path ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, fd, 0);
    if (stats == MAP_FAILED) fail("mmap");
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"step-us", required_argument, NULL, 's'},
                                            {"doubling", required_argument, NULL, 'd'},
                                            {"interval", required_argument, NULL, 'i'},
                                            {"stats", required_argument, NULL, 'f'},
                                            {0}};
    const char *stats_path = NULL;
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (option) {
            case 's': step_us = strtoull(optarg, NULL, 10); break;
            case 'd': doubling = strtoull(optarg, NULL, 10); break;
            case 'i': interval = atoi(optarg); break;
            case 'f': stats_path = optarg; break;
            default: return 2;
        }
    if (argc - optind != 2 || interval < 1) {
        fprintf(stderr, "usage: fake_vllm [--step-us N] [--doubling N] [--interval N] [--stats FILE] HOST PORT\n");
        return 2;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // it ends with who started it
    open_stats(stats_path);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (timer < 0) fail("timerfd_create");
    set_timer();
    int listener = listen_on(argv[optind], atoi(argv[optind + 1]));
    struct epoll_event events[EVENTS], wanted = {.events = EPOLLIN, .data.ptr = &listener};
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &wanted)) fail("epoll_ctl");
    wanted.data.ptr = &timer;
    if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &wanted)) fail("epoll_ctl");
    for (;;) {
        int count = epoll_wait(epoll_fd, events, EVENTS, -1);
        uint64_t steps = 0;
        for (int i = 0; i < count; i++) {
            if (events[i].data.ptr == &listener)
                accept_all(listener);
            else if (events[i].data.ptr == &timer)
                (void)!read(timer, &steps, sizeof steps);
            else
                serve_connection(events[i].data.ptr, events[i].events);
        }
        // After the connections: a step may drop one that `events` still names.
        bool stepped = steps > 0;
        while (steps--) step_all();
        if (stepped && doubling) set_timer();
    }
}

/* Progress on a terminal or in a log; human-readable numbers. */
#include "cli/output/progress.h"

#include <stdarg.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { BAR = 20 };

double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

const char *text_of_count(double count, char *buffer) {
    const char *unit = count >= 1e9 ? "G" : count >= 1e6 ? "M" : count >= 1e3 ? "k" : "";
    const double scale = count >= 1e9 ? 1e9 : count >= 1e6 ? 1e6 : count >= 1e3 ? 1e3 : 1;
    snprintf(buffer, 32, "%.*f%s", scale == 1 ? 0 : 1, count / scale, unit);
    return buffer;
}

const char *text_of_bytes(double bytes, char *buffer) {
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    int u = 0;
    for (; u < 4 && bytes >= 1000; ++u) bytes /= 1024; /* the limit is 1000, so that three digits suffice */
    snprintf(buffer, 32, "%.*f %s", u == 0 || bytes >= 100 ? 0 : bytes >= 10 ? 1 : 2, bytes, unit[u]);
    return buffer;
}

const char *text_of_seconds(double seconds, char *buffer) {
    const long s = seconds > 0 ? (long)(seconds + 0.5) : 0;
    if (s >= 3600)
        snprintf(buffer, 32, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
    else
        snprintf(buffer, 32, "%ld:%02ld", s / 60, s % 60);
    return buffer;
}

void progress_begin(progress *p, FILE *stream, const char *label, int64_t first, int64_t total) {
    const bool terminal = isatty(fileno(stream)) == 1;
    const double now = seconds_now();
    *p = (progress){.stream = stream,
                    .label = label,
                    .total = total,
                    .first = first,
                    .done = first,
                    .started = now,
                    .drawn = now - 3600, /* the first update draws */
                    .interval = terminal ? 0.1 : 5,
                    .terminal = terminal};
}

bool progress_due(const progress *p, int64_t done) {
    return done >= p->total || seconds_now() - p->drawn >= p->interval;
}

/* Columns of the terminal; a bar line that wraps could not be redrawn. */
static int columns(const progress *p) {
    struct winsize size;
    const bool known = ioctl(fileno(p->stream), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
    return known ? size.ws_col : 80;
}

void progress_update(progress *p, int64_t done, const char *format, ...) {
    p->done = done;
    if (!progress_due(p, done)) return;
    const double now = seconds_now(), elapsed = now - p->started;
    char text[256], line[400], bar[BAR + 4] = "", left[32];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (p->terminal) {
        const int full = p->total > 0 ? (int)(BAR * done / p->total) : BAR;
        bar[0] = ' ', bar[1] = '[';
        memset(bar + 2, '#', (size_t)full);
        memset(bar + 2 + full, '-', (size_t)(BAR - full));
        bar[BAR + 2] = ']';
    }
    const int64_t here = done - p->first;
    const bool finished = done >= p->total;
    const double remaining = here > 0 ? elapsed / (double)here * (double)(p->total - done) : 0;
    text_of_seconds(finished ? elapsed : remaining, left);
    snprintf(line, sizeof line, "%s %lld/%lld%s %s %s %s", p->label, (long long)done, (long long)p->total, bar, text,
             finished ? "time" : "eta", finished || here > 0 ? left : "?");
    if (p->terminal)
        fprintf(p->stream, "\r%.*s\033[K", columns(p) - 1, line);
    else
        fprintf(p->stream, "%s\n", line);
    fflush(p->stream);
    p->shown = p->terminal;
    p->drawn = now;
}

void progress_note(progress *p, const char *format, ...) {
    if (p->shown) fputs("\r\033[K", p->stream);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(p->stream, format, arguments);
    va_end(arguments);
    fputc('\n', p->stream);
    fflush(p->stream);
    p->shown = false;
    if (p->terminal) p->drawn = 0; /* the next update draws the bar again */
}

void progress_end(progress *p) {
    if (p->shown) fputc('\n', p->stream);
    fflush(p->stream);
    p->shown = false;
}

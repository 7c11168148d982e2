/* SVG line charts: a frame, ticks, curves, levels, a legend. Colours come in two sets, chosen by
   the page's colour scheme; a viewer without media queries shows the light set. */
#include "cli/output/plot.h"

#include "cli/output/progress.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { WIDTH = 800, HEIGHT = 500, LEFT = 84, RIGHT = 28, LEVEL_LABELS = 116, BOTTOM = 60 };
enum { TICKS_MAX = 24, LEVELS_MAX = 16, COLORS = 6, LETTER = 7 }; /* LETTER: mean width at 13 px */

static const char style[] =
    "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:13px;"
    "fill:#1f2328}\n"
    ".page{fill:#ffffff}.title{font-size:18px;font-weight:600}.soft{fill:#59636e}\n"
    ".grid{stroke:#d8dee4;stroke-width:1}.axis{stroke:#818b98;stroke-width:1.2}\n"
    ".level{stroke:#59636e;stroke-width:1.2;stroke-dasharray:2 3}\n"
    ".curve{fill:none;stroke-width:2.2;stroke-linejoin:round;stroke-linecap:round}\n"
    ".dash{fill:none;stroke-width:1.8;stroke-dasharray:6 5}\n"
    ".c0{stroke:#0969da}.c1{stroke:#d1570a}.c2{stroke:#1a7f37}.c3{stroke:#8250df}"
    ".c4{stroke:#bf3989}.c5{stroke:#6e7781}\n"
    ".m{stroke:#ffffff;stroke-width:1.4}.m0{fill:#0969da}.m1{fill:#d1570a}.m2{fill:#1a7f37}"
    ".m3{fill:#8250df}.m4{fill:#bf3989}.m5{fill:#6e7781}\n"
    "@media (prefers-color-scheme:dark){\n"
    "text{fill:#e6edf3}.page{fill:#0d1117}.soft{fill:#9198a1}.grid{stroke:#2a313c}"
    ".axis{stroke:#656c76}.level{stroke:#9198a1}\n"
    ".c0{stroke:#58a6ff}.c1{stroke:#f0883e}.c2{stroke:#3fb950}.c3{stroke:#bc8cff}"
    ".c4{stroke:#f778ba}.c5{stroke:#8b949e}\n"
    ".m{stroke:#0d1117}.m0{fill:#58a6ff}.m1{fill:#f0883e}.m2{fill:#3fb950}.m3{fill:#bc8cff}"
    ".m4{fill:#f778ba}.m5{fill:#8b949e}}\n";

/* The layout of an axis: values are transformed (log or not), then mapped linearly to pixels. */
typedef struct layout {
    const plot_axis *axis;
    double low, high;  /* transformed */
    double begin, end; /* pixels of low and high */
    double step;       /* between ticks, transformed */
    double tick[TICKS_MAX];
    int n_ticks;
} layout;

/* NaN where the axis cannot show v. */
static double transformed(const plot_axis *a, double v) {
    if (a->scale == PLOT_LINEAR) return isfinite(v) ? v : NAN;
    if (!(v > 0) || !isfinite(v)) return NAN;
    return a->scale == PLOT_LOG2 ? log2(v) : log10(v);
}

static double value_at(const plot_axis *a, double t) {
    return a->scale == PLOT_LINEAR ? t : a->scale == PLOT_LOG2 ? exp2(t) : pow(10, t);
}

static double pixel(const layout *l, double v) {
    const double t = transformed(l->axis, v);
    return l->begin + (t - l->low) / (l->high - l->low) * (l->end - l->begin);
}

static void widen(layout *l, double v) {
    const double t = transformed(l->axis, v);
    if (isnan(t)) return;
    l->low = fmin(l->low, t);
    l->high = fmax(l->high, t);
}

/* 1, 2 or 5 times a power of ten; whole numbers of the exponent on a log axis. */
static double tick_step(const plot_axis *a, double range, int wanted) {
    if (a->scale != PLOT_LINEAR) return fmax(1, ceil(range / wanted));
    const double rough = range / wanted, power = pow(10, floor(log10(rough)));
    const double lead = rough / power;
    return power * (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10);
}

static void lay_out(layout *l, int wanted) {
    const plot_axis *a = l->axis;
    const bool given = a->max > a->min;
    if (given) {
        l->low = transformed(a, a->min);
        l->high = transformed(a, a->max);
    }
    if (!(l->low <= l->high)) l->low = 0, l->high = 1; /* nothing to show */
    if (l->high - l->low < 1e-12 * (1 + fabs(l->high))) l->low -= 0.5, l->high += 0.5;
    l->step = tick_step(a, l->high - l->low, wanted);
    const double slack = 1e-9 * l->step;
    if (!given) {
        l->low = floor((l->low + slack) / l->step) * l->step;
        l->high = ceil((l->high - slack) / l->step) * l->step;
    }
    const double first = ceil((l->low - slack) / l->step) * l->step;
    while (l->n_ticks < TICKS_MAX && first + l->n_ticks * l->step <= l->high + slack) {
        l->tick[l->n_ticks] = first + l->n_ticks * l->step;
        ++l->n_ticks;
    }
}

static const char *tick_text(const layout *l, double t, char *buffer) {
    const plot_axis *a = l->axis;
    const double v = value_at(a, t);
    if (a->unit == PLOT_BYTES) {
        static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
        int u = 0;
        double scaled = v;
        for (; u < 4 && scaled >= 1024; ++u) scaled /= 1024;
        snprintf(buffer, 32, "%.4g %s", scaled, unit[u]);
    } else if (a->scale == PLOT_LINEAR && fabs(v) < 10000) {
        const int decimals = (int)fmax(0, -floor(log10(l->step) + 1e-9));
        snprintf(buffer, 32, "%.*f", decimals, fabs(v) < 1e-9 * l->step ? 0 : v);
    } else if (fabs(v) >= 1e6) {
        snprintf(buffer, 32, "%.4gM", v / 1e6);
    } else {
        snprintf(buffer, 32, fabs(v) >= 10000 && a->scale != PLOT_LOG2 ? "%.4gk" : "%.5g",
                 fabs(v) >= 10000 && a->scale != PLOT_LOG2 ? v / 1e3 : v);
    }
    if (a->unit == PLOT_FACTOR) strcat(buffer, "\u00d7");
    return buffer;
}

static void put_text(FILE *f, const char *attributes, double x, double y, const char *text) {
    fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
    for (const char *c = text; *c; ++c) {
        if (*c == '<')
            fputs("&lt;", f);
        else if (*c == '&')
            fputs("&amp;", f);
        else
            fputc(*c, f);
    }
    fputs("</text>\n", f);
}

static void put_line(FILE *f, const char *class, double x1, double y1, double x2, double y2) {
    fprintf(f, "<line class=\"%s\" x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\"/>\n", class, x1, y1, x2, y2);
}

/* The number of characters of a UTF-8 text. */
static int letters(const char *text) {
    int n = 0;
    for (; *text; ++text) n += (*text & 0xc0) != 0x80;
    return n;
}

static void put_axes(FILE *f, const layout *x, const layout *y) {
    char text[40];
    int widest = 0;
    for (int i = 0; i < y->n_ticks; ++i) {
        const double at = pixel(y, value_at(y->axis, y->tick[i]));
        put_line(f, "grid", x->begin, at, x->end, at);
        tick_text(y, y->tick[i], text);
        put_text(f, "class=\"soft\" text-anchor=\"end\"", x->begin - 9, at + 4.5, text);
        if (letters(text) > widest) widest = letters(text);
    }
    for (int i = 0; i < x->n_ticks; ++i) {
        const double at = pixel(x, value_at(x->axis, x->tick[i]));
        put_line(f, "axis", at, y->begin, at, y->begin + 5);
        put_text(f, "class=\"soft\" text-anchor=\"middle\"", at, y->begin + 21, tick_text(x, x->tick[i], text));
    }
    put_line(f, "axis", x->begin, y->begin, x->end, y->begin);
    put_text(f, "text-anchor=\"middle\"", (x->begin + x->end) / 2, HEIGHT - 14, x->axis->label);
    const double middle = (y->begin + y->end) / 2, left = fmax(16, LEFT - 22 - 8.5 * widest);
    char turned[96];
    snprintf(turned, sizeof turned, "text-anchor=\"middle\" transform=\"rotate(-90 %.1f %.1f)\"", left, middle);
    put_text(f, turned, left, middle, y->axis->label);
}

static bool visible(const layout *x, const layout *y, double vx, double vy) {
    const double tx = transformed(x->axis, vx), ty = transformed(y->axis, vy);
    return tx >= x->low && tx <= x->high && ty >= y->low && ty <= y->high; /* false for NaN */
}

static const char *line_class(plot_style s) { return s == PLOT_DASHED ? "dash" : "curve"; }
static bool has_marks(plot_style s) { return s == PLOT_MARKED || s == PLOT_POINTS; }

static void put_mark(FILE *f, int color, double x, double y) {
    fprintf(f, "<circle class=\"m m%d\" cx=\"%.1f\" cy=\"%.1f\" r=\"4.5\"/>\n", color, x, y);
}

static void put_series(FILE *f, const plot_series *s, const layout *x, const layout *y) {
    const int color = s->color % COLORS;
    bool down = false;
    if (s->style != PLOT_POINTS) {
        fprintf(f, "<path class=\"%s c%d\" d=\"", line_class(s->style), color);
        for (int64_t i = 0; i < s->n; ++i) {
            const bool seen = visible(x, y, s->x[i], s->y[i]);
            if (seen) fprintf(f, "%c%.1f %.1f", down ? 'L' : 'M', pixel(x, s->x[i]), pixel(y, s->y[i]));
            down = seen;
        }
        fputs("\"/>\n", f);
    }
    for (int64_t i = 0; has_marks(s->style) && i < s->n; ++i) {
        if (visible(x, y, s->x[i], s->y[i])) put_mark(f, color, pixel(x, s->x[i]), pixel(y, s->y[i]));
    }
}

/* Labels are right of the frame, at their line's height or as near as their neighbours allow. */
static void put_levels(FILE *f, const plot *p, const layout *x, const layout *y) {
    int order[LEVELS_MAX], n = 0;
    for (int i = 0; i < p->n_levels && n < LEVELS_MAX; ++i) {
        if (!visible(x, y, value_at(x->axis, x->low), p->levels[i].y)) continue;
        int at = n++;
        for (; at > 0 && p->levels[order[at - 1]].y < p->levels[i].y; --at) order[at] = order[at - 1];
        order[at] = i; /* from the top of the picture down */
    }
    const double spacing = 15;
    double label[LEVELS_MAX];
    for (int i = 0; i < n; ++i) {
        label[i] = pixel(y, p->levels[order[i]].y);
        if (i > 0) label[i] = fmax(label[i], label[i - 1] + spacing);
    }
    for (int i = n - 1; i >= 0; --i) label[i] = fmin(label[i], y->begin - spacing * (n - 1 - i));
    for (int i = 0; i < n; ++i) {
        const double at = pixel(y, p->levels[order[i]].y);
        put_line(f, "level", x->begin, at, x->end, at);
        put_line(f, "level", x->end, at, x->end + 10, label[i]);
        put_text(f, "class=\"soft\"", x->end + 14, label[i] + 4.5, p->levels[order[i]].name);
    }
}

/* One row or more of line samples and names; f NULL only measures. Returns the last row's y. */
static double put_legend(FILE *f, const plot *p, double y) {
    double x = LEFT;
    for (int i = 0; i < p->n_series; ++i) {
        const plot_series *s = &p->series[i];
        if (!s->name) continue;
        const double width = 36 + LETTER * letters(s->name) + 22;
        if (x > LEFT && x + width - 22 > WIDTH - RIGHT) {
            x = LEFT;
            y += 20;
        }
        if (f) {
            const int color = s->color % COLORS;
            if (s->style != PLOT_POINTS)
                fprintf(f, "<path class=\"%s c%d\" d=\"M%.1f %.1fh28\"/>\n", line_class(s->style), color, x, y - 4.5);
            if (has_marks(s->style)) put_mark(f, color, x + 14, y - 4.5);
            put_text(f, "", x + 36, y, s->name);
        }
        x += width;
    }
    return y;
}

static void draw(FILE *f, const plot *p) {
    layout x = {.axis = &p->x, .low = INFINITY, .high = -INFINITY};
    layout y = {.axis = &p->y, .low = INFINITY, .high = -INFINITY};
    for (int s = 0; s < p->n_series; ++s) {
        for (int64_t i = 0; i < p->series[s].n; ++i) {
            const double px = p->series[s].x[i], py = p->series[s].y[i];
            if (isnan(transformed(&p->x, px)) || isnan(transformed(&p->y, py))) continue;
            widen(&x, px);
            widen(&y, py);
        }
    }
    for (int i = 0; i < p->n_levels; ++i) widen(&y, p->levels[i].y);
    lay_out(&x, 9);
    lay_out(&y, 7);

    const double title = 34, legend = title + (p->subtitle ? 22 : 0) + 26;
    x.begin = LEFT, x.end = WIDTH - RIGHT - (p->n_levels ? LEVEL_LABELS : 0);
    y.begin = HEIGHT - BOTTOM, y.end = put_legend(NULL, p, legend) + 18;

    fprintf(f,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" "
            "height=\"%d\" role=\"img\">\n<style>\n%s</style>\n",
            WIDTH, HEIGHT, WIDTH, HEIGHT, style);
    fprintf(f, "<rect class=\"page\" width=\"%d\" height=\"%d\"/>\n", WIDTH, HEIGHT);
    put_text(f, "class=\"title\"", LEFT, title, p->title);
    if (p->subtitle) put_text(f, "class=\"soft\"", LEFT, title + 22, p->subtitle);
    put_axes(f, &x, &y);
    put_levels(f, p, &x, &y);
    for (int s = 0; s < p->n_series; ++s) put_series(f, &p->series[s], &x, &y);
    put_legend(f, p, legend);
    fputs("</svg>\n", f);
}

bool plot_write(const plot *p, output *to) {
    output_restart(to);
    draw(to->file, p);
    return output_close(to);
}

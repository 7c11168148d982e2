/* A line chart as an SVG file: readable on light and dark pages, no dependency. */
#ifndef FATTNI_CLI_OUTPUT_PLOT_H
#define FATTNI_CLI_OUTPUT_PLOT_H

#include "cli/output/files.h"

#include <stdint.h>

typedef enum plot_scale { PLOT_LINEAR, PLOT_LOG2, PLOT_LOG10 } plot_scale;
typedef enum plot_unit { PLOT_NUMBER, PLOT_BYTES, PLOT_FACTOR } plot_unit; /* 1500, 1.5 KiB, 12x */

typedef struct plot_axis {
    const char *label;
    plot_scale scale;
    plot_unit unit;
    double min, max; /* equal: from the data, widened to ticks */
} plot_axis;

typedef enum plot_style { PLOT_LINE, PLOT_MARKED, PLOT_DASHED, PLOT_POINTS } plot_style;

typedef struct plot_series {
    const char *name;    /* label at the curve's end and in the legend */
    const double *x, *y; /* points that are not finite, or not positive on a log axis, leave a gap */
    int64_t n;
    plot_style style;
    int color; /* 0..5; same colour = same thing, e.g. measured and predicted */
} plot_series;

typedef struct plot_level {
    const char *name;
    double y;
} plot_level; /* horizontal reference */

typedef struct plot {
    const char *title, *subtitle; /* subtitle NULL = none */
    plot_axis x, y;
    const plot_series *series;
    int n_series;
    const plot_level *levels;
    int n_levels;
} plot;

/* Writes and closes an output that was opened with OUTPUT_LATER. False after an error message. */
bool plot_write(const plot *p, output *to);

#endif

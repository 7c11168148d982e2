/* Progress of a long command: a bar that is redrawn on a terminal, plain lines elsewhere. */
#ifndef FATTNI_CLI_OUTPUT_PROGRESS_H
#define FATTNI_CLI_OUTPUT_PROGRESS_H

#include <fattn/base.h>

#include <stdbool.h>
#include <stdio.h>

typedef struct progress {
    FILE *stream;
    const char *label; /* "step" */
    int64_t total, first, done;
    double started, drawn; /* seconds on the monotonic clock */
    double interval;       /* between two drawings: 0.1 on a terminal, else 5 */
    bool terminal, shown;  /* shown: an unfinished bar is on the terminal's last line */
} progress;

/* Starts at `first` of `total`: a resumed run's time left counts the steps of this run only. */
void progress_begin(progress *p, FILE *stream, const char *label, int64_t first, int64_t total);
/* True when progress_update would draw, so that costly text is made only then. */
bool progress_due(const progress *p, int64_t done);
/* "step 120/600 [####------] <text> eta 0:58"; the last step is always drawn. */
void progress_update(progress *p, int64_t done, const char *format, ...) FATTN_PRINTF(3, 4);
/* A permanent line above the bar. */
void progress_note(progress *p, const char *format, ...) FATTN_PRINTF(2, 3);
void progress_end(progress *p); /* leaves the last bar and goes to a new line */

double seconds_now(void); /* monotonic clock */

/* Human-readable: "17.2k", "41.0 MiB", "1:02:03"; buffer is at least 32 bytes and is returned. */
const char *text_of_count(double count, char *buffer);
const char *text_of_bytes(double bytes, char *buffer);
const char *text_of_seconds(double seconds, char *buffer);

#endif

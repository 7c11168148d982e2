/* Batches on their way to the device. There are two places in page-locked memory: the host fills one while the other
   is copied and its pass runs. */
#ifndef FATTNI_CLI_TRAIN_BATCH_FEED_H
#define FATTNI_CLI_TRAIN_BATCH_FEED_H

#include "cli/tasks/task.h"

#include <fattn/overlap.h>

enum { BATCH_NONE = -1 };

/* A place. */
typedef struct batch_place {
    int32_t *ids, *targets; /* [sequences, context], on the host */
    int32_t *pass;          /* its number */
    int64_t cursor;         /* the first training sequence in it; BATCH_NONE: others */
    fattn_tensor memory;    /* of all three */
    fattn_mark *sent;       /* behind the copy to the device */
} batch_place;

typedef struct batch_feed {
    fattn_ctx *ctx;
    fattn_tensor ids, targets; /* I32 [sequences, context], on the device: of the batch that was sent last */
    fattn_tensor pass;         /* I32, its number, which selects the dropout masks */
    fattn_tensor memory;       /* of all three */
    batch_place places[2];
    int next; /* the place that is filled and sent next */
} batch_feed;

/* Of so many sequences of `context` tokens. On failure everything is freed. */
fattn_status batch_feed_create(fattn_ctx *ctx, int64_t sequences, int64_t context, batch_feed *b);
void batch_feed_destroy(batch_feed *b); /* zeroed, or created */
/* The next place, free to be filled: waits until its last batch has been copied. */
fattn_status batch_feed_open(batch_feed *b, batch_place **place);
/* Enqueues the copy of the next place to the device, as pass number `pass`. It may be read, but not written, until
   batch_feed_open gives it again. */
fattn_status batch_feed_send(batch_feed *b, int64_t pass);

#endif
